-- Who rotates or destroys here: one at a time. `expires` in seconds since 1970, by the server's clock.
CREATE TABLE IF NOT EXISTS hardwrap_lease (
    name VARCHAR(64) NOT NULL PRIMARY KEY,
    holder TEXT NOT NULL,
    expires BIGINT NOT NULL
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
-- One row for each key that values were moved to.
CREATE TABLE IF NOT EXISTS hardwrap_rotation (
    target VARCHAR(64) NOT NULL PRIMARY KEY,
    mode TEXT NOT NULL,
    started TEXT NOT NULL,
    moved BIGINT NOT NULL,
    proven TEXT
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
-- Values that could not be moved. `row_key` is the key as a text that says what it is.
CREATE TABLE IF NOT EXISTS hardwrap_ledger (
    id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    tbl VARCHAR(200) NOT NULL,
    col VARCHAR(64) NOT NULL,
    row_key TEXT,
    shown TEXT NOT NULL,
    kid TEXT NOT NULL,
    error TEXT NOT NULL,
    digest TEXT NOT NULL,
    noted TEXT NOT NULL,
    accepted TEXT,
    reason TEXT
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
CREATE INDEX IF NOT EXISTS hardwrap_ledger_row ON hardwrap_ledger (tbl(64), col, row_key(255));
-- What listeners are to hear, at least once.
CREATE TABLE IF NOT EXISTS hardwrap_outbox (
    id VARCHAR(64) NOT NULL PRIMARY KEY,
    event MEDIUMTEXT NOT NULL,
    made TEXT NOT NULL,
    delivered TEXT
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
-- The last search of the whole database: one row.
CREATE TABLE IF NOT EXISTS hardwrap_discovery (
    id BIGINT PRIMARY KEY CHECK (id = 1),
    searched TEXT NOT NULL,
    `columns` BIGINT NOT NULL,
    unregistered BIGINT NOT NULL
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- One row for each migration that was applied.
CREATE TABLE IF NOT EXISTS hardwrap_migration (
    version BIGINT PRIMARY KEY,
    applied TEXT NOT NULL
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
-- One row: who this database is to a keyring, and the oldest hardwrap that may use it.
CREATE TABLE IF NOT EXISTS hardwrap_database (
    identity VARCHAR(64) NOT NULL PRIMARY KEY,
    made TEXT NOT NULL,
    oldest_version TEXT NOT NULL,
    one BIGINT NOT NULL DEFAULT 1 UNIQUE CHECK (one = 1)
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
-- The master keys that this database has seen, so that an older keyring record put back is noticed.
CREATE TABLE IF NOT EXISTS hardwrap_key_seen (
    kid VARCHAR(64) NOT NULL PRIMARY KEY,
    alg TEXT NOT NULL,
    state TEXT NOT NULL,
    seen TEXT NOT NULL
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

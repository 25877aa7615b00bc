-- Who rotates or destroys here: one at a time. `expires` in seconds since 1970.
CREATE TABLE hardwrap_lease (
    name TEXT NOT NULL PRIMARY KEY,
    holder TEXT NOT NULL,
    expires INTEGER NOT NULL
);
-- One row for each key that values were moved to.
CREATE TABLE hardwrap_rotation (
    target TEXT NOT NULL PRIMARY KEY,
    mode TEXT NOT NULL,
    started TEXT NOT NULL,
    moved INTEGER NOT NULL,
    proven TEXT
);
-- Values that could not be moved. `row_key` has no type: it is the key as it stands in its table.
CREATE TABLE hardwrap_ledger (
    id INTEGER PRIMARY KEY,
    tbl TEXT NOT NULL,
    col TEXT NOT NULL,
    row_key,
    shown TEXT NOT NULL,
    kid TEXT NOT NULL,
    error TEXT NOT NULL,
    digest TEXT NOT NULL,
    noted TEXT NOT NULL,
    accepted TEXT,
    reason TEXT
);
CREATE INDEX hardwrap_ledger_row ON hardwrap_ledger (tbl, col, row_key);
-- What listeners are to hear, at least once.
CREATE TABLE hardwrap_outbox (
    id TEXT NOT NULL PRIMARY KEY,
    event TEXT NOT NULL,
    made TEXT NOT NULL,
    delivered TEXT
);
-- The last search of the whole database: one row.
CREATE TABLE hardwrap_discovery (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    searched TEXT NOT NULL,
    columns INTEGER NOT NULL,
    unregistered INTEGER NOT NULL
);

-- One row for each migration that was applied.
CREATE TABLE hardwrap_migration (
    version INTEGER PRIMARY KEY,
    applied TEXT NOT NULL
);
-- One row: who this database is to a keyring, and the oldest hardwrap that may use it.
CREATE TABLE hardwrap_database (
    identity TEXT NOT NULL PRIMARY KEY,
    made TEXT NOT NULL,
    oldest_version TEXT NOT NULL
);
-- The master keys that this database has seen, so that an older keyring record put back is noticed.
CREATE TABLE hardwrap_key_seen (
    kid TEXT NOT NULL PRIMARY KEY,
    alg TEXT NOT NULL,
    state TEXT NOT NULL,
    seen TEXT NOT NULL
);

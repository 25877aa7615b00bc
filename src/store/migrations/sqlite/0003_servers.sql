-- What several workers share: the parts of a column, each leased to one of them. `from_key` stands before the part,
-- `to_key` is its last row. `expires` in seconds since 1970.
CREATE TABLE hardwrap_part (
    id INTEGER PRIMARY KEY,
    target TEXT NOT NULL,
    tbl TEXT NOT NULL,
    col TEXT NOT NULL,
    from_key TEXT,
    to_key TEXT,
    holder TEXT NOT NULL DEFAULT '',
    expires INTEGER NOT NULL DEFAULT 0,
    moved INTEGER NOT NULL DEFAULT 0,
    changed INTEGER NOT NULL DEFAULT 0,
    bad INTEGER NOT NULL DEFAULT 0,
    done INTEGER NOT NULL DEFAULT 0
);
-- When the old keys were fenced on the token, and what stood in for the fence where no trigger could be made.
ALTER TABLE hardwrap_rotation ADD COLUMN fenced INTEGER;
ALTER TABLE hardwrap_rotation ADD COLUMN weaker TEXT;
-- Keys of the ledger as texts that say what they are.
UPDATE hardwrap_ledger SET row_key = CASE typeof(row_key)
    WHEN 'integer' THEN 'i:' || row_key
    WHEN 'text' THEN 't:' || row_key
    WHEN 'blob' THEN 'x:' || lower(hex(row_key))
    WHEN 'real' THEN 'r:' || row_key
    ELSE 'n:' END;

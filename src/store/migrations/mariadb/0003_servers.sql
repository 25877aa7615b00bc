-- What several workers share: the parts of a column, each leased to one of them. `from_key` stands before the part,
-- `to_key` is its last row. `expires` in seconds since 1970, by the server's clock.
CREATE TABLE IF NOT EXISTS hardwrap_part (
    id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    target VARCHAR(64) NOT NULL,
    tbl VARCHAR(200) NOT NULL,
    col VARCHAR(64) NOT NULL,
    from_key TEXT,
    to_key TEXT,
    holder VARCHAR(255) NOT NULL DEFAULT '',
    expires BIGINT NOT NULL DEFAULT 0,
    moved BIGINT NOT NULL DEFAULT 0,
    changed BIGINT NOT NULL DEFAULT 0,
    bad BIGINT NOT NULL DEFAULT 0,
    done BIGINT NOT NULL DEFAULT 0
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
-- When the old keys were fenced on the token, and what stood in for the fence where no trigger could be made.
ALTER TABLE hardwrap_rotation ADD COLUMN IF NOT EXISTS fenced BIGINT;
ALTER TABLE hardwrap_rotation ADD COLUMN IF NOT EXISTS weaker TEXT;

-- One row per key. Times are microseconds since 1970 by the machine's clock; texts may be empty.
CREATE TABLE IF NOT EXISTS "{table}" (
    key TEXT NOT NULL PRIMARY KEY,   -- the operation
    state TEXT NOT NULL,             -- in_progress, completed, failed, released
    fence INTEGER NOT NULL,          -- rises with every lease of the key
    owner TEXT NOT NULL,             -- random id of the delivery that holds the lease
    task TEXT NOT NULL,              -- task id of the last holder
    holder TEXT NOT NULL,            -- host and process of the holder, for people
    lease_end INTEGER NOT NULL,      -- when the lease runs out
    not_before INTEGER NOT NULL,     -- when the retry is due that a released record waits for
    crashes INTEGER NOT NULL,        -- holders in a row that died
    reason TEXT NOT NULL,            -- why the lease was given back
    fingerprint TEXT NOT NULL,       -- digest of the arguments
    payload BLOB NOT NULL,           -- the outcome
    ended INTEGER NOT NULL,          -- when it was settled
    expires INTEGER NOT NULL,        -- when the record is forgotten
    waiting TEXT,                    -- JSON: by task id the attempt, copy and token that arrived last
    attempts TEXT,                   -- JSON: by task id the attempt below which copies are superseded
    announced TEXT                   -- JSON: task ids whose callbacks were dispatched, oldest first
) WITHOUT ROWID;

-- For removing what has expired.
CREATE INDEX IF NOT EXISTS "{table}_expires" ON "{table}" (expires);

-- version: of this schema; last_fence: the highest fence of a record that was removed.
CREATE TABLE IF NOT EXISTS "{table}_meta" (
    name TEXT NOT NULL PRIMARY KEY,
    value INTEGER NOT NULL
) WITHOUT ROWID;

INSERT OR IGNORE INTO "{table}_meta" (name, value) VALUES ('version', {version}), ('last_fence', 0);

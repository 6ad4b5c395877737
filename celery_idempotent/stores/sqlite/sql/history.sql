-- What happened to keys, for people: the newest lines of each. Nothing that a verb decides depends on it.
CREATE TABLE IF NOT EXISTS "{table}_history" (
    key TEXT NOT NULL PRIMARY KEY,   -- the operation; its record may be there or not
    lines TEXT NOT NULL,             -- JSON: when each happened, in microseconds since 1970, and what
    expires INTEGER NOT NULL         -- when all of it is forgotten
) WITHOUT ROWID;

CREATE INDEX IF NOT EXISTS "{table}_history_expires" ON "{table}_history" (expires);

-- Version 1. JSON columns carry a `format_version` of their own; the columns beside them are for finding and ordering.
CREATE TABLE meta (
    name TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE tasks (
    task TEXT PRIMARY KEY,
    spec TEXT NOT NULL
) STRICT;

CREATE TABLE idempotency (
    key TEXT PRIMARY KEY,
    body_hash TEXT NOT NULL,
    task TEXT NOT NULL REFERENCES tasks
) STRICT;

CREATE TABLE runs (
    id INTEGER PRIMARY KEY,
    run TEXT NOT NULL UNIQUE,
    task TEXT NOT NULL REFERENCES tasks,
    session TEXT NOT NULL,
    trace TEXT NOT NULL,
    parent TEXT,
    state TEXT NOT NULL,
    is_terminal INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    fence INTEGER NOT NULL,
    -- JSON, like labels.
    owner TEXT,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    labels TEXT NOT NULL
) STRICT;
CREATE INDEX runs_by_task ON runs (task);
CREATE INDEX runs_by_age ON runs (created_at, run);
CREATE INDEX runs_unfinished ON runs (created_at, run) WHERE NOT is_terminal;

CREATE TABLE entries (
    run INTEGER NOT NULL REFERENCES runs,
    seq INTEGER NOT NULL,
    entry TEXT NOT NULL,
    PRIMARY KEY (run, seq)
) STRICT;

CREATE TABLE checkpoints (
    run INTEGER NOT NULL REFERENCES runs,
    revision INTEGER NOT NULL,
    checkpoint TEXT NOT NULL,
    PRIMARY KEY (run, revision)
) STRICT;

-- An id is never used again, or a commit could answer a signal that it has not seen.
CREATE TABLE inbox (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    run INTEGER NOT NULL REFERENCES runs,
    signal TEXT NOT NULL
) STRICT;
CREATE INDEX inbox_by_run ON inbox (run);

CREATE TABLE audit (
    seq INTEGER PRIMARY KEY,
    entry TEXT NOT NULL
) STRICT;

-- Against our own mistakes; whoever can write the file can drop these, and the chain is for that.
CREATE TRIGGER audit_is_not_edited BEFORE UPDATE ON audit BEGIN
    SELECT RAISE(ABORT, 'the audit log is append-only');
END;
CREATE TRIGGER audit_is_not_deleted BEFORE DELETE ON audit BEGIN
    SELECT RAISE(ABORT, 'the audit log is append-only');
END;
CREATE TRIGGER entries_are_not_edited BEFORE UPDATE ON entries BEGIN
    SELECT RAISE(ABORT, 'journals are append-only');
END;

-- Tables of a ledger (ledger.py): replies by digest, and the cost of each call.
CREATE TABLE replies (
    digest TEXT PRIMARY KEY, model TEXT NOT NULL, text TEXT NOT NULL, finish_reason TEXT NOT NULL,
    prompt_tokens INTEGER, completion_tokens INTEGER
) WITHOUT ROWID;
CREATE TABLE calls (
    id INTEGER PRIMARY KEY, agent TEXT NOT NULL, open INTEGER NOT NULL, tokens INTEGER NOT NULL, nanos INTEGER NOT NULL
);

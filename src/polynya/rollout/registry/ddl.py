"""The schema, one text for SQLite and PostgreSQL. A database of another version is refused, never guessed at."""

from __future__ import annotations

VERSION = 1

TABLES = (
    "CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value BIGINT NOT NULL)",
    """CREATE TABLE IF NOT EXISTS tasks (
        task_id TEXT PRIMARY KEY, seq BIGINT NOT NULL UNIQUE, spec TEXT NOT NULL, created_at DOUBLE PRECISION NOT NULL,
        priority BIGINT NOT NULL, num_samples BIGINT NOT NULL, retries BIGINT NOT NULL,
        max_concurrent BIGINT, early_stop BIGINT, callback TEXT,
        queued BIGINT NOT NULL, leased BIGINT NOT NULL, done BIGINT NOT NULL, scored BIGINT NOT NULL,
        ready BIGINT NOT NULL, stop TEXT, ended BIGINT NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS tasks_ready ON tasks (priority DESC, seq) WHERE ready = 1",
    """CREATE TABLE IF NOT EXISTS sessions (
        session_id TEXT PRIMARY KEY, task_id TEXT NOT NULL, sample_index BIGINT NOT NULL, state TEXT NOT NULL,
        attempt BIGINT NOT NULL, reported BIGINT NOT NULL, node TEXT, confirmed BIGINT NOT NULL,
        lease_until DOUBLE PRECISION, failures BIGINT NOT NULL, losses BIGINT NOT NULL, cancelled BIGINT NOT NULL,
        lost_tokens BIGINT NOT NULL, lost_calls BIGINT NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS sessions_by_task ON sessions (task_id, state, sample_index)",
    "CREATE INDEX IF NOT EXISTS sessions_by_node ON sessions (node) WHERE state = 'leased'",
    """CREATE INDEX IF NOT EXISTS sessions_unconfirmed ON sessions (lease_until)
        WHERE state = 'leased' AND confirmed = 0""",
    """CREATE TABLE IF NOT EXISTS deliveries (
        seq BIGINT PRIMARY KEY, delivery_id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, task_id TEXT NOT NULL,
        status TEXT NOT NULL, payload TEXT NOT NULL, trajectory TEXT, acked BIGINT NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS deliveries_open ON deliveries (seq) WHERE acked = 0",
    "CREATE INDEX IF NOT EXISTS deliveries_by_task ON deliveries (task_id, seq)",
    """CREATE TABLE IF NOT EXISTS outbox (
        delivery_id TEXT PRIMARY KEY, url TEXT NOT NULL, due DOUBLE PRECISION, tries BIGINT NOT NULL, error TEXT NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS outbox_due ON outbox (due) WHERE due IS NOT NULL",
    """CREATE TABLE IF NOT EXISTS nodes (
        node TEXT PRIMARY KEY, epoch BIGINT NOT NULL, capacity BIGINT NOT NULL, model TEXT NOT NULL, url TEXT NOT NULL,
        labels TEXT NOT NULL, lease_until DOUBLE PRECISION NOT NULL, beat BIGINT NOT NULL,
        suspect BIGINT NOT NULL, draining BIGINT NOT NULL, gone BIGINT NOT NULL)""",
    "CREATE TABLE IF NOT EXISTS policies (model TEXT PRIMARY KEY, version TEXT, paused BIGINT NOT NULL)",
    """CREATE TABLE IF NOT EXISTS tokens (
        kid TEXT PRIMARY KEY, kind TEXT NOT NULL, digest TEXT NOT NULL, subject TEXT NOT NULL, attempt BIGINT,
        revoked BIGINT NOT NULL)""",
)

COUNTERS = ("queued", "leased", "done", "tasks", "deliveries")
"""Rows of ``meta``, changed in the transaction that they count: gapless, and equal on both databases."""

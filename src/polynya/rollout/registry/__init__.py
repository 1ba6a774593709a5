"""The durable store of a rollout server: tasks, sessions, leases, results, callbacks, nodes, credentials.

Invariant: work may run again, a result counts once. What was answered is kept whatever dies; see ``base`` for the sentences.
It decides nothing that needs a clock of its own or a network: the dispatcher drives it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from polynya.config import DispatchSettings
from polynya.rollout.registry.base import Registry
from polynya.rollout.registry.database import Database
from polynya.rollout.registry.sql import InlineWorker, SqlRegistry, ThreadWorker, Worker
from polynya.rollout.registry.sqlite import SqliteDatabase

__all__ = ["InlineWorker", "Registry", "SqlRegistry", "ThreadWorker", "open_registry"]


def open_registry(
    where: str | Path,
    settings: DispatchSettings | None = None,
    *,
    workers: tuple[Worker, Worker] | None = None,
    wall: Callable[[], float] = time.time,
) -> Registry:
    """A registry in a SQLite file, or in PostgreSQL for a ``postgresql://`` URL. Nothing is opened before ``start``,
    which raises RegistryInUse, RegistryUnavailable or RegistryError (another schema version)."""
    place = str(where)
    if place.startswith(("postgresql://", "postgres://")):
        from polynya.rollout.registry.postgres import PostgresDatabase

        def connect(write: bool) -> Database:
            return PostgresDatabase(place, write)
    else:

        def connect(write: bool) -> Database:
            return SqliteDatabase(Path(place), write)

    return SqlRegistry(
        connect,
        workers=workers or (ThreadWorker("registry-write"), ThreadWorker("registry-read")),
        max_losses=(settings or DispatchSettings()).max_losses,
        wall=wall,
    )

"""Opening a registry, and what is refused there."""

from __future__ import annotations

import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from polynya.errors import RegistryError
from polynya.rollout.registry import open_registry

from .world import LEASE, direct, task

WITHOUT_PSYCOPG = """
import sys
sys.modules["psycopg"] = None
import asyncio
from polynya.errors import ConfigError
from polynya.rollout.registry import open_registry
try:
    asyncio.run(open_registry("postgresql://somewhere/db").start(0.0, 10.0))
except ConfigError as exc:
    print(exc)
"""


def test_files_are_their_owners_only(tmp_path: Path) -> None:
    registry = direct(tmp_path / "state" / "r.db")
    registry.submit(task())
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "state").iterdir()}
    registry.close()
    assert set(modes) == {"r.db", "r.db-wal", "r.db-shm", "r.db.lock"}
    assert set(modes.values()) == {0o600}


def test_database_of_another_version_is_refused(fresh: Callable[[], str]) -> None:
    place = fresh()
    registry = direct(place)
    registry.registry._db.execute("UPDATE meta SET value = 99 WHERE name = 'schema'")  # type: ignore[attr-defined]
    registry.close()
    with pytest.raises(RegistryError, match="version 99"):
        direct(place)


async def test_nothing_is_opened_before_the_start(tmp_path: Path) -> None:
    registry = open_registry(tmp_path / "r.db")
    with pytest.raises(RuntimeError, match="not open"):
        await registry.counts()
    with pytest.raises(RuntimeError, match="not open"):
        await registry.submit(task())
    assert list(tmp_path.iterdir()) == []
    await registry.close()


async def test_writes_and_reads_of_many_tasks_run_beside_the_loop(tmp_path: Path) -> None:
    registry = open_registry(tmp_path / "r.db")
    await registry.start(0.0, LEASE)
    await registry.submit(task("a"))
    assert (await registry.task("a")).queued == 1
    await registry.close()
    with closing(sqlite3.connect(tmp_path / "r.db")) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_missing_driver_is_named_with_its_extra() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_PSYCOPG], capture_output=True, text=True, check=True)
    assert "pip install 'polynya[postgres]'" in done.stdout

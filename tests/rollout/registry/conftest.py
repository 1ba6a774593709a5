"""Each test of ``fresh`` runs on SQLite and, with the marker ``postgres``, on PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .servers import PostgresServer
from .world import Direct, direct


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Gives a place where no registry was before."""
    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres")
        return server.fresh
    count = iter(range(10_000))
    return lambda: str(tmp_path / f"{next(count)}.db")


@pytest.fixture
def registry(fresh: Callable[[], str]) -> Iterator[Direct]:
    found = direct(fresh())
    yield found
    found.close()

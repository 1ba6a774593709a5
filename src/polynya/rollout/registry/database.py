"""The narrow seam between the registry's operations and a database: one connection, one statement at a time.

Invariant: an operation runs in one transaction, or left nothing. A busy database is asked again within a bound; what else goes
wrong in it is RegistryUnavailable. Refuses a schema of another version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from polynya.errors import PolynyaError, RegistryError, RegistryInUse, RegistryUnavailable
from polynya.rollout.registry.ddl import COUNTERS, TABLES, VERSION

P = ParamSpec("P")
T = TypeVar("T")
Row = tuple[Any, ...]

_TRIES = 5


class Busy(Exception):
    """The statement may succeed when asked again."""


class Database(Protocol):
    """A connection. Statements use ``?``, hold no literal ``?`` or ``%``, and mean the same to both databases."""

    def begin(self, write: bool) -> None:
        """Open a transaction; one that writes waits for its turn now, not at its first change. Raises as ``execute``."""
        ...

    def commit(self) -> None: ...

    def execute(self, sql: str, params: Sequence[Any] = ()) -> list[Row]:
        """All rows of one statement. Raises Busy or RegistryUnavailable."""
        ...

    def many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None: ...

    def recover(self) -> None:
        """After an error: no transaction is open, and the connection works again if it can."""
        ...

    def close(self) -> None: ...


def transact(db: Database, operation: Callable[Concatenate[Database, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run an operation in one transaction. Raises what it raises, after rolling back."""
    return _run(db, True, lambda: operation(db, *args, **kwargs))


def read(db: Database, operation: Callable[Concatenate[Database, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run an operation that changes nothing, on one snapshot."""
    return _run(db, False, lambda: operation(db, *args, **kwargs))


def _run(db: Database, write: bool, operation: Callable[[], T]) -> T:
    tried = 0
    while True:
        try:
            db.begin(write)
            result = operation()
            db.commit()
            return result
        except Busy as exc:
            _recover(db)
            tried += 1
            if tried == _TRIES:
                raise RegistryUnavailable(
                    f"registry: the database was busy {_TRIES} times: {exc}", fix="end what else writes to it"
                ) from exc
        except BaseException:
            _recover(db)
            raise


def _recover(db: Database) -> None:
    """A database that cannot even roll back says so at its next statement; the first error is the one to tell. But one that
    another server has taken over is never asked again."""
    try:
        db.recover()
    except RegistryInUse:
        raise
    except (PolynyaError, Busy):
        return


def prepare(db: Database) -> None:
    """Lay the schema out where there is none. Raises RegistryError for one of another version."""
    for statement in TABLES:
        db.execute(statement)
    found = db.execute("SELECT value FROM meta WHERE name = 'schema'")
    if found and found[0][0] != VERSION:
        raise RegistryError(
            f"registry: its schema has version {found[0][0]}, this polynya knows {VERSION}",
            fix="use the polynya that made it, or another database",
        )
    rows = [("schema", VERSION), *((name, 0) for name in COUNTERS)]
    db.many("INSERT INTO meta (name, value) VALUES (?, ?) ON CONFLICT (name) DO NOTHING", rows)


def bump(db: Database, name: str, by: int = 1) -> int:
    """Change a counter; returns its new value."""
    return int(db.execute("UPDATE meta SET value = value + ? WHERE name = ? RETURNING value", (by, name))[0][0])


def counters(db: Database) -> dict[str, int]:
    return {name: int(value) for name, value in db.execute("SELECT name, value FROM meta")}

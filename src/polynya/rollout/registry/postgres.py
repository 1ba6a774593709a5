"""PostgreSQL: the same statements on a server that others keep alive, back up and fail over.

The writer holds an advisory lock of its schema while it is connected, so a second server on the same database is refused, and after a
lost connection it goes on only if nobody took over meanwhile. Needs the extra ``[postgres]``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

from polynya.errors import ConfigError, RegistryInUse, RegistryUnavailable
from polynya.rollout.registry.database import Busy, Row

try:
    import psycopg
    from psycopg import errors
except ImportError as exc:
    raise ConfigError(
        f"registry: a postgresql:// URL needs psycopg ({exc})", fix="pip install 'polynya[postgres]'"
    ) from exc

_LOCK = "SELECT pg_advisory_lock(hashtext('polynya registry'), hashtext(current_schema()))"
_BUSY = (errors.SerializationFailure, errors.DeadlockDetected, errors.LockNotAvailable)


class PostgresDatabase:
    """One connection. ``write``: the one of the server, which holds the lock until ``close``."""

    def __init__(self, url: str, write: bool, *, connect_seconds: int = 5) -> None:
        self._url = url
        self._write = write
        self._connect_seconds = connect_seconds
        self._connection = self._open()

    def _open(self) -> psycopg.Connection[Row]:
        connection: psycopg.Connection[Row] | None = None
        try:
            connection = psycopg.connect(self._url, autocommit=True, connect_timeout=self._connect_seconds)
            if self._write:
                self._take_lock(connection)
            return connection
        except psycopg.Error as exc:
            if connection is not None:
                connection.close()
            raise _translated(exc) from exc

    def _take_lock(self, connection: psycopg.Connection[Row]) -> None:
        """Waits a little: the connection of a server that just ended may linger."""
        try:
            connection.execute(f"SET lock_timeout = '{self._connect_seconds}s'")
            connection.execute(_LOCK)
            connection.execute("SET lock_timeout = 0")
        except errors.LockNotAvailable as exc:
            connection.close()
            raise RegistryInUse(
                "registry: another server has this database", fix="end that one, or name another database"
            ) from exc

    def begin(self, write: bool) -> None:
        try:
            self.execute("BEGIN" if write else "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        except RegistryUnavailable as exc:
            if self._connection.closed:
                # lost since the last operation: nothing was asked yet, so it can be asked of a new connection
                raise Busy(exc.message) from exc
            raise

    def commit(self) -> None:
        self.execute("COMMIT")

    def execute(self, sql: str, params: Sequence[Any] = ()) -> list[Row]:
        try:
            cursor = self._connection.execute(_placeholders(sql), params)
            return cursor.fetchall() if cursor.description else []
        except psycopg.Error as exc:
            raise _translated(exc) from exc

    def many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        try:
            self._connection.cursor().executemany(_placeholders(sql), rows)
        except psycopg.Error as exc:
            raise _translated(exc) from exc

    def recover(self) -> None:
        if not self._connection.closed:
            with contextlib.suppress(psycopg.Error):
                self._connection.execute("ROLLBACK")
                return
        self._connection.close()
        self._connection = self._open()

    def close(self) -> None:
        self._connection.close()


@functools.lru_cache(maxsize=256)
def _placeholders(sql: str) -> str:
    return sql.replace("?", "%s")


def _translated(exc: psycopg.Error) -> Exception:
    """What to raise for it: a statement that is wrong, or breaks a constraint, is a bug and stays what it is."""
    if isinstance(exc, _BUSY):
        return Busy(str(exc))
    if isinstance(exc, psycopg.OperationalError | psycopg.InterfaceError):
        # its own words may hold the connection string, and with it a password
        return RegistryUnavailable(
            f"registry: PostgreSQL: {type(exc).__name__} {exc.sqlstate or ''}".rstrip(),
            fix="check that the server of the URL runs, has space and lets this user in",
        )
    return exc

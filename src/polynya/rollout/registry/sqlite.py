"""SQLite: one file, write-ahead log, survives SIGKILL at any instruction.

``synchronous=NORMAL``: a transaction that was answered is with the kernel, so a killed process loses nothing; a power cut may take
the last moments, after which the file is whole all the same. Refuses a file that another server has open.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polynya.errors import RegistryInUse, RegistryUnavailable
from polynya.rollout.registry.database import Busy, Row

_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_FIXES = {
    sqlite3.SQLITE_FULL: "free some space on its disk",
    sqlite3.SQLITE_CANTOPEN: "check its folder and who may write there",
    sqlite3.SQLITE_READONLY: "check who may write to it",
}


class SqliteDatabase:
    """One connection. ``write``: the one of the server, which holds the file's lock until ``close``."""

    def __init__(self, path: Path, write: bool, *, busy_seconds: float = 5.0) -> None:
        self._path = path
        self._busy_seconds = busy_seconds
        self._lock = _claim_file(path) if write else None
        try:
            self._connection = self._open()
        except RegistryUnavailable:
            self._unlock()
            raise

    def _open(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = None
        try:
            connection = sqlite3.connect(
                self._path,
                timeout=self._busy_seconds,
                isolation_level=None,
                check_same_thread=False,
                cached_statements=512,
            )
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA cache_size = -65536")
            return connection
        except sqlite3.Error as exc:
            if connection is not None:
                connection.close()
            raise self._unavailable(exc) from exc

    def begin(self, write: bool) -> None:
        self.execute("BEGIN IMMEDIATE" if write else "BEGIN")

    def commit(self) -> None:
        self.execute("COMMIT")

    def execute(self, sql: str, params: Sequence[Any] = ()) -> list[Row]:
        try:
            return self._connection.execute(sql, params).fetchall()
        except sqlite3.Error as exc:
            raise self._unavailable(exc) from exc

    def many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        try:
            self._connection.executemany(sql, rows)
        except sqlite3.Error as exc:
            raise self._unavailable(exc) from exc

    def recover(self) -> None:
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = self._open()

    def close(self) -> None:
        try:
            self._connection.close()
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _unavailable(self, exc: sqlite3.Error) -> Exception:
        """What to raise for it: a statement that is wrong, or breaks a constraint, is a bug and stays what it is."""
        code = getattr(exc, "sqlite_errorcode", None)
        primary = code & 0xFF if code is not None else None
        if primary in (
            None,
            sqlite3.SQLITE_ERROR,
            sqlite3.SQLITE_CONSTRAINT,
            sqlite3.SQLITE_MISUSE,
            sqlite3.SQLITE_RANGE,
        ):
            return exc
        if primary in _BUSY:
            return Busy(str(exc))
        fix = _FIXES.get(primary, "look at its disk; `sqlite3 FILE 'PRAGMA integrity_check'` says what is damaged")
        return RegistryUnavailable(f"registry {self._path}: {exc} ({exc.sqlite_errorname})", fix=fix)


def _claim_file(path: Path) -> int:
    """Make it, for its owner's eyes only, and lock it; the lock is the open file's, so it ends with the process, however that ends."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_name(path.name + ".lock"), flags, 0o600)
        os.close(os.open(path, flags, 0o600))
    except OSError as exc:
        raise RegistryUnavailable(
            f"registry {path}: {exc.strerror}", fix="check its folder and who may write there"
        ) from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(lock)
        raise RegistryInUse(
            f"registry {path}: another server has it open", fix="end that one, or name another file"
        ) from exc
    return lock

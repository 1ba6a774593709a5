"""What sessions left: rows and calls of each attempt, in a folder that the server and its nodes share.

Invariant: an attempt's folder appears whole or not at all, and is never changed after that; its name is the reference that
travels. Refuses a reference that would lead out of the archive.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from polynya.errors import DiskFull, RunDirError, UnknownRecord
from polynya.rollout.tables import calls_table, traces_table
from polynya.schema import SessionResult, Trajectory

_REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}/a[0-9]{1,9}", re.ASCII)
_NO_SPACE = {28, 122}
TABLES = ("traces", "calls")


class Archive:
    """Blocking; call it from a thread."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, result: SessionResult, trajectory: Trajectory) -> str:
        """The reference. A second time for the same attempt it is the first that stays. Raises DiskFull or RunDirError."""
        reference = f"{result.session_id}/a{result.attempt}"
        target = self._folder(reference)
        if target.exists():
            return reference
        aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            aside.mkdir(parents=True)
            _write(aside / "traces.parquet", traces_table(result, trajectory.traces))
            _write(aside / "calls.parquet", calls_table(trajectory.calls))
            (aside / "result.json").write_bytes(msgspec.json.encode(result))
            with contextlib.suppress(FileExistsError):
                aside.rename(target)
            _sync(target.parent)
        except OSError as exc:
            if exc.errno in _NO_SPACE:
                raise DiskFull(f"no space left in {self.root}", fix="free space; the session runs again") from exc
            raise RunDirError(f"{self.root}: {exc}", fix="see whether the archive can be written") from exc
        return reference

    def read(self, reference: str, table: str) -> bytes:
        """A Parquet file, whole. ``table``: one of ``TABLES``. Raises UnknownRecord."""
        if table not in TABLES:
            raise UnknownRecord(f"{table!r} is no table", fix=f"use one of {', '.join(TABLES)}")
        try:
            return (self._folder(reference) / f"{table}.parquet").read_bytes()
        except OSError as exc:
            raise UnknownRecord(f"the rows of {reference} are not in {self.root}: {exc.strerror}") from exc

    def _folder(self, reference: str) -> Path:
        if not _REFERENCE.fullmatch(reference):
            raise UnknownRecord(f"{reference!r:.120} is no reference")
        return self.root / reference


def _write(path: Path, table: pa.Table) -> None:
    pq.write_table(table, path, compression="zstd", compression_level=3)
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""The run directory: written atomically, readable while the run goes on, resumable after a SIGKILL.

A session is committed in this order: its rows as one part file each for calls and traces, then its line in
``sessions.jsonl`` (one write, synced). The line is the commit: rows without a line are dropped, a torn line is cut off.
``calls.parquet`` and ``traces.parquet`` are rebuilt from the parts and replaced by rename, less often as they grow, so a
reader always finds whole files. Refuses a directory that is in use by another process or holds something else.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from polynya.errors import DiskFull, RunDirError
from polynya.rollout.tables import CALLS, TRACES, calls_table, traces_table
from polynya.schema import Call, Ledger, SessionResult, Trajectory
from polynya.tokens.ledger import total

_GROWTH = 1.25
_ROW_GROUP = 64
"""Rows that a reader must hold at once: a row may be 35,000 tokens and more."""
_PROBE_BYTES = 1 << 20
_OURS = {".lock", "capture", "logs", "parts", "sessions.jsonl", "view.html", "work"}
"""What a run leaves that never came to its ``run.json``."""
_TABLES = {"calls": CALLS, "traces": TRACES}
_PARQUET: dict[str, Any] = {"compression": "zstd", "compression_level": 3}
_decode_result = msgspec.json.Decoder(SessionResult).decode


class RunDir:
    """An open run directory. Blocking; call it from a thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        self._results: dict[str, SessionResult] = {}
        self._merged = 0
        """Sessions in the big tables."""

    @property
    def results(self) -> dict[str, SessionResult]:
        """Committed results by session id, in order of commit."""
        return self._results

    @property
    def capture(self) -> Path:
        return self.path / "capture"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def work(self) -> Path:
        return self.path / "work"

    @property
    def _parts(self) -> Path:
        return self.path / "parts"

    @property
    def _sessions(self) -> Path:
        return self.path / "sessions.jsonl"

    def create(self) -> None:
        """A new run. Raises RunDirError when there is one already, or the directory cannot be made."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            names = {entry.name for entry in self.path.iterdir()}
            ours = ".lock" in names
            if ours:
                self._take_lock()
            if "run.json" in names:
                raise RunDirError(
                    f"{self.path} holds a run already",
                    fix="choose another directory; `run` goes on with it when --resume is given",
                )
            foreign = names - (_OURS if ours and not self._has_results() else {".lock", "view.html"})
            if foreign:
                raise RunDirError(
                    f"{self.path} is not empty ({min(foreign)!r} is in it)", fix="choose an empty or new --out"
                )
            self._open()
        except OSError as exc:
            raise _explain(exc, self.path) from exc

    def resume(self, keep: frozenset[str]) -> dict[str, Any]:
        """Open an earlier run and forget all results but those with a status in ``keep``. Gives its ``run.json``."""
        try:
            record: dict[str, Any] = msgspec.json.decode((self.path / "run.json").read_bytes())
        except FileNotFoundError as exc:
            raise RunDirError(f"{self.path}: no run.json in it", fix="leave --resume out to begin a new run") from exc
        except (OSError, msgspec.DecodeError) as exc:
            raise RunDirError(f"{self.path}/run.json cannot be read: {exc}", fix="choose another --out") from exc
        if record.get("command") == "gateway":
            raise RunDirError(
                f"{self.path} is of `polynya gateway`, which has no tasks to go on with", fix="choose another --out"
            )
        try:
            self._open()
            self._results = {item.session_id: item for item in read_results(self.path) if str(item.status) in keep}
            self._rewrite_sessions()
            self._drop_uncommitted_parts()
            self.merge()
        except OSError as exc:
            raise _explain(exc, self.path) from exc
        return record

    def discard(self) -> None:
        """Take back a ``create`` that no run followed. Logs stay, if there are any: they say why."""
        with contextlib.suppress(OSError):
            if not (self.path / "run.json").exists() and not self._has_results():
                self._sessions.unlink(missing_ok=True)
                shutil.rmtree(self.capture, ignore_errors=True)
                for folder in (self.logs, self.work, self._parts):
                    with contextlib.suppress(OSError):
                        folder.rmdir()
                if [entry.name for entry in self.path.iterdir()] == [".lock"]:
                    (self.path / ".lock").unlink()
                    self.path.rmdir()

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def check_space(self) -> None:
        """Raises DiskFull or RunDirError when not even a small record could be written now."""
        probe = self.path / ".probe"
        try:
            with probe.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, _PROBE_BYTES)
        except OSError as exc:
            raise _explain(exc, self.path) from exc
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()

    def write_json(self, name: str, value: Any) -> None:
        """Replace a JSON file atomically. Raises DiskFull or RunDirError."""
        try:
            self._replace(self.path / name, msgspec.json.format(msgspec.json.encode(value), indent=1))
        except OSError as exc:
            raise _explain(exc, self.path) from exc

    def commit(self, result: SessionResult, trajectory: Trajectory | None, earlier: Sequence[Call] = ()) -> None:
        """Make a session finished. ``earlier``: calls of attempts that were lost. Raises DiskFull or RunDirError."""
        try:
            calls = [*earlier, *(trajectory.calls if trajectory else [])]
            self._write_part("calls", result.session_id, calls_table(calls))
            self._write_part("traces", result.session_id, traces_table(result, trajectory.traces if trajectory else []))
            line = msgspec.json.encode(result) + b"\n"
            with self._sessions.open("ab", buffering=0) as file:
                start = file.tell()
                try:
                    if file.write(line) != len(line):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(start)
                    raise
        except OSError as exc:
            raise _explain(exc, self.path) from exc
        self._results[result.session_id] = result
        if len(self._results) >= self._merged * _GROWTH:
            self.merge()

    def merge(self) -> None:
        """Bring the big tables and the ledger up to all committed sessions."""
        try:
            for name in _TABLES:
                self._merge_table(name)
            self._merged = len(self._results)
            ledgers = {session_id: result.ledger for session_id, result in self._results.items()}
            self.write_json("ledger.json", {"total": total(ledgers.values()), "sessions": ledgers})
        except OSError as exc:
            raise _explain(exc, self.path) from exc

    def remove_work(self) -> None:
        """The scratch folder and the parts are gone when all is merged."""
        for part in self._parts.glob("*.parquet"):
            part.unlink()
        with contextlib.suppress(OSError):
            self._parts.rmdir()
        shutil.rmtree(self.work, ignore_errors=True)

    def _open(self) -> None:
        self._take_lock()
        for folder in (self.capture, self.logs, self.work, self._parts):
            folder.mkdir(exist_ok=True)
        self._sessions.touch()

    def _has_results(self) -> bool:
        return self._sessions.exists() and self._sessions.stat().st_size > 0

    def _take_lock(self) -> None:
        if self._lock is not None:
            return
        lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            os.close(lock)
            raise RunDirError(
                f"{self.path} is in use by another polynya process", fix="wait for it, or choose another --out"
            ) from exc
        self._lock = lock

    def _rewrite_sessions(self) -> None:
        self._replace(
            self._sessions, b"".join(msgspec.json.encode(result) + b"\n" for result in self._results.values())
        )

    def _drop_uncommitted_parts(self) -> None:
        for part in self._parts.iterdir():
            if part.suffix != ".parquet" or _session_of(part) not in self._results:
                part.unlink()

    def _write_part(self, name: str, session_id: str, table: pa.Table) -> None:
        target = self._parts / f"{session_id}.{name}.parquet"
        self._write_parquet(target, table.schema, [table])

    def _merge_table(self, name: str) -> None:
        """All rows of committed sessions: from their parts, or from the table as it was."""
        parts = {_session_of(part): part for part in self._parts.glob(f"*.{name}.parquet")}
        target = self.path / f"{name}.parquet"
        old = pq.read_table(target, schema=_TABLES[name]) if target.exists() else _TABLES[name].empty_table()
        kept = [session_id in self._results and session_id not in parts for session_id in old["session_id"].to_pylist()]
        tables = [old.filter(pa.array(kept, type=pa.bool_()))]
        tables += [
            pq.read_table(parts[session_id], schema=_TABLES[name])
            for session_id in self._results
            if session_id in parts
        ]
        self._write_parquet(target, _TABLES[name], tables)

    def _write_parquet(self, target: Path, schema: pa.Schema, tables: Sequence[pa.Table]) -> None:
        with _replacing(target) as temporary, pq.ParquetWriter(temporary, schema, **_PARQUET) as writer:
            for table in tables:
                if table.num_rows:
                    writer.write_table(table, row_group_size=_ROW_GROUP)

    def _replace(self, target: Path, content: bytes) -> None:
        with _replacing(target) as temporary:
            temporary.write_bytes(content)


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Write aside, sync, rename: a reader sees the old file or the new one."""
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _session_of(part: Path) -> str:
    return part.name.rsplit(".", 2)[0]


def read_results(path: Path) -> Iterator[SessionResult]:
    """The committed results of a run directory; a torn last line is passed over, an unreadable other one is an error."""
    try:
        lines = (path / "sessions.jsonl").read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    except OSError as exc:
        raise _explain(exc, path) from exc
    for number, line in enumerate(lines[:-1], 1):
        try:
            yield _decode_result(line)
        except msgspec.MsgspecError as exc:
            raise RunDirError(
                f"{path}/sessions.jsonl:{number} cannot be read: {exc}", fix="this run directory was altered"
            ) from exc


def read_ledger(path: Path) -> Ledger:
    """The total ledger of a run directory."""
    document = msgspec.json.decode((path / "ledger.json").read_bytes(), type=dict[str, Any])
    return msgspec.convert(document["total"], Ledger)


def _explain(exc: OSError, path: Path) -> RunDirError | DiskFull:
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"no space left in {path}", fix="free space and run again with --resume; finished sessions are kept"
        )
    if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return RunDirError(f"{path}: {exc.strerror}", fix="choose a directory that you may write, with --out")
    return RunDirError(f"{path}: {exc}", fix="choose another --out")

"""The append-only journal: one writer thread, one open segment, group commit.

Invariants: records reach the file in the order of ``append``; the future of a durable append is done only after
``fdatasync`` (or after ``write`` with ``durability: write``); a failed write leaves no half frame that later records would
follow, and says so to each caller. A journal that was left behind is never appended to: a new one begins a new segment.
Refuses to write from the event loop, and to drop a record silently.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import queue
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

from polynya.capture import framing
from polynya.capture.records import Record, decode, encode
from polynya.config import JournalSettings
from polynya.errors import CaptureError, DiskFull

_GROUP = 256
_NOTE_SECONDS = 0.05
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_PERMISSION = {errno.EACCES, errno.EPERM, errno.EROFS}


class Written(msgspec.Struct, frozen=True, gc=False):
    """Where a record stands in a journal."""

    segment: str
    offset: int
    size: int


class _Entry:
    __slots__ = ("durable", "future", "payload", "written")

    def __init__(self, payload: bytes, durable: bool, future: asyncio.Future[Written]) -> None:
        self.payload = payload
        self.durable = durable
        self.future = future
        self.written = Written("", 0, 0)


class Journal:
    """Appends records to ``directory/NNNNNN.journal``. ``start`` before use, ``close`` after."""

    def __init__(self, directory: Path, settings: JournalSettings | None = None) -> None:
        self.directory = directory
        self.settings = settings or JournalSettings()
        self._queue: queue.SimpleQueue[list[_Entry] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._notes: list[Record] = []
        self._waiting: list[_Entry] = []
        """For the thread, which is woken once for all that one turn of the loop appends."""
        self._fd = -1
        self._segment = ""
        self._sync = b""
        self._size = 0

    def start(self) -> None:
        """Open a new segment. Raises DiskFull (no space, no permission) or CaptureError."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._open_segment()
        except OSError as exc:
            raise _explain(exc, self.directory) from exc
        self._thread = threading.Thread(target=self._run, name="polynya-journal", daemon=True)
        self._thread.start()

    def append(self, record: Record, *, durable: bool) -> asyncio.Future[Written]:
        """Queue a record. The future ends when it is written (``durable=False``) or safe on the disk (``durable=True``).

        ``read_back`` finds the record by its result.

        It raises DiskFull or CaptureError when the record could not be written; then nothing of it is in the journal.
        """
        if self._notes:
            self._flush_notes()
        future: asyncio.Future[Written] = asyncio.get_running_loop().create_future()
        if self._thread is None:
            future.set_exception(CaptureError("the journal is closed", fix="start() it first"))
            return future
        try:
            payload = encode(record)
        except (OverflowError, ValueError, TypeError) as exc:
            future.set_exception(
                CaptureError(f"a record cannot be encoded: {exc}", fix="report this: a parser let it in")
            )
            return future
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._hand_over)
        self._waiting.append(_Entry(payload, durable, future))
        return future

    def _hand_over(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._queue.put(waiting)

    def note(self, record: Record) -> None:
        """Queue a record that nobody waits for and whose loss is harmless: it goes with the next one, or soon by itself."""
        self._notes.append(record)
        if len(self._notes) == 1:
            asyncio.get_running_loop().call_later(_NOTE_SECONDS, self._flush_notes)

    def _flush_notes(self) -> None:
        notes, self._notes = self._notes, []
        for record in notes:
            self.append(record, durable=False).add_done_callback(_retrieve)

    async def close(self) -> None:
        """Write what is queued, sync, and stop. Idempotent."""
        self._flush_notes()
        self._hand_over()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            await asyncio.to_thread(thread.join)

    def _run(self) -> None:
        going = True
        while going:
            entries = self._queue.get()
            group: list[_Entry] = []
            while True:
                if entries is None:
                    going = False
                else:
                    group += entries
                if not going or len(group) >= _GROUP:
                    break
                try:
                    entries = self._queue.get_nowait()
                except queue.Empty:
                    break
            if group:
                self._commit(group)
        self._close_segment()

    def _commit(self, group: list[_Entry]) -> None:
        try:
            if self._fd < 0:
                self._open_segment()
            self._write(b"".join(self._frames(group)))
            _settle([entry for entry in group if not entry.durable], None)
            durable = [entry for entry in group if entry.durable]
            if durable:
                if self.settings.durability == "fsync":
                    os.fdatasync(self._fd)
                _settle(durable, None)
            if self._size >= self.settings.segment_bytes:
                self._close_segment()
                self._open_segment()
        except OSError as exc:
            _settle(group, _explain(exc, self.directory))
            self._recover_segment()
        except Exception as exc:
            # Whatever it is, the thread must live: a dead writer would leave every session without an answer.
            _settle(group, CaptureError(f"journal in {self.directory}: {type(exc).__name__}: {exc}", fix="report this"))
            self._recover_segment()

    def _frames(self, group: list[_Entry]) -> Iterator[bytes]:
        at = self._size
        for entry in group:
            frame = framing.frame(self._sync, entry.payload)
            entry.written = Written(self._segment, at, len(frame))
            at += len(frame)
            yield frame

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        self._size += len(data)

    def _recover_segment(self) -> None:
        """Cut a half frame off; where even that fails, the next write begins a new segment."""
        if self._fd < 0:
            return
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            os.close(self._fd)
            self._fd = -1

    def _open_segment(self) -> None:
        self._sync = secrets.token_bytes(framing.SYNC_BYTES)
        last = max((int(path.stem) for path in segments(self.directory)), default=0)
        path = self.directory / f"{last + 1:06d}.journal"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, framing.header(self._sync))
            os.fsync(fd)
            folder = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        self._fd, self._size, self._segment = fd, framing.HEADER_BYTES, str(path.absolute())

    def _close_segment(self) -> None:
        """Everything acknowledged as durable was synced before; a disk that fails now takes nothing away."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.fdatasync(self._fd)
            os.close(self._fd)
            self._fd = -1


def _retrieve(written: asyncio.Future[Written]) -> None:
    if not written.cancelled():
        written.exception()


def _settle(entries: list[_Entry], error: CaptureError | None) -> None:
    """Finish the futures on their own loop; a caller that is gone (cancelled, loop closed) is passed over."""

    def finish() -> None:
        for entry in entries:
            if not entry.future.done():
                if error is None:
                    entry.future.set_result(entry.written)
                else:
                    entry.future.set_exception(error)

    if entries:
        loop = entries[0].future.get_loop()
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish)


def _explain(exc: OSError, directory: Path) -> CaptureError:
    if exc.errno in _NO_SPACE:
        return DiskFull(
            f"no space for a record in {directory}: {exc.strerror}",
            fix="free space there; the call was not shown to the harness",
        )
    if exc.errno in _NO_PERMISSION:
        return DiskFull(
            f"cannot write in {directory}: {exc.strerror}", fix="choose a directory that you may write, with --out"
        )
    return CaptureError(f"journal in {directory}: {exc}", fix="check the disk")


def segments(directory: Path) -> list[Path]:
    """The segments of a journal, oldest first."""
    return sorted(path for path in directory.glob("*.journal") if path.stem.isdigit())


def read_back(written: Written) -> Record:
    """One record again. Blocking. Raises CaptureError when it is no longer there as it was written."""
    try:
        fd = os.open(written.segment, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(fd, written.size, written.offset)
        finally:
            os.close(fd)
    except OSError as exc:
        raise CaptureError(f"journal {written.segment}: {exc}", fix="leave a run's journal in its place") from exc
    payload = framing.unframe(data)
    if payload is None:
        raise CaptureError(
            f"journal {written.segment}: the record at {written.offset} is damaged", fix="check the disk"
        )
    return decode(payload)


class JournalScan(msgspec.Struct, kw_only=True):
    """What reading a journal found."""

    records: int = 0
    damages: list[tuple[str, framing.Damage]] = []
    """Segment name and what could not be read in it."""


def read_journal(directory: Path, scan: JournalScan | None = None) -> Iterator[Record]:
    """All whole records of all segments, in order. Damage goes into ``scan``; it never stops the reading."""
    scan = JournalScan() if scan is None else scan
    for path in segments(directory):
        for item in framing.read_frames(path.read_bytes()):
            if isinstance(item, framing.Damage):
                scan.damages.append((path.name, item))
            else:
                scan.records += 1
                yield decode(item)

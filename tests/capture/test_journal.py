"""The writer thread: order, durability, full disks, left-over segments, SIGKILL."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polynya.capture import journal as module
from polynya.capture.journal import Journal, JournalScan, _Entry, _settle, read_back, read_journal, segments
from polynya.capture.records import SessionOpened, SessionSealed
from polynya.config import JournalSettings
from polynya.errors import CaptureError, DiskFull


def record(number: int) -> SessionOpened:
    return SessionOpened(session_id=f"s{number}", attempt=1, at=0.0)


def written(directory: Path) -> list[str]:
    return [item.session_id for item in read_journal(directory)]


@pytest.fixture
async def journal(tmp_path: Path) -> Any:
    made = Journal(tmp_path / "capture")
    made.start()
    yield made
    await made.close()


async def test_records_come_back_in_order_of_append(journal: Journal) -> None:
    futures = [journal.append(record(i), durable=i % 3 == 0) for i in range(1000)]
    await asyncio.gather(*futures)
    assert written(journal.directory) == [f"s{i}" for i in range(1000)]


async def test_each_record_is_found_where_its_append_said(tmp_path: Path) -> None:
    journal = Journal(tmp_path, JournalSettings(segment_bytes=4096))
    journal.start()
    places = []
    for first in range(0, 600, 100):
        places += await asyncio.gather(*(journal.append(record(first + i), durable=i % 2 == 0) for i in range(100)))
    await journal.close()
    assert [read_back(place) for place in places] == [record(i) for i in range(600)]
    assert len({place.segment for place in places}) > 2


async def test_records_of_one_turn_of_the_loop_are_one_write(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[bytes] = []
    monkeypatch.setattr(journal, "_write", lambda data: writes.append(data))
    await asyncio.gather(*(journal.append(record(i), durable=i == 1) for i in range(3)))
    assert len(writes) == 1


async def test_durable_append_is_synced_before_it_is_acknowledged(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(module.os, "fdatasync", lambda fd: synced.append(fd))
    await journal.append(record(0), durable=False)
    assert synced == []
    await journal.append(record(1), durable=True)
    assert len(synced) == 1


async def test_durability_write_does_not_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path, JournalSettings(durability="write"))
    journal.start()
    synced: list[int] = []
    monkeypatch.setattr(module.os, "fdatasync", lambda fd: synced.append(fd))
    await journal.append(record(0), durable=True)
    assert synced == []
    await journal.close()


async def test_close_writes_what_is_queued_and_is_idempotent(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.start()
    futures = [journal.append(record(i), durable=True) for i in range(20)]
    await journal.close()
    await journal.close()
    await asyncio.gather(*futures)
    assert len(written(tmp_path)) == 20


async def test_append_to_a_closed_journal_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="closed"):
        await Journal(tmp_path).append(record(0), durable=True)


async def test_reopened_journal_begins_a_new_segment_and_keeps_the_torn_one(tmp_path: Path) -> None:
    for number in range(2):
        journal = Journal(tmp_path)
        journal.start()
        await journal.append(record(number), durable=True)
        await journal.close()
        path = segments(tmp_path)[-1]
        path.write_bytes(path.read_bytes() + b"torn")
    assert [path.name for path in segments(tmp_path)] == ["000001.journal", "000002.journal"]
    scan = JournalScan()
    assert [item.session_id for item in read_journal(tmp_path, scan)] == ["s0", "s1"]
    assert [(name, damage.torn_tail) for name, damage in scan.damages] == [
        ("000001.journal", True),
        ("000002.journal", True),
    ]
    assert scan.records == 2


async def test_segments_roll_over_at_their_size(tmp_path: Path) -> None:
    journal = Journal(tmp_path, JournalSettings(segment_bytes=100))
    journal.start()
    for i in range(5):
        await journal.append(record(i), durable=True)
    await journal.close()
    assert len(segments(tmp_path)) > 2
    assert written(tmp_path) == [f"s{i}" for i in range(5)]


class FailingDisk:
    """``os.write`` that writes a part of what it is given and then has no space, until it is repaired."""

    def __init__(self, code: int, *, partial: int = 7) -> None:
        self.code = code
        self.partial = partial
        self.broken = True

    def __call__(self, fd: int, data: Any) -> int:
        if not self.broken:
            return REAL_WRITE(fd, data)
        if self.partial:
            part, self.partial = self.partial, 0
            return REAL_WRITE(fd, bytes(data[:part]))
        raise OSError(self.code, os.strerror(self.code))


REAL_WRITE = os.write


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOSPC, DiskFull), (errno.EACCES, DiskFull), (errno.EIO, CaptureError)]
)
async def test_failed_write_is_told_to_every_caller_and_leaves_no_half_frame(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[CaptureError]
) -> None:
    await journal.append(record(0), durable=True)
    disk = FailingDisk(code)
    monkeypatch.setattr(module.os, "write", disk)
    outcomes = await asyncio.gather(
        *(journal.append(record(i), durable=i == 1) for i in (1, 2)), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [kind, kind]
    disk.broken = False
    await journal.append(record(3), durable=True)
    scan = JournalScan()
    assert [item.session_id for item in read_journal(journal.directory, scan)] == ["s0", "s3"]
    assert scan.damages == []


async def test_segment_that_cannot_even_be_cut_is_left_for_a_new_one(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(errno.ENOSPC)
    monkeypatch.setattr(module.os, "write", disk)

    def refuse(fd: int, size: int) -> None:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(module.os, "ftruncate", refuse)
    with pytest.raises(DiskFull):
        await journal.append(record(0), durable=True)
    with pytest.raises(DiskFull):
        await journal.append(record(1), durable=True)
    disk.broken = False
    await journal.append(record(2), durable=True)
    assert written(journal.directory) == ["s2"]
    assert len(segments(journal.directory)) == 2


async def test_journal_without_an_open_segment_closes(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, size: int) -> None:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(module.os, "write", FailingDisk(errno.ENOSPC))
    monkeypatch.setattr(module.os, "ftruncate", refuse)
    with pytest.raises(DiskFull):
        await journal.append(record(0), durable=True)
    await journal.close()
    assert written(journal.directory) == []


@pytest.mark.parametrize(("code", "kind"), [(errno.EROFS, DiskFull), (errno.EIO, CaptureError)])
def test_directory_that_cannot_be_written_is_an_error_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[CaptureError]
) -> None:
    disk = FailingDisk(code, partial=0)
    monkeypatch.setattr(module.os, "write", disk)
    with pytest.raises(kind, match=str(tmp_path)):
        Journal(tmp_path).start()
    assert segments(tmp_path) == []


async def test_record_that_cannot_be_encoded_is_refused_alone(journal: Journal) -> None:
    monstrous = SessionOpened(session_id="s0", attempt=1, at=0.0, meta={"seed": 2**70})
    with pytest.raises(CaptureError, match="cannot be encoded"):
        await journal.append(monstrous, durable=True)
    await journal.append(record(1), durable=True)
    assert written(journal.directory) == ["s1"]


async def test_writer_outlives_a_fault_that_nobody_foresaw(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(sync: bytes, payload: bytes) -> bytes:
        raise RuntimeError("a bug")

    monkeypatch.setattr(module.framing, "frame", broken)
    with pytest.raises(CaptureError, match="a bug"):
        await journal.append(record(0), durable=True)
    monkeypatch.undo()
    await journal.append(record(1), durable=True)
    assert written(journal.directory) == ["s1"]


async def test_caller_that_was_cancelled_does_not_stop_the_writer(journal: Journal) -> None:
    gone = journal.append(record(0), durable=True)
    gone.cancel()
    await journal.append(record(1), durable=True)
    assert written(journal.directory) == ["s0", "s1"]


def test_loop_that_is_gone_does_not_stop_the_writer(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.start()

    async def leave() -> None:
        journal.append(record(0), durable=True)

    asyncio.run(leave())
    asyncio.run(journal.close())
    assert written(tmp_path) == ["s0"]


def test_alien_files_are_no_segments(tmp_path: Path) -> None:
    (tmp_path / "notes.journal").write_text("x")
    assert segments(tmp_path) == []


VICTIM = """
import asyncio, sys
from pathlib import Path
from polynya.capture.journal import Journal
from polynya.capture.records import SessionSealed

async def main():
    journal = Journal(Path(sys.argv[1]))
    journal.start()
    number = 0
    while True:
        group = [journal.append(SessionSealed(session_id=f"s{number + i}", attempt=1, at=0.0), durable=True) for i in range(8)]
        await asyncio.gather(*group)
        number += 8
        print(number, flush=True)

asyncio.run(main())
"""


def test_sigkill_loses_no_acknowledged_record(tmp_path: Path) -> None:
    for attempt in range(3):
        directory = tmp_path / str(attempt)
        victim = subprocess.Popen([sys.executable, "-c", VICTIM, str(directory)], stdout=subprocess.PIPE, text=True)
        assert victim.stdout is not None
        acknowledged = 0
        for _ in range(3 + attempt):
            acknowledged = int(victim.stdout.readline())
        victim.send_signal(signal.SIGKILL)
        acknowledged = max([acknowledged, *(int(line) for line in victim.stdout.read().split())])
        victim.stdout.close()
        victim.wait()
        found = [item for item in read_journal(directory) if isinstance(item, SessionSealed)]
        assert [item.session_id for item in found[:acknowledged]] == [f"s{i}" for i in range(acknowledged)]


def test_caller_whose_loop_is_closed_is_passed_over() -> None:
    loop = asyncio.new_event_loop()
    entry = _Entry(b"", True, loop.create_future())
    loop.close()
    _settle([entry], None)
    assert not entry.future.done()

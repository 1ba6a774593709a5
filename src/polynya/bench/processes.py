"""Programs of the bench: started on a core of their own, spoken to in lines of JSON, measured by the kernel's own counters.

Invariant: whatever is started here is ended here, with all its children, also when the bench is interrupted or killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from polynya.errors import PolynyaError

_TICK = os.sysconf("SC_CLK_TCK")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
_LINE_LIMIT = 64 * 1024 * 1024


class BenchFailed(PolynyaError):
    """A program of the bench did not do its part."""

    boundary = "bench"


def cores() -> tuple[set[int], set[int]]:
    """(the contender's, everybody else's). On one core they share it."""
    usable = sorted(os.sched_getaffinity(0))
    return {usable[0]}, set(usable[1:]) or {usable[0]}


class Program:
    """A child process in a session of its own."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self.log = log

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        core: set[int],
        log: Path,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Program:
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=out,
                env={**os.environ, **(env or {})},
                cwd=cwd,
                start_new_session=True,
                limit=_LINE_LIMIT,
                preexec_fn=lambda: _prepare(core),
            )
        return cls(process, log)

    @classmethod
    async def module(cls, name: str, *arguments: str, core: set[int], log: Path) -> Program:
        return await cls.start([sys.executable, "-m", f"polynya.bench.{name}", *arguments], core=core, log=log)

    async def read(self, timeout: float = 300) -> Any:
        """Its next line of JSON; BenchFailed with the end of its log when there is none."""
        assert self.process.stdout is not None
        try:
            line = await asyncio.wait_for(self.process.stdout.readline(), timeout)
        except TimeoutError as exc:
            raise BenchFailed(f"{self.log.stem}: no answer in {timeout:g} s{self.last_words()}") from exc
        if not line:
            raise BenchFailed(f"{self.log.stem} ended{self.last_words()}")
        return msgspec.json.decode(line)

    async def ask(self, command: Any, timeout: float = 300) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(command) + b"\n")
        return await self.read(timeout)

    def last_words(self) -> str:
        text = self.log.read_text("utf-8", "replace").strip() if self.log.exists() else ""
        return f"; its log ends with: {text[-1500:]}" if text else ""

    def cpu(self) -> float:
        return tree_cpu(self.process.pid)

    def peak_rss(self) -> int:
        return sum(_status_bytes(pid, b"VmHWM:") for pid in tree(self.process.pid))

    async def close(self) -> None:
        """End the whole session, gently, then not. Idempotent."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), 5.0)
        if self.process.stdin is not None:
            self.process.stdin.close()


def _prepare(core: set[int]) -> None:
    """In the child, before it is its own program: its core, and a signal for when the bench itself is killed."""
    os.sched_setaffinity(0, core)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def tree(root: int) -> list[int]:
    """The process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) is not None:
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children.get(pid, [])
    return found


def tree_cpu(root: int) -> float:
    """CPU seconds of the tree so far, in the kernel's ticks (10 ms each): children that ended are counted by their parent."""
    ticks = 0
    for pid in tree(root):
        if (fields := _stat(pid)) is not None:
            ticks += sum(int(field) for field in fields[11:15])
    return ticks / _TICK


def _stat(pid: int) -> list[bytes] | None:
    """Fields of /proc/PID/stat from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except OSError:
        return None


def _status_bytes(pid: int, field: bytes) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return 0
    at = text.find(field)
    return int(text[at + len(field) :].split(None, 1)[0]) * 1024 if at >= 0 else 0


def own_rss() -> int:
    return _status_bytes(os.getpid(), b"VmRSS:")

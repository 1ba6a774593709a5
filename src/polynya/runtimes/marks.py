"""Finds and kills processes by what cannot be lost: the label in their environment, or whose descendants they are.

Invariant: it never signals this process or its ancestors. It refuses nothing else: whoever carries the mark dies.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

KILL_SECONDS = 10.0


def labels() -> dict[int, str]:
    """Pid → ``POLYNYA_LABEL`` of every process whose environment can be read."""
    found = {}
    for pid in _pids():
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if entry.startswith(b"POLYNYA_LABEL="):
                    found[pid] = entry[14:].decode(errors="replace")
    return found


def kill_labelled(matches: Callable[[str], bool]) -> dict[int, str]:
    """Kill all processes whose label matches, until none is left. Returns those that were found."""
    return _kill(lambda: {pid: label for pid, label in labels().items() if matches(label)})


def kill_below(pid: int) -> None:
    """Kill all descendants of a process, until none is left. The process itself lives."""

    def targets() -> dict[int, str]:
        parents = dict(_parents())
        return {found: "" for found in parents if found != pid and pid in _line(found, parents)}

    _kill(targets)


def _kill(find: Callable[[], dict[int, str]]) -> dict[int, str]:
    own = _line(os.getpid(), dict(_parents()))
    seen: dict[int, str] = {}
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        alive = {pid: label for pid, label in find().items() if pid not in own}
        if not alive:
            break
        seen |= alive
        _kill_and_wait(list(alive), deadline)
    return seen


def _kill_and_wait(pids: list[int], deadline: float) -> None:
    handles = []
    for pid in pids:
        with contextlib.suppress(OSError):
            handles.append(os.pidfd_open(pid))
    try:
        for fd in handles:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        for fd in handles:
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            poller.poll(max(0, int((deadline - time.monotonic()) * 1000)))
    finally:
        for fd in handles:
            os.close(fd)


def _pids() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _parents() -> Iterator[tuple[int, int]]:
    for pid in _pids():
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:2]
            if state not in (b"Z", b"X"):
                yield pid, int(parent)


def _line(pid: int, parents: dict[int, int]) -> set[int]:
    """The pid and its ancestors."""
    line: set[int] = set()
    while pid and pid not in line:
        line.add(pid)
        pid = parents.get(pid, 0)
    return line

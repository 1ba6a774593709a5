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

from polynya.runtimes._supervisor import INNER_NAME

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
    """Kill all processes whose label matches, until none is left. Returns those that were found.

    The inner halves of supervisors come last: left without the outer one they kill their tree, labelled or not, and end.
    """

    def find() -> dict[int, str]:
        return {pid: label for pid, label in labels().items() if matches(label)}

    found = find()
    inner = [pid for pid, parent in _parents() if (pid in found or parent in found) and _is_inner(pid)]
    first = _kill(lambda: {pid: label for pid, label in find().items() if not _is_inner(pid)})
    _wait(inner, time.monotonic() + KILL_SECONDS)
    return found | first | _kill(find)


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
        _wait_handles(handles, deadline)
    finally:
        for fd in handles:
            os.close(fd)


def _wait(pids: list[int], deadline: float) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            fd = os.pidfd_open(pid)
            try:
                _wait_handles([fd], deadline)
            finally:
                os.close(fd)


def _wait_handles(handles: list[int], deadline: float) -> None:
    for fd in handles:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        poller.poll(max(0, int((deadline - time.monotonic()) * 1000)))


def _is_inner(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_bytes().strip() == INNER_NAME
    except OSError:
        return False


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

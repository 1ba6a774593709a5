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

from polynya.runtimes._supervisor import FORK_NAME, INNER_NAME

KILL_SECONDS = 10.0
LOOK_SECONDS = 0.2
"""So long a wait for what should end by itself, before all is looked at again."""


def labels() -> dict[int, str]:
    """Pid → ``POLYNYA_LABEL`` of every process whose environment can be read."""
    found = {}
    for pid in _pids():
        with contextlib.suppress(OSError):
            _, mark, rest = (b"\0" + _read(f"/proc/{pid}/environ")).rpartition(b"\0POLYNYA_LABEL=")
            if mark:
                found[pid] = rest.partition(b"\0")[0].decode(errors="replace")
    return found


def kill_labelled(matches: Callable[[str], bool]) -> dict[int, str]:
    """Kill all processes whose label matches, until none is left. Returns those that were found.

    The inner halves of supervisors come last: left without the outer one they kill their tree, labelled or not, and end.
    """

    def find() -> dict[int, str]:
        return {pid: label for pid, label in labels().items() if matches(label)}

    found: dict[int, str] = {}
    inner: set[int] = set()
    own: set[int] = set()
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        alive = find()
        if not alive and not inner:
            return found
        parents = dict(_parents())
        own = own or _line(os.getpid(), parents)
        alive = {pid: label for pid, label in alive.items() if pid in parents and pid not in own}
        mine = {pid for pid, parent in parents.items() if pid in alive or parent in alive or pid in inner}
        inner = {pid for pid in mine if _is_inner(pid)}
        found |= alive
        if others := [pid for pid in alive if pid not in inner]:
            _kill_and_wait(others, deadline)
        else:
            _kill_and_wait(list(inner), min(deadline, time.monotonic() + LOOK_SECONDS), 0)
    return found | _kill(find)


def await_forks() -> None:
    """Until no fork server whose polynya is gone, and no child that it was about to turn into something, is left."""
    deadline = time.monotonic() + KILL_SECONDS
    while (left := _stray_forks()) and time.monotonic() < deadline:
        _kill_and_wait(left, min(deadline, time.monotonic() + LOOK_SECONDS), 0)


def _stray_forks() -> list[int]:
    forks = {pid: parent for pid, parent in _parents() if _comm(pid) == FORK_NAME}
    kept = set()
    for pid, parent in forks.items():
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The last argument of a fork server is the pid of its polynya.
            if int(_read(f"/proc/{pid}/cmdline").split(b"\0")[-2]) == parent:
                kept.add(pid)
    return [pid for pid, parent in forks.items() if pid not in kept and parent not in kept]


def kill_below(pid: int) -> None:
    """Kill all descendants of a process, until none is left. The process itself lives."""

    def targets() -> dict[int, str]:
        parents = dict(_parents())
        return {found: "" for found in parents if found != pid and pid in _line(found, parents)}

    _kill(targets)


def _kill(find: Callable[[], dict[int, str]]) -> dict[int, str]:
    own: set[int] = set()
    seen: dict[int, str] = {}
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        alive = find()
        if alive and not own:
            own = _line(os.getpid(), dict(_parents()))
        alive = {pid: label for pid, label in alive.items() if pid not in own}
        if not alive:
            break
        seen |= alive
        _kill_and_wait(list(alive), deadline)
    return seen


def _kill_and_wait(pids: list[int], deadline: float, number: int = signal.SIGKILL) -> None:
    handles = []
    for pid in pids:
        with contextlib.suppress(OSError):
            handles.append(os.pidfd_open(pid))
    try:
        for fd in handles:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(fd, number)
        _wait_handles(handles, deadline)
    finally:
        for fd in handles:
            os.close(fd)


def _wait_handles(handles: list[int], deadline: float) -> None:
    for fd in handles:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        poller.poll(max(0, int((deadline - time.monotonic()) * 1000)))


def _is_inner(pid: int) -> bool:
    return _comm(pid) == INNER_NAME


def _comm(pid: int) -> bytes:
    try:
        return _read(f"/proc/{pid}/comm").strip()
    except OSError:
        return b""


def _pids() -> list[int]:
    with os.scandir("/proc") as entries:
        return [int(entry.name) for entry in entries if entry.name.isdigit()]


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        data = part = os.read(fd, 1 << 16)
        while part:
            part = os.read(fd, 1 << 16)
            data += part
        return data
    finally:
        os.close(fd)


def _parents() -> Iterator[tuple[int, int]]:
    for pid in _pids():
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[:2]
            if state not in (b"Z", b"X"):
                yield pid, int(parent)


def _line(pid: int, parents: dict[int, int]) -> set[int]:
    """The pid and its ancestors."""
    line: set[int] = set()
    while pid and pid not in line:
        line.add(pid)
        pid = parents.get(pid, 0)
    return line

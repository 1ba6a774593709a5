"""Runs one program, owns everything that it starts, and is able to kill all of it. Standard library only.

Forked by ``_forkserver.py``, which calls ``main`` with a stream socket to polynya. Two processes come of it:

* the **outer** one reads the configuration, keeps the program's output within its cap, watches the clock, and answers.
  It never runs foreign code. When its socket ends (polynya is gone) it orders the kill;
* the **inner** one is forked after the namespaces of the sandbox are entered. It is a *child subreaper*: a process that
  daemonises, leaves its session or clears its environment still becomes its child, so the tree below it is complete.
  It holds no privilege, is not dumpable (the program cannot read or trace it), and kills by walking that tree.

Invariant: after the answer to a kill, nothing that the program started is alive, unless the answer says ``orphaned``
(the program killed its own supervisor); then polynya kills by other marks. It refuses to answer twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import socket
import struct
import time
import traceback
from collections import deque
from typing import Any, NoReturn

KILL_GRACE = 10.0
"""Seconds that the inner process gets to kill the tree before it is given up as orphaned."""
TAIL = 64 * 1024
"""Bytes of the end of the output that are kept when the rest goes to a file."""
PIPE_MAX = 1 << 20
"""More than this cannot wait in a pipe: what a dead program wrote is read within this bound."""

FORK_NAME, OUTER_NAME, INNER_NAME = b"polynya-fork", b"polynya-outer", b"polynya-inner"
"""What the kernel calls these processes, so that a sweep lets a fork server end and an inner process do its work."""

PR_SET_DUMPABLE, PR_SET_NAME, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 4, 15, 24, 36
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
CAPABILITY_VERSION_3 = 0x20080522

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def prctl(option: int, *args: int) -> int:
    padded = [ctypes.c_ulong(arg) for arg in (*args, 0, 0, 0, 0)][:4]
    return int(libc.prctl(option, *padded))


def name_process(name: bytes) -> None:
    libc.prctl(PR_SET_NAME, ctypes.c_char_p(name))


def drop_privileges() -> None:
    """No capability in any set, none to be gained by exec; uid 0 keeps its number and loses its power."""
    for cap in range(64):
        if prctl(PR_CAPBSET_DROP, cap) != 0:
            if ctypes.get_errno() == errno.EINVAL:
                break
            check(-1, "PR_CAPBSET_DROP")
    check(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL), "PR_CAP_AMBIENT")
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    check(libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")
    check(prctl(PR_SET_NO_NEW_PRIVS, 1), "PR_SET_NO_NEW_PRIVS")


def enter(namespaces: list[int], root: int | None) -> None:
    """Join namespaces in the given order (the user namespace first), then the sandbox's root folder."""
    for fd in namespaces:
        check(libc.setns(fd, 0), "setns")
        os.close(fd)
    if root is not None:
        os.fchdir(root)
        os.chroot(".")
        os.close(root)


class Sink:
    """One output stream: to a file up to a cap, its end in memory."""

    def __init__(self, path: str | None, cap: int) -> None:
        self.file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), "wb", 0) if path else None
        self.keep = min(TAIL, cap // 2) if path else cap
        self.room = cap - self.keep if path else 0
        self.total = 0
        self.chunks: deque[bytes] = deque()
        self.held = 0

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        if self.file and self.room:
            head = data[: self.room]
            self.room -= len(head)
            self.file.write(head)
        self.chunks.append(data)
        self.held += len(data)
        while self.chunks and self.held - len(self.chunks[0]) >= self.keep:
            self.held -= len(self.chunks.popleft())

    def finish(self, cap: int) -> tuple[bytes, bool]:
        """The end of the stream, and whether something was dropped. The file gets its end, too."""
        joined = b"".join(self.chunks)
        tail = joined[max(0, len(joined) - self.keep) :]
        if self.file:
            beyond = self.total - (cap - self.keep)
            if beyond > self.keep:
                self.file.write(b"\n[polynya: %d bytes left out]\n" % (beyond - self.keep))
            if beyond > 0:
                self.file.write(tail[max(0, len(tail) - beyond) :])
            self.file.close()
        return tail, self.total > cap


# --- the inner process -------------------------------------------------------------------------------------------


def parent_of(pid: str) -> int:
    fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    try:
        # The second field is the program's own name in parentheses and may hold anything.
        return int(os.read(fd, 4096).rpartition(b")")[2].split()[1])
    finally:
        os.close(fd)


def descendants(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parents[int(entry.name)] = parent_of(entry.name)
    found: list[int] = []
    frontier = {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        found += frontier
    return found


def launch(config: dict[str, Any], stdio: list[int], groups: list[int]) -> NoReturn:
    """Become the program. Never returns: what cannot be started ends with 126 or 127, as in a shell."""
    code = 126
    try:
        for fd in groups:
            os.write(fd, b"0")
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        if config["drop"]:
            drop_privileges()
        for target, fd in enumerate(stdio):
            os.dup2(fd, target)
        os.closerange(3, 1 << 20)
        os.umask(0o022)
        os.chdir(config["cwd"])
        code = 127
        os.execvpe(config["argv"][0], config["argv"], config["env"])
    except OSError as exc:
        if not isinstance(exc, FileNotFoundError):
            code = 126
        os.write(2, f"polynya: cannot start {config['argv'][0]!r} in {config['cwd']!r}: {exc}\n".encode())
    finally:
        os._exit(code)


def inner(config: dict[str, Any], stdio: list[int], groups: list[int], orders: int, answers: int) -> NoReturn:
    """Start the program, reap whatever is orphaned below it, obey the one order. Ends when no child is left."""
    os.setpgid(0, 0)
    check(prctl(PR_SET_CHILD_SUBREAPER, 1), "PR_SET_CHILD_SUBREAPER")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    child = os.fork()
    if child == 0:
        launch(config, stdio, groups)
    for fd in (*stdio, *groups):
        os.close(fd)
    if config["drop"]:
        drop_privileges()
    prctl(PR_SET_DUMPABLE, 0)
    killing = False
    while True:
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 4096)
        try:
            while (done := os.waitpid(-1, os.WNOHANG))[0]:
                if done[0] == child:
                    # With the outer one dead nobody reads it; the tree must be killed all the same.
                    with contextlib.suppress(BrokenPipeError):
                        os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(done[1]))
        except ChildProcessError:
            os._exit(0)
        if killing:
            # Not a race: whoever was forked meanwhile becomes ours when its parent is reaped, which brings us here again.
            for pid in descendants(os.getpid()):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        ready, _, _ = select.select([woken] if killing else [woken, orders], [], [])
        if orders in ready:
            killing = True


# --- the outer process -------------------------------------------------------------------------------------------


class Outer:
    def __init__(self, control: socket.socket, config: dict[str, Any]) -> None:
        self.control = control
        self.cap: int = config["max_output"]
        self.began = time.monotonic()
        self.deadline: float | None = None if config["timeout"] is None else self.began + config["timeout"]
        self.sinks: dict[int, Sink] = {}
        self.outputs: list[Sink] = []
        self.code: int | None = None
        self.timed_out = False
        self.killing = False
        self.answered = False
        self.start(config)

    def start(self, config: dict[str, Any]) -> None:
        groups = [os.open(path, os.O_WRONLY) for path in config["groups"]]
        writers = []
        for path in (config["stdout"], config["stderr"]):
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            self.sinks[reader] = Sink(path, self.cap)
            writers.append(writer)
        self.outputs = list(self.sinks.values())
        orders, self.order = os.pipe()
        self.answers, answers = os.pipe()
        enter(config["namespaces"], config["root"])
        # Named before it is there: a sweep that takes it for another process would kill it, and miss what it starts next.
        name_process(INNER_NAME)
        self.inner = os.fork()
        if self.inner:
            name_process(OUTER_NAME)
        else:
            # The order pipe must have one writer, or its end would never be seen; the same holds for the rest.
            for fd in (self.order, self.answers, self.control.fileno(), *self.sinks):
                os.close(fd)
            try:
                inner(config, [config["stdin"], *writers], groups, orders, answers)
            finally:
                os._exit(125)
        for fd in (*groups, *writers, orders, answers, config["stdin"]):
            os.close(fd)

    def kill(self) -> None:
        if not self.killing:
            self.killing = True
            os.close(self.order)
            with contextlib.suppress(OSError):
                os.kill(self.inner, signal.SIGCONT)
            self.deadline = time.monotonic() + KILL_GRACE

    def drain(self, fd: int, bound: int) -> None:
        while bound > 0:
            try:
                data = os.read(fd, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                os.close(fd)
                del self.sinks[fd]
                return
            bound -= len(data)
            if not self.answered:
                self.sinks[fd].feed(data)

    def answer(self, orphaned: bool) -> None:
        """The one answer. What the program wrote before it ended is in the pipes by now."""
        if self.answered:
            return
        for fd in list(self.sinks):
            self.drain(fd, PIPE_MAX)
        self.answered = True
        ends = [sink.finish(self.cap) for sink in self.outputs]
        header = {
            "code": -signal.SIGKILL if self.code is None else self.code,
            "timed_out": self.timed_out,
            "truncated": any(cut for _, cut in ends),
            "seconds": time.monotonic() - self.began,
            "orphaned": orphaned,
            "sizes": [len(tail) for tail, _ in ends],
        }
        raw = json.dumps(header).encode()
        with contextlib.suppress(OSError):
            self.control.sendall(struct.pack(">I", len(raw)) + raw + b"".join(tail for tail, _ in ends))
        if not self.killing:
            self.deadline = None

    def serve(self) -> None:
        """Until the program and all that it left behind are gone, or the tree had to be given up."""
        control: list[int] = [self.control.fileno()]
        while True:
            left = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
            ready, _, _ = select.select([*control, self.answers, *self.sinks], [], [], left)
            if self.deadline is not None and time.monotonic() >= self.deadline:
                if self.killing:
                    with contextlib.suppress(OSError):
                        os.kill(self.inner, signal.SIGKILL)
                    return self.answer(orphaned=True)
                self.timed_out = True
                self.kill()
            for fd in [fd for fd in ready if fd in self.sinks]:
                self.drain(fd, 1 << 16)
            if control and control[0] in ready:
                if not self.control.recv(64):
                    control = []
                self.kill()
            if self.answers in ready:
                data = os.read(self.answers, 64)
                if not data:
                    os.waitpid(self.inner, 0)
                    return self.answer(orphaned=self.code is None)
                self.code = int(data)
                if not self.killing:
                    self.answer(orphaned=False)


def receive(control: socket.socket) -> dict[str, Any]:
    def exactly(size: int) -> bytes:
        data = b""
        while len(data) < size:
            if not (part := control.recv(size - len(data))):
                raise EOFError
            data += part
        return data

    config: dict[str, Any] = json.loads(exactly(struct.unpack(">I", exactly(4))[0]))
    return config


def listen(control: socket.socket, config: dict[str, Any]) -> None:
    enter(config["namespaces"], None)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.bind(("127.0.0.1", 0))
        server.listen(config["listen"])
        socket.send_fds(control, [b"l"], [server.fileno()])


def main(fd: int) -> None:
    """``fd``: the socket. The configuration that comes through it names further descriptors by their numbers here."""
    control = socket.socket(fileno=fd)
    control.set_inheritable(False)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        config = receive(control)
        if "listen" in config:
            listen(control, config)
        else:
            Outer(control, config).serve()
    except EOFError:
        return
    except Exception:
        raw = json.dumps({"error": traceback.format_exc()[-4000:]}).encode()
        with contextlib.suppress(OSError):
            control.sendall(struct.pack(">I", len(raw)) + raw)

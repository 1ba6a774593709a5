"""Forks what polynya starts, so that polynya itself never does. A script of its own, standard library only.

A fork or vfork of polynya would hold its event loop until the child is scheduled and has called exec: on a machine full of
agents, a tenth of a second and more. Started once as ``python -I -S _forkserver.py FD PID``, this small process does it instead.
PID is polynya's, for the sweep; FD is a seqpacket socket; one message asks for one child and brings the child's file descriptors along:

* ``supervise``: a fork that becomes ``_supervisor.py``, without an exec and the start-up of another Python;
* ``program``: a fork and an exec.

Answers: ``id`` with ``pid`` and a pidfd, or with ``error``; later ``id`` with ``ended``, the exit code, when it is reaped.

Invariant: it has one thread, on which the life of what it started may hang (``--die-with-parent``), and it ends when its
socket does. It refuses to keep a descriptor of a request: whatever hangs on the end of one, its child alone holds it open.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib.util
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from polynya.runtimes import _supervisor
else:
    # Not by sys.path: the names of the files beside this one must not be taken for those of the standard library.
    _spec = importlib.util.spec_from_file_location("_supervisor", Path(__file__).with_name("_supervisor.py"))
    _supervisor = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_supervisor)

ROOM = "POLYNYA_ROOM"
"""A variable of this process's own start, filled with nothing, in whose place a supervisor writes its label."""
NICENESS = 5
"""Of this process and all that comes of it: a gateway that waits for its agents to yield holds up all of them."""
MAX_MESSAGE = 1 << 17
MAX_FDS = 64
PR_SET_PDEATHSIG = 1


def lower_priority() -> None:
    """Of this session: nothing that is started here leaves it by itself.

    Where the scheduler shares out the CPU by sessions (autogroup), a session for each of a hundred agents would leave polynya,
    one session, a hundredth of it, whatever their niceness. Together they are one, which is below polynya's.
    """
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # Not there, or, without privilege, asked for too often.
        Path("/proc/self/autogroup").write_text(str(NICENESS))


def write_label(label: str) -> None:
    """Into the environment that /proc shows of this process, where the sweep looks for it."""
    _supervisor.libc.getenv.restype = ctypes.c_void_p
    value = _supervisor.libc.getenv(ROOM.encode())
    room = len(os.environb[ROOM.encode()])
    text = b"POLYNYA_LABEL=" + os.fsencode(label) + b"\0"
    begin, size = value - len(ROOM) - 1, len(ROOM) + 1 + room
    if len(text) > size:
        raise ValueError(f"the label {label!r} is longer than {room} bytes")
    ctypes.memmove(begin, text.ljust(size, b"\0"), size)


def install(fds: list[int], first: int) -> None:
    """Make these the descriptors ``first``, ``first + 1``, … of this process, to be inherited, and close all beyond."""
    end = first + len(fds)
    aside = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, end) for fd in fds]
    for number, fd in enumerate(aside, first):
        os.dup2(fd, number)
    os.closerange(end, 1 << 20)


def become(request: dict[str, Any], fds: list[int], server: int) -> NoReturn:
    """What the child does. Never returns."""
    code = 126
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        if request["kind"] == "supervise":
            write_label(request["label"])
            _supervisor.name_process(_supervisor.OUTER_NAME)
            install(fds, 3)
            _supervisor.main(3)
            code = 0
        else:
            install(fds, 0)
            code = execute(request, server)
    finally:
        os._exit(code)


def execute(request: dict[str, Any], server: int) -> int:
    """As a shell: 127 is a program that does not exist, 126 one that cannot be started."""
    _supervisor.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        return 126
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.chdir(request["cwd"])
        os.execve(request["argv"][0], request["argv"], request["env"])
    except OSError as exc:
        os.write(2, f"polynya: cannot start {request['argv'][0]!r}: {exc}\n".encode())
        return 127 if isinstance(exc, FileNotFoundError) else 126


class Server:
    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.ids: dict[int, int] = {}
        """Pid → id of the request, for every child that is not reaped."""
        self.woken, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(self.woken, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Until the socket ends. Requests that polynya left in it when it died are not worth a child."""
        poller = select.poll()
        poller.register(self.control, select.POLLIN | select.POLLRDHUP)
        poller.register(self.woken, select.POLLIN)
        while True:
            ready = dict(poller.poll())
            if ready.get(self.control.fileno(), 0) & (select.POLLHUP | select.POLLRDHUP):
                return
            if self.woken in ready:
                os.read(self.woken, 4096)
            self.reap()
            if self.control.fileno() in ready:
                flags = socket.MSG_CMSG_CLOEXEC
                data, fds, _, _ = socket.recv_fds(self.control, MAX_MESSAGE, MAX_FDS, flags)
                if not data:
                    return
                try:
                    self.start(json.loads(data), fds)
                finally:
                    for fd in fds:
                        os.close(fd)

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (done := os.waitpid(-1, os.WNOHANG))[0]:
                number = self.ids.pop(done[0])
                self.answer({"id": number, "ended": os.waitstatus_to_exitcode(done[1])})

    def start(self, request: dict[str, Any], fds: list[int]) -> None:
        number, server = request["id"], os.getpid()
        if len(fds) != request["fds"]:
            return self.answer({"id": number, "error": "too many open files"})
        try:
            pid = os.fork()
        except OSError as exc:
            return self.answer({"id": number, "error": str(exc)})
        if pid == 0:
            become(request, fds, server)
        self.ids[pid] = number
        try:
            handle = os.pidfd_open(pid)
        except OSError as exc:
            os.kill(pid, signal.SIGKILL)
            return self.answer({"id": number, "error": str(exc)})
        try:
            self.answer({"id": number, "pid": pid}, [handle])
        finally:
            os.close(handle)

    def answer(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        socket.send_fds(self.control, [json.dumps(message).encode()], fds or [])


def main() -> None:
    _supervisor.name_process(_supervisor.FORK_NAME)
    lower_priority()
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    server = Server(control)
    gc.collect()
    gc.freeze()
    with contextlib.suppress(ConnectionError):
        server.serve()
        server.reap()


if __name__ == "__main__":
    main()

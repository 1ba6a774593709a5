"""Starts programs on this machine without forking polynya: it asks ``_forkserver.py``, one small process, to do it.

Invariants: the event loop never waits for a fork or an exec; a request that is cancelled leaves no child; the fork server
runs while somebody holds the spawner (a live sandbox does) and is gone when the last one has let go. If it is killed, what
waits for it gets a RuntimeFailure, and the next request starts another. It refuses to start anything while nobody holds it,
and serves one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from polynya.errors import RuntimeFailure

SCRIPT = Path(__file__).with_name("_forkserver.py")
ROOM = "POLYNYA_ROOM"
LABEL_MAX = 1000
WINDOW = 32
"""Requests on their way at once. The kernel bounds the descriptors in flight, for all but root, by the open file limit."""
ANSWER_SECONDS = 60.0
"""A fork server that is silent for so long is killed: no request may wait without end."""
END_SECONDS = 10.0
MAX_REQUEST = 1 << 17
MAX_ANSWER = 1 << 14


async def readable(fd: int) -> None:
    """Until the descriptor can be read or has ended: a pipe, a socket, a pidfd."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(fd, _settle, ready)
    try:
        await ready
    finally:
        loop.remove_reader(fd)


async def settled(work: Awaitable[Any]) -> asyncio.CancelledError | None:
    """Until the work is done, with a result or an error, whatever cancellation comes. Returns the cancellation."""
    cancelled = None
    future = asyncio.ensure_future(work)
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as exc:
            cancelled = exc
    return cancelled


def lost() -> RuntimeFailure:
    return RuntimeFailure(
        "the process that starts programs for polynya was killed",
        fix="look for an out-of-memory kill in dmesg; the next program starts another one",
    )


class Child:
    """A process that the fork server started."""

    def __init__(self, pid: int, handle: int) -> None:
        self.pid = pid
        self.orphaned = False
        """The fork server is gone: nobody tells its exit code."""
        self._handle = handle
        self._watching = asyncio.Lock()
        self._code: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    def kill(self) -> None:
        if self._handle >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def kill_group(self) -> None:
        if not self._code.done():
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)

    async def wait(self) -> int | None:
        """Until it is gone; its exit code (minus the signal that killed it), or None when that is not known."""
        code = await asyncio.shield(self._code)
        async with self._watching:
            if self._handle >= 0:
                await readable(self._handle)
                self._close()
        return code

    def ended(self, code: int) -> None:
        self._close()
        _settle(self._code, code)

    def orphan(self) -> None:
        self.orphaned = True
        _settle(self._code, None)

    def _close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class _ForkServer:
    """One run of the fork server, and what was asked of it."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self.lost = False
        self._process = process
        self._control = control
        self._asked: dict[int, asyncio.Future[Child]] = {}
        self._children: dict[int, Child] = {}
        self._count = 0
        self._sending = asyncio.Lock()
        asyncio.get_running_loop().add_reader(control.fileno(), self._receive)

    async def ask(self, request: Mapping[str, Any], fds: Sequence[int]) -> Child:
        """The child. Cancelled, it is dead before this raises."""
        self._count += 1
        number = self._count
        answer: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        message = json.dumps({**request, "id": number, "fds": len(fds)}).encode()
        if len(message) > MAX_REQUEST:
            raise RuntimeFailure(f"a command line of {len(message)} bytes is too long", fix="fewer or shorter binds")
        async with self._sending:
            if self.lost:
                raise lost()
            await self._send(message, fds)
            self._asked[number] = answer
        patience = asyncio.get_running_loop().call_later(ANSWER_SECONDS, self._process.kill)
        cancelled = await settled(answer)
        patience.cancel()
        if cancelled is not None:
            if answer.exception() is None:
                answer.result().kill()
                await settled(answer.result().wait())
            raise cancelled
        return answer.result()

    async def _send(self, message: bytes, fds: Sequence[int]) -> None:
        while True:
            try:
                socket.send_fds(self._control, [message], fds)
                return
            except BlockingIOError:
                await _writable(self._control.fileno())
            except ConnectionError as exc:
                raise lost() from exc
            except OSError as exc:
                raise RuntimeFailure(
                    f"cannot ask for a program: {exc}", fix="fewer sandboxes, or binds, at once"
                ) from exc

    def _receive(self) -> None:
        while not self.lost:
            try:
                data, fds, _, _ = socket.recv_fds(self._control, MAX_ANSWER, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except ConnectionError:
                data, fds = b"", []
            if data:
                self._take(json.loads(data), fds)
            else:
                self._lose()

    def _take(self, message: dict[str, Any], fds: list[int]) -> None:
        number: int = message["id"]
        if "ended" in message:
            if child := self._children.pop(number, None):
                child.ended(message["ended"])
            return
        answer = self._asked.pop(number)
        if fds:
            self._children[number] = Child(message["pid"], fds[0])
            answer.set_result(self._children[number])
        else:
            reason = message.get("error", "too many open files")
            answer.set_exception(RuntimeFailure(f"cannot start a program: {reason}", fix="raise ulimit -n and -u"))

    def _lose(self) -> None:
        if self.lost:
            return
        self.lost = True
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
        for answer in self._asked.values():
            answer.set_exception(lost())
        for child in self._children.values():
            child.orphan()
        self._asked, self._children = {}, {}

    async def close(self) -> None:
        self._lose()
        if self._process.returncode is None:
            handle = os.pidfd_open(self._process.pid)
            try:
                await asyncio.wait_for(readable(handle), END_SECONDS)
            except TimeoutError:
                self._process.kill()
            finally:
                os.close(handle)
            await asyncio.to_thread(self._process.wait)


class Spawner:
    """Starts programs. ``async with`` holds it: so one that is shared keeps its fork server between sandboxes."""

    def __init__(self) -> None:
        self._holders = 0
        self._server: asyncio.Task[_ForkServer] | None = None
        self._window = asyncio.Semaphore(WINDOW)

    async def __aenter__(self) -> Spawner:
        self.hold()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()

    def hold(self) -> None:
        self._holders += 1

    async def release(self) -> None:
        """The last one to let go waits until the fork server is gone."""
        self._holders -= 1
        if self._holders == 0 and self._server is not None:
            server, self._server = self._server, None
            if cancelled := await settled(_close(server)):
                raise cancelled

    async def supervise(self, label: str, fds: Sequence[int]) -> Child:
        """A fork that runs ``_supervisor.main(3)``. It has ``fds`` as its descriptors 3, 4, …"""
        if len(os.fsencode(label)) > LABEL_MAX:
            raise RuntimeFailure(f"label {label!r:.100} is longer than {LABEL_MAX} bytes", fix="use a shorter one")
        return await self._ask({"kind": "supervise", "label": label}, fds)

    async def program(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str, fds: Sequence[int]) -> Child:
        """A program in a process group of its own. It has ``fds`` as its descriptors 0, 1, 2, … and dies with the fork server."""
        return await self._ask({"kind": "program", "argv": list(argv), "env": dict(env), "cwd": cwd}, fds)

    async def run(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str) -> tuple[int, bytes, bytes]:
        """Run a program to its end: exit code, output, errors. Cancelling kills its process group."""
        with contextlib.ExitStack() as stack:
            fds = [os.open(os.devnull, os.O_RDONLY), os.memfd_create("stdout"), os.memfd_create("stderr")]
            for fd in fds:
                stack.callback(os.close, fd)
            child = await self.program(argv, env=env, cwd=cwd, fds=fds)
            try:
                code = await child.wait()
            except asyncio.CancelledError:
                child.kill_group()
                await settled(child.wait())
                raise
            if code is None:
                raise lost()
            return code, written(fds[1]), written(fds[2])

    async def _ask(self, request: Mapping[str, Any], fds: Sequence[int]) -> Child:
        async with self._window:
            if self._holders == 0:
                raise RuntimeError("hold the spawner while it is used")
            if self._server is None or (self._server.done() and _is_lost(self._server)):
                self._server = asyncio.create_task(_start(self._server))
            return await (await asyncio.shield(self._server)).ask(request, fds)


async def _start(before: asyncio.Task[_ForkServer] | None) -> _ForkServer:
    if before is not None:
        await _close(before)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    try:
        with theirs:
            # Once, and on a thread that may end before the fork server does: nothing hangs on it.
            process = await asyncio.to_thread(
                subprocess.Popen,
                [sys.executable, "-I", "-S", str(SCRIPT), str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={ROOM: "-" * LABEL_MAX, "LANG": "C.UTF-8"},
                cwd="/",
                start_new_session=True,
            )
    except BaseException as exc:
        ours.close()
        if isinstance(exc, OSError):
            raise RuntimeFailure(f"cannot start {sys.executable}: {exc}", fix="raise ulimit -n and -u") from exc
        raise
    return _ForkServer(process, ours)


async def _close(server: asyncio.Task[_ForkServer]) -> None:
    await asyncio.wait([server])
    if server.exception() is None:
        await server.result().close()


def _is_lost(server: asyncio.Task[_ForkServer]) -> bool:
    return server.exception() is not None or server.result().lost


def written(fd: int) -> bytes:
    """What is in a memory file, wherever its writers have left the position."""
    return os.pread(fd, os.fstat(fd).st_size, 0)


async def _writable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_writer(fd, _settle, ready)
    try:
        await ready
    finally:
        loop.remove_writer(fd)


def _settle(future: asyncio.Future[Any], value: Any = None) -> None:
    if not future.done():
        future.set_result(value)

"""The programs of one sandbox: started, capped, timed and killed through ``_supervisor.py``.

Invariant: a program that timed out or was cancelled is dead, with all that it started, before ``run`` returns or raises;
other programs of the same sandbox do not notice. It refuses to start a program after ``close``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polynya.errors import RuntimeFailure
from polynya.runtimes.base import ExecResult
from polynya.runtimes.spawner import Spawner, readable, settled

LABEL = "POLYNYA_LABEL"
"""The environment variable that marks every process of a sandbox, for the sweep."""
PASSED = 4
"""The first descriptor of a supervisor that is ours to name; 3 is its socket."""
BACKLOG = 1024
LISTEN_SECONDS = 30.0


class Namespaces:
    """Open handles on a live sandbox's namespaces. They cannot come to mean another process, as a pid can."""

    def __init__(self, pid: int, names: Sequence[str]) -> None:
        self.fds: dict[str, int] = {}
        self.root: int = -1
        try:
            for name in names:
                self.fds[name] = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)
            self.root = os.open(f"/proc/{pid}/root", os.O_RDONLY | os.O_DIRECTORY)
        except BaseException:
            self.close()
            raise

    def passed(self) -> list[int]:
        """The root folder, then the namespaces in the order in which they are entered."""
        return [self.root, *self.fds.values()]

    def close(self) -> None:
        for fd in (*self.fds.values(), self.root):
            if fd >= 0:
                os.close(fd)
        self.fds, self.root = {}, -1


class _Supervised:
    """One supervisor process and the socket to it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = json.dumps(config).encode()
        self.ended = asyncio.Event()
        """The supervisor is gone, or never came."""
        self.forgetting: asyncio.Task[None] | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.killed = False

    async def start(self, spawner: Spawner, label: str, fds: Sequence[int]) -> None:
        """``fds`` become the supervisor's descriptors from ``PASSED`` on. Raises RuntimeFailure."""
        self.socket, theirs = socket.socketpair()
        try:
            self.socket.setblocking(False)
            with theirs:
                self.child = await spawner.supervise(label, [theirs.fileno(), *fds])
        except BaseException:
            self.socket.close()
            self.ended.set()
            raise

    async def converse(self) -> tuple[dict[str, Any], bytes, bytes]:
        """Send the configuration and read until the one answer."""
        self.reader, self.writer = await asyncio.open_unix_connection(sock=self.socket)
        self.writer.write(struct.pack(">I", len(self.config)) + self.config + (b"k" if self.killed else b""))
        try:
            size = struct.unpack(">I", await self.reader.readexactly(4))[0]
            header = json.loads(await self.reader.readexactly(size))
            if "error" in header:
                raise RuntimeFailure(f"the supervisor of a program failed: {header['error']}")
            out, err = [await self.reader.readexactly(n) for n in header["sizes"]]
            return header, out, err
        except (asyncio.IncompleteReadError, ConnectionError) as exc:
            raise RuntimeFailure(
                "the supervisor of a program died before it answered", fix="look for an out-of-memory kill in dmesg"
            ) from exc

    def kill(self) -> None:
        self.killed = True
        if self.writer is not None and not self.writer.is_closing():
            self.writer.write(b"k")

    async def end(self) -> None:
        """Wait until the supervisor is gone: nothing that it watched is left, or it gave up."""
        if self.writer is not None:
            with contextlib.suppress(OSError):
                while await self.reader.read(4096):
                    pass
            self.writer.close()
            with contextlib.suppress(OSError):
                await self.writer.wait_closed()
        await self.child.wait()


class Programs:
    """All programs of one sandbox."""

    def __init__(
        self,
        label: str,
        spawner: Spawner,
        *,
        namespaces: Namespaces | None = None,
        groups: Sequence[Path] = (),
        kill_orphans: Callable[[bool], Awaitable[None]],
    ) -> None:
        self._label = label
        self._spawner = spawner
        self._namespaces = namespaces
        self._groups = [str(path) for path in groups]
        self._kill_orphans = kill_orphans
        """Kills what belongs to the sandbox and hangs below no supervisor. Told whether no supervisor is alive."""
        self._live: set[_Supervised] = set()
        self._closed = False

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        stdin: bytes | None,
        timeout: float | None,
        stdout: Path | None,
        stderr: Path | None,
        max_output: int,
    ) -> ExecResult:
        if self._closed:
            raise RuntimeFailure(f"sandbox {self._label} is destroyed", fix="create a new one")
        if not argv:
            raise RuntimeFailure("exec: argv [] is empty", fix="name a program")
        source = _readable(stdin)
        try:
            passed = [source, *(self._namespaces.passed() if self._namespaces else [])]
            numbers = list(range(PASSED, PASSED + len(passed)))
            supervised = _Supervised(
                {
                    "argv": list(argv),
                    "cwd": cwd,
                    "env": {**env, LABEL: self._label},
                    "stdin": numbers[0],
                    "stdout": str(stdout.absolute()) if stdout else None,
                    "stderr": str(stderr.absolute()) if stderr else None,
                    "timeout": timeout,
                    "max_output": max_output,
                    "namespaces": numbers[2:],
                    "root": numbers[1] if self._namespaces else None,
                    "groups": self._groups,
                    "drop": self._namespaces is not None,
                }
            )
            await self._begin(supervised, passed)
        finally:
            os.close(source)
        return await self._finish(supervised)

    async def _begin(self, supervised: _Supervised, passed: Sequence[int]) -> None:
        # Among the living at once, so that kill_all does not miss one whose supervisor is on its way.
        self._live.add(supervised)
        try:
            await supervised.start(self._spawner, self._label, passed)
        except BaseException:
            self._live.discard(supervised)
            raise

    async def _finish(self, supervised: _Supervised) -> ExecResult:
        talk = asyncio.ensure_future(supervised.converse())
        cancelled: asyncio.CancelledError | None = None
        while not talk.done():
            try:
                await asyncio.wait([talk])
            except asyncio.CancelledError as exc:
                # The supervisor answers within its grace, so this wait is bounded.
                cancelled = exc
                supervised.kill()
        failed = talk.exception() is not None
        supervised.forgetting = asyncio.create_task(self._forget(supervised))
        header, out, err = ({}, b"", b"") if failed else talk.result()
        if cancelled or failed or header["timed_out"] or header["orphaned"]:
            await asyncio.wait([supervised.forgetting])
            if failed or header["orphaned"]:
                await self._kill_orphans(not self._live)
        if cancelled:
            raise cancelled
        if failed:
            talk.result()
        return ExecResult(
            exit_code=header["code"],
            stdout=out,
            stderr=err,
            timed_out=header["timed_out"],
            truncated=header["truncated"],
            seconds=header["seconds"],
        )

    async def _forget(self, supervised: _Supervised) -> None:
        await supervised.end()
        self._live.discard(supervised)
        supervised.ended.set()

    async def kill_all(self) -> None:
        """Every program, those in the background too. Their ``run`` returns with what they had."""
        await self.kill_supervised()
        await self._kill_orphans(True)

    async def kill_supervised(self) -> None:
        """All below a supervisor. A run that was still going finishes by itself."""
        living = list(self._live)
        for item in living:
            item.kill()
        for item in living:
            await item.ended.wait()

    async def listen(self) -> socket.socket:
        """A listening socket on the sandbox's own loopback. Needs namespaces."""
        assert self._namespaces is not None
        spaces = [fd for name, fd in self._namespaces.fds.items() if name in ("user", "net")]
        numbers = list(range(PASSED, PASSED + len(spaces)))
        supervised = _Supervised({"listen": BACKLOG, "namespaces": numbers})
        await supervised.start(self._spawner, self._label, spaces)
        try:
            async with asyncio.timeout(LISTEN_SECONDS):
                return await _take_listener(supervised)
        except TimeoutError as exc:
            raise RuntimeFailure(f"no listening socket from the sandbox within {LISTEN_SECONDS:g} s") from exc
        finally:
            supervised.socket.close()
            supervised.child.kill()
            if cancelled := await settled(supervised.child.wait()):
                raise cancelled

    def close(self) -> None:
        self._closed = True


async def _take_listener(supervised: _Supervised) -> socket.socket:
    control = supervised.socket
    message = struct.pack(">I", len(supervised.config)) + supervised.config
    await asyncio.get_running_loop().sock_sendall(control, message)
    await readable(control.fileno())
    data, fds, _, _ = socket.recv_fds(control, 1 << 16, 1, socket.MSG_CMSG_CLOEXEC)
    if not fds:
        raise RuntimeFailure(f"cannot listen inside the sandbox: {data[4:].decode(errors='replace') or 'it is gone'}")
    listener = socket.socket(fileno=fds[0])
    listener.setblocking(False)
    return listener


def _readable(data: bytes | None) -> int:
    """A file descriptor to be the program's stdin: a memory file, so that no pump is needed and nothing can block."""
    if data is None:
        return os.open(os.devnull, os.O_RDONLY)
    fd = os.memfd_create("stdin")
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd

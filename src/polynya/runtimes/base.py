"""The sandbox behind one interface.

Invariants: ``destroy`` is idempotent and leaves no process and no mount behind; a time-out kills the whole
process tree inside; a program's output is capped, not buffered without bound; a runtime never sees another session's
files. A failure of the sandbox is RuntimeFailure, a failure of the program in it is an exit code.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from polynya.schema import RuntimeSpec


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    exit_code: int
    """Minus the signal number when it was killed by one."""
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False
    truncated: bool = False
    """More output came than ``max_output``; the end of it is kept."""
    seconds: float = 0.0


class Bind(msgspec.Struct, frozen=True, kw_only=True):
    """A host directory that the runtime shows, read-only unless said."""

    source: Path
    target: str
    """Absolute path inside. ``local`` has no inside: it demands ``target == str(source)``."""
    writable: bool = False


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """What ``doctor`` says of a part: does it work here, and if not, why and what to do."""

    name: str
    ok: bool
    detail: str = ""
    fix: str = ""


class Runtime(Protocol):
    """One live sandbox."""

    workdir: str
    """The workspace, as a program inside sees it."""
    home: str
    """A writable, empty home folder, as a program inside sees it."""
    workspace: Path
    """The workspace on the host."""
    home_path: Path
    """``home`` on the host: a harness writes its configuration there before the run."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout: float | None = None,
        stdout: Path | None = None,
        stderr: Path | None = None,
        max_output: int = 1 << 20,
    ) -> ExecResult:
        """Run a program. ``cwd`` defaults to ``workdir``. ``env`` is added to the runtime's own clean environment.

        ``stdout``/``stderr``: host files that get the whole output as it comes. Beyond ``max_output`` bytes the middle
        is left out and the end is kept; the last 64 KiB are returned as well. Without a file up to ``max_output``
        bytes, the last ones, are returned. On time-out and on cancellation every process that the program started is
        killed. What a program that ends by itself leaves in the background lives on, and never delays the return.
        """
        ...

    async def kill_all(self) -> None:
        """Kill every program inside, also what runs in the background. The sandbox and its files stay.

        The node calls it after the harness and before it copies the workspace.
        """
        ...

    async def listen(self) -> socket.socket | None:
        """A listening TCP socket on loopback *inside* the sandbox for the gateway to serve, or None.

        None: the sandbox shares the host's network, so the gateway's own address is reached from inside.
        """
        ...

    async def destroy(self) -> None:
        """Kill everything inside and remove the home folder. May be called again.

        The workspace stays, to be copied and graded; it goes with ``root``, which is the caller's
        (``files.remove_tree`` removes what an agent may have made of it).
        """
        ...


class RuntimeProvider(Protocol):
    name: str

    async def check(self) -> Check: ...

    async def create(self, spec: RuntimeSpec, *, label: str, root: Path, binds: Sequence[Bind] = ()) -> Runtime:
        """A new sandbox with an empty workspace at ``root/workspace`` and an empty home at ``root/home``.

        ``label`` marks all that belongs to it, for ``sweep``. Raises RuntimeFailure.
        """
        ...

    async def sweep(self, label_prefix: str) -> list[str]:
        """Kill and remove what an earlier, killed process left behind; returns what was found."""
        ...

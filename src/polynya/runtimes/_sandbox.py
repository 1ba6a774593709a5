"""What every runtime on this machine shares: its folders, its clean environment, its end.

Invariant: the environment of a program is built from nothing but what stands here, the runtime's own variables and those
of the call. It refuses to reuse a folder that already holds files: a workspace starts empty.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from polynya.errors import RuntimeFailure
from polynya.runtimes.base import ExecResult
from polynya.runtimes.files import remove_tree
from polynya.runtimes.limits import Limits
from polynya.runtimes.programs import Programs
from polynya.runtimes.spawner import Spawner, lost

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PLAIN = {"LANG": "C.UTF-8", "TERM": "dumb", "USER": "agent", "LOGNAME": "agent", "SHELL": "/bin/sh"}


class Sandbox:
    """The part of ``Runtime`` that does not depend on how programs are isolated."""

    def __init__(
        self,
        *,
        label: str,
        spawner: Spawner,
        workdir: str,
        home: str,
        workspace: Path,
        home_path: Path,
        env: Mapping[str, str],
        programs: Programs,
        limits: Limits,
        folders: Sequence[Path],
    ) -> None:
        self.label = label
        self.spawner = spawner
        """Starts its programs. It is held from before the sandbox began until it has ended."""
        self.workdir = workdir
        self.home = home
        self.workspace = workspace
        self.home_path = home_path
        self.limits_enforced = limits.enforced
        """Which of the limits that were asked for the kernel holds."""
        self._env = {**PLAIN, "HOME": home, "PWD": workdir, **env}
        self._programs = programs
        self._limits = limits
        self._folders = list(folders)
        """Removed at the end. The workspace is not among them: it is what the agent made."""
        self._ending: asyncio.Task[None] | None = None

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
        if self._lost():
            raise lost()
        place = cwd or self.workdir
        result = await self._programs.run(
            argv,
            cwd=place,
            env={**self._env, "PWD": place, **(env or {})},
            stdin=stdin,
            timeout=timeout,
            stdout=stdout,
            stderr=stderr,
            max_output=max_output,
        )
        if result.exit_code == -signal.SIGKILL and self._lost():
            raise lost()
        return result

    def _lost(self) -> bool:
        """Did the whole sandbox die with the fork server?"""
        return False

    async def kill_all(self) -> None:
        await self._programs.kill_all()

    async def destroy(self) -> None:
        """Idempotent, and not to be interrupted half-way: a second caller waits for the first one's work."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        self._programs.close()
        try:
            await self._stop()
            await asyncio.to_thread(self._limits.remove)
            await asyncio.to_thread(remove_tree, *self._folders)
        finally:
            await self.spawner.release()

    async def _stop(self) -> None:
        """Kill everything that belongs to the sandbox."""
        await self._programs.kill_all()


def make_folders(root: Path, names: Sequence[str]) -> list[Path]:
    folders = []
    for name in names:
        folder = root / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            empty = not any(folder.iterdir())
        except OSError as exc:
            raise RuntimeFailure(f"cannot make {folder}: {exc}", fix="check space and permissions there") from exc
        if not empty:
            raise RuntimeFailure(f"{folder} is not empty", fix="give each sandbox a root folder of its own")
        folders.append(folder.absolute())
    return folders

"""Puts a pinned program from a package registry into the cache, once, so that it starts without network afterwards.

Invariant: a folder under ``<cache>/harnesses`` is complete or absent: it is filled beside its place and renamed into it,
and a marker in it says what it holds. Two processes do not install one at the same time; what a killed one left is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

from polynya.errors import HarnessMissing
from polynya.harnesses.base import Progress

MARKER = "polynya-install.json"
LOCK_POLL = 0.2


def folder_of(cache: Path, name: str, version: str) -> Path:
    return cache.absolute() / "harnesses" / f"{name}-{version}"


def is_installed(folder: Path, packages: Mapping[str, str]) -> bool:
    try:
        return bool(json.loads((folder / MARKER).read_bytes())["packages"] == dict(packages))
    except (OSError, ValueError, KeyError, TypeError):
        return False


async def install(
    name: str, folder: Path, packages: Mapping[str, str], progress: Progress, fill: Callable[[Path], Awaitable[None]]
) -> None:
    """Let ``fill`` put ``packages`` (name → exact version) into a new folder, unless ``folder`` holds them."""
    if is_installed(folder, packages):
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        async with _lock(folder.parent / f".{folder.name}.lock", name, progress):
            if not is_installed(folder, packages):
                await _install_locked(name, folder, packages, progress, fill)
    except OSError as exc:
        raise HarnessMissing(
            f"{name} cannot be installed into {folder}: {exc}", fix="set POLYNYA_CACHE to a writable folder"
        ) from exc


async def _install_locked(
    name: str, folder: Path, packages: Mapping[str, str], progress: Progress, fill: Callable[[Path], Awaitable[None]]
) -> None:
    progress(f"{name}: installing {', '.join(f'{key} {value}' for key, value in packages.items())}")
    await asyncio.to_thread(_remove_leftovers, folder)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.new-", dir=folder.parent))
    try:
        staging.chmod(0o755)
        await fill(staging)
        (staging / MARKER).write_text(json.dumps({"packages": dict(packages)}))
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        staging.rename(folder)
    except BaseException:
        await asyncio.to_thread(shutil.rmtree, staging, ignore_errors=True)
        raise
    progress(f"{name}: installed in {folder}")


def _remove_leftovers(folder: Path) -> None:
    """What a killed installation left. We hold the lock, so nobody works in there."""
    for old in folder.parent.glob(f".{folder.name}.new-*"):
        shutil.rmtree(old, ignore_errors=True)


async def run(argv: list[str], name: str, fix: str) -> None:
    """Run an installer. Raises HarnessMissing with the last lines that it said."""
    # Cancelled between the fork and its end, create_subprocess_exec would leave the child to itself.
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    )
    try:
        process = await asyncio.shield(starting)
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        await asyncio.shield(_kill(starting))
        raise
    if process.returncode != 0:
        lines = output.decode(errors="replace").strip().splitlines()
        raise HarnessMissing(
            f"{name}: {Path(argv[0]).name} ended with {process.returncode}: " + "\n".join(lines[-12:])[-2000:], fix=fix
        )


async def _kill(starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
    with contextlib.suppress(OSError):
        process = await starting
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


@contextlib.asynccontextmanager
async def _lock(path: Path, name: str, progress: Progress) -> AsyncIterator[None]:
    """Held by one process of this machine. Polled, because a thread blocked in flock cannot be cancelled."""
    with path.open("w") as file:
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    progress(f"{name}: another process installs it, waiting")
                    told = True
                await asyncio.sleep(LOCK_POLL)
        yield

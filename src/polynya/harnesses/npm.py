"""Installs pinned npm packages into the cache, once, so that they start without network afterwards.

Invariant: a folder under ``<cache>/harnesses`` is complete or absent: packages are installed beside it and renamed into
place, and a marker in it says what it holds. Two processes do not install one at the same time. Install scripts of
packages never run: they are code from elsewhere and would run outside every sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import platform
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from polynya.errors import HarnessMissing
from polynya.harnesses.base import Progress
from polynya.runtimes.base import Check

NODE_VERSION = "22.23.3"
MARKER = "polynya-install.json"
LOCK_POLL = 0.2
NPM_FIX = "install npm, e.g. `apt-get install npm`, and see that it reaches a registry (`npm ping`)"
_MACHINES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}


def node_package() -> str:
    """The package that holds Node itself for this machine. The `node` package would fetch it in an install script."""
    machine = platform.machine().lower()
    if machine not in _MACHINES:
        raise HarnessMissing(f"no Node {NODE_VERSION} package for {machine!r}", fix="use an x86-64 or arm64 machine")
    return f"node-linux-{_MACHINES[machine]}"


def node_program(folder: Path) -> Path:
    return folder / "node_modules" / node_package() / "bin" / "node"


async def install_node(cache: Path, progress: Progress) -> Path:
    """Node in a folder of its own, for all that need it."""
    folder = folder_of(cache, "node", NODE_VERSION)
    await install("node", folder, {node_package(): NODE_VERSION}, progress)
    return folder


def folder_of(cache: Path, name: str, version: str) -> Path:
    return cache.absolute() / "harnesses" / f"{name}-{version}"


def is_installed(folder: Path, packages: Mapping[str, str]) -> bool:
    try:
        return bool(json.loads((folder / MARKER).read_bytes())["packages"] == dict(packages))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def check_of(name: str, folder: Path, packages: Mapping[str, str]) -> Check:
    if is_installed(folder, packages):
        return Check(name=name, ok=True, detail=f"installed in {folder}")
    if npm := shutil.which("npm"):
        return Check(name=name, ok=True, detail=f"not installed yet; the first run installs it with {npm}")
    return Check(name=name, ok=False, detail="not installed, and there is no npm", fix=NPM_FIX)


async def install(name: str, folder: Path, packages: Mapping[str, str], progress: Progress) -> None:
    """Put ``packages`` (name → exact version) below ``folder/node_modules`` unless they are there."""
    if is_installed(folder, packages):
        return
    npm = shutil.which("npm")
    if npm is None:
        raise HarnessMissing(f"{name} is not installed in {folder}, and there is no npm", fix=NPM_FIX)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        async with _lock(folder.parent / f".{folder.name}.lock", name, progress):
            if is_installed(folder, packages):
                return
            await _install_locked(npm, name, folder, packages, progress)
    except OSError as exc:
        raise HarnessMissing(
            f"{name} cannot be installed into {folder}: {exc}", fix="set POLYNYA_CACHE to a writable folder"
        ) from exc


async def _install_locked(npm: str, name: str, folder: Path, packages: Mapping[str, str], progress: Progress) -> None:
    progress(f"{name}: installing {', '.join(f'{key} {value}' for key, value in packages.items())} with npm")
    await asyncio.to_thread(_remove_leftovers, folder)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.new-", dir=folder.parent))
    try:
        staging.chmod(0o755)
        wanted = [f"{package}@{version}" for package, version in packages.items()]
        argv = [npm, "install", "--prefix", str(staging), "--ignore-scripts", "--no-audit", "--no-fund"]
        await _run([*argv, "--include=optional", "--save-exact", "--loglevel=error", *wanted], name)
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


async def _run(argv: list[str], name: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.shield(process.wait())
        raise
    if process.returncode != 0:
        lines = output.decode(errors="replace").strip().splitlines()
        raise HarnessMissing(
            f"{name}: npm ended with {process.returncode}: " + "\n".join(lines[-12:])[-2000:], fix=NPM_FIX
        )


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

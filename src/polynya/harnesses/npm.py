"""Installs pinned npm packages into the cache.

Invariant: install scripts of packages never run: they are code from elsewhere and would run outside every sandbox.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Mapping
from pathlib import Path

from polynya.errors import HarnessMissing
from polynya.harnesses import _cache
from polynya.harnesses._cache import folder_of, is_installed
from polynya.harnesses.base import Progress
from polynya.runtimes.base import Check

__all__ = ["check_of", "folder_of", "install", "install_node", "is_installed", "node_package", "node_program"]

NODE_VERSION = "22.23.3"
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


async def install_node(cache: Path, progress: Progress, needed_by: str) -> Path:
    """Node in a folder of its own, for all that need it."""
    folder = folder_of(cache, "node", NODE_VERSION)
    await install(f"node for {needed_by}", folder, {node_package(): NODE_VERSION}, progress)
    return folder


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

    async def fill(staging: Path) -> None:
        wanted = [f"{package}@{version}" for package, version in packages.items()]
        argv = [npm, "install", "--prefix", str(staging), "--ignore-scripts", "--no-audit", "--no-fund"]
        await _cache.run([*argv, "--include=optional", "--save-exact", "--loglevel=error", *wanted], name, NPM_FIX)

    await _cache.install(name, folder, packages, progress, fill)

"""Python interpreters for agents that are Python packages, and environments of their own made with them.

Invariant: an interpreter is taken only after it said its own version: what is called ``python3.12`` may be a launcher that
has none. Found are those on the PATH, then those of pyenv; nothing is installed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from polynya.harnesses import _cache

PIP_FIX = (
    "install the venv module (apt-get install python3-venv), and see that pip reaches an index (`pip download litellm`)"
)
_ASK = "import sys; print('%d.%d' % sys.version_info[:2]); print(sys.executable); print(sys.base_prefix)"


class Interpreter(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    """``3.12``."""
    program: Path
    base: Path
    """The folder that holds its library."""


async def find(version: str) -> Interpreter | None:
    """An interpreter of that minor version, or None."""
    for program in _candidates(version):
        found = await _ask(program)
        if found is not None and found.version == version:
            return found
    return None


def _candidates(version: str) -> list[str]:
    on_path = [shutil.which(name) for name in (f"python{version}", "python3", "python")]
    pyenv = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser() / "versions"
    own = sorted(map(str, pyenv.glob(f"{version}.*/bin/python{version}")), reverse=True)
    return list(dict.fromkeys([path for path in on_path if path] + own))


async def _ask(program: str) -> Interpreter | None:
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            "-c",
            _ASK,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return None
    said, _ = await process.communicate()
    lines = said.decode(errors="replace").splitlines()
    if process.returncode != 0 or len(lines) != 3:
        return None
    return Interpreter(version=lines[0], program=Path(lines[1]), base=Path(lines[2]))


async def make_environment(
    name: str, folder: Path, python: Path, packages: Sequence[str], built: Sequence[str] = ()
) -> None:
    """A virtual environment with these requirements, from wheels; ``built``: packages that have none and are built here."""
    await _cache.run([str(python), "-m", "venv", str(folder)], name, PIP_FIX)
    argv = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    argv += ["--no-input", "--only-binary", ":all:"]
    for package in built:
        argv += ["--no-binary", package]
    await _cache.run([*argv, *packages], name, PIP_FIX)


def shown(folder: Path, base: Path) -> list[Path]:
    """What a sandbox must show of an environment: itself, and its interpreter's library where ``/usr`` does not hold it."""
    bases = dict.fromkeys([base, base.resolve()])
    return [folder, *(path for path in bases if not path.is_relative_to("/usr"))]

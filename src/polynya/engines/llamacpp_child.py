"""The embedded engine's server process, seen from the parent: start, address, end.

Invariant: the child never outlives the parent (its standard input is our pipe, and the kernel kills it with us), and a
failed start is an EngineUnavailable that carries the last lines of its log.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from pathlib import Path

import msgspec

from polynya.engines.llamacpp_server import KEY_VARIABLE
from polynya.errors import EngineUnavailable

_LOG_TAIL = 4096


class ChildSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How llama.cpp runs. Defaults are measured ones: see docs/engines.md."""

    window: int = 16_384
    """Tokens of prompt and reply, per slot."""
    slots: int = 2
    """Calls that are worked on at once; further ones wait."""
    threads: int | None = None
    """None: as many as this process may use cores."""
    poll: int = 0
    """Share of busy waiting, 0 to 100. Above 0 a shared machine gets many times slower."""
    batch: int = 64
    """Prompt tokens per step. A cancelled prompt stops after one step; on a CPU larger steps are no faster."""
    cache_ram_mib: int = 1024
    """Host memory for prompts of sessions that hold no slot."""
    start_timeout: float = 120.0


class _Hello(msgspec.Struct):
    address: str
    pid: int


class LlamaChild:
    def __init__(self, model: Path, settings: ChildSettings, log: Path) -> None:
        self.model = model
        self.settings = settings
        self.log = log
        self.api_key = secrets.token_hex(24)
        self.address = ""
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> str:
        """Address of the server, which has loaded the model."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self._environment(),
                start_new_session=True,
            )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(self.settings.start_timeout):
                line = await self._process.stdout.readline()
        except TimeoutError:
            await self.close()
            raise self._failed(f"not ready within {self.settings.start_timeout:g} s") from None
        except asyncio.CancelledError:
            await self.close()
            raise
        if not line:
            code = await self._process.wait()
            raise self._failed(f"ended with {code} while starting")
        self.address = msgspec.json.decode(line, type=_Hello).address
        return self.address

    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def died(self) -> EngineUnavailable:
        code = self._process.returncode if self._process is not None else None
        return self._failed(f"ended with {code}")

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        # the pipes' transports must see the end, else they warn when collected
        await process.wait()
        if process.stdin is not None:
            process.stdin.close()

    def _command(self) -> list[str]:
        settings = self.settings
        threads = settings.threads or len(os.sched_getaffinity(0))
        options = {
            "--model": self.model,
            "--parent": os.getpid(),
            "--window": settings.window,
            "--slots": settings.slots,
            "--threads": threads,
            "--poll": settings.poll,
            "--batch": settings.batch,
            "--cache-ram-mib": settings.cache_ram_mib,
        }
        pairs = [str(piece) for pair in options.items() for piece in pair]
        return [sys.executable, "-m", "polynya.engines.llamacpp_server", *pairs]

    def _environment(self) -> dict[str, str]:
        # OpenMP threads that spin on a busy machine made decoding 10 to 30 times slower here
        return {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", KEY_VARIABLE: self.api_key}

    def _failed(self, why: str) -> EngineUnavailable:
        tail = _tail(self.log)
        if "No module named 'xllamacpp'" in tail:
            fix = "pip install 'polynya[embedded]'"
        elif "failed to load model" in tail or "gguf" in tail.lower():
            fix = f"is {self.model} whole, and a model that this llama.cpp knows? The log is {self.log}"
        else:
            fix = f"see {self.log}"
        return EngineUnavailable(f"embedded engine, model {self.model}: {why}. Its log ends with: {tail}", fix=fix)


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - _LOG_TAIL, 0))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError as exc:
        return f"(unreadable: {exc})"
    return " | ".join(line.strip() for line in lines[-6:] if line.strip()) or "(nothing)"

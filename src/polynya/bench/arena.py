"""One mock, one load generator and the contenders, all running for as long as the arena is open.

The contender has a core of its own; what feeds it has the others. Idle contenders cost nothing, so rounds can go over all
of them in turn, and what else the machine does falls on all alike.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Self

import aiohttp
import msgspec

from polynya.bench.contenders import CONTENDERS
from polynya.bench.load import Command, Endpoint, Result
from polynya.bench.places import Missing, Place, Running
from polynya.bench.processes import BenchFailed, Program, cores
from polynya.bench.workload import Spec

_READY_SECONDS = 60.0


class Arena:
    """Use as an async context; leaving it ends every program."""

    def __init__(self, spec: Spec, folder: Path, names: tuple[str, ...], sessions: int) -> None:
        """``sessions`` are given to each contender."""
        self.spec = spec
        self.running: dict[str, Running] = {}
        self.missing: dict[str, str] = {}
        self._folder = folder
        self._names = names
        self._sessions = sessions
        self._core, self._others = cores()
        self._programs: list[Program] = []

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        spec = msgspec.json.encode(self.spec).decode()
        self._mock = await self._module("mock", spec)
        self._upstream = (await self._mock.read())["port"]
        self._load = await self._module("load", spec)
        for name in self._names:
            place = Place(
                spec=self.spec, upstream=self._upstream, folder=self._folder, core=self._core, sessions=self._sessions
            )
            try:
                self.running[name] = running = await CONTENDERS[name].start(place)
                self._programs.append(running.program)
                await self._ready(name)
            except (Missing, BenchFailed) as exc:
                self.running.pop(name, None)
                self.missing[name] = str(exc)

    async def _module(self, name: str, spec: str) -> Program:
        program = await Program.module(name, spec, core=self._others, log=self._folder / f"{name}.log")
        self._programs.append(program)
        return program

    async def _ready(self, name: str) -> None:
        """Its first good answer, from the last session: routers listen before they have found their workers."""
        result = Result()
        for _ in range(int(_READY_SECONDS)):
            result, _ = await self.closed(name, first=self._sessions - 1, each=1)
            if not result.failures:
                return
            if name == "polynya":
                break
            await asyncio.sleep(1)
        raise BenchFailed(f"{name}: {result.failures} {result.failure_text[:300]}")

    async def close(self) -> None:
        for program in reversed(self._programs):
            await program.close()

    async def closed(self, name: str, **fields: Any) -> tuple[Result, float]:
        """A closed-loop run, and the CPU seconds of the contender's tree in it."""
        running = self.running[name]
        before = running.program.cpu()
        command = Command(do="closed", endpoint=running.endpoint, **fields)
        result = msgspec.convert(await self._load.ask(command, timeout=900), Result)
        return result, running.program.cpu() - before

    async def latency(self, name: str, session: int, seconds: float) -> Result:
        """One connection, the contender and the mock itself in turn."""
        direct = Endpoint(name="direct", port=self._upstream)
        endpoint = self.running[name].endpoint
        command = Command(do="latency", endpoint=endpoint, direct=direct, first=session, seconds=seconds)
        return msgspec.convert(await self._load.ask(command), Result)

    async def tell(self, name: str, command: str) -> Any:
        """A command to polynya's own process."""
        return await self.running[name].program.ask(command)

    async def upstream_stats(self) -> dict[str, Any]:
        """What the mock was asked since the last time."""
        async with aiohttp.ClientSession() as session, session.get(self._mock_url("/bench/stats")) as answer:
            found: dict[str, Any] = await answer.json()
        return found

    async def upstream_delay(self, seconds: float) -> None:
        async with aiohttp.ClientSession() as session, session.post(self._mock_url("/bench/delay"), data=str(seconds)):
            pass

    def _mock_url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._upstream}{path}"

<<<<<<< HEAD
"""The measurements: rounds over all contenders in turn, so that what else the machine does falls on all of them alike."""
=======
"""CPU, throughput and latency at one size: rounds over all contenders in turn, medians over the rounds."""
>>>>>>> 97b387fbd882dd22383392c0079d5c1661ee35d6

from __future__ import annotations

import os
import platform
import statistics
<<<<<<< HEAD
import time
from collections.abc import Callable
=======
import tempfile
import time
>>>>>>> 97b387fbd882dd22383392c0079d5c1661ee35d6
from pathlib import Path
from typing import Any

import msgspec

<<<<<<< HEAD
from polynya.bench.contenders import CONTENDERS, Missing, Place, Running
from polynya.bench.load import Command, Endpoint, Result
from polynya.bench.processes import BenchFailed, Program, cores
from polynya.bench.workload import Spec, spec_of

_LATENCY_SECONDS = 1.0
=======
from polynya.bench.arena import Arena
from polynya.bench.workload import Spec

PACE = 20.0
"""Requests a second: about a thousand agents whose turns take a minute."""
_COLD = 2
"""Requests of each session before anything counts: connections, caches, the first whole prompt."""
>>>>>>> 97b387fbd882dd22383392c0079d5c1661ee35d6


class Options(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float = 3.0
<<<<<<< HEAD
    """Of each closed-loop round."""
=======
    """Of each closed-loop round; latency at one connection takes a third of it."""
>>>>>>> 97b387fbd882dd22383392c0079d5c1661ee35d6
    rounds: int = 3
    connections: int = 16
    sampled: int = 1000
    contenders: tuple[str, ...] = ("polynya", "nginx", "pass")
<<<<<<< HEAD


class Bench:
    """One size: a mock, a load generator and the contenders, all running for as long as it is open."""

    def __init__(self, spec: Spec, options: Options, folder: Path) -> None:
        self.spec = spec
        self.options = options
        self.folder = folder
        self.core, self.others = cores()
        self.running: dict[str, Running] = {}
        self.missing: dict[str, str] = {}
        self._programs: list[Program] = []

    async def open(self, sessions: int) -> None:
        """``sessions`` are given to each contender; one more for the latency at one connection."""
        self.folder.mkdir(parents=True, exist_ok=True)
        spec = msgspec.json.encode(self.spec).decode()
        self.mock = await self._module("mock", spec)
        self.upstream = (await self.mock.read())["port"]
        self.load = await self._module("load", spec)
        place = Place(spec=self.spec, upstream=self.upstream, folder=self.folder, core=self.core, sessions=sessions + 1)
        for name in self.options.contenders:
            try:
                self.running[name] = await CONTENDERS[name].start(place)
                self._programs.append(self.running[name].program)
            except (Missing, BenchFailed) as exc:
                self.missing[name] = str(exc)

    async def _module(self, name: str, spec: str) -> Program:
        program = await Program.module(name, spec, core=self.others, log=self.folder / f"{name}.log")
        self._programs.append(program)
        return program

    async def close(self) -> None:
        for program in reversed(self._programs):
            await program.close()

    async def closed(self, name: str, **fields: Any) -> tuple[Result, float]:
        """A closed-loop run, and the CPU seconds of the contender's tree in it."""
        running = self.running[name]
        before = running.program.cpu()
        command = Command(do="closed", endpoint=running.endpoint, **fields)
        result = msgspec.convert(await self.load.ask(command, timeout=900), Result)
        return result, running.program.cpu() - before

    async def latency(self, name: str, session: int) -> Result:
        running = self.running[name]
        direct = Endpoint(name="direct", port=self.upstream)
        command = Command(
            do="latency", endpoint=running.endpoint, direct=direct, first=session, seconds=_LATENCY_SECONDS
        )
        return msgspec.convert(await self.load.ask(command), Result)


async def measure_size(spec: Spec, options: Options, folder: Path) -> dict[str, Any]:
    """CPU per request, throughput and latency of every contender at one size."""
    bench = Bench(spec, options, folder)
    sessions = options.connections
    try:
        await bench.open(sessions)
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in bench.running}
        for name in bench.running:
            # cold: first requests, connections, caches
            await bench.closed(name, sessions=sessions, each=2)
        for _ in range(options.rounds):
            for name in bench.running:
                rounds[name].append(await _round(bench, name, sessions))
        check = await bench.running["polynya"].program.ask("check")
        rows = {
            name: _row(found) | {"peak_rss": bench.running[name].program.peak_rss()} for name, found in rounds.items()
        }
        rows["polynya"]["check"] = check
    finally:
        await bench.close()
    rows |= {name: {"missing": why} for name, why in bench.missing.items()}
    return {"size": spec.name, "spec": msgspec.to_builtins(spec), "contenders": rows}


async def _round(bench: Bench, name: str, sessions: int) -> dict[str, Any]:
    load = os.getloadavg()[0]
    result, cpu = await bench.closed(name, sessions=sessions, seconds=bench.options.seconds)
    alone = await bench.latency(name, sessions)
=======
    agents: int = 512
    """In flight at once, on an upstream that takes ``upstream_seconds``."""
    upstream_seconds: float = 2.0
    held: int = 32
    """Long sessions alive at once, for memory and disk."""


async def measure_size(spec: Spec, options: Options, folder: Path) -> dict[str, Any]:
    sessions = options.connections
    async with Arena(spec, folder, options.contenders, sessions + 1) as arena:
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in arena.running}
        for name in arena.running:
            await arena.closed(name, sessions=sessions, each=_COLD)
        for _ in range(options.rounds):
            for name in arena.running:
                rounds[name].append(await _round(arena, name, options))
        rows: dict[str, dict[str, Any]] = {
            name: _row(found) | {"peak_rss": arena.running[name].program.peak_rss()} for name, found in rounds.items()
        }
        if "polynya" in rows:
            rows["polynya"] |= await _inside(arena, options)
    rows |= {name: {"missing": why} for name, why in arena.missing.items()}
    ordered = {name: rows[name] for name in options.contenders}
    return {"size": spec.name, "spec": msgspec.to_builtins(spec), "contenders": ordered}


async def _round(arena: Arena, name: str, options: Options) -> dict[str, Any]:
    load = os.getloadavg()[0]
    result, cpu = await arena.closed(name, sessions=options.connections, seconds=options.seconds)
    alone = await arena.latency(name, options.connections, options.seconds / 3)
>>>>>>> 97b387fbd882dd22383392c0079d5c1661ee35d6
    done = max(1, result.requests)
    return {
        "requests": result.requests,
        "seconds": round(result.seconds, 3),
        "cpu_us": round(cpu / done * 1e6, 1),
<<<<<<< HEAD
        "p50_ms": _quantile(result.latencies_ms, 0.5),
        "p99_ms": _quantile(result.latencies_ms, 0.99),
        "alone_p50_ms": _quantile(alone.latencies_ms, 0.5),
        "alone_p99_ms": _quantile(alone.latencies_ms, 0.99),
        "direct_p50_ms": _quantile(alone.direct_ms, 0.5),
        "direct_p99_ms": _quantile(alone.direct_ms, 0.99),
=======
        "p50_ms": quantile(result.latencies_ms, 0.5),
        "p99_ms": quantile(result.latencies_ms, 0.99),
        "alone_p50_ms": quantile(alone.latencies_ms, 0.5),
        "alone_p99_ms": quantile(alone.latencies_ms, 0.99),
        "alone_requests": len(alone.latencies_ms),
        "direct_p50_ms": quantile(alone.direct_ms, 0.5),
        "direct_p99_ms": quantile(alone.direct_ms, 0.99),
>>>>>>> 97b387fbd882dd22383392c0079d5c1661ee35d6
        "body_bytes": result.bytes_sent // done,
        "answer_bytes": result.bytes_received // done,
        "failures": {**result.failures, **alone.failures},
        "failure_text": result.failure_text or alone.failure_text,
        "load": round(load, 2),
    }


def _row(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds."""

<<<<<<< HEAD
    def median(value: str) -> float:
        return round(float(statistics.median(one[value] for one in rounds)), 3)

    cpu = median("cpu_us")
    return {
        "cpu_us": cpu,
        "requests_per_core_second": round(1e6 / cpu) if cpu else None,
        "added_p50_ms": round(statistics.median(one["alone_p50_ms"] - one["direct_p50_ms"] for one in rounds), 3),
        "added_p99_ms": round(statistics.median(one["alone_p99_ms"] - one["direct_p99_ms"] for one in rounds), 3),
        "p99_ms": median("p99_ms"),
=======
    def added(which: str) -> float:
        values = [one[f"alone_{which}_ms"] - one[f"direct_{which}_ms"] for one in rounds]
        return round(float(statistics.median(values)), 3)

    cpu = round(float(statistics.median(one["cpu_us"] for one in rounds)), 1)
    return {
        "cpu_us": cpu,
        "requests_per_core_second": round(1e6 / cpu) if cpu else None,
        "added_p50_ms": added("p50"),
        "added_p99_ms": added("p99"),
>>>>>>> 97b387fbd882dd22383392c0079d5c1661ee35d6
        "failures": sum(sum(one["failures"].values()) for one in rounds),
        "rounds": rounds,
    }


<<<<<<< HEAD
def _quantile(values: list[float], share: float) -> float:
=======
async def _inside(arena: Arena, options: Options) -> dict[str, Any]:
    """What polynya's own process can say: stalls of its loop, calls upstream for each request, exactness.

    ``paced`` is a load that leaves it idle most of the time: there a stall is one piece of work, not a queue of them.
    """
    await arena.upstream_stats()
    await arena.tell("polynya", "monitor")
    full, _ = await arena.closed("polynya", sessions=options.connections, seconds=options.seconds)
    saturated = await arena.tell("polynya", "stalls")
    await arena.tell("polynya", "monitor")
    think = options.connections / PACE
    calm, _ = await arena.closed("polynya", sessions=options.connections, seconds=2 * options.seconds, think=think)
    paced = await arena.tell("polynya", "stalls")
    paths = (await arena.upstream_stats())["paths"]
    return {
        "stalls_paced": {
            "rate": PACE,
            "p50_ms": quantile(calm.latencies_ms, 0.5),
            "p99_ms": quantile(calm.latencies_ms, 0.99),
        }
        | paced,
        "stalls_saturated": saturated,
        "upstream_calls_per_request": round(sum(paths.values()) / max(1, full.requests + calm.requests), 3),
        "check": await arena.tell("polynya", "check"),
    }


def quantile(values: list[float], share: float) -> float:
>>>>>>> 97b387fbd882dd22383392c0079d5c1661ee35d6
    ordered = sorted(values) or [0.0]
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 3)


<<<<<<< HEAD
async def measure(sizes: list[str], options: Options, folder: Path, progress: Callable[[str], None]) -> dict[str, Any]:
    """Everything. ``exact`` is False when a captured id differs from what the mock said."""
    found = []
    for name in sizes:
        progress(f"{name}: {', '.join(options.contenders)}, {options.rounds} rounds of {options.seconds:g} s")
        found.append(await measure_size(spec_of(name, options.sampled), options, folder / name))
    exact = all(not size["contenders"]["polynya"]["check"]["differences"] for size in found)
    return {"machine": machine(), "options": msgspec.to_builtins(options), "sizes": found, "exact": exact}


=======
>>>>>>> 97b387fbd882dd22383392c0079d5c1661ee35d6
def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")), "")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
<<<<<<< HEAD
        "load": [round(value, 2) for value in os.getloadavg()],
        "date": time.strftime("%Y-%m-%d"),
    }
=======
        "fdatasync_ms": _fdatasync_ms(),
        "load": [round(value, 2) for value in os.getloadavg()],
        "date": time.strftime("%Y-%m-%d"),
    }


def _fdatasync_ms() -> float:
    """Median for 20 KB appended, where the journals of the bench lie."""
    times = []
    with tempfile.TemporaryFile() as file:
        for _ in range(21):
            file.write(b"x" * 20_000)
            file.flush()
            begun = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - begun)
    return round(statistics.median(times) * 1000, 2)
>>>>>>> 97b387fbd882dd22383392c0079d5c1661ee35d6

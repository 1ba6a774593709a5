"""CPU, throughput and latency at one size: rounds over all contenders in turn, medians over the rounds."""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from polynya.bench.arena import Arena
from polynya.bench.workload import Spec

PACE = 20.0
"""Requests a second: about a thousand agents whose turns take a minute."""
_COLD = 2
"""Requests of each session before anything counts: connections, caches, the first whole prompt."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float = 3.0
    """Of each closed-loop round; latency at one connection takes a third of it."""
    rounds: int = 3
    connections: int = 16
    sampled: int = 1000
    contenders: tuple[str, ...] = ("polynya", "nginx", "pass")
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
    done = max(1, result.requests)
    return {
        "requests": result.requests,
        "seconds": round(result.seconds, 3),
        "cpu_us": round(cpu / done * 1e6, 1),
        "p50_ms": quantile(result.latencies_ms, 0.5),
        "p99_ms": quantile(result.latencies_ms, 0.99),
        "alone_p50_ms": quantile(alone.latencies_ms, 0.5),
        "alone_p99_ms": quantile(alone.latencies_ms, 0.99),
        "alone_requests": len(alone.latencies_ms),
        "direct_p50_ms": quantile(alone.direct_ms, 0.5),
        "direct_p99_ms": quantile(alone.direct_ms, 0.99),
        "body_bytes": result.bytes_sent // done,
        "answer_bytes": result.bytes_received // done,
        "failures": {**result.failures, **alone.failures},
        "failure_text": result.failure_text or alone.failure_text,
        "load": round(load, 2),
    }


def _row(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds."""

    def added(which: str) -> float:
        values = [one[f"alone_{which}_ms"] - one[f"direct_{which}_ms"] for one in rounds]
        return round(float(statistics.median(values)), 3)

    cpu = round(float(statistics.median(one["cpu_us"] for one in rounds)), 1)
    return {
        "cpu_us": cpu,
        "requests_per_core_second": round(1e6 / cpu) if cpu else None,
        "added_p50_ms": added("p50"),
        "added_p99_ms": added("p99"),
        "failures": sum(sum(one["failures"].values()) for one in rounds),
        "rounds": rounds,
    }


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
    ordered = sorted(values) or [0.0]
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 3)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")), "")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
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

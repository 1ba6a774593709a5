"""What a closed loop does not show: many agents on a slow engine, what live sessions hold, what a window costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from polynya.bench.arena import Arena
from polynya.bench.measure import Options, quantile
from polynya.bench.workload import Spec, long_session, spec_of

_WINDOW = 262_144
"""Of the models that are trained on sessions of 130k ids."""
_AT_A_TIME = 4


async def agents_at_once(options: Options, folder: Path) -> dict[str, Any]:
    """All agents ask at the same moment and the engine takes its time. Connecting is part of it."""
    spec = spec_of("2k", options.sampled)
    rows: dict[str, Any] = {}
    async with Arena(spec, folder, options.contenders, options.agents + 1) as arena:
        for name in arena.running:
            await arena.closed(name, sessions=min(16, options.agents), each=1)
            await arena.upstream_delay(options.upstream_seconds)
            await arena.upstream_stats()
            result, cpu = await arena.closed(name, sessions=options.agents, each=1)
            stats = await arena.upstream_stats()
            await arena.upstream_delay(0)
            rows[name] = {
                "makespan": round(result.seconds, 3),
                "ratio": round(result.seconds / options.upstream_seconds, 3),
                "most_in_flight": stats["most_in_flight"],
                "upstream_calls_per_request": round(sum(stats["paths"].values()) / max(1, result.requests), 3),
                "cpu_seconds": round(cpu, 3),
                "answered": result.requests,
                "failures": result.failures,
                "failure_text": result.failure_text,
            }
        check = await arena.tell("polynya", "check") if "polynya" in arena.running else None
    rows |= {name: {"missing": why} for name, why in arena.missing.items()}
    return {"agents": options.agents, "upstream_seconds": options.upstream_seconds, "contenders": rows, "check": check}


async def exact_at_once(options: Options, folder: Path) -> dict[str, Any]:
    """All agents at full speed, with growing chains, a chain break in each, and texts of their own: every id compared."""
    spec = Spec(
        name="exact",
        body_bytes=40_000,
        prompt_ids=9_000,
        sampled=200,
        turns=4,
        growth_ids=600,
        variants=options.agents,
    )
    async with Arena(spec, folder, ("polynya",), options.agents + 1) as arena:
        await arena.tell("polynya", "monitor")
        result, cpu = await arena.closed("polynya", sessions=options.agents, each=6)
        return {
            "agents": options.agents,
            "requests": result.requests,
            "failures": result.failures,
            "failure_text": result.failure_text,
            "seconds": round(result.seconds, 3),
            "cpu_seconds": round(cpu, 3),
            "p99_ms": quantile(result.latencies_ms, 0.99),
            "stalls": await arena.tell("polynya", "stalls"),
            "check": await arena.tell("polynya", "check"),
        }


async def held_sessions(options: Options, folder: Path) -> dict[str, Any]:
    """RSS and journal of whole sessions that are still open, over what the process holds after a few others."""
    warm = _AT_A_TIME
    spec = long_session(variants=options.held + warm + 1)
    async with Arena(spec, folder, ("polynya",), options.held + warm + 1) as arena:
        await arena.closed("polynya", sessions=warm, each=spec.turns)
        before = await arena.tell("polynya", "rest")
        for first in range(warm, options.held + warm, _AT_A_TIME):
            count = min(_AT_A_TIME, options.held + warm - first)
            await arena.closed("polynya", first=first, sessions=count, each=spec.turns)
        after = await arena.tell("polynya", "rest")
        return {
            "sessions": options.held,
            "turns": spec.turns,
            "last_prompt_ids": spec.prompt_length(spec.turns - 1),
            "memory_bytes_per_session": (after["rss"] - before["rss"]) // options.held,
            "disk_bytes_per_session": (after["disk"] - before["disk"]) // options.held,
            "rss": after["rss"],
            "spec": msgspec.to_builtins(spec),
            "check": await arena.tell("polynya", "check"),
        }


async def with_a_window(options: Options, folder: Path) -> dict[str, Any]:
    """The largest bodies on an engine with a real window: does polynya ask the engine more than once a request?"""
    spec = spec_of("577k", options.sampled, window=_WINDOW)
    async with Arena(spec, folder, ("polynya",), 5) as arena:
        await arena.upstream_stats()
        result, cpu = await arena.closed("polynya", sessions=4, each=8)
        paths = (await arena.upstream_stats())["paths"]
        return {
            "window": _WINDOW,
            "upstream_paths": paths,
            "upstream_calls_per_request": round(sum(paths.values()) / max(1, result.requests), 3),
            "cpu_us": round(cpu / max(1, result.requests) * 1e6, 1),
            "failures": result.failures,
            "failure_text": result.failure_text,
        }

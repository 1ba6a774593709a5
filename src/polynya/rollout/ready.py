"""What the READY buffer is worth: the same sessions with it and without, their INIT slow, on the scripted engine. For ``bench``.

Without the buffer a runtime is prepared while it holds the place in which the agent will run, so the RUNNING pool waits for INIT.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polynya.config import NodeLimits, Settings
from polynya.engines.scripted import Script, ScriptedEngine
from polynya.rollout.parse import parse_task
from polynya.rollout.rundir import read_results
from polynya.rollout.runner import Runner, RunOptions
from polynya.schema import SessionResult


async def ready_report(
    out: Path, cache: Path, *, sessions: int, running: int, init_seconds: float, run_seconds: float
) -> dict[str, Any]:
    """``{"on": …, "off": …}``: utilisation of the RUNNING pool (0 to 1) and seconds, buffer on and off."""
    task = parse_task(
        {
            "task_id": "ready",
            "instruction": "wait",
            "num_samples": sessions,
            "harness": {"name": "shell", "settings": {"command": f"sleep {run_seconds}"}},
            "runtime": {"name": "local", "prepare": [f"sleep {init_seconds}"]},
            "evaluator": {"name": "completed"},
        },
        "bench",
    )
    report: dict[str, Any] = {}
    for name, ready in (("on", running), ("off", 0)):
        limits = NodeLimits(init=2 * running, ready=ready, running=running, postrun=running)
        options = RunOptions(out=out / name, cache=cache, settings=Settings(node=limits), command="bench stages")
        await Runner([task], ScriptedEngine(Script()), options).run()
        report[name] = utilisation(list(read_results(out / name)), running)
    return report


def utilisation(results: list[SessionResult], running: int) -> dict[str, Any]:
    """Of the time between the first start of an agent and the last end of one, the share in which the slots were taken."""
    spans = []
    for result in results:
        timings = result.timings
        begun = result.started_at + sum(timings.get(stage, 0.0) for stage in ("queued", "init", "ready"))
        spans.append((begun, begun + timings.get("running", 0.0)))
    first, last = min(begin for begin, _ in spans), max(end for _, end in spans)
    busy = sum(end - begin for begin, end in spans)
    return {"utilisation": round(busy / (running * (last - first)), 4), "seconds": round(last - first, 2)}

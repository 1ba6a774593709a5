"""The command-line agents for real, all at a time, each in its sandbox: on an engine that misbehaves, and with a long task.

The engine is a server of its own on a real socket, so the faults meet polynya's engine client as they would in a cluster. All
of them strike the second of three replies, after the engine seemed to work for longer than the gateway holds back the headers
of a stream: what the agent saw by then is an open stream. An error in it ends the run of gemini_cli (with exit code 0) and of
qwen_code; the others ask again. So every agent does its task to the end, and none of them notices anything, only because the
engine client asks again itself.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from polynya.config import NodeLimits, Settings, cache_dir
from polynya.engines.compatible import CompatibleEngine
from polynya.engines.scripted import Script, ScriptedApp, serve
from polynya.engines.scripted.script import Fault, ScriptedCall, Step
from polynya.harnesses import _python
from polynya.rollout.parse import parse_task
from polynya.rollout.runner import Runner, RunOptions

pytestmark = [pytest.mark.harness, pytest.mark.sandbox, pytest.mark.clis, pytest.mark.timeout(900)]
"""The first of them installs every agent that is not in the cache yet."""
SHELLS = {
    "claude_code": ("Bash", "command"),
    "codex": ("exec_command", "cmd"),
    "codex_ws": ("exec_command", "cmd"),
    "gemini_cli": ("run_shell_command", "command"),
    "mini_swe_agent": ("bash", "command"),
    "opencode": ("bash", "command"),
    "openhands": ("terminal", "command"),
    "pi": ("bash", "command"),
    "qwen_code": ("run_shell_command", "command"),
}
"""The tool of each agent that runs a command, and the name of its parameter."""
OTHER_THAN_THEIR_NAME = {"codex_ws": {"name": "codex", "settings": {"websockets": True}}}
EXTRA = {
    "opencode": {"description": "Work"},
    "openhands": {"security_risk": "LOW", "summary": "Work"},
    "qwen_code": {"is_background": False},
}
AGENTS = [name for name in SHELLS if name != "openhands" or asyncio.run(_python.find("3.12")) is not None]
"""openhands where there is the Python that it needs."""
MORE_THAN_THE_GRACE = 1.0
"""Seconds: by then the headers of a stream are out (``GatewaySettings.first_event_grace`` is 0.25)."""


def step(name: str, command: str, **fields: Any) -> Step:
    tool, parameter = SHELLS[name]
    # As each of them writes arguments that it gives back; openhands writes them like Python.
    separators = None if name == "openhands" else (",", ":")
    arguments = json.dumps({parameter: command, **EXTRA.get(name, {})}, separators=separators)
    return Step(text="Working.", tool_calls=[ScriptedCall(name=tool, arguments=arguments)], **fields)


def script_of(name: str, **second: Any) -> list[Step]:
    """Write, look, end. ``second``: what is special about the second reply."""
    last = Step(text="Done.")
    if name == "mini_swe_agent":
        last = step(name, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    return [step(name, "printf 'hello world' > notes.txt"), step(name, "cat notes.txt", **second), last]


def task_of(name: str, instruction: str) -> Any:
    return parse_task(
        {
            "task_id": name,
            "instruction": instruction,
            "harness": OTHER_THAN_THEIR_NAME.get(name, {"name": name}),
            "runtime": {"name": "bubblewrap"},
            "evaluator": {"name": "command", "command": 'test "$(cat notes.txt)" = "hello world"'},
            "budgets": {"init": 600, "run": 240},
            "retries": 0,
        },
        "test",
    )


async def run_all(
    folder: Path, instruction: str = "Create notes.txt that says hello world.", **second: Any
) -> tuple[dict[str, dict[str, Any]], ScriptedApp]:
    """All agents at once on one engine. Results by harness, and the engine."""
    sessions = {f"{name}.0": script_of(name, **second) for name in AGENTS}
    app = ScriptedApp(Script(sessions=sessions, window=2_000_000))
    async with serve(app) as url:
        settings = Settings(node=NodeLimits(init=8, ready=8, running=8, postrun=2))
        options = RunOptions(out=folder, cache=cache_dir(), settings=settings)
        await Runner([task_of(name, instruction) for name in AGENTS], CompatibleEngine(url), options).run()
    results = map(json.loads, (folder / "sessions.jsonl").read_text().splitlines())
    return {result["task_id"]: result for result in results}, app


CASES = [
    pytest.param({"delay": 60.0}, {}, {}, id="slow-60s"),
    pytest.param({"fault": Fault(kind="http_error", status=429, times=1)}, {"upstream_retries": 1}, {}, id="429-once"),
    *(
        pytest.param(
            {"fault": Fault(kind=kind, times=1)},  # type: ignore[arg-type]
            {"upstream_retries": 1, "upstream_resent": 1},
            {kind: 1},
            id=f"{kind}-once",
        )
        for kind in ("reset_midway", "truncated", "bad_json")
    ),
]


@pytest.mark.parametrize(("second", "flags", "lost"), CASES)
async def test_every_agent_does_its_task_and_no_call_is_lost_or_doubled(
    second: dict[str, Any], flags: dict[str, int], lost: dict[str, int], tmp_path: Path
) -> None:
    """Three generations that are shown and captured each, and one more, that nobody saw, where an answer broke off."""
    results, app = await run_all(tmp_path / "run", **{"delay": MORE_THAN_THE_GRACE, **second})
    calls = pq.read_table(tmp_path / "run" / "calls.parquet").to_pylist()
    rows = {row["task_id"]: row for row in pq.read_table(tmp_path / "run" / "traces.parquet").to_pylist()}
    for name in AGENTS:
        result = results[name]
        words = (tmp_path / "run" / "logs" / f"{name}.0" / "harness.stderr").read_text()[-1500:]
        assert (result["status"], result["exit_code"], result["error"], result["reward"]) == (
            "completed",
            0,
            None,
            1.0,
        ), f"{name}: {words}"
        assert (name, result["flags"]) == (name, {**flags, "continued": 2})
        own = sorted((call for call in calls if call["session_id"] == f"{name}.0"), key=lambda call: call["index"])
        assert [(call["lane"], call["outcome"], call["delivered"]) for call in own] == [("main", "ok", True)] * 3, name
        assert [json.loads(call["flags"]) for call in own] == [{}, {**flags, "continued": 1}, {"continued": 1}]
        asked = [call for call in app.desk.calls if call.affinity == f"{name}.0"]
        assert Counter(call.fault for call in asked if call.fault != "http_error") == Counter({"": 3, **lost}), name
        check_row(result, rows[name])


def check_row(result: dict[str, Any], row: dict[str, Any]) -> None:
    """One row that trains all that was captured, over the whole conversation."""
    ledger = result["ledger"]
    assert ledger["captured"] == ledger["trained"] > 0
    assert (ledger["excluded"], ledger["chain_breaks"], ledger["calls_by_outcome"]) == ({}, {}, {"ok": 3})
    assert (result["num_traces"], row["num_turns"], row["lane"]) == (1, 3, "main")
    assert len(row["input_ids"]) == len(row["loss_mask"]) == len(row["logprobs"])
    assert sum(row["loss_mask"]) == ledger["trained"]
    assert np.isfinite(row["logprobs"]).all()


async def test_a_task_of_300_kilobytes_reaches_every_agent_whole(tmp_path: Path) -> None:
    """No argument of a program may be longer than 128 KiB.

    What codex asks later is its own: it takes no model for one with a window above 272,000, so it compacts this task, which
    is 300,000 tokens to the scripted tokenizer, and then cuts it in its middle.
    """
    lines = "".join(f"{number}: a line of a long specification.\n" for number in range(8_000))
    instruction = f"Create notes.txt that says hello world.\n{lines}THE-END"
    assert len(instruction) > 300_000
    results, _ = await run_all(tmp_path / "run", instruction)
    calls = pq.read_table(tmp_path / "run" / "calls.parquet").to_pylist()
    for name in AGENTS:
        result = results[name]
        assert (name, result["status"], result["reward"]) == (name, "completed", 1.0)
        (first,) = [call["request"] for call in calls if call["session_id"] == f"{name}.0" and call["index"] == 0]
        numbers = [int(number) for number in re.findall(r"(\d+): a line of a long specification\.", first)]
        assert (name, numbers) == (name, list(range(8_000)))
        assert "THE-END" in first
        ledger = result["ledger"]
        assert ledger["captured"] == ledger["trained"] + sum(ledger["excluded"].values())

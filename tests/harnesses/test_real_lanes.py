"""Lanes and lineage of the command-line agents for real: their sub-agents and compactions, as they ask for them today."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from polynya.config import cache_dir
from polynya.engines.scripted import Script, ScriptedEngine
from polynya.engines.scripted.script import Fault, ScriptedCall, Step
from polynya.rollout.parse import parse_task
from polynya.rollout.runner import Runner, RunOptions

pytestmark = [pytest.mark.harness, pytest.mark.sandbox, pytest.mark.clis]
DONE = Step(text="Done.")
FULL = Step(text="Never said.", fault=Fault(kind="overflow"))
"""The window is full from the second turn on: those that can, compact."""
LESS_THAN_CODEX_NEEDS = 26_000
"""The scripted tokenizer makes an id of each byte: what Codex always sends is 24,000 ids of a window of this size, and it
compacts at 90 % of it."""


def asks(tool: str, **arguments: Any) -> Step:
    text = json.dumps(arguments, separators=(",", ":"))
    return Step(text="Working.", tool_calls=[ScriptedCall(name=tool, arguments=text)])


async def run(
    folder: Path, name: str, settings: dict[str, Any], script: Script | ScriptedEngine
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    task = parse_task(
        {
            "task_id": "t",
            "instruction": "Create notes.txt that says hello world.",
            "harness": {"name": name, "settings": settings},
            "runtime": {"name": "bubblewrap"},
            "budgets": {"init": 600, "run": 200},
            "retries": 0,
        },
        "test",
    )
    engine = script if isinstance(script, ScriptedEngine) else ScriptedEngine(script)
    await Runner([task], engine, RunOptions(out=folder, cache=cache_dir())).run()
    calls = pq.read_table(folder / "calls.parquet").to_pylist()
    return json.loads((folder / "sessions.jsonl").read_text()), sorted(calls, key=lambda call: call["index"])


SPAWNS = [
    ("claude_code", {}, asks("Agent", description="x", prompt="Look.", subagent_type="general-purpose")),
    ("opencode", {}, asks("task", description="x", prompt="Look.", subagent_type="general")),
    ("codex", {"multi_agent": True}, asks("multi_agent_v1__spawn_agent", message="Look.")),
    ("codex", {"multi_agent": True, "websockets": True}, asks("multi_agent_v1__spawn_agent", message="Look.")),
]


@pytest.mark.parametrize(("name", "settings", "spawn"), SPAWNS)
async def test_a_sub_agent_has_its_lane_and_knows_who_started_it(
    name: str, settings: dict[str, Any], spawn: Step, tmp_path: Path
) -> None:
    """claude_code's sub-agents may start sub-agents: the script asks each of them to, so there is a chain of parents.

    No agent ends before a sub-agent has called: codex would not wait for it.
    """
    engine = ScriptedEngine(Script(steps=[spawn, msgspec.structs.replace(DONE, hold=True)]))
    running = asyncio.create_task(run(tmp_path / "run", name, settings, engine))
    await engine.until(lambda: sum(call.turn == 0 for call in engine.desk.calls) > 1)
    engine.desk.release()
    result, calls = await running
    assert (result["status"], result["error"]) == ("completed", None)
    main = [call for call in calls if call["lane"] == "main"]
    subs = [call for call in calls if call["lane"] == "subagent"]
    assert len(main) + len(subs) == len(calls) and len(main) >= 2 and subs
    (root,) = {call["agent"] for call in main}
    agents = {root, *(call["agent"] for call in subs)}
    assert "" not in agents and {call["parent_agent"] for call in main} == {""}
    assert {call["lane_rule"] for call in subs} == {f"{name}_subagent"}
    assert all(call["parent_agent"] in agents - {call["agent"]} for call in subs)
    assert root in {call["parent_agent"] for call in subs}


COMPACT = [
    ("claude_code", asks("Bash", command="true"), "claude_code_compaction"),
    ("opencode", asks("bash", command="true", description="x"), "opencode_compaction"),
    ("qwen_code", asks("run_shell_command", command="true", is_background=False), "qwen_code_compaction"),
]


@pytest.mark.parametrize(("name", "act", "rule"), COMPACT)
async def test_a_full_window_is_compacted_in_its_own_lane(name: str, act: Step, rule: str, tmp_path: Path) -> None:
    _, calls = await run(tmp_path / "run", name, {}, Script(steps=[act, FULL]))
    assert (calls[0]["lane"], calls[1]["lane"]) == ("main", "main")
    compactions = [call for call in calls if call["lane"] == "compaction"]
    assert compactions and {call["lane_rule"] for call in compactions} == {rule}


@pytest.mark.parametrize("websockets", [False, True])
async def test_codex_in_a_window_that_holds_only_its_prompt_ends(websockets: bool, tmp_path: Path) -> None:
    """It would compact after every turn for ever: 695 calls in 40 s, each of them a sample."""
    settings = {"websockets": websockets}
    result, calls = await run(tmp_path / "run", "codex", settings, Script(window=LESS_THAN_CODEX_NEEDS))
    assert (result["status"], result["exit_code"]) == ("failed", 1)
    assert "ran out of room in the model's context window" in result["error"]["message"]
    assert [call["lane"] for call in calls] == ["main", "compaction"] * 8 + ["main"]
    assert {call["lane_rule"] for call in calls} == {"", "codex_compaction"}
    assert result["ledger"]["excluded"] == {"compaction_lane": sum(call["sampled_len"] for call in calls[1::2])}

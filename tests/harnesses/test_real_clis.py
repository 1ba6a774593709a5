"""The command-line agents for real: a whole run in a sandbox that reaches nothing but the gateway, with the scripted engine.

All but pi are marked ``clis`` too: their installation is 100 to 750 MB each, once a cache.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from polynya.config import cache_dir
from polynya.engines.scripted import Script, ScriptedEngine
from polynya.engines.scripted.script import Fault, ScriptedCall, Step
from polynya.gateway.app import GatewayApp
from polynya.harnesses import _python, openhands
from polynya.rollout.parse import parse_task
from polynya.rollout.runner import Runner, RunOptions

pytestmark = [
    pytest.mark.harness,
    pytest.mark.sandbox,
    pytest.mark.skipif(shutil.which("npm") is None, reason="no npm"),
]
GRADER = {"name": "command", "command": 'test "$(cat notes.txt)" = "hello world"'}
CHAT, RESPONSES, ANTHROPIC, GOOGLE = "openai_chat", "openai_responses", "anthropic_messages", "google_generate"
DIALECTS = {"chat": CHAT, "responses": RESPONSES, "anthropic": ANTHROPIC, "google": GOOGLE}
NATIVE = [("claude_code", ANTHROPIC), ("codex", RESPONSES), ("gemini_cli", GOOGLE)]
MANY = ("opencode", "qwen_code", "pi")


def case(name: str, dialect: str, **settings: Any) -> Any:
    marks = [] if name == "pi" else [pytest.mark.clis]
    return pytest.param(name, dialect, settings, marks=marks, id="-".join([name, *map(str, settings.values())]))


RUNS = [
    *(case(name, dialect) for name, dialect in NATIVE),
    *(case(name, dialect, wire=wire) for name in MANY for wire, dialect in DIALECTS.items()),
    case("claude_code", ANTHROPIC, bare=True),
    case("claude_code", ANTHROPIC, experimental_betas=False),
    case("codex", RESPONSES, multi_agent=True),
    case("codex", RESPONSES, websockets=True),
    case("qwen_code", CHAT, bare=True),
]


async def run(folder: Path, name: str, settings: dict[str, Any], engine: Script | ScriptedEngine) -> dict[str, Any]:
    task = parse_task(
        {
            "task_id": "t",
            "instruction": "--help: create notes.txt that says hello world",
            "harness": {"name": name, "settings": settings},
            "runtime": {"name": "bubblewrap"},
            "evaluator": GRADER,
            "budgets": {"run": 240},
            "retries": 0,
        },
        "test",
    )
    options = RunOptions(out=folder, cache=cache_dir())
    engine = ScriptedEngine(engine) if isinstance(engine, Script) else engine
    await Runner([task], engine, options).run()
    result: dict[str, Any] = json.loads((folder / "sessions.jsonl").read_text())
    return result


@pytest.mark.parametrize(("name", "dialect", "settings"), RUNS)
async def test_does_its_task_with_one_exact_row(
    name: str, dialect: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    result = await run(tmp_path / "run", name, settings, Script())
    words = (tmp_path / "run" / "logs" / "t.0" / "harness.stderr").read_text()[-2000:]
    assert (result["status"], result["exit_code"], result["error"]) == ("completed", 0, None), words
    assert result["reward"] == 1.0
    assert (result["num_calls"], result["num_traces"]) == (2, 1)
    ledger = result["ledger"]
    assert ledger["captured"] == ledger["trained"] > 0
    assert (ledger["excluded"], ledger["chain_breaks"]) == ({}, {})
    calls = pq.read_table(tmp_path / "run" / "calls.parquet").to_pylist()
    assert {(call["dialect"], call["lane"], call["model"]) for call in calls} == {(dialect, "main", "scripted")}
    row = pq.read_table(tmp_path / "run" / "traces.parquet").to_pylist()[0]
    assert sum(row["loss_mask"]) == ledger["trained"]
    assert "--help: create notes.txt" in row["messages"]


@pytest.mark.clis
@pytest.mark.parametrize("multi_agent", [False, True])
async def test_codex_over_a_websocket_posts_nothing(
    multi_agent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One connection, a warm-up that is answered without the engine, and then the calls."""
    seen: list[tuple[str, str]] = []
    original = GatewayApp.__call__

    async def spying(app: GatewayApp, scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["type"], scope["path"].partition("/v1/")[2]))
        await original(app, scope, receive, send)

    monkeypatch.setattr(GatewayApp, "__call__", spying)
    engine = ScriptedEngine(Script())
    settings = {"websockets": True, "multi_agent": multi_agent}
    result = await run(tmp_path / "run", "codex", settings, engine)
    assert (result["status"], result["num_calls"], result["num_traces"]) == ("completed", 2, 1)
    assert result["ledger"]["captured"] == result["ledger"]["trained"] > 0
    assert seen == [("websocket", "responses")]
    assert engine.desk.started == 2


def bash(command: str) -> Step:
    return Step(text="Working.", tool_calls=[ScriptedCall(name="bash", arguments=json.dumps({"command": command}))])


@pytest.mark.clis
async def test_mini_swe_agent_does_its_task_with_one_exact_row(tmp_path: Path) -> None:
    """It ends by a command, not by a reply without one."""
    script = Script(
        steps=[bash("printf 'hello world' > notes.txt"), bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")]
    )
    result = await run(tmp_path / "run", "mini_swe_agent", {}, script)
    assert (result["status"], result["exit_code"], result["error"]) == ("completed", 0, None)
    assert (result["reward"], result["num_calls"], result["num_traces"]) == (1.0, 2, 1)
    assert result["ledger"]["captured"] == result["ledger"]["trained"] > 0


PYTHON = asyncio.run(_python.find(openhands.PYTHON))


@pytest.mark.clis
@pytest.mark.skipif(PYTHON is None, reason=f"openhands needs Python {openhands.PYTHON}, and there is none")
async def test_openhands_does_its_task_with_one_exact_row(tmp_path: Path) -> None:
    """Its tools want to be told how risky they are."""
    arguments = {"command": "printf 'hello world' > notes.txt", "security_risk": "LOW", "summary": "Create notes.txt"}
    act = Step(text="Working.", tool_calls=[ScriptedCall(name="terminal", arguments=json.dumps(arguments))])
    result = await run(tmp_path / "run", "openhands", {}, Script(steps=[act, Step(text="Done.")]))
    assert (result["status"], result["exit_code"], result["error"]) == ("completed", 0, None)
    assert (result["reward"], result["num_calls"], result["num_traces"]) == (1.0, 2, 1)
    assert result["ledger"]["captured"] == result["ledger"]["trained"] > 0
    (row,) = pq.read_table(tmp_path / "run" / "traces.parquet").to_pylist()
    assert json.loads(row["messages"])[1]["content"] == [
        {"type": "text", "text": "--help: create notes.txt that says hello world"}
    ]


@pytest.mark.clis
async def test_mini_swe_agent_that_never_calls_its_tool_fails(tmp_path: Path) -> None:
    result = await run(tmp_path / "run", "mini_swe_agent", {"max_format_errors": 2}, Script(act_turns=0))
    assert (result["status"], result["num_calls"]) == ("failed", 2)
    assert result["error"]["message"] == "RepeatedFormatError"


REFUSALS = [
    case(name, dialect)
    for name, dialect in [*NATIVE, ("opencode", CHAT), ("qwen_code", CHAT), ("pi", CHAT), ("mini_swe_agent", CHAT)]
]


@pytest.mark.parametrize(("name", "dialect", "settings"), REFUSALS)
async def test_a_prompt_that_does_not_fit_is_a_failure_and_no_infrastructure(
    name: str, dialect: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    script = Script(steps=[Step(fault=Fault(kind="overflow"))])
    result = await run(tmp_path / "run", name, settings, script)
    assert (result["status"], result["reward"], result["num_traces"]) == ("failed", 0.0, 0)
    assert result["error"]["boundary"] == "harness"


@pytest.mark.parametrize(("name", "dialect", "settings"), REFUSALS[:-1])
async def test_an_engine_that_fails_once_is_asked_again(
    name: str, dialect: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """By the client itself: the in-process engine has no retries of its own."""
    failing = Step(text="Done.", fault=Fault(kind="http_error", status=503, times=1))
    result = await run(tmp_path / "run", name, settings, Script(steps=[failing]))
    assert (result["status"], result["reward"], result["num_traces"]) == ("completed", 0.0, 1)
    assert result["ledger"]["calls_by_outcome"] == {"failed": 1, "ok": 1}

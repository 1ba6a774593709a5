"""MCP servers of a task: in each agent's own configuration, and for real: an agent starts one and the model calls its tool."""

from __future__ import annotations

import asyncio
import json
import tomllib
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from polynya.config import cache_dir
from polynya.engines.scripted import Script, ScriptedEngine
from polynya.engines.scripted.script import ScriptedCall, Step
from polynya.errors import TaskFileError
from polynya.harnesses import _python, harness, openhands
from polynya.harnesses.base import Endpoint, Installed, Launch
from polynya.rollout.parse import parse_task
from polynya.rollout.runner import Runner, RunOptions
from polynya.schema import HarnessSpec, McpServer

ENDPOINT = Endpoint(base_url="http://127.0.0.1:1/s/k", api_key="k", model="policy", window=32_000, max_tokens=700)
SERVERS = [
    McpServer(name="lab", command="/bin/sh", args=["a b", 'c"d'], env={"KEY.X": 'v "1"\n', "B": ""}),
    McpServer(name="other-one", command="./serve"),
]
PYTHON = asyncio.run(_python.find(openhands.PYTHON))
NO_PYTHON = pytest.mark.skipif(PYTHON is None, reason=f"openhands needs Python {openhands.PYTHON}, and there is none")
WITH_CLIENT = ("claude_code", "codex", "gemini_cli", "opencode", "pi", "qwen_code")
WITHOUT_CLIENT = [("mini_swe_agent", {}), ("shell", {"command": "true"})]


def launch(name: str, servers: list[McpServer]) -> Launch:
    spec = HarnessSpec(name=name, mcp_servers=servers)
    made = harness(name)
    made.validate(spec)
    installed = Installed(version="1", programs={name: f"/cache/{name}", "node": "/cache/node"})
    return made.launch(spec, "go", ENDPOINT, installed, workdir="/workspace", home="/home/agent")


def configured(name: str, servers: list[McpServer]) -> dict[str, Any]:
    """What the agent reads of them."""
    made = launch(name, servers)
    match name:
        case "claude_code":
            path = made.argv[made.argv.index("--mcp-config") + 1].removeprefix("/home/agent/")
            found = json.loads(made.home_files[path])["mcpServers"]
        case "codex":
            found = tomllib.loads(made.home_files[".codex/config.toml"])["mcp_servers"]
        case "opencode":
            found = json.loads(made.env["OPENCODE_CONFIG_CONTENT"])["mcp"]
        case "pi":
            found = json.loads(made.home_files[".pi/agent/mcp.json"])["mcpServers"]
        case _:
            folder = {"gemini_cli": ".gemini", "qwen_code": ".qwen"}[name]
            found = json.loads(made.home_files[f"{folder}/settings.json"])["mcpServers"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("name", WITH_CLIENT)
def test_servers_stand_in_the_agents_own_schema(name: str) -> None:
    found = configured(name, SERVERS)
    assert list(found) == ["lab", "other-one"]
    for server in SERVERS:
        entry = found[server.name]
        if name == "opencode":
            assert (entry["type"], entry["enabled"]) == ("local", True)
            assert (entry["command"], entry["environment"]) == ([server.command, *server.args], server.env)
        else:
            assert (entry["command"], entry["args"], entry["env"]) == (server.command, server.args, server.env)
    assert "lab" not in json.dumps([launch(name, []).argv, launch(name, []).home_files, launch(name, []).env])


@pytest.mark.parametrize(("name", "settings"), WITHOUT_CLIENT)
def test_an_agent_without_an_mcp_client_refuses_them(name: str, settings: dict[str, str]) -> None:
    with pytest.raises(TaskFileError, match=r"mcp_servers.*lab, other-one"):
        harness(name).validate(HarnessSpec(name=name, settings=settings, mcp_servers=SERVERS))


@pytest.mark.parametrize("name", WITH_CLIENT)
def test_names_that_are_one_to_an_agent_are_refused(name: str) -> None:
    twins = [McpServer(name="my-tools", command="a"), McpServer(name="My_tools", command="b")]
    with pytest.raises(TaskFileError, match="'My_tools' and 'my-tools'"):
        harness(name).validate(HarnessSpec(name=name, mcp_servers=twins))


@pytest.mark.parametrize(
    ("server", "field"),
    [
        ({"name": "a b", "command": "x"}, "mcp_servers"),
        ({"name": "a\n", "command": "x"}, "mcp_servers"),
        ({"name": "a", "command": ""}, "command"),
        ({"name": "a"}, "command"),
        ({"name": "a", "url": "http://x"}, "url"),
        ({"name": "a", "command": "x", "env": {"A=B": "c"}}, "env"),
    ],
)
def test_a_server_that_cannot_be_is_refused_by_field(server: dict[str, Any], field: str) -> None:
    task = {"task_id": "t", "instruction": "go", "harness": {"name": "pi", "mcp_servers": [server]}}
    with pytest.raises(TaskFileError, match=field):
        parse_task(task, "test")


ORACLE = """\
#!/bin/sh
# A whole MCP server: one tool, which answers with $ANSWER.
while read -r line; do
  id=$(printf '%s' "$line" | sed -n 's/.*"id": *\\("[^"]*"\\|[0-9][0-9]*\\).*/\\1/p')
  version=$(printf '%s' "$line" | sed -n 's/.*"protocolVersion": *"\\([^"]*\\)".*/\\1/p')
  case "$line" in
    *'"initialize"'*)
      result='{"protocolVersion":"'$version'","capabilities":{"tools":{}},"serverInfo":{"name":"oracle","version":"1"}}' ;;
    *'"tools/list"'*)
      schema='{"type":"object","properties":{"question":{"type":"string"}}}'
      result='{"tools":[{"name":"oracle_ask","description":"Ask the oracle.","inputSchema":'$schema'}]}' ;;
    *'"tools/call"'*)
      result='{"content":[{"type":"text","text":"'$ANSWER'"}]}' ;;
    *)
      result='{}' ;;
  esac
  [ -z "$id" ] || printf '{"jsonrpc":"2.0","id":%s,"result":%s}\\n' "$id" "$result"
done
"""
RISK = {"openhands": {"security_risk": "LOW", "summary": "Ask"}}


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    return {"pi": [], "openhands": [pytest.mark.clis, NO_PYTHON]}.get(name, [pytest.mark.clis])


REAL = [
    ("claude_code", "mcp__lab__oracle_ask", False),
    ("codex", "mcp__lab__oracle_ask", True),
    ("gemini_cli", "mcp_lab_oracle_ask", True),
    ("opencode", "lab_oracle_ask", True),
    ("openhands", "oracle_ask", True),
    ("pi", "mcp__lab__oracle_ask", True),
    ("qwen_code", "mcp__lab__oracle_ask", False),
]


@pytest.mark.harness
@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("name", "tool", "declared"),
    [pytest.param(*row, marks=marks_of(row[0]), id=row[0]) for row in REAL],
)
async def test_the_model_is_offered_the_tool_and_gets_its_answer(
    name: str, tool: str, declared: bool, tmp_path: Path
) -> None:
    """claude_code and qwen_code name it in the prompt and declare it only when the model searches for it."""
    asks = Step(
        text="Working.",
        tool_calls=[ScriptedCall(name=tool, arguments=json.dumps({"question": "what", **RISK.get(name, {})}))],
    )
    server = {"name": "lab", "command": "/bin/sh", "args": ["oracle.sh"], "env": {"ANSWER": "forty two"}}
    task = parse_task(
        {
            "task_id": "t",
            "instruction": "Ask the oracle.",
            "harness": {"name": name, "mcp_servers": [server]},
            "runtime": {"name": "bubblewrap", "files": {"oracle.sh": ORACLE}},
            "budgets": {"init": 600, "run": 200},
            "retries": 0,
        },
        "test",
    )
    folder = tmp_path / "run"
    engine = ScriptedEngine(Script(steps=[asks, Step(text="Done.")]))
    await Runner([task], engine, RunOptions(out=folder, cache=cache_dir())).run()
    result = json.loads((folder / "sessions.jsonl").read_text())
    assert (result["status"], result["error"], result["num_calls"]) == ("completed", None, 2)
    row = pq.read_table(folder / "traces.parquet").to_pylist()[-1]
    offered = [offer["function"]["name"] for offer in json.loads(row["tools"])]
    assert (tool in offered) is declared
    *before, said, answer, _ = json.loads(row["messages"])
    assert declared or tool in json.dumps(before)
    assert said["tool_calls"][0]["function"]["name"] == tool
    assert "forty two" in json.dumps(answer)

"""Every request that real harnesses and SDKs were recorded with, through a real gateway over HTTP.

Each is sent as it was and with streaming the other way round. It is accepted; all of it that a model should see reaches the
engine, in order; and the reply (text, tool calls of tools that the request offers, reasoning, in turn) is read strictly as
the provider's own SDK types it, the same whole and streamed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from anthropic.types import MessageTokensCount
from google.genai.types import CountTokensResponse

from polynya.dialects.base import route
from polynya.dialects.neutral import ChatReply
from polynya.engines.base import EngineReply, EngineRequest
from polynya.engines.scripted import Script, ScriptedCall, ScriptedEngine, Step

from ..recordings import rows
from . import sdk_shapes, seen
from .conftest import RECORDED_TABLE

MakeRig = Callable[..., Any]
ROWS = rows()
CASES = {case: list(found) for case, found in itertools.groupby(ROWS, lambda row: (row["harness"], row["case"]))}
TEXT = "I look into it.\n\nÄ 漢字 🙂 " + "word " * 120
REASONING = "because\n  of this " * 40
ARGUMENTS = '{"path": "ä.txt",  "count": 1.50, "input": "echo"}'


class AnyTool(ScriptedEngine):
    """Replies in four shapes in turn, with calls of the tools that are offered; keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(Script(window=8_000_000))
        self.asked: list[EngineRequest] = []
        self.shape = 0

    async def generate(self, request: EngineRequest) -> EngineReply:
        self.asked.append(request)
        step = self.step([tool.name for tool in request.chat.tools])
        self.script = self.desk.script = Script(window=8_000_000, steps=[step])
        return await super().generate(request)

    def step(self, tools: list[str]) -> Step:
        calls = [
            ScriptedCall(name=name, arguments=arguments, id=f"call_{i}")
            for i, (name, arguments) in enumerate(zip(tools[-2:], (ARGUMENTS, '{"broken": '), strict=False))
        ]
        match self.shape % 4:
            case 0:
                return Step(text=TEXT)
            case 1:
                return Step(text="" if calls else "no tool", tool_calls=calls[:1])
            case 2:
                return Step(text=TEXT, reasoning=REASONING, tool_calls=calls)
            case _:
                return Step(reasoning=REASONING, text="." if not calls else "", tool_calls=calls[:1])


@pytest.mark.parametrize(("harness", "case"), list(CASES), ids=lambda value: value)
async def test_recorded_request_is_accepted_and_reaches_the_model(make_rig: MakeRig, harness: str, case: str) -> None:
    rig = await make_rig(engine=AnyTool())
    answered: dict[str, str] = {}
    for number, row in enumerate(CASES[harness, case]):
        rig.engine.shape = number
        await _drive(rig, row, f"{case}.{number}", answered)


async def _drive(rig: Any, row: dict[str, Any], name: str, answered: dict[str, str]) -> None:
    line = RECORDED_TABLE.setdefault((row["harness"], row["case"]), {})
    found = route("POST" if row["method"] == "WS" else row["method"], row["path"], row["headers"])
    if found is None:
        await _probe(rig, row)
        kind = "probe" if row["method"] == "HEAD" else "handshake"
    elif found.action == "count_tokens":
        await _count(rig, row, found.dialect)
        kind = f"{found.dialect} (count)"
    else:
        agent = await rig.open(name)
        for streaming in (True, False):
            await _generate(rig, agent, row, found.dialect, streaming, answered)
        kind = found.dialect + (" (frame)" if row["method"] == "WS" else "")
    line[kind] = line.get(kind, 0) + row["times"]


async def _generate(
    rig: Any, agent: Any, row: dict[str, Any], dialect: str, streaming: bool, answered: dict[str, str]
) -> None:
    body, path, history = dict(row["body"]), row["path"], row["body"].get("previous_response_id")
    if row["method"] == "WS":
        # a frame says by its type what a POST says by its method; the engine works for each here
        body.pop("type"), body.pop("generate", None)
    if history:
        body["previous_response_id"] = answered[f"{history} {streaming}"]
        agent = rig.frames
    rig.frames = agent
    if dialect == "google_generate":
        path = path.partition(":")[0] + (":streamGenerateContent?alt=sse" if streaming else ":generateContent")
    else:
        body["stream"] = streaming
        path += f"?{row['query']}" if row["query"] else ""
    if dialect == "openai_chat" and streaming:
        body["stream_options"] = {"include_usage": True}
    elif dialect == "openai_chat":
        body.pop("stream_options", None)
    flags, asked = agent.session.flags.copy(), len(rig.engine.asked)
    url = rig.gateway.base_url(agent.key) + path
    async with rig.client.post(url, json=body, headers=_headers(row)) as response:
        text = await response.read()
        assert response.status == 200, (row["harness"], row["case"], text)
    (request,) = rig.engine.asked[asked:]
    wanted, got = seen.expected(dialect, body), seen.engine_saw(request.chat)
    if not history:
        seen.assert_same(wanted, got)
    dropped = {key[8:]: n for key, n in (agent.session.flags - flags).items() if key.startswith("dropped_")}
    assert dropped == +wanted.dropped
    said = (sdk_shapes.streamed if streaming else sdk_shapes.whole)(dialect, text)
    # what the engine replied: a small max_tokens of the client cuts it
    reply = rig.engine.script.expected("", 0, max_tokens=request.sampling.max_tokens).reply
    _assert_said(said, reply, wanted.tools)
    call = agent.session.capture.calls[-1]
    assert said.usage == (len(call.prompt_ids), len(call.sampled_ids))
    if answers := row.get("answered"):
        last = text.decode().rpartition("data: ")[2] if streaming else text.decode()
        payload = json.loads(last)
        answered[f"{answers} {streaming}"] = (payload["response"] if streaming else payload)["id"]


def _assert_said(said: sdk_shapes.Said, reply: ChatReply, offered: list[str]) -> None:
    assert (said.text, said.reasoning) == (reply.text, reply.reasoning)
    assert [(i, name) for i, name, _ in said.calls] == [(call.id, call.name) for call in reply.tool_calls]
    assert {name for _, name, _ in said.calls} <= set(offered)
    for (_, _, arguments), call in zip(said.calls, reply.tool_calls, strict=True):
        # as the model wrote it, as an object, as an object around what is no JSON, or the free text of a custom tool
        shapes = {call.arguments, seen.canonical(call.arguments), seen.canonical({"_raw_arguments": call.arguments})}
        assert {arguments, seen.canonical(arguments)} & (shapes | {"echo"})
    if reply.finish_reason == "length":
        assert said.finish in {"length", "incomplete", "max_tokens", "MAX_TOKENS"}
    else:
        calls = {"tool_calls", "tool_use"} if reply.tool_calls else {"stop", "end_turn"}
        assert said.finish in calls | {"completed", "STOP"}


async def _count(rig: Any, row: dict[str, Any], dialect: str) -> None:
    agent = await rig.open(f"count.{row['case']}.{len(rig.engine.asked)}.{id(row)}")
    async with rig.client.post(
        rig.gateway.base_url(agent.key) + row["path"], json=row["body"], headers=_headers(row)
    ) as response:
        assert response.status == 200
        text = await response.read()
    if dialect == "anthropic_messages":
        assert MessageTokensCount.model_validate_json(text, strict=True).input_tokens > 0
    else:
        assert CountTokensResponse.model_validate_json(text, strict=True).total_tokens
    assert agent.session.capture.calls == []


async def _probe(rig: Any, row: dict[str, Any]) -> None:
    """No model call: answered here, without a capture. (The handshake is a test of its own where it is served.)"""
    agent = await rig.open(f"probe.{row['case']}")
    async with rig.client.request(row["method"], rig.gateway.base_url(agent.key) + row["path"]) as response:
        assert response.status == (200 if row["method"] == "HEAD" else 404)
    assert agent.session.capture.calls == []


def _headers(row: dict[str, Any]) -> dict[str, str]:
    return {name: value for name, value in row["headers"].items() if name not in ("upgrade", "connection")}


def test_all_harnesses_are_there() -> None:
    lines = sum(row["times"] for row in ROWS)
    assert (lines, len(ROWS), len(CASES)) == (402, 393, 121)
    assert {row["harness"] for row in ROWS} == {
        "claude-agent-sdk", "claude-code", "codex", "gemini-cli", "mini-swe-agent", "openai-agents", "opencode", "pi",
        "qwen-code", "sdk-clients",
    }  # fmt: skip

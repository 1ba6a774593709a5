"""The same conversation through each dialect, over a real socket: what is captured does not depend on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polynya.engines.scripted import Script, ScriptedCall, Step
from polynya.schema import Lane
from polynya.tokens import build

MakeRig = Callable[..., Any]
SCRIPT = Script(
    steps=[
        Step(text="I look.", tool_calls=[ScriptedCall(name="bash", arguments='{"command":"ls"}', id="call_a")]),
        Step(text="Done."),
    ]
)
TOOL_SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}


class Talk:
    """One two-turn conversation of a dialect: path, bodies, and what the client shows of the reply."""

    path = ""
    stream_path = ""

    def first(self) -> dict[str, Any]:
        raise NotImplementedError

    def second(self, reply: Any) -> dict[str, Any]:
        raise NotImplementedError

    def streaming(self, body: dict[str, Any]) -> dict[str, Any]:
        return {**body, "stream": True}


class Chat(Talk):
    path = "/v1/chat/completions"

    def first(self) -> dict[str, Any]:
        tool = {"type": "function", "function": {"name": "bash", "description": "run", "parameters": TOOL_SCHEMA}}
        messages = [{"role": "system", "content": "sys"}, {"role": "user", "content": "go"}]
        return {"model": "m", "messages": messages, "tools": [tool]}

    def second(self, reply: Any) -> dict[str, Any]:
        body = self.first()
        body["messages"] += [
            reply["choices"][0]["message"],
            {"role": "tool", "tool_call_id": "call_a", "content": "files"},
        ]
        return body


class Anthropic(Talk):
    path = "/v1/messages?beta=true"

    def first(self) -> dict[str, Any]:
        tool = {"name": "bash", "description": "run", "input_schema": TOOL_SCHEMA}
        return {
            "model": "m",
            "max_tokens": 99,
            "system": "sys",
            "messages": [{"role": "user", "content": "go"}],
            "tools": [tool],
        }

    def second(self, reply: Any) -> dict[str, Any]:
        body = self.first()
        result = {"type": "tool_result", "tool_use_id": "call_a", "content": "files"}
        body["messages"] += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": [result]}]
        return body


class Responses(Talk):
    path = "/v1/responses"

    def first(self) -> dict[str, Any]:
        tool = {"type": "function", "name": "bash", "description": "run", "parameters": TOOL_SCHEMA}
        return {"model": "m", "instructions": "sys", "input": [{"role": "user", "content": "go"}], "tools": [tool]}

    def second(self, reply: Any) -> dict[str, Any]:
        body = self.first()
        body["input"] += [*reply["output"], {"type": "function_call_output", "call_id": "call_a", "output": "files"}]
        return body


class Google(Talk):
    path = "/v1beta/models/m:generateContent"
    stream_path = "/v1beta/models/m:streamGenerateContent?alt=sse"

    def first(self) -> dict[str, Any]:
        tool = {"functionDeclarations": [{"name": "bash", "description": "run", "parametersJsonSchema": TOOL_SCHEMA}]}
        return {
            "systemInstruction": {"parts": [{"text": "sys"}]},
            "contents": [{"role": "user", "parts": [{"text": "go"}]}],
            "tools": [tool],
        }

    def second(self, reply: Any) -> dict[str, Any]:
        body = self.first()
        answer = {"functionResponse": {"id": "call_a", "name": "bash", "response": {"output": "files"}}}
        body["contents"] += [reply["candidates"][0]["content"], {"role": "user", "parts": [answer]}]
        return body

    def streaming(self, body: dict[str, Any]) -> dict[str, Any]:
        return body


TALKS = [Chat(), Anthropic(), Responses(), Google()]


@pytest.mark.parametrize("talk", TALKS, ids=lambda talk: type(talk).__name__)
async def test_two_turns_are_one_exact_row_in_every_dialect(make_rig: MakeRig, talk: Talk) -> None:
    rig = await make_rig(SCRIPT)
    agent = await rig.open()
    base = rig.gateway.base_url(agent.key)
    async with rig.client.post(base + talk.path, json=talk.first()) as response:
        assert response.status == 200
        reply = await response.json()
    async with rig.client.post(base + talk.path, json=talk.second(reply)) as response:
        assert response.status == 200
        assert "Done." in await response.text()
    calls = agent.session.capture.calls
    built = build(calls, session_id="t.0", builder="prefix_merging")
    (row,) = built.traces
    assert row.num_turns == 2
    for turn, call in enumerate(calls):
        expected = SCRIPT.expected("t.0", turn, tools=[])
        np.testing.assert_array_equal(call.sampled_ids, expected.sampled_ids)
    roles = [message["role"] for message in json.loads(row.messages)]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]


async def test_the_engine_conditions_on_the_same_ids_whatever_the_dialect(make_rig: MakeRig) -> None:
    rig = await make_rig(SCRIPT)
    prompts = []
    for i, talk in enumerate(TALKS):
        agent = await rig.open(f"t.{i}")
        compact = json.dumps(talk.first(), separators=(",", ":"))
        async with rig.client.post(rig.gateway.base_url(agent.key) + talk.path, data=compact) as response:
            assert response.status == 200
        prompts.append(agent.session.capture.calls[0].prompt_ids.tolist())
    assert prompts[1:] == prompts[:1] * 3


@pytest.mark.parametrize("talk", TALKS, ids=lambda talk: type(talk).__name__)
async def test_stream_of_every_dialect_begins_at_once_keeps_alive_and_ends_whole(make_rig: MakeRig, talk: Talk) -> None:
    script = Script(steps=[Step(text="I look.", hold=True)])
    rig = await make_rig(script, keepalive_seconds=0.02, first_event_grace=0.0)
    agent = await rig.open()
    url = rig.gateway.base_url(agent.key) + (talk.stream_path or talk.path)
    async with rig.client.post(url, json=talk.streaming(talk.first())) as response:
        assert response.headers["content-type"] == "text/event-stream"
        for _ in range(2):
            await response.content.readuntil(b"data: ")
        rig.engine.desk.release()
        rest = (await response.read()).decode()
    assert "I look." in rest
    await rig.idle()
    assert agent.session.capture.calls[0].delivered


async def test_google_without_sse_streams_one_json_array(make_rig: MakeRig) -> None:
    rig = await make_rig(SCRIPT)
    agent = await rig.open()
    url = rig.gateway.base_url(agent.key) + "/v1beta/models/m:streamGenerateContent"
    async with rig.client.post(url, json=Google().first()) as response:
        (element,) = await response.json()
    assert element["candidates"][0]["finishReason"] == "STOP"


@pytest.mark.parametrize(
    ("path", "body", "read"),
    [
        ("/v1/messages/count_tokens", Anthropic().first(), lambda answer: answer["input_tokens"]),
        ("/v1beta/models/m:countTokens", Google().first(), lambda answer: answer["totalTokens"]),
    ],
)
async def test_counted_tokens_are_those_of_the_real_call(
    make_rig: MakeRig, path: str, body: dict[str, Any], read: Callable[[Any], int]
) -> None:
    rig = await make_rig(SCRIPT)
    agent = await rig.open()
    base = rig.gateway.base_url(agent.key)
    async with rig.client.post(base + path, json=body) as response:
        count = read(await response.json())
    assert agent.session.capture.calls == []
    real = Anthropic() if "messages" in path else Google()
    async with rig.client.post(base + real.path, json=real.first()) as response:
        assert response.status == 200
    assert count == agent.session.capture.calls[0].prompt_len


async def test_previous_response_is_the_history_of_the_session(make_rig: MakeRig) -> None:
    rig = await make_rig(SCRIPT)
    agent = await rig.open()
    url = rig.gateway.base_url(agent.key) + "/v1/responses"
    talk = Responses()
    async with rig.client.post(url, json=talk.first()) as response:
        reply = await response.json()
    item = {"type": "function_call_output", "call_id": "call_a", "output": "files"}
    body = {**talk.first(), "previous_response_id": reply["id"], "input": [item]}
    async with rig.client.post(url, json=body) as response:
        assert response.status == 200
    built = build(agent.session.capture.calls, session_id="t.0", builder="prefix_merging")
    assert [row.num_turns for row in built.traces] == [2]


async def test_unknown_previous_response_is_404_never_lost_history(make_rig: MakeRig) -> None:
    rig = await make_rig(SCRIPT)
    agent, other = await rig.open("t.0"), await rig.open("t.1")
    async with rig.client.post(rig.gateway.base_url(other.key) + "/v1/responses", json=Responses().first()) as response:
        foreign = (await response.json())["id"]
    for unknown in ("resp_none", foreign):
        body = {**Responses().first(), "previous_response_id": unknown}
        async with rig.client.post(rig.gateway.base_url(agent.key) + "/v1/responses", json=body) as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "previous_response_not_found"
    assert agent.session.capture.calls == []


@pytest.mark.parametrize(
    ("headers", "lane"),
    [
        ({}, Lane.MAIN),
        ({"x-claude-code-agent-id": "a1"}, Lane.SUBAGENT),
        ({"x-openai-subagent": "collab_spawn"}, Lane.SUBAGENT),
    ],
)
async def test_lane_is_read_from_the_harnesss_own_headers(
    make_rig: MakeRig, headers: dict[str, str], lane: Lane
) -> None:
    rig = await make_rig(SCRIPT)
    agent = await rig.open()
    async with rig.client.post(
        rig.gateway.base_url(agent.key) + "/v1/messages", json=Anthropic().first(), headers=headers
    ) as r:
        assert r.status == 200
    assert agent.session.capture.calls[0].lane == lane


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/messages", lambda body: body["error"]["type"] == "authentication_error"),
        ("/v1/responses", lambda body: body["error"]["code"] == "invalid_api_key"),
        ("/v1beta/models/m:generateContent", lambda body: body["error"]["status"] == "UNAUTHENTICATED"),
    ],
)
async def test_unknown_key_is_refused_in_each_dialects_own_shape(
    make_rig: MakeRig, path: str, shape: Callable[[Any], bool]
) -> None:
    rig = await make_rig()
    async with rig.client.post(f"{rig.gateway.url}/s/none{path}", json={}) as response:
        assert response.status == 401
        assert shape(await response.json())

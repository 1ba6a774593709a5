"""Failures met in the field: dialects and the quirks of harnesses. docs/field-cases.md says where each case is shown."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from polynya.dialects.wire import sign
from polynya.engines.base import EngineReply, EngineRequest
from polynya.engines.scripted import Script, ScriptedCall, ScriptedEngine, Step
from polynya.schema import Budgets
from polynya.tokens import build

from . import sdk_shapes
from .test_dialects import TALKS, Anthropic, Google, Responses, Talk

MakeRig = Callable[..., Any]
TALK_IDS = [type(talk).__name__ for talk in TALKS]
DIALECT_OF = dict(
    zip(TALK_IDS, ["openai_chat", "anthropic_messages", "openai_responses", "google_generate"], strict=True)
)


class Keeping(ScriptedEngine):
    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.asked: list[EngineRequest] = []

    async def generate(self, request: EngineRequest) -> EngineReply:
        self.asked.append(request)
        return await super().generate(request)

    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(bytes(message.raw)) for message in self.asked[-1].chat.messages]


async def post(rig: Any, agent: Any, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
    async with rig.client.post(rig.gateway.base_url(agent.key) + path, json=body, **kwargs) as response:
        return response.status, await response.json()


async def test_counting_generates_and_records_nothing(make_rig: MakeRig) -> None:
    """48: with tools and system the count is that of the real call; ten counts leave no trace."""
    rig = await make_rig(Script(steps=[Step(text="ok")]))
    agent = await rig.open()
    body = Anthropic().first()
    counts = [(await post(rig, agent, "/v1/messages/count_tokens", body))[1]["input_tokens"] for _ in range(10)]
    assert (rig.engine.desk.started, agent.session.capture.calls) == (0, [])
    _, reply = await post(rig, agent, "/v1/messages", body)
    assert set(counts) == {reply["usage"]["input_tokens"]}


async def test_previous_response_id_brings_the_earlier_turns_into_the_prompt(make_rig: MakeRig) -> None:
    """51: only the new item is sent; the engine's prompt begins with the whole of the call before."""
    rig = await make_rig(engine=Keeping(Script(steps=[Step(text="one"), Step(text="two"), Step(text="three")])))
    agent = await rig.open()
    previous: dict[str, str] = {}
    for turn in ("first", "second", "third"):
        _, reply = await post(rig, agent, "/v1/responses", {"model": "m", "input": turn, **previous})
        previous = {"previous_response_id": reply["id"]}
    said = [message["content"] for message in rig.engine.messages()]
    assert said == ["first", "one", "second", "two", "third"]
    assert [
        row.num_turns for row in build(agent.session.capture.calls, session_id="t.0", builder="prefix_merging").traces
    ] == [3]


async def test_namespace_and_custom_tools_come_back_as_the_client_knows_them(make_rig: MakeRig) -> None:
    """53: over HTTP: upstream names, the reply's items, and the echo of the reply is one node of the chain."""
    calls = [
        ScriptedCall(name="fs__read", arguments='{"path":"a"}', id="c1"),
        ScriptedCall(name="exec", arguments='{"input":"ls -l"}', id="c2"),
    ]
    rig = await make_rig(engine=Keeping(Script(steps=[Step(tool_calls=calls), Step(text="done")])))
    agent = await rig.open()
    inner = {"type": "function", "name": "read", "parameters": {"type": "object"}}
    tools = [
        {"type": "namespace", "name": "fs", "description": "files", "tools": [inner]},
        {"type": "custom", "name": "exec"},
        {"type": "web_search"},
    ]
    items: list[Any] = [{"role": "user", "content": "go"}]
    _, reply = await post(rig, agent, "/v1/responses", {"model": "m", "input": items, "tools": tools})
    offered = json.loads(bytes(rig.engine.asked[0].chat.tools_raw))
    assert [tool["function"]["name"] for tool in offered] == ["fs__read", "exec"]
    assert offered[0]["function"]["description"] == "files"
    shown = [(item["type"], item.get("namespace"), item["name"]) for item in reply["output"]]
    assert shown == [("function_call", "fs", "read"), ("custom_tool_call", None, "exec")]
    assert reply["output"][1]["input"] == "ls -l"
    items += [
        *reply["output"],
        {"type": "function_call_output", "call_id": "c1", "output": "A"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "B"},
    ]
    assert (await post(rig, agent, "/v1/responses", {"model": "m", "input": items, "tools": tools}))[0] == 200
    built = build(agent.session.capture.calls, session_id="t.0", builder="prefix_merging")
    assert [row.num_turns for row in built.traces] == [2]
    assert agent.session.flags["dropped_provider_tool"] == 2


async def test_unknown_keys_are_accepted_dropped_upstream_and_logged_once(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    """55: ``input_examples`` of a tool, a beta header, fields that nobody heard of."""
    rig = await make_rig(engine=Keeping(Script(steps=[Step(text="ok")])))
    agent = await rig.open()
    body = Anthropic().first() | {"context_management": {"edits": []}, "brand_new": 1}
    body["tools"][0] |= {"input_examples": [{"command": "ls"}], "defer_loading": True, "cache_control": {"type": "x"}}
    caplog.set_level(logging.INFO, logger="polynya.gateway")
    for _ in range(2):
        assert (await post(rig, agent, "/v1/messages", body, headers={"anthropic-beta": "x-2026"}))[0] == 200
    upstream = rig.engine.asked[-1].chat
    assert b"input_examples" not in bytes(upstream.tools_raw) and b"cache_control" not in bytes(upstream.tools_raw)
    lines = [record.getMessage() for record in caplog.records if "without a use" in record.getMessage()]
    assert lines == ["session t.0: fields without a use here: brand_new, context_management"]


async def test_tool_that_a_search_found_is_told_to_the_model(make_rig: MakeRig) -> None:
    """55, of its kind: a client-side tool search answers with references, which must not end the run."""
    rig = await make_rig(engine=Keeping(Script(steps=[Step(text="ok")])))
    agent = await rig.open()
    use = {"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {"query": "x"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "Deep"}]}
    body = Anthropic().first()
    body["messages"] += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    assert (await post(rig, agent, "/v1/messages", body))[0] == 200
    assert rig.engine.messages()[-1]["content"] == "Tool found: Deep"


@pytest.mark.parametrize("talk", TALKS, ids=TALK_IDS)
async def test_turn_that_was_cut_says_so_and_its_row_is_marked(make_rig: MakeRig, talk: Talk) -> None:
    """62: ``length`` in each dialect's own word, and a row that a trainer can leave out."""
    rig = await make_rig(Script(steps=[Step(text="this goes on and", finish_reason="length")]))
    agent = await rig.open()
    async with rig.client.post(rig.gateway.base_url(agent.key) + talk.path, json=talk.first()) as response:
        said = sdk_shapes.whole(DIALECT_OF[type(talk).__name__], await response.read())
    assert said.finish in ("length", "max_tokens", "incomplete", "MAX_TOKENS")
    (row,) = build(agent.session.capture.calls, session_id="t.0", builder="prefix_merging").traces
    assert row.truncated


@pytest.mark.parametrize("echoes", [True, False], ids=["echoed", "dropped by the harness"])
async def test_cut_turn_is_extended_only_when_the_harness_echoes_it(make_rig: MakeRig, echoes: bool) -> None:
    """62: some harnesses drop a cut turn from their history; then it is a row of its own, never joined to what follows."""
    rig = await make_rig(Script(steps=[Step(text="cut", finish_reason="length"), Step(text="whole")]))
    agent = await rig.open()
    await agent.say("one")
    if not echoes:
        agent.messages.pop()
        rig.engine.script = rig.engine.desk.script = Script(steps=[Step(text="whole")])
    await agent.say("two")
    built = build(agent.session.capture.calls, session_id="t.0", builder="prefix_merging")
    first, second = agent.session.capture.calls
    rows = [(row.input_ids.tolist(), row.num_turns, row.truncated) for row in built.traces]
    last = (second.full_ids.tolist(), 2 if echoes else 1, False)
    assert rows == ([last] if echoes else [(first.full_ids.tolist(), 1, True), last])


@pytest.mark.parametrize("talk", TALKS, ids=TALK_IDS)
@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
async def test_spent_budget_ends_in_a_well_formed_answer_without_tools(
    make_rig: MakeRig, talk: Talk, streaming: bool
) -> None:
    """63: harnesses do not honour step limits; the answer after the last one makes them stop."""
    dialect = DIALECT_OF[type(talk).__name__]
    rig = await make_rig(Script(steps=[Step(tool_calls=[ScriptedCall(name="bash")])]))
    agent = await rig.open(budgets=Budgets(calls=10))
    url = rig.gateway.base_url(agent.key) + (talk.stream_path if streaming and talk.stream_path else talk.path)
    body = talk.streaming(talk.first()) if streaming else talk.first()
    if dialect == "openai_chat" and streaming:
        body["stream_options"] = {"include_usage": True}
    said, statuses = [], []
    for _ in range(15):
        async with rig.client.post(url, json=body) as response:
            statuses.append(response.status)
            text = await response.read()
            if response.status == 200:
                said.append((sdk_shapes.streamed if streaming else sdk_shapes.whole)(dialect, text))
    assert statuses == [200] * 14 + [429]
    assert [bool(reply.calls) for reply in said] == [True] * 10 + [False] * 4
    assert all("budget" in reply.text and reply.usage == (0, 0) for reply in said[10:])
    assert len(agent.session.capture.calls) == 10


async def test_any_model_name_is_served_and_kept_slashes_and_all(make_rig: MakeRig) -> None:
    """65: in a Google path too."""
    rig = await make_rig(Script(steps=[Step(text="ok")]))
    agent = await rig.open()
    path = "/v1beta/models/org/some-model-7b:streamGenerateContent?alt=sse"
    async with rig.client.post(rig.gateway.base_url(agent.key) + path, json=Google().first()) as response:
        assert response.status == 200
        assert '"modelVersion":"org/some-model-7b"' in await response.text()
    assert (await post(rig, agent, "/v1/responses", Responses().first() | {"model": "a/b/c"}))[1]["model"] == "a/b/c"
    assert [call.intent.model for call in agent.session.capture.calls] == ["org/some-model-7b", "a/b/c"]


async def test_thinking_of_ours_returns_and_foreign_thinking_leaves_its_message(make_rig: MakeRig) -> None:
    """67: the message count never changes, so roles do not collide."""
    rig = await make_rig(engine=Keeping(Script(steps=[Step(text="ok")])))
    agent = await rig.open()

    def thought(text: str, signature: str) -> dict[str, Any]:
        return {"role": "assistant", "content": [{"type": "thinking", "thinking": text, "signature": signature}]}

    user = {"role": "user", "content": "go on"}
    redacted = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "QUJD"}]}
    messages = [user, thought("mine", sign("mine")), user, thought("theirs", "xyz"), user, redacted, user]
    assert (await post(rig, agent, "/v1/messages", Anthropic().first() | {"messages": messages}))[0] == 200
    got = rig.engine.messages()[1:]
    assert [message["role"] for message in got] == ["user", "assistant"] * 3 + ["user"]
    assert [message.get("reasoning_content") for message in got[1::2]] == ["mine", None, None]
    assert agent.session.flags["dropped_foreign_reasoning"] == 2


async def test_call_with_the_key_of_an_ended_session_is_refused_and_counted(make_rig: MakeRig) -> None:
    """69: a judge that got the session's key asks the policy; after the run it is refused, and one can see that it tried."""
    rig = await make_rig(Script(steps=[Step(text="10/10")]))
    agent = await rig.open()
    await rig.gateway.close_session(agent.session)
    for path, body in (("/v1/messages", Anthropic().first()), ("/v1/responses", Responses().first())):
        assert (await post(rig, agent, path, body))[0] == 410
    assert rig.gateway.app.side_requests["ended_key"] == 2
    assert rig.engine.desk.started == 0

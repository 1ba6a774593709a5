"""Failures met in the field: ids, logprobs and versions. docs/field-cases.md says where each case is shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.engines.routed import RoutedApp
from tests.tokens.harness import NAMES, PATHS, PNG, body, tool, user

from polynya.engines.compatible import CompatibleEngine
from polynya.engines.routes import Route
from polynya.engines.scripted import Script, ScriptedApp, ScriptedCall, Step, serve
from polynya.engines.scripted.tokens import MEDIA
from polynya.node.trajectory import trajectory_of
from polynya.schema import BuilderSpec, PolicySpan

from .test_field_cases_dialects import Keeping

MakeRig = Callable[..., Any]
LISTS = {"openai_responses": "input", "google_generate": "contents"}


async def post(rig: Any, agent: Any, dialect: str, sent: dict[str, Any]) -> dict[str, Any]:
    async with rig.client.post(rig.gateway.base_url(agent.key) + PATHS[dialect], json=sent) as response:
        assert response.status == 200, await response.text()
        reply: dict[str, Any] = await response.json()
        return reply


def echo(dialect: str, reply: dict[str, Any]) -> list[Any]:
    match dialect:
        case "openai_chat":
            return [reply["choices"][0]["message"]]
        case "anthropic_messages":
            return [{"role": "assistant", "content": reply["content"]}]
        case "openai_responses":
            return list(reply["output"])
    return [reply["candidates"][0]["content"]]


async def act_and_go_on(rig: Any, agent: Any, dialect: str, call: ScriptedCall) -> dict[str, Any]:
    """A call, its result and one more turn. The first reply."""
    sent = body(dialect, [user("go")])
    if "max_tokens" in sent:
        sent["max_tokens"] = 500
    first = await post(rig, agent, dialect, sent)
    history = sent[LISTS.get(dialect, "messages")]
    history += echo(dialect, first)
    after = body(dialect, [tool(call.id or "", "out", call.name)])
    history += after[LISTS.get(dialect, "messages")]
    await post(rig, agent, dialect, sent)
    return first


@pytest.mark.parametrize("dialect", NAMES)
async def test_id_of_a_tool_call_is_the_engines_there_and_back(make_rig: MakeRig, dialect: str) -> None:
    """13: Kimi's template prints the id, Mistral's counts its characters."""
    call = ScriptedCall(name="bash", arguments='{"command":"ls"}', id="functions.bash:0")
    rig = await make_rig(engine=Keeping(Script(steps=[Step(tool_calls=[call]), Step(text="done")])))
    agent = await rig.open()
    first = await act_and_go_on(rig, agent, dialect, call)
    assert json.dumps(first).count('"functions.bash:0"') == 1
    said, result = rig.engine.messages()[-2:]
    assert [said["tool_calls"][0]["id"], result["tool_call_id"]] == ["functions.bash:0"] * 2


@pytest.mark.parametrize("dialect", NAMES)
async def test_arguments_that_are_no_json_are_delivered_sent_back_and_known_again(
    make_rig: MakeRig, dialect: str
) -> None:
    """27: no 500, and the next turn goes on from the call."""
    call = ScriptedCall(name="bash", arguments='{"a": ', id="c1")
    rig = await make_rig(engine=Keeping(Script(steps=[Step(tool_calls=[call]), Step(text="done")])))
    agent = await rig.open()
    await act_and_go_on(rig, agent, dialect, call)
    assert rig.engine.messages()[-2]["tool_calls"][0]["function"]["arguments"] == '{"a": '
    before, after = agent.session.capture.committed
    assert after.intent.continues == before.call_id


@pytest.mark.parametrize(
    "asked", [{"logprobs": False}, {"logprobs": True, "top_logprobs": 20}, {"logprobs": None}, {"top_logprobs": None}]
)
async def test_what_a_harness_asks_of_logprobs_changes_nothing_upstream(
    make_rig: MakeRig, asked: dict[str, Any]
) -> None:
    """22: the engine always gets our values; the call is whole."""
    app = ScriptedApp(Script(steps=[Step(text="ok")]))
    async with serve(app) as url:
        rig = await make_rig(engine=CompatibleEngine(url))
        agent = await rig.open()
        status, reply = await agent.post(agent.body(**asked))
        sent = json.loads(app.bodies[-1])
        await rig.engine.close()
    assert status == 200 and reply["choices"][0]["logprobs"] is None
    assert (sent["logprobs"], sent["top_logprobs"], sent["return_token_ids"]) == (True, 0, True)
    (call,) = agent.session.capture.committed
    assert call.exclusion is None and len(call.logprobs) == call.sampled_count > 0


async def test_image_of_an_earlier_turn_is_expanded_once(make_rig: MakeRig) -> None:
    """31: no bridge over media: the engine renders, and sees each image once, in its order."""
    rig = await make_rig(engine=Keeping(Script(steps=[Step(text="a cat"), Step(text="a dog")])))
    agent = await rig.open()
    sent = body("openai_chat", [user("what is it?", image=PNG)])
    sent["messages"] += echo("openai_chat", await post(rig, agent, "openai_chat", sent))
    sent["messages"].append({"role": "user", "content": "sure?"})
    await post(rig, agent, "openai_chat", sent)
    prompts = [record.prompt_ids for record in rig.engine.desk.calls]
    assert [int(np.count_nonzero(prompt == MEDIA)) for prompt in prompts] == [1, 1]
    assert [record.token_in for record in rig.engine.desk.calls] == [False, False]
    assert agent.session.flags["continuation_refused_media"] == 1


async def test_tokens_are_credited_to_the_weights_that_sampled_them(make_rig: MakeRig) -> None:
    """70: version 7 becomes 8 behind token 57 of 128; an engine that can say so is believed, span by span."""
    app = RoutedApp(Script(steps=[Step(text="a" * 127)]), "generate")
    app.weights = [{"version": "7", "start": 0, "end": 57}, {"version": "8", "start": 57, "end": 128}]
    async with serve(app) as url:
        rig = await make_rig(engine=CompatibleEngine(url, token_route=Route.GENERATE))
        agent = await rig.open()
        await agent.say("go")
        await rig.engine.close()
    (call,) = agent.session.capture.committed
    assert call.policy_spans == [PolicySpan("7", 0, 57), PolicySpan("8", 57, 128)]
    agent.session.capture.sealed = True
    (row,) = trajectory_of(agent.session.capture, builder=BuilderSpec()).traces
    start = row.prompt_len
    assert row.policy_spans == [PolicySpan("7", start, start + 57), PolicySpan("8", start + 57, start + 128)]


MARKUP = [
    '<tool_call>\n{"name": "bash"',
    '[TOOL_CALLS][{"name": "bash"}]',
    "<function=bash>",
    "<|python_tag|>bash.call",
]
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("text", MARKUP)
async def test_markup_of_a_call_that_no_parser_read_is_counted(make_rig: MakeRig, text: str) -> None:
    """28: the parser of another family finds no calls, and the agent seems not to use its tools."""
    rig = await make_rig(Script(steps=[Step(text=text)]))
    agent = await rig.open()
    assert (await agent.post(agent.body(tools=TOOLS)))[0] == 200
    assert (await agent.post(agent.body()))[0] == 200
    flags = [call.flags.get("unparsed_tool_markup", 0) for call in agent.session.capture.committed]
    assert flags == [1, 0]
    assert agent.session.flags["unparsed_tool_markup"] == 1


async def test_call_that_was_parsed_beside_a_quoted_marker_is_not_counted(make_rig: MakeRig) -> None:
    call = ScriptedCall(name="bash", arguments=msgspec.json.encode({"command": "ls"}).decode())
    rig = await make_rig(Script(steps=[Step(text="I use <tool_call>", tool_calls=[call])]))
    agent = await rig.open()
    await agent.post(agent.body(tools=TOOLS))
    assert "unparsed_tool_markup" not in agent.session.flags

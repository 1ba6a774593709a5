"""Failures met in the field: tokens, logprobs, versions. docs/field-cases.md says where each case is shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.engines.families import QWEN35, FamilyDesk

from polynya.engines.base import EngineReply, EngineRequest
from polynya.engines.compatible import CompatibleEngine
from polynya.engines.scripted import Script, ScriptedCall, ScriptedEngine, Step, scripted_app, serve
from polynya.engines.scripted.tokens import MEDIA
from polynya.schema import PolicySpan

from . import test_images
from .test_continuation import built
from .test_dialects import TALKS, Anthropic, Talk
from .test_drift import FamilyEngine, Turn
from .test_field_cases_dialects import Keeping, post

MakeRig = Callable[..., Any]


@pytest.mark.parametrize("continuation", [True, False], ids=["by ids", "by messages"])
async def test_turn_that_only_closes_its_thought_has_one_close_and_no_opening_is_trained(
    make_rig: MakeRig, continuation: bool
) -> None:
    """3: a template that opens the thought itself, a reply that closes it at once, a template that then prints a block anew."""
    desk = await FamilyDesk(QWEN35).learn()
    turns = [
        Turn(thought="", text=f"Hi {n}.", calls=[], spelled=f"</think>\n\nHi {n}.", stop="<|im_end|>") for n in (1, 2)
    ]
    rig = await make_rig(engine=FamilyEngine(desk, turns), continuation=continuation)
    agent = await rig.open()
    await agent.say("one")
    await agent.say("two")
    [opening], [close] = await desk.encode_special("<think>"), await desk.encode_special("</think>")
    first, second = agent.session.capture.committed
    assert first.sampled_ids.tolist().count(close) == 1
    trajectory = built(agent)
    for row in trajectory.traces:
        assert opening not in row.input_ids[row.loss_mask == 1].tolist()
    assert sum(int((row.input_ids[row.loss_mask == 1] == close).sum()) for row in trajectory.traces) == 2
    if continuation:
        turn = second.prompt_ids[first.prompt_len :].tolist()
        assert turn[: first.sampled_count] == first.sampled_ids.tolist()
        # What follows the turn is the next generation prompt, which opens a thought and closes none.
        assert (turn.count(close), len(trajectory.traces)) == (1, 1)


def renamed(value: Any, call_id: str) -> Any:
    return json.loads(json.dumps(value).replace("call_a", call_id))


@pytest.mark.parametrize("continuation", [True, False], ids=["by ids", "by messages"])
@pytest.mark.parametrize("call_id", ["functions.bash:0", "a1B2c3D4e"])
@pytest.mark.parametrize("talk", TALKS, ids=lambda talk: type(talk).__name__)
async def test_ids_of_calls_reach_the_client_and_the_next_prompt_as_the_engine_gave_them(
    make_rig: MakeRig, talk: Talk, call_id: str, continuation: bool
) -> None:
    """13: some templates print the id."""
    call = ScriptedCall(name="bash", arguments='{"command":"ls"}', id=call_id)
    rig = await make_rig(
        engine=Keeping(Script(steps=[Step(text="I look.", tool_calls=[call]), Step(text="Done.")])),
        continuation=continuation,
    )
    agent = await rig.open()
    _, reply = await post(rig, agent, talk.path, talk.first())
    assert f'"{call_id}"' in json.dumps(reply)
    status, _ = await post(rig, agent, talk.path, renamed(talk.second(reply), call_id))
    assert status == 200
    said, result = rig.engine.messages()[-2:]
    assert (said["tool_calls"][0]["id"], result["tool_call_id"]) == (call_id, call_id)


@pytest.mark.parametrize("talk", TALKS, ids=lambda talk: type(talk).__name__)
async def test_streaming_client_gets_what_one_unstreamed_engine_call_gave(make_rig: MakeRig, talk: Talk) -> None:
    """17: an engine's own stream loses the ids of what its tool parser swallows; it is never asked for one."""
    call = ScriptedCall(name="bash", arguments='{"command":"ls"}', id="call_a")
    app = scripted_app(Script(sessions={name: [Step(text="I look.", tool_calls=[call])] for name in ("t.0", "t.1")}))
    async with serve(app) as url:
        rig = await make_rig(engine=CompatibleEngine(url))
        seen = []
        for name, stream in (("t.0", False), ("t.1", True)):
            agent = await rig.open(name)
            body = talk.streaming(talk.first()) if stream else talk.first()
            path = talk.stream_path if stream and talk.stream_path else talk.path
            async with rig.client.post(rig.gateway.base_url(agent.key) + path, json=body) as response:
                assert response.status == 200
                assert "call_a" in await response.text()
            [captured] = agent.session.capture.committed
            assert captured.outcome_record.usage[1] == captured.sampled_count > 0
            seen.append(captured.sampled_ids.tolist())
            assert json.loads(app.bodies[-1])["stream"] is False
        assert seen[0] == seen[1]
        await rig.engine.close()


@pytest.mark.parametrize(
    "asked",
    [{}, {"logprobs": False}, {"logprobs": None, "top_logprobs": None}, {"logprobs": True, "top_logprobs": 20}],
    ids=str,
)
async def test_what_a_harness_says_of_logprobs_does_not_reach_the_engine(
    make_rig: MakeRig, asked: dict[str, Any]
) -> None:
    """22: the engine is asked as capture needs it; the harness gets none that it did not ask for, and no 500."""
    app = scripted_app(Script(steps=[Step(text="ok")]))
    async with serve(app) as url:
        rig = await make_rig(engine=CompatibleEngine(url))
        agent = await rig.open()
        status, reply = await agent.post(agent.body(**asked))
        sent = json.loads(app.bodies[-1])
        assert (status, reply["choices"][0]["logprobs"]) == (200, None)
        assert (sent["logprobs"], sent["top_logprobs"]) == (True, 0)
        [call] = agent.session.capture.committed
        assert call.exclusion is None and call.logprobs.size == call.sampled_count
        await rig.engine.close()


def echoed_input(talk: Talk, reply: Any) -> Any:
    """The arguments as the client is given them."""
    return {
        "Chat": lambda: reply["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"],
        "Anthropic": lambda: reply["content"][-1]["input"],
        "Responses": lambda: reply["output"][-1]["arguments"],
        "Google": lambda: reply["candidates"][0]["content"]["parts"][-1]["functionCall"]["args"],
    }[type(talk).__name__]()


@pytest.mark.parametrize("arguments", ['{"a": ', "", "[1, 2]", "rm -rf"])
@pytest.mark.parametrize("talk", TALKS, ids=lambda talk: type(talk).__name__)
async def test_malformed_arguments_are_delivered_whole_and_their_turn_is_continued(
    make_rig: MakeRig, talk: Talk, arguments: str
) -> None:
    """27: as text where the dialect carries text, under one key where it carries objects; the next turn holds them."""
    call = ScriptedCall(name="bash", arguments=arguments, id="call_a")
    rig = await make_rig(engine=Keeping(Script(steps=[Step(text="I look.", tool_calls=[call]), Step(text="Done.")])))
    agent = await rig.open()
    status, reply = await post(rig, agent, talk.path, talk.first())
    assert status == 200
    as_text = type(talk).__name__ in ("Chat", "Responses")
    whole = arguments if as_text else {"_raw_arguments": arguments} if arguments else {}
    assert echoed_input(talk, reply) == whole
    status, reply = await post(rig, agent, talk.path, talk.second(reply))
    assert status == 200 and "Done." in json.dumps(reply)
    assert rig.engine.messages()[-2]["tool_calls"][0]["function"]["arguments"] in (arguments, arguments or "{}")
    trajectory = built(agent)
    assert (len(trajectory.traces), trajectory.ledger.trained) == (1, trajectory.ledger.captured)
    assert [call.flags.get("continued") for call in agent.session.capture.committed] == [None, 1]


@pytest.mark.parametrize(
    "markup", ["<tool_call>\n{oops\n</tool_call>", '[TOOL_CALLS][{"name": "bash"}]', "<|python_tag|>x"]
)
async def test_markup_of_calls_that_the_engine_did_not_read_is_counted(make_rig: MakeRig, markup: str) -> None:
    """28: the wrong tool parser "succeeds" with no calls at all."""
    rig = await make_rig(Script(steps=[Step(text=f"I look. {markup}")]))
    agent = await rig.open()
    _, reply = await post(rig, agent, "/v1/messages", Anthropic().first())
    assert [block["type"] for block in reply["content"]] == ["text"]
    [call] = agent.session.capture.committed
    assert call.flags["unparsed_tool_markup"] == agent.session.flags["unparsed_tool_markup"] == 1
    await agent.say("no tools here")
    assert "unparsed_tool_markup" not in agent.session.capture.committed[1].flags


@pytest.mark.parametrize("dialect", test_images.PATHS)
async def test_image_of_an_earlier_turn_is_in_the_prompt_once(make_rig: MakeRig, dialect: str) -> None:
    """31: the echo of a turn with an image expands it no second time, and the order of the parts stays."""
    rig = await make_rig(engine=test_images.Keeping())
    agent = await rig.open()
    parts = [test_images.part(dialect, kind, text) for kind, text in (("say", "see"), ("png", "A"), ("say", "that"))]
    first = test_images.body(dialect, parts)
    status, reply = await test_images.post(rig, agent, dialect, first)
    assert status == 200
    listed = first.get("messages") or first.get("input") or first["contents"]
    listed += {
        "responses": lambda: [*reply["output"], {"role": "user", "content": "and?"}],
        "google": lambda: [reply["candidates"][0]["content"], {"role": "user", "parts": [{"text": "and?"}]}],
        "anthropic": lambda: [
            {"role": "assistant", "content": reply["content"]},
            {"role": "user", "content": "and?"},
        ],
        "chat": lambda: [reply["choices"][0]["message"], {"role": "user", "content": "and?"}],
    }[dialect]()
    assert (await test_images.post(rig, agent, dialect, first))[0] == 200
    prompts = [call.prompt_ids for call in agent.session.capture.committed]
    assert [int((prompt == MEDIA).sum()) for prompt in prompts] == [1, 1]
    assert np.array_equal(prompts[1][: prompts[0].size], prompts[0])
    shown = [piece for piece in rig.engine.parts() if piece[0] == "user"]
    assert shown == [("user", "see"), ("user", test_images.url("png", "A")), ("user", "that"), ("user", "and?")]
    assert len(built(agent).traces) == 1


class Reloaded(ScriptedEngine):
    """Says of each reply which weights sampled which of its tokens, as far as it knows."""

    def __init__(self, script: Script, spans: list[PolicySpan]) -> None:
        super().__init__(script)
        self._spans = spans

    async def generate(self, request: EngineRequest) -> EngineReply:
        reply = await super().generate(request)
        return msgspec.structs.replace(reply, policy_spans=self._spans)


@pytest.mark.parametrize(
    "spans",
    [[PolicySpan("7", 0, 57), PolicySpan("8", 57, 128)], [PolicySpan("7..8", 0, 128)], []],
    ids=["proved", "straddling", "unknown"],
)
async def test_tokens_have_the_version_that_the_engine_proves_and_no_other(
    make_rig: MakeRig, spans: list[PolicySpan]
) -> None:
    """70: new weights while token 57 of 128 is sampled."""
    rig = await make_rig(engine=Reloaded(Script(steps=[Step(text="x" * 127)]), spans))
    agent = await rig.open()
    await agent.say("go")
    [call] = agent.session.capture.committed
    assert (call.sampled_count, call.policy_spans) == (128, spans)
    [row] = built(agent).traces
    moved = [PolicySpan(span.version, row.prompt_len + span.start, row.prompt_len + span.end) for span in spans]
    assert row.policy_spans == (moved or [PolicySpan(None, row.prompt_len, row.prompt_len + 128)])

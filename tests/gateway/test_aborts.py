"""Replies that the engine broke off for new weights: the harness sees one whole reply, the row two policy versions."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from polynya.engines.base import EngineReply, EngineRequest
from polynya.engines.scripted import Script, ScriptedEngine
from polynya.engines.scripted.script import Fault, ScriptedCall, Step
from polynya.schema import PolicySpan

from .test_continuation import built

_BREAKS_OFF = Fault(kind="abort")


class Updated(ScriptedEngine):
    """Gets new weights whenever it breaks a reply off."""

    async def generate(self, request: EngineRequest) -> EngineReply:
        reply = await super().generate(request)
        if reply.finish_reason == "abort":
            self.desk.policy_version = "8"
        return reply


def engine(step: Step, **fields: Any) -> Updated:
    return Updated(Script(steps=[step], policy_version="7", **fields))


async def test_reply_that_was_broken_off_is_gone_on_with_and_has_two_versions(make_rig: Any) -> None:
    rig = await make_rig(engine=engine(Step(text="0123456789", fault=_BREAKS_OFF)))
    agent = await rig.open()
    message = await agent.say("count")
    assert message["content"] == "0123456789"
    [call] = agent.session.capture.committed
    assert call.policy_spans == [PolicySpan("7", 0, 5), PolicySpan("8", 5, 11)]
    assert (call.finish_reason, call.flags["aborts"], call.sampled_count) == ("stop", 1, 11)
    trajectory = built(agent)
    start = trajectory.traces[0].prompt_len
    assert trajectory.traces[0].policy_spans == [
        PolicySpan("7", start, start + 5),
        PolicySpan("8", start + 5, start + 11),
    ]
    assert trajectory.ledger.trained == 11


async def test_joined_logprobs_are_those_of_the_parts(make_rig: Any) -> None:
    rig = await make_rig(engine=engine(Step(text="0123456789", fault=_BREAKS_OFF)))
    agent = await rig.open()
    await agent.say("count")
    expected = rig.engine.script.expected("t.0", 0)
    [call] = agent.session.capture.committed
    assert np.array_equal(call.sampled_ids, expected.sampled_ids) and np.array_equal(call.logprobs, expected.logprobs)


async def test_tool_call_that_was_cut_in_two_is_read_from_both_parts(make_rig: Any) -> None:
    spelled = '<tool_call>\n{"name": "run", "arguments": {"cmd": "ls"}}\n</tool_call>'
    rig = await make_rig(engine=engine(Step(text=spelled, fault=_BREAKS_OFF)))
    agent = await rig.open()
    tools = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]
    _, reply = await agent.post({**agent.body("go"), "tools": tools})
    [call] = reply["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("run", '{"cmd": "ls"}')
    assert reply["choices"][0]["finish_reason"] == "tool_calls"


async def test_engine_that_takes_no_ids_is_asked_anew_and_the_loss_is_counted(make_rig: Any) -> None:
    step = Step(text="0123456789", fault=Fault(kind="abort", times=1))
    rig = await make_rig(engine=engine(step, token_in=False))
    agent = await rig.open()
    assert (await agent.say("count"))["content"] == "0123456789"
    assert agent.session.capture.committed[0].flags == {"aborts": 1, "abort_discarded": 5}


async def test_cap_on_the_reply_counts_both_parts(make_rig: Any) -> None:
    rig = await make_rig(engine=engine(Step(text="0123456789", fault=_BREAKS_OFF)))
    agent = await rig.open()
    _, reply = await agent.post(agent.body("count", max_tokens=8))
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 8


async def test_call_before_any_token_is_asked_anew(make_rig: Any) -> None:
    rig = await make_rig(engine=engine(Step(text="", finish_reason="stop", fault=Fault(kind="abort", times=1))))
    agent = await rig.open()
    await agent.say("count")
    assert agent.session.capture.committed[0].flags == {"aborts": 1}


async def test_scripted_tools_survive(make_rig: Any) -> None:
    call = ScriptedCall(name="run", arguments='{"a": 1}')
    rig = await make_rig(engine=engine(Step(text="abc", tool_calls=[call], fault=_BREAKS_OFF)))
    agent = await rig.open()
    _, reply = await agent.post(agent.body("go"))
    assert reply["choices"][0]["message"]["content"].startswith("abc")


async def test_reply_that_is_broken_off_at_its_last_token_is_whole(make_rig: Any) -> None:
    class AtTheEnd(ScriptedEngine):
        async def generate(self, request: EngineRequest) -> EngineReply:
            return msgspec.structs.replace(await super().generate(request), finish_reason="abort")

    rig = await make_rig(engine=AtTheEnd(Script(steps=[Step(text="0123456789")])))
    agent = await rig.open()
    _, reply = await agent.post(agent.body("count", max_tokens=4))
    assert (reply["choices"][0]["finish_reason"], reply["choices"][0]["message"]["content"]) == ("length", "0123")
    [call] = agent.session.capture.committed
    assert (call.flags, call.sampled_count) == ({"aborts": 1}, 4)

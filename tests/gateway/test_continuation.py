"""Calls that go on from captured ones: prompted with ids, noticed when the engine does not take them, never in the agent's way."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.engines.routed import RoutedApp

from polynya.engines.base import EngineReply, EngineRequest
from polynya.engines.compatible import CompatibleEngine
from polynya.engines.scripted import Script, ScriptedEngine, serve
from polynya.engines.scripted.script import Fault, ScriptedCall, Step
from polynya.node.trajectory import trajectory_of
from polynya.schema import BuilderSpec, Exclusion, SamplingSpec, Trajectory

_THINKS = [Step(text=f"answer {i}", reasoning=f"thought {i}") for i in range(4)]


def built(agent: Any) -> Trajectory:
    agent.session.capture.sealed = True
    return trajectory_of(agent.session.capture, builder=BuilderSpec())


async def talk(
    agent: Any, turns: int, *, echo: Callable[[dict[str, Any]], dict[str, Any]] = lambda message: message
) -> None:
    for turn in range(turns):
        await agent.say(f"question {turn}")
        agent.messages[-1] = echo(agent.messages[-1])


def bare(message: dict[str, Any]) -> dict[str, Any]:
    """As a harness that drops thinking echoes a reply."""
    return {"role": "assistant", "content": message["content"]}


async def test_turns_of_a_harness_that_drops_thinking_are_one_row(make_rig: Any) -> None:
    rig = await make_rig(Script(steps=_THINKS))
    agent = await rig.open()
    await talk(agent, 4, echo=bare)
    calls = agent.session.capture.committed
    for before, after in itertools.pairwise(calls):
        assert np.array_equal(after.prompt_ids[: before.total_len], before.full_ids)
    trajectory = built(agent)
    assert (len(trajectory.traces), trajectory.ledger.chain_breaks) == (1, {})
    assert trajectory.ledger.trained == trajectory.ledger.captured == int(trajectory.traces[0].loss_mask.sum())
    assert [record.token_in for record in rig.engine.desk.calls] == [False, True, True, True]
    assert [call.intent.continues for call in calls] == ["", *(call.call_id for call in calls[:-1])]


async def test_without_continuation_each_of_these_turns_is_a_row_and_the_cause_is_named(make_rig: Any) -> None:
    rig = await make_rig(Script(steps=_THINKS), continuation=False)
    agent = await rig.open()
    await talk(agent, 4, echo=bare)
    trajectory = built(agent)
    assert (len(trajectory.traces), trajectory.ledger.chain_breaks) == (4, {"reasoning_stripped": 3})
    assert rig.gateway.continuation == "off"


async def test_ids_that_no_tokenizer_gives_stay_as_they_were_sampled(make_rig: Any) -> None:
    script = Script(steps=[Step(text="a text of some length " * 4)], noncanonical=0.5)
    for continuation, breaks in ((True, {}), (False, {"retokenised": 3})):
        rig = await make_rig(script, continuation=continuation)
        agent = await rig.open(f"t.{continuation}")
        await talk(agent, 4)
        assert built(agent).ledger.chain_breaks == breaks


async def test_thinking_is_split_off_where_the_template_drops_it_when_that_is_asked_for(make_rig: Any) -> None:
    rig = await make_rig(Script(steps=_THINKS, drop_reasoning=True), thinking="template")
    agent = await rig.open()
    await talk(agent, 3)
    assert built(agent).ledger.chain_breaks == {"reasoning_stripped": 2}
    assert agent.session.flags["continuation_refused_thinking_dropped"] == 2


class Deaf(ScriptedEngine):
    """Ignores prompts of ids in silence, as older servers do."""

    async def generate(self, request: EngineRequest) -> EngineReply:
        return await super().generate(msgspec.structs.replace(request, prompt=None))


async def test_engine_that_ignores_ids_is_noticed_once_and_not_given_any_again(make_rig: Any) -> None:
    rig = await make_rig(engine=Deaf(Script(steps=_THINKS)))
    agent = await rig.open()
    await talk(agent, 4, echo=bare)
    flags = [call.flags for call in agent.session.capture.committed]
    assert flags == [{}, {"continuation_echo_mismatch": 1}, {}, {}]
    trajectory = built(agent)
    assert trajectory.ledger.trained == trajectory.ledger.captured
    assert trajectory.ledger.chain_breaks == {"reasoning_stripped": 3}
    assert rig.gateway.continuation == "off"


@pytest.mark.parametrize("status", [400, 403, 404, 422, 500, 501])
async def test_engine_that_refuses_ids_is_asked_with_messages(make_rig: Any, status: int) -> None:
    rig = await make_rig(
        Script(sessions={"t.0": [_THINKS[0], Step(text="b", fault=Fault(kind="http_error", status=status, times=1))]})
    )
    agent = await rig.open()
    await talk(agent, 2)
    assert agent.messages[-1]["content"] == "b"
    assert [record.token_in for record in rig.engine.desk.calls] == [False, True, False]
    assert agent.session.capture.committed[1].flags == {"continuation_rejected": 1}
    assert built(agent).ledger.trained == built(agent).ledger.captured


async def test_prompt_that_overflows_with_thinking_kept_is_asked_for_without(make_rig: Any) -> None:
    rig = await make_rig(Script(sessions={"t.0": [_THINKS[0], Step(text="b", fault=Fault(kind="overflow", times=1))]}))
    agent = await rig.open()
    await talk(agent, 2)
    assert agent.messages[-1]["content"] == "b"
    assert rig.gateway.continuation == "retain"


async def test_echo_that_does_not_come_leaves_the_call_untrained(make_rig: Any) -> None:
    rig = await make_rig(Script(sessions={"t.0": [_THINKS[0], Step(text="b", fault=Fault(kind="no_prompt_ids"))]}))
    agent = await rig.open()
    await talk(agent, 2)
    call = agent.session.capture.committed[1]
    assert (call.exclusion, call.flags) == (Exclusion.INCOMPLETE_IDS, {"continuation_echo_absent": 1})
    assert rig.gateway.continuation == "off"


async def test_edited_history_begins_a_row_and_foreign_turns_do_too(make_rig: Any) -> None:
    rig = await make_rig(Script(steps=_THINKS))
    agent = await rig.open()
    await talk(agent, 2, echo=bare)
    agent.messages += [{"role": "user", "content": "x"}, {"role": "assistant", "content": "not yours"}]
    await agent.say("and now?")
    agent.messages = [{"role": "user", "content": "another question"}]
    await agent.say("more")
    trajectory = built(agent)
    assert trajectory.ledger.chain_breaks == {"foreign_assistant": 1, "history_edited": 1}
    assert (len(trajectory.traces), trajectory.ledger.trained) == (3, trajectory.ledger.captured)
    assert agent.session.flags["continuation_refused_foreign_assistant"] == 1


async def test_rewound_history_goes_on_from_the_turn_that_is_left(make_rig: Any) -> None:
    rig = await make_rig(Script(steps=_THINKS))
    agent = await rig.open()
    await talk(agent, 3, echo=bare)
    agent.messages = agent.messages[:2]
    await agent.say("another way")
    calls = agent.session.capture.committed
    assert calls[3].intent.continues == calls[0].call_id
    trajectory = built(agent)
    assert (len(trajectory.traces), trajectory.ledger.chain_breaks) == (2, {"history_edited": 1})
    assert trajectory.ledger.trained == trajectory.ledger.captured


async def test_cut_turn_is_closed_with_tokens_that_nothing_trains(make_rig: Any) -> None:
    cut = Step(text="half an ans", finish_reason="length")
    rig = await make_rig(Script(sessions={"t.0": [cut, *_THINKS[1:]]}))
    agent = await rig.open()
    await talk(agent, 2, echo=bare)
    trajectory = built(agent)
    assert (len(trajectory.traces), agent.session.flags["synthetic_close"]) == (1, 1)
    assert int(trajectory.traces[0].loss_mask.sum()) == trajectory.ledger.captured


async def test_bridge_that_fails_costs_no_call(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await make_rig(Script(steps=_THINKS))

    async def broken() -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(rig.engine, "bridger", broken)
    agent = await rig.open()
    await talk(agent, 2)
    assert agent.session.flags["continuation_failed"] == 1
    assert built(agent).ledger.trained == built(agent).ledger.captured


async def test_template_that_cannot_be_bridged_switches_continuation_off(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await make_rig(Script(steps=_THINKS))

    async def none() -> None:
        return None

    monkeypatch.setattr(rig.engine, "bridger", none)
    agent = await rig.open()
    await talk(agent, 3)
    assert rig.gateway.continuation == "retain"
    await talk(agent, 1)
    assert rig.gateway.continuation == "off"


async def test_long_reply_is_clamped_to_what_the_ids_leave_of_the_window(make_rig: Any) -> None:
    rig = await make_rig(Script(steps=_THINKS, window=200))
    agent = await rig.open()
    await agent.say("hi")
    agent.messages.append({"role": "user", "content": "and?"})
    status, _ = await agent.post({"model": "m", "messages": agent.messages, "max_tokens": 5_000})
    assert status == 200
    last = rig.engine.desk.calls[-1]
    assert (last.token_in, last.sampling.max_tokens) == (True, 200 - len(last.prompt_ids))


async def test_prompt_that_fills_the_window_goes_as_messages(make_rig: Any) -> None:
    long = Step(text="a", reasoning="x" * 120)
    rig = await make_rig(Script(sessions={"t.0": [long, *_THINKS]}, window=150))
    agent = await rig.open()
    await talk(agent, 2, echo=bare)
    assert agent.session.flags["continuation_refused_window"] == 1


async def test_tool_results_are_bridged(make_rig: Any) -> None:
    steps = [
        Step(text="", reasoning="t", tool_calls=[ScriptedCall(name="run", arguments='{"b": 1, "a": 2}')]),
        Step(text="done"),
    ]
    rig = await make_rig(Script(sessions={"t.0": steps}))
    agent = await rig.open()
    tools = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]
    first: dict[str, Any] = {"role": "user", "content": "go"}
    _, reply = await agent.post({"model": "m", "messages": [first], "tools": tools})
    [call] = reply["choices"][0]["message"]["tool_calls"]
    call["function"]["arguments"] = '{"a":2,"b":1}'
    echoed = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "42 <|end|> <|assistant|>"}
    status, reply = await agent.post({"model": "m", "messages": [first, echoed, result], "tools": tools})
    assert (status, reply["choices"][0]["message"]["content"]) == (200, "done")
    assert len(built(agent).traces) == 1


@pytest.mark.parametrize(
    "echo",
    [
        lambda message: message,
        bare,
        lambda message: {**message, "reasoning_content": f" {message.get('reasoning_content', '')}\n"},
    ],
    ids=["verbatim", "dropped", "trimmed"],
)
async def test_thinking_echoed_in_any_way_trains_the_same(make_rig: Any, echo: Callable[..., dict[str, Any]]) -> None:
    rig = await make_rig(Script(steps=_THINKS))
    agent = await rig.open()
    await talk(agent, 3, echo=echo)
    trajectory = built(agent)
    expected = [rig.engine.script.expected("t.0", turn).sampled_ids.size for turn in range(3)]
    assert (len(trajectory.traces), trajectory.ledger.trained) == (1, sum(expected))


async def test_replies_to_given_ids_still_have_tool_calls_and_thinking(make_rig: Any) -> None:
    call = ScriptedCall(name="run", arguments='{"cmd": "ls"}')
    rig = await make_rig(Script(steps=[Step(text="", reasoning=f"t{n}", tool_calls=[call]) for n in range(3)]))
    agent = await rig.open()
    tools = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for turn in range(3):
        _, reply = await agent.post({"model": "m", "messages": messages, "tools": tools})
        message = reply["choices"][0]["message"]
        [made] = message["tool_calls"]
        assert (made["function"]["arguments"], message["reasoning_content"]) == ('{"cmd": "ls"}', f"t{turn}")
        messages += [message, {"role": "tool", "tool_call_id": made["id"], "content": "a.txt"}]
    assert [record.token_in for record in rig.engine.desk.calls] == [False, True, True]


async def test_concurrent_branches_and_retries_of_one_turn_get_the_same_prompt(make_rig: Any) -> None:
    rig = await make_rig(Script(steps=_THINKS))
    agent = await rig.open()
    await talk(agent, 2, echo=bare)
    body = {"model": "m", "messages": [*agent.messages, {"role": "user", "content": "and?"}]}
    for _ in range(2):
        assert (await agent.post(body))[0] == 200
    others = [agent.post({**body, "temperature": t, "messages": body["messages"]}) for t in (0.1, 0.2, 0.3)]
    assert [status for status, _ in await asyncio.gather(*others)] == [200, 200, 200]
    prompts = [call.prompt_ids.tolist() for call in agent.session.capture.committed[2:]]
    assert len(prompts) == 5 and all(prompt == prompts[0] for prompt in prompts)
    trajectory = built(agent)
    assert trajectory.ledger.chain_breaks == {}
    assert trajectory.ledger.trained == trajectory.ledger.captured


async def test_engine_that_refuses_ids_three_times_in_a_row_is_not_given_any_again(make_rig: Any) -> None:
    refuse = [Step(text=f"b{n}", fault=Fault(kind="http_error", status=400, times=1)) for n in range(5)]
    rig = await make_rig(Script(sessions={"t.0": [_THINKS[0], *refuse]}))
    agent = await rig.open()
    await talk(agent, 4)
    assert rig.gateway.continuation == "off"
    agent.messages.append({"role": "user", "content": "once more"})
    assert (await agent.post({"model": "m", "messages": agent.messages}))[0] == 400
    assert [record.token_in for record in list(rig.engine.desk.calls)[-3:]] == [True, False, False]


async def test_large_history_is_digested_beside_the_loop_and_a_large_tail_goes_as_messages(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polynya.gateway.continuation._OFF_LOOP_BYTES", 1_000)
    rig = await make_rig(Script(steps=[Step(text="ok")]))
    agent = await rig.open()
    await agent.say("x" * 1_100)
    await agent.say("small")
    await agent.say("y" * 1_100)
    assert [record.token_in for record in rig.engine.desk.calls] == [False, True, False]
    assert agent.session.flags["continuation_refused_size"] == 1
    assert built(agent).ledger.chain_breaks == {}


async def test_call_with_ids_that_no_vocabulary_has_is_not_gone_on_from(make_rig: Any) -> None:
    bad = Step(text="a", fault=Fault(kind="id_out_of_range"))
    rig = await make_rig(Script(sessions={"t.0": [bad, Step(text="b")]}))
    agent = await rig.open()
    await talk(agent, 2)
    assert [record.token_in for record in rig.engine.desk.calls] == [False, False]


async def test_flags_of_a_bridge_are_counted(make_rig: Any) -> None:
    rig = await make_rig(Script(steps=_THINKS))
    agent = await rig.open()
    await agent.say("hi")
    await agent.say("<|end|><|user|><|end|>")
    assert agent.session.capture.committed[1].flags == {"continued": 1, "neutralised": 3}


@pytest.mark.parametrize("door", ["generate", "completions"])
async def test_engine_that_turns_deaf_to_ids_beside_messages_is_given_them_by_another_door(
    make_rig: Any, door: str
) -> None:
    app = RoutedApp(Script(steps=_THINKS, drop_reasoning=True), door)
    async with serve(app) as url:
        rig = await make_rig(engine=CompatibleEngine(url))
        agent = await rig.open()
        await talk(agent, 2)
        app.obeys = False
        await talk(agent, 4)
        assert rig.gateway.continuation == "retain" and rig.engine.token_route == door
        await rig.engine.close()
    flags = [call.flags for call in agent.session.capture.committed]
    assert [call.get("continued", 0) for call in flags] == [0, 1, 0, 1, 1, 1]
    assert [call.get("continuation_echo_mismatch", 0) for call in flags] == [0, 0, 1, 0, 0, 0]
    trajectory = built(agent)
    assert (len(trajectory.traces), trajectory.ledger.chain_breaks) == (2, {"template": 1})
    assert trajectory.ledger.captured == trajectory.ledger.trained


async def test_a_task_may_ask_for_its_own_way_with_earlier_thinking(make_rig: Any) -> None:
    rig = await make_rig(Script(steps=_THINKS, drop_reasoning=True), thinking="retain")
    sampling = SamplingSpec(thinking="template")
    agent = await rig.open(sampling=sampling)
    await talk(agent, 3)
    assert built(agent).ledger.chain_breaks == {"reasoning_stripped": 2}
    assert rig.gateway.continuation_of(sampling) == "template"
    assert rig.gateway.continuation_of(SamplingSpec()) == "retain"

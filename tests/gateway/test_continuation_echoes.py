"""Echoes over a real socket: what the dialect, a prefill or an edit makes of a reply, and the rows that come of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from polynya.engines.scripted import Script, ScriptedCall, Step

from .test_continuation import built
from .test_dialects import Responses
from .test_field_cases_dialects import post

MakeRig = Callable[..., Any]
USER = {"role": "user", "content": "and?"}


def anthropic(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 99, "messages": messages}


@pytest.mark.parametrize("joined", [True, False], ids=["one message", "two messages"])
async def test_reply_that_goes_on_with_a_prefill_is_gone_on_from(make_rig: MakeRig, joined: bool) -> None:
    rig = await make_rig(Script(steps=[Step(text="never said"), Step(text=" 42.")]))
    agent = await rig.open()
    begun = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "The answer is"}]
    _, reply = await post(rig, agent, "/v1/messages", anthropic(begun))
    [block] = reply["content"]
    assert block["text"] == " 42."
    said: list[dict[str, Any]] = (
        [{"role": "assistant", "content": "The answer is 42."}]
        if joined
        else [begun[1], {"role": "assistant", "content": [block]}]
    )
    assert (await post(rig, agent, "/v1/messages", anthropic([begun[0], *said, USER])))[0] == 200
    first, second = agent.session.capture.committed
    assert second.intent.continues == first.call_id
    trajectory = built(agent)
    assert (len(trajectory.traces), trajectory.ledger.chain_breaks) == (1, {})


@pytest.mark.parametrize("turn", [0, 1], ids=["an earlier turn", "the last turn"])
async def test_edited_thinking_begins_a_row_of_its_own(make_rig: MakeRig, turn: int) -> None:
    rig = await make_rig(Script(steps=[Step(text=f"answer {n}", reasoning=f"thought {n}") for n in range(3)]))
    agent = await rig.open()
    messages: list[dict[str, Any]] = [USER]
    for _ in range(2):
        _, reply = await post(rig, agent, "/v1/messages", anthropic(messages))
        messages = [*messages, {"role": "assistant", "content": reply["content"]}, USER]
    thought = messages[1 + 2 * turn]["content"][0]
    thought["thinking"] = "something else"
    assert (await post(rig, agent, "/v1/messages", anthropic(messages)))[0] == 200
    trajectory = built(agent)
    assert trajectory.ledger.trained == trajectory.ledger.captured
    assert (len(trajectory.traces), trajectory.ledger.chain_breaks) == (2, {"history_edited": 1})
    # What the engine saw in the edited turn is what the harness made of it.
    text = b"something else"
    assert text in bytes(value % 256 for value in agent.session.capture.committed[2].prompt_ids.tolist())


CUSTOM = {"type": "custom", "name": "patch", "description": "d"}
SHELL = {"type": "local_shell"}


@pytest.mark.parametrize(
    ("tool", "call"),
    [
        (CUSTOM, ScriptedCall(name="patch", arguments="*** Begin Patch", id="call_a")),
        (SHELL, ScriptedCall(name="local_shell", arguments='{"command": ["ls"]}', id="call_a")),
    ],
    ids=["custom", "shell"],
)
async def test_turns_of_tools_that_the_client_knows_in_another_form_are_one_row(
    make_rig: MakeRig, tool: dict[str, Any], call: ScriptedCall
) -> None:
    rig = await make_rig(Script(steps=[Step(tool_calls=[call]), Step(text="Done.")]))
    agent = await rig.open()
    talk = Responses()
    first = talk.first() | {"tools": [tool]}
    _, reply = await post(rig, agent, talk.path, first)
    output = {"type": f"{reply['output'][0]['type']}_output", "call_id": "call_a", "output": "files"}
    second = first | {"input": [*first["input"], *reply["output"], output]}
    assert (await post(rig, agent, talk.path, second))[0] == 200
    assert [call.flags.get("continued") for call in agent.session.capture.committed] == [None, 1]
    assert len(built(agent).traces) == 1


async def test_new_weights_between_turns_are_two_spans_of_one_row(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="a"), Step(text="b")], policy_version="7"))
    agent = await rig.open()
    await agent.say("one")
    rig.engine.desk.policy_version = "8"
    await agent.say("two")
    [row] = built(agent).traces
    assert [(span.version, span.end - span.start) for span in row.policy_spans] == [("7", 2), ("8", 2)]
    assert [span.start for span in row.policy_spans] == row.call_starts

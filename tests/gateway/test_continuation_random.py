"""Harnesses that do anything to their history: what is captured is what the engine saw, and every token is accounted for."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from polynya.engines.scripted import Script
from polynya.engines.scripted.script import Fault, ScriptedCall, Step

from .test_continuation import built

_TOOLS = [
    [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in names]
    for names in (["run"], ["run", "read"])
]
_TEXTS = (
    "ok",
    "<|end|><|assistant|>",
    "naïve café 漢字 🙂",
    "  spaced  ",
    "",
    "line\nline\n",
    "<tool_call>",
    "\x00\x1f",
)


def steps(dice: random.Random) -> list[Step]:
    made = []
    for number in range(12):
        calls = [
            ScriptedCall(name="run", arguments=dice.choice(['{"b":1,"a":2.0}', '{"a": "\\u00e9"}', "{}", '{"cut": ']))
            for _ in range(dice.choice([0, 0, 1, 2]))
        ]
        made.append(
            Step(
                text=dice.choice(_TEXTS) if calls else f"said {number} {dice.choice(_TEXTS)}",
                reasoning=dice.choice(["", f"thought {number}"]),
                tool_calls=calls,
                finish_reason="length" if dice.random() < 0.1 and not calls else "stop",
                fault=Fault(kind=dice.choice(["nan_logprob", "short_logprobs", "abort"]))
                if dice.random() < 0.1
                else None,
            )
        )
    return made


def echoed(message: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    """The reply as this harness sends it back."""
    echo = dict(message)
    if dice.random() < 0.5:
        echo.pop("reasoning_content", None)
    if isinstance(echo.get("content"), str) and dice.random() < 0.3:
        echo["content"] = [{"type": "text", "text": echo["content"].strip()}]
    if dice.random() < 0.1:
        echo["content"] = "not what was said"
    return echo


def answers(message: dict[str, Any], dice: random.Random) -> list[dict[str, Any]]:
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": dice.choice(_TEXTS)}
        for call in message.get("tool_calls") or []
    ]
    if results and dice.random() < 0.7:
        return results
    return [*results, {"role": "user", "content": f"next {dice.choice(_TEXTS)}"}]


async def session(agent: Any, dice: random.Random) -> None:
    system, tools = "be good", _TOOLS[0]
    history: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for _ in range(dice.randint(1, 9)):
        if dice.random() < 0.06:
            system += "!"
        if dice.random() < 0.06:
            tools = _TOOLS[1]
        body = {"model": "m", "messages": [{"role": "system", "content": system}, *history], "tools": tools}
        replies = [await agent.post(body)]
        if dice.random() < 0.15:
            replies += await asyncio.gather(*(agent.post({**body, "temperature": t}) for t in (0.5, 0.7)))
        assert all(status == 200 for status, _ in replies), replies
        message = dice.choice(replies)[1]["choices"][0]["message"]
        history += [echoed(message, dice), *answers(message, dice)]
        if dice.random() < 0.1:
            history = [{"role": "user", "content": "so far: a summary"}]
        elif dice.random() < 0.1:
            users = [n for n, said in enumerate(history) if said["role"] == "user"]
            history = history[: dice.choice(users) + 1]


@pytest.mark.parametrize("noncanonical", [0.0, 0.2])
@pytest.mark.parametrize("thinking", ["retain", "template"])
async def test_capture_is_what_the_engine_saw_and_the_ledger_balances(
    make_rig: Any, noncanonical: float, thinking: str
) -> None:
    dice = random.Random(f"{noncanonical} {thinking}")
    scripts = {f"t.{n}": steps(dice) for n in range(60)}
    rig = await make_rig(
        Script(sessions=scripts, noncanonical=noncanonical, drop_reasoning=True, window=1_000_000), thinking=thinking
    )
    continued = 0
    for name in scripts:
        agent = await rig.open(name)
        await session(agent, dice)
        calls = agent.session.capture.committed
        saw = Counter(record.prompt_ids.tobytes() for record in rig.engine.desk.calls if record.affinity == name)
        assert Counter(call.prompt_ids.tobytes() for call in calls) <= saw
        for call in calls:
            if parent := next((other for other in calls if other.call_id == call.intent.continues), None):
                continued += 1
                assert call.prompt_ids[: parent.total_len].tolist() == parent.full_ids.tolist()
        trajectory = built(agent)
        assert trajectory.ledger.balanced()
        by_id = {call.call_id: call for call in calls}
        trained = Counter(
            call_id
            for row in trajectory.traces
            for call_id, start in zip(row.call_ids, row.call_starts, strict=True)
            if row.loss_mask[start : start + 1].any()
        )
        assert all(times == 1 for times in trained.values())
        for row in trajectory.traces:
            assert row.input_ids.tolist() == by_id[row.call_ids[-1]].full_ids.tolist()
    assert continued > 60
    assert rig.gateway.continuation == thinking

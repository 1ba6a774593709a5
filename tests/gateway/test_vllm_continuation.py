"""Continuation on a real vLLM server (`scripts/vllm_cpu.sh` starts one and prints the variable to set)."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from polynya.engines.compatible import CompatibleEngine
from polynya.engines.routes import Route
from polynya.node.trajectory import trajectory_of
from polynya.schema import BuilderSpec

pytestmark = pytest.mark.vllm

_TURNS = 12


def reworded(message: dict[str, Any]) -> dict[str, Any]:
    """As harnesses echo a reply: without white space at the ends, as a list of parts."""
    return {"role": "assistant", "content": [{"type": "text", "text": (message["content"] or "").strip()}]}


@pytest.mark.parametrize(
    ("continuation", "route"), [(True, Route.CHAT), (True, Route.GENERATE), (True, Route.COMPLETIONS), (False, None)]
)
async def test_twelve_turns_are_one_row_with_continuation(
    make_rig: Any, continuation: bool, route: Route | None
) -> None:
    url = os.environ.get("POLYNYA_TEST_VLLM_URL")
    if not url:
        pytest.fail("POLYNYA_TEST_VLLM_URL is not set: run scripts/vllm_cpu.sh and export what it prints")
    engine = CompatibleEngine(url, token_route=route)
    try:
        rig = await make_rig(engine=engine, continuation=continuation)
        agent = await rig.open()
        for turn in range(_TURNS):
            agent.messages.append({"role": "user", "content": f"Say something new, with <|im_end|> in it. {turn}"})
            body = {"model": "m", "messages": agent.messages, "max_tokens": 24, "temperature": 1.0, "seed": turn}
            status, reply = await agent.post(body)
            assert status == 200, reply
            agent.messages.append(reworded(reply["choices"][0]["message"]))
        calls = agent.session.capture.committed
        agent.session.capture.sealed = True
        trajectory = trajectory_of(agent.session.capture, builder=BuilderSpec(), vocab_size=engine.info.vocab_size)
    finally:
        await engine.close()
    assert trajectory.ledger.trained == trajectory.ledger.captured
    if not continuation:
        assert sum(trajectory.ledger.chain_breaks.values()) + 1 == len(trajectory.traces) > 1
        return
    assert [call.flags.get("continued", 0) for call in calls] == [0] + [1] * (_TURNS - 1)
    assert (len(trajectory.traces), trajectory.ledger.chain_breaks) == (1, {})
    row = trajectory.traces[0]
    for call in calls:
        assert np.array_equal(row.input_ids[: call.total_len], call.full_ids)
    assert int(row.loss_mask.sum()) == trajectory.ledger.captured
    told = {span.version for call in calls for span in call.policy_spans}
    assert len(told) == 1 and None not in told

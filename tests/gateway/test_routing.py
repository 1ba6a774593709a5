"""Routed experts of a mixture beside the ids of a row: in their place, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest

from polynya.capture.store import recover
from polynya.engines.base import EngineReply, EngineRequest
from polynya.engines.scripted import Script, ScriptedEngine, Step
from polynya.node.trajectory import trajectory_of
from polynya.rollout.tables import traces_table
from polynya.schema import BuilderSpec, Int16Array, Int32Array, Provenance, SessionResult, Status, Trajectory
from polynya.tokens.routing import Routing

MakeRig = Callable[..., Any]
STEPS = [Step(text=f"answer {n}") for n in range(4)]


def experts(ids: Int32Array) -> Int16Array:
    """``(len(ids), 2)``: of the place and of the id, so that a shift shows."""
    return np.stack([np.arange(len(ids)), ids % 7], axis=1).astype(np.int16)


class Mixture(ScriptedEngine):
    """``crop``: rows that are left out at the end, call by call; the last one repeats."""

    def __init__(self, *crop: int) -> None:
        super().__init__(Script(steps=STEPS))
        self.crop = list(crop)

    async def generate(self, request: EngineRequest) -> EngineReply:
        reply = await super().generate(request)
        assert reply.prompt_ids is not None and reply.sampled_ids is not None
        rows = experts(np.concatenate([reply.prompt_ids, reply.sampled_ids]))
        left_out = self.crop.pop(0) if len(self.crop) > 1 else self.crop[0]
        rows = rows[: len(rows) - left_out]
        return msgspec.structs.replace(reply, routing=Routing(rows.reshape(-1), len(rows), [1, 2]))


def built(capture: Any) -> Trajectory:
    capture.sealed = True
    return trajectory_of(capture, builder=BuilderSpec())


@pytest.mark.parametrize("crop", [0, 1], ids=["with the last id", "without it"])
async def test_every_id_of_a_row_but_the_last_has_its_own_experts(make_rig: MakeRig, crop: int, tmp_path: Any) -> None:
    rig = await make_rig(engine=Mixture(crop))
    agent = await rig.open()
    for turn in range(4):
        await agent.say(f"question {turn}")
    agent.messages = agent.messages[:3]
    await agent.say("another way")
    live = built(agent.session.capture)
    assert len(live.traces) == 2
    for row in live.traces:
        assert row.routed_experts is not None
        assert np.array_equal(row.routed_experts, experts(row.input_ids)[:-1])
        assert row.routed_experts_shape == [1, 2]
    await rig.gateway.close_session(agent.session)
    replayed = built(recover(rig.journal)[("t.0", 1)])
    for ours, theirs in zip(live.traces, replayed.traces, strict=True):
        assert np.array_equal(ours.routed_experts, theirs.routed_experts)
    result = SessionResult(
        session_id="t.0",
        task_id="t",
        group_id="t",
        sample_index=0,
        attempt=1,
        status=Status.COMPLETED,
        reward=None,
        provenance=Provenance(polynya="0"),
    )
    pq.write_table(traces_table(result, live.traces), tmp_path / "traces.parquet")
    read = pq.read_table(tmp_path / "traces.parquet").to_pylist()[0]
    back = np.frombuffer(read["routed_experts"], "<i2").reshape(-1, *read["routed_experts_shape"])
    assert back.shape == (len(read["input_ids"]) - 1, 1, 2)


async def test_a_report_that_does_not_fit_leaves_the_row_without_experts_and_is_counted(make_rig: MakeRig) -> None:
    rig = await make_rig(engine=Mixture(0, 2, 0))
    agent = await rig.open()
    for turn in range(2):
        await agent.say(f"question {turn}")
    trajectory = built(agent.session.capture)
    assert [row.routed_experts for row in trajectory.traces] == [None]
    assert [call.flags.get("routing_misaligned", 0) for call in agent.session.capture.committed] == [0, 1]
    assert trajectory.ledger.trained == trajectory.ledger.captured


async def test_a_later_report_makes_good_for_an_earlier_one_that_was_refused(make_rig: MakeRig) -> None:
    rig = await make_rig(engine=Mixture(2, 0))
    agent = await rig.open()
    for turn in range(2):
        await agent.say(f"question {turn}")
    (row,) = built(agent.session.capture).traces
    assert row.routed_experts is not None
    assert np.array_equal(row.routed_experts, experts(row.input_ids)[:-1])

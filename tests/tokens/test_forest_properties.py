"""Any session, whatever its harness did to its history and in whatever order its calls ended."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, given, settings

from polynya.schema import Exclusion, Lane
from polynya.tokens import Built, build

from .conftest import FakeCall

_MOVES = ("go on", "go on", "go on", "retry", "rewind", "edit", "compact", "sub-agent", "title", "cut", "cancel", "bad")


@st.composite
def sessions(draw: st.DrawFn) -> list[FakeCall]:
    """Calls of a harness: each prompt goes on from an earlier call, from a part of it, or from nothing."""
    ids = st.lists(st.integers(0, 5), min_size=1, max_size=4)
    calls: list[FakeCall] = []
    for number in range(draw(st.integers(1, 14))):
        move = draw(st.sampled_from(_MOVES))
        base = draw(st.sampled_from(calls)) if calls else None
        before = [] if base is None else [*base.prompt_ids.tolist(), *base.sampled_ids.tolist()]
        fields: dict[str, Any] = {"agent": base.agent if base else "", "lane": base.lane if base else Lane.MAIN}
        prompt = [*before, *draw(ids)]
        if move == "retry" and base is not None:
            prompt = base.prompt_ids.tolist()
        elif move == "rewind":
            prompt = [*before[: draw(st.integers(0, len(before)))], *draw(ids)]
        elif move == "edit" and before:
            prompt[draw(st.integers(0, len(before) - 1))] += 10
        elif move == "compact":
            fields["lane"] = Lane.COMPACTION
        elif move == "sub-agent":
            prompt, fields = draw(ids), {"lane": Lane.SUBAGENT, "agent": f"a{number}"}
        elif move == "title":
            prompt, fields["lane"] = draw(ids), Lane.AUXILIARY
        elif move == "cut":
            fields["finish_reason"] = "length"
        elif move == "cancel":
            fields["outcome"] = "cancelled"
        elif move == "bad":
            fields["exclusion"] = draw(st.sampled_from([Exclusion.LENGTH_MISMATCH, Exclusion.NONFINITE_LOGPROB]))
        sampled = [] if move == "cancel" else draw(st.lists(st.integers(0, 5), max_size=4))
        fields["delivered"] = draw(st.integers(0, 9)) > 0
        calls.append(FakeCall(f"c{number}", prompt, sampled, **fields))
    return draw(st.permutations(calls))


def check(calls: list[FakeCall], built: Built) -> None:
    by_id = {call.call_id: call for call in calls}
    ledger = built.ledger
    assert ledger.balanced() and ledger.captured == sum(call.sampled_count for call in calls)
    trained: Counter[str] = Counter()
    for trace in built.traces:
        last = by_id[trace.call_ids[-1]]
        assert trace.input_ids.tolist() == [*last.prompt_ids.tolist(), *last.sampled_ids.tolist()]
        covered = np.zeros(len(trace.input_ids), dtype=np.uint8)
        for call_id, start, length in zip(trace.call_ids, trace.call_starts, trace.call_lens, strict=True):
            call = by_id[call_id]
            assert trace.input_ids[:start].tolist() == call.prompt_ids.tolist()
            assert trace.input_ids[start : start + length].tolist() == call.sampled_ids.tolist()
            mask = trace.loss_mask[start : start + length]
            assert mask.all() or not mask.any()
            if mask.any():
                trained[call_id] += 1
                covered[start : start + length] = 1
                assert np.array_equal(trace.logprobs[start : start + length], call.logprobs)
        assert np.array_equal(covered, trace.loss_mask)
    assert all(times == 1 for times in trained.values())
    assert set(trained) == {
        call.call_id for call in calls if call.sampled_count and call.call_id not in built.exclusions
    }


@settings(max_examples=2_000, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(sessions(), st.sampled_from(["prefix_merging", "per_request"]))
def test_every_sampled_span_is_trained_once_in_its_own_context_or_excluded_by_name(
    calls: list[FakeCall], builder: str
) -> None:
    check(calls, build(calls, session_id="s", builder=builder))


@settings(max_examples=300, deadline=None)
@given(sessions(), st.data())
def test_order_in_which_calls_end_changes_no_row_but_who_trains_a_shared_span(
    calls: list[FakeCall], data: st.DataObject
) -> None:
    """(Which of two equal spans is trained, and which one a compaction supersedes, goes by the order.)"""
    other = data.draw(st.permutations(calls))
    one, two = (build(order, session_id="s", builder="per_request") for order in (calls, other))
    assert one.ledger.captured == two.ledger.captured
    if not any(call.lane == Lane.COMPACTION for call in calls):
        assert one.ledger.trained == two.ledger.trained

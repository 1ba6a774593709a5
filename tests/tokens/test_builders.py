"""Rows and ledger from calls."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polynya.errors import CaptureError
from polynya.schema import Exclusion, Lane, Ledger, PolicySpan
from polynya.tokens import BUILDERS, build
from polynya.tokens.ledger import lost, total

from .conftest import FakeCall

MakeCall = Callable[..., FakeCall]


def chain(call: MakeCall) -> list[FakeCall]:
    return [
        call("c0", [1, 2], [10, 99]),
        call("c1", [1, 2, 10, 99, 5], [11, 99]),
        call("c2", [1, 2, 10, 99, 5, 11, 99, 6], [12]),
    ]


def test_prefix_merging_joins_a_strict_chain_into_one_row(call: MakeCall) -> None:
    built = build(chain(call), session_id="s", builder="prefix_merging")
    (row,) = built.traces
    assert row.input_ids.tolist() == [1, 2, 10, 99, 5, 11, 99, 6, 12]
    assert row.loss_mask.tolist() == [0, 0, 1, 1, 0, 1, 1, 0, 1]
    assert row.logprobs.tolist() == [0, 0, -0.5, -0.515625, 0, -0.5, -0.515625, 0, -0.5]
    assert (row.prompt_len, row.num_turns, row.call_starts, row.call_lens) == (2, 3, [2, 5, 8], [2, 2, 1])
    assert built.parents == {"c1": "c0", "c2": "c1"}
    assert built.ledger == Ledger(captured=5, trained=5, calls=3, calls_by_outcome={"ok": 3})


def test_per_request_gives_a_row_per_call(call: MakeCall) -> None:
    built = build(chain(call), session_id="s", builder="per_request")
    assert [row.input_ids.tolist()[-1] for row in built.traces] == [99, 99, 12]
    assert [int(row.loss_mask.sum()) for row in built.traces] == [2, 2, 1]
    assert built.ledger.trained == 5


def test_span_that_does_not_come_back_as_it_was_sampled_splits(call: MakeCall) -> None:
    calls = [call("c0", [1, 2, 3], [10, 11, 12, 20, 99]), call("c1", [1, 2, 3, 20, 99, 5], [21])]
    built = build(calls, session_id="s", builder="prefix_merging")
    assert len(built.traces) == 2
    assert built.ledger.trained == 6


def test_shared_span_is_trained_once_over_two_leaves(call: MakeCall) -> None:
    root = call("c0", [1], [10])
    left, right = call("c1", [1, 10, 5], [11]), call("c2", [1, 10, 6], [12])
    built = build([root, left, right], session_id="s", builder="prefix_merging")
    first, second = built.traces
    assert first.loss_mask.tolist() == [0, 1, 0, 1]
    assert second.loss_mask.tolist() == [0, 0, 0, 1]
    assert second.logprobs.tolist() == [0, 0, 0, -0.5]
    assert built.ledger.trained == built.ledger.captured == 3


def test_same_prompt_twice_gives_siblings(call: MakeCall) -> None:
    built = build([call("a", [1], [5]), call("b", [1], [6])], session_id="s", builder="prefix_merging")
    assert [row.call_ids for row in built.traces] == [["a"], ["b"]]


def test_twins_with_equal_ids_extend_the_later_one(call: MakeCall) -> None:
    calls = [call("a", [1], [5]), call("b", [1], [5]), call("c", [1, 5, 7], [8])]
    built = build(calls, session_id="s", builder="prefix_merging")
    assert built.parents == {"c": "b"}
    assert [row.call_ids for row in built.traces] == [["a"], ["b", "c"]]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"exclusion": Exclusion.NONFINITE_LOGPROB}, "nonfinite_logprob"),
        ({"delivered": False}, "not_delivered"),
        ({"lane": Lane.AUXILIARY}, "auxiliary_lane"),
        ({"lane": Lane.COMPACTION}, "compaction_lane"),
        ({"outcome": "cancelled"}, "cancelled"),
    ],
)
def test_excluded_call_stands_in_the_ledger_and_its_siblings_live(
    call: MakeCall, fields: dict[str, object], reason: str
) -> None:
    calls = [call("c0", [1], [10]), call("c1", [1, 10, 5], [11, 12], **fields), call("c2", [1, 10, 5, 11, 12, 6], [13])]
    built = build(calls, session_id="s", builder="prefix_merging")
    (row,) = built.traces
    assert row.loss_mask.tolist() == [0, 1, 0, 0, 0, 0, 1]
    assert built.ledger.excluded == {reason: 2}
    assert str(built.exclusions["c1"]) == reason


def test_call_that_sampled_nothing_makes_no_row(call: MakeCall) -> None:
    built = build([call("c0", [1], [])], session_id="s", builder="prefix_merging")
    assert built.traces == []
    assert built.ledger == Ledger(calls=1, calls_by_outcome={"ok": 1})


def test_policy_spans_are_moved_to_the_row(call: MakeCall) -> None:
    spans = [PolicySpan("7", 0, 1), PolicySpan("8", 1, 2)]
    built = build([call("c0", [1, 2], [3, 4], spans=spans)], session_id="s", builder="per_request")
    assert built.traces[0].policy_spans == [PolicySpan("7", 2, 3), PolicySpan("8", 3, 4)]


def test_unknown_policy_version_is_unknown(call: MakeCall) -> None:
    built = build([call("c0", [1, 2], [3, 4])], session_id="s", builder="per_request")
    assert built.traces[0].policy_spans == [PolicySpan(None, 2, 4)]


def test_truncated_row_is_marked(call: MakeCall) -> None:
    built = build([call("c0", [1], [3], finish_reason="length")], session_id="s", builder="per_request")
    assert built.traces[0].truncated


def test_row_that_slipped_through_capture_is_refused_with_its_calls(call: MakeCall) -> None:
    with pytest.raises(CaptureError, match=r"calls c0.*logprobs"):
        build([call("c0", [1], [3], logprobs=[float("nan")])], session_id="s", builder="per_request")


def test_ledger_that_does_not_balance_is_refused(call: MakeCall) -> None:
    class Liar(FakeCall):
        @property
        def sampled_count(self) -> int:
            return 7

    with pytest.raises(CaptureError, match="does not balance"):
        build([Liar("c0", [1], [3])], session_id="s", builder="per_request")


def test_hash_collision_is_not_believed(call: MakeCall, monkeypatch: pytest.MonkeyPatch) -> None:
    class Constant:
        def update(self, data: bytes) -> None: ...

        def digest(self) -> bytes:
            return b"x"

    monkeypatch.setattr("polynya.tokens.forest.xxhash.xxh3_128", Constant)
    monkeypatch.setattr("polynya.tokens.forest.xxhash.xxh3_128_digest", lambda data: b"x")
    built = build([call("a", [1], [5]), call("b", [2, 6, 7], [8])], session_id="s", builder="prefix_merging")
    assert built.parents == {}


def test_total_adds_ledgers_up_and_lost_attempts_stay_visible() -> None:
    one = Ledger(
        captured=5,
        trained=3,
        excluded={"cancelled": 2},
        calls=2,
        calls_by_outcome={"ok": 2},
        chain_breaks={"history_changed": 1},
    )
    both = total([one, lost(4, 3)])
    assert both.captured == 9
    assert both.excluded == {"attempt_lost": 4, "cancelled": 2}
    assert both.calls_by_outcome == {"attempt_lost": 3, "ok": 2}
    assert both.balanced()


def test_nothing_lost_is_nothing_in_the_ledger() -> None:
    assert lost(0, 0) == Ledger()


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[list[int], list[int], bool]]:
    """Sessions that extend, branch, edit and repeat: each prompt starts from some earlier call or from nothing."""
    calls: list[tuple[list[int], list[int], bool]] = []
    few = st.lists(st.integers(1, 4), min_size=1, max_size=4)
    for _ in range(draw(st.integers(1, 8))):
        prompt = draw(few)
        if calls and draw(st.booleans()):
            before, sampled, _ = draw(st.sampled_from(calls))
            full = before + sampled
            prompt = full[: draw(st.integers(1, len(full)))] + prompt if draw(st.booleans()) else full + prompt
        calls.append((prompt, draw(few), draw(st.integers(0, 4)) > 0))
    return calls


@given(history=histories(), builder=st.sampled_from(sorted(BUILDERS)))
def test_every_sampled_token_is_trained_once_in_its_own_context_or_excluded(
    history: list[tuple[list[int], list[int], bool]], builder: str
) -> None:
    calls = [
        FakeCall(f"c{i}", prompt, sampled, logprobs=[-(i + 1) - j / 16 for j in range(len(sampled))], delivered=kept)
        for i, (prompt, sampled, kept) in enumerate(history)
    ]
    built = build(calls, session_id="s", builder=builder)
    by_id = {call.call_id: call for call in calls}
    seen: list[float] = []
    for row in built.traces:
        assert any(row.input_ids.tolist() == p + s for p, s, _ in history), (
            "a row is some engine's prompt and completion"
        )
        for call_id, start, length in zip(row.call_ids, row.call_starts, row.call_lens, strict=True):
            call = by_id[call_id]
            np.testing.assert_array_equal(row.input_ids[:start], call.prompt_ids)
            np.testing.assert_array_equal(row.input_ids[start : start + length], call.sampled_ids)
        seen += row.logprobs[row.loss_mask == 1].tolist()
    expected = [float(value) for call in calls if call.delivered for value in call.logprobs]
    assert sorted(seen) == sorted(expected)
    assert built.ledger.balanced()
    assert built.ledger.captured == sum(len(sampled) for _, sampled, _ in history)


@given(history=histories())
def test_same_calls_give_the_same_rows(history: list[tuple[list[int], list[int], bool]]) -> None:
    def rows() -> list[tuple[object, ...]]:
        calls = [FakeCall(f"c{i}", p, s, delivered=kept) for i, (p, s, kept) in enumerate(history)]
        built = build(calls, session_id="s", builder="prefix_merging")
        return [(row.trace_id, row.input_ids.tolist(), row.loss_mask.tolist(), row.call_ids) for row in built.traces]

    assert rows() == rows()


def test_a_compaction_that_the_same_agent_asks_for_again_is_superseded(call: MakeCall) -> None:
    """What capture found wrong with it comes first, and another agent's compaction in between is not its own."""
    compaction = Lane.COMPACTION
    calls = [
        call("c0", [1], [10], agent="a", lane=compaction),
        call("c1", [2], [11], agent="b", lane=compaction),
        call("c2", [3], [12], agent="a", lane=compaction, delivered=False),
        call("c3", [4], [13], agent="a", lane=compaction),
        call("c4", [5], [14], agent="a"),
    ]
    expected = {"c0": Exclusion.SUPERSEDED_RETRY, "c2": Exclusion.NOT_DELIVERED}
    trained = build(calls, session_id="s", builder="prefix_merging", extra_lanes=["compaction"])
    assert trained.exclusions == expected
    assert [row.call_ids for row in trained.traces] == [["c1"], ["c3"], ["c4"]]
    left_out = build(calls, session_id="s", builder="prefix_merging")
    assert left_out.exclusions == {**expected, "c1": Exclusion.COMPACTION_LANE, "c3": Exclusion.COMPACTION_LANE}


def test_parent_that_capture_proved_is_taken_and_an_excluded_one_is_passed_over(call: MakeCall) -> None:
    one = call("a", [1], [10])
    bad = call("b", [1, 10, 2], [11], exclusion=Exclusion.LENGTH_MISMATCH)
    last = call("c", [1, 10, 2, 11, 3], [12])
    bad.extends, last.extends = one, bad
    built = build([one, bad, last], session_id="s", builder="prefix_merging")
    assert built.parents == {"c": "a"}
    assert built.traces[0].loss_mask.tolist() == [0, 1, 0, 0, 0, 1]


def test_what_a_builder_of_a_third_party_puts_into_no_row_is_excluded_by_that_name(call: MakeCall) -> None:
    calls = [call("c0", [1], [10, 11]), call("c1", [1, 10, 11, 5], [12])]
    built = build(calls, session_id="s", builder=lambda nodes: [[nodes[-1]]])
    (row,) = built.traces
    assert row.loss_mask.tolist() == [0, 0, 0, 0, 1]
    assert built.exclusions == {"c0": Exclusion.LEFT_OUT}
    assert (built.ledger.excluded, built.ledger.trained) == ({"left_out": 2}, 1)


@pytest.mark.parametrize("orders", [[1, 0], [0, 2], [1, 2], [0, 0], []])
def test_a_row_of_calls_that_do_not_follow_from_each_other_is_refused(call: MakeCall, orders: list[int]) -> None:
    calls = [call("c0", [1], [10]), call("c1", [1, 10, 5], [11]), call("c2", [7], [12])]
    with pytest.raises(CaptureError, match="no way down"):
        build(calls, session_id="s", builder=lambda nodes: [[nodes[order] for order in orders]])

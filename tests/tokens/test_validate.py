"""The judgement of one reply, and the last gate of a row."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polynya.schema import Exclusion, Trace
from polynya.tokens import judge, row_problem
from polynya.tokens.validate import common_prefix


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def lps(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_sound_reply_has_no_exclusion() -> None:
    assert judge(prompt_ids=ids(1, 2), sampled_ids=ids(3), logprobs=lps(-0.1), vocab_size=4).exclusion is None


def test_certain_token_with_logprob_zero_is_sound() -> None:
    assert judge(prompt_ids=ids(1), sampled_ids=ids(3), logprobs=lps(0.0)).exclusion is None


@pytest.mark.parametrize(
    ("prompt", "sampled", "logprobs", "reason", "position"),
    [
        (None, None, None, Exclusion.TEXT_ONLY, None),
        (None, ids(3), lps(-0.1), Exclusion.INCOMPLETE_IDS, None),
        (ids(1), None, None, Exclusion.INCOMPLETE_IDS, None),
        (ids(), ids(3), lps(-0.1), Exclusion.INCOMPLETE_IDS, None),
        (ids(1), ids(3, 4), lps(-0.1), Exclusion.LENGTH_MISMATCH, None),
        (ids(1), ids(3), None, Exclusion.LENGTH_MISMATCH, None),
        (ids(1, -1), ids(3), lps(-0.1), Exclusion.ID_OUT_OF_RANGE, 1),
        (ids(1), ids(3, 10), lps(-0.1, -0.1), Exclusion.ID_OUT_OF_RANGE, 1),
        (ids(1), ids(3, 4), lps(-0.1, math.nan), Exclusion.NONFINITE_LOGPROB, 1),
        (ids(1), ids(3), lps(-math.inf), Exclusion.NONFINITE_LOGPROB, 0),
        (ids(1), ids(3), lps(0.25), Exclusion.NONFINITE_LOGPROB, 0),
        (ids(1), ids(3), lps(-9999.0), Exclusion.NONFINITE_LOGPROB, 0),
    ],
)
def test_unsound_reply_names_reason_and_position(prompt, sampled, logprobs, reason, position) -> None:  # type: ignore[no-untyped-def]
    verdict = judge(prompt_ids=prompt, sampled_ids=sampled, logprobs=logprobs, vocab_size=10)
    assert (verdict.exclusion, verdict.position) == (reason, position)
    assert verdict.detail


def test_guided_reply_is_refused() -> None:
    assert (
        judge(prompt_ids=ids(1), sampled_ids=ids(3), logprobs=lps(-1), guided=True).exclusion
        == Exclusion.GRAMMAR_MASKED
    )


@given(a=st.lists(st.integers(0, 3)), b=st.lists(st.integers(0, 3)))
def test_common_prefix_is_the_longest(a: list[int], b: list[int]) -> None:
    n = common_prefix(ids(*a), ids(*b))
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


def good_row() -> Trace:
    return Trace(
        trace_id="s.t0",
        session_id="s",
        lane="main",
        segment=0,
        input_ids=ids(1, 2, 3),
        loss_mask=np.array([0, 0, 1], dtype=np.uint8),
        logprobs=lps(0, 0, -0.5),
        prompt_len=2,
        policy_spans=[],
        call_ids=["c"],
        call_starts=[2],
        call_lens=[1],
        finish_reason="stop",
        truncated=False,
        num_turns=1,
        messages="[]",
        tools="[]",
    )


def test_good_row_passes() -> None:
    assert row_problem(good_row(), vocab_size=4) == ""


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"logprobs": lps(0, 0)}, "lengths differ"),
        ({"loss_mask": np.array([0, 1], dtype=np.uint8)}, "lengths differ"),
        ({"input_ids": ids(), "loss_mask": ids(), "logprobs": lps()}, "empty"),
        ({"loss_mask": np.array([0, 0, 2], dtype=np.uint8)}, "other values"),
        ({"logprobs": lps(0, 0, math.nan)}, "logprobs[2]"),
        ({"logprobs": lps(0, -1, -0.5)}, "logprobs[1]"),
        ({"input_ids": ids(1, 2, 4)}, "vocabulary"),
        ({"input_ids": ids(-1, 2, 3)}, "vocabulary"),
        ({"prompt_len": 0}, "prompt_len"),
        ({"prompt_len": 3}, "prompt_len"),
        ({"prompt_len": 4}, "prompt_len"),
    ],
)
def test_bad_row_is_named(change: dict[str, object], word: str) -> None:
    assert word in row_problem(msgspec.structs.replace(good_row(), **change), vocab_size=4)


def test_negative_id_is_refused_without_a_known_vocabulary() -> None:
    assert "vocabulary" in row_problem(msgspec.structs.replace(good_row(), input_ids=ids(-1, 2, 3)))


def test_bad_ids_are_named_before_logprobs_that_are_missing() -> None:
    """A later prompt that extends these ids takes them for judged."""
    found = judge(
        prompt_ids=np.array([1, 999_999], dtype=np.int32),
        sampled_ids=np.array([4], dtype=np.int32),
        logprobs=None,
        vocab_size=1000,
    )
    assert (found.exclusion, found.position) == (Exclusion.ID_OUT_OF_RANGE, 1)

"""The numbers at the end of a run."""

from __future__ import annotations

import pytest

from polynya.rollout.summary import summarise
from polynya.schema import Provenance, SessionResult, Status


def result(index: int, status: Status, reward: float | None) -> SessionResult:
    return SessionResult(
        session_id=f"t.{index}", task_id="t", group_id="t", sample_index=index, attempt=1, status=status, reward=reward,
        provenance=Provenance(polynya="test"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("last", "scored", "mean"),
    [((Status.INFRA_ERROR, None), 3, 2.0), ((Status.FAILED, 0.0), 4, 1.5)],
    ids=["infrastructure", "the policy's own"],
)
def test_reward_that_is_unknown_is_in_no_mean(last: tuple[Status, float | None], scored: int, mean: float) -> None:
    """44: rewards 1, 3, 2 and an infrastructure failure are a mean of 2 over 3; a failure of the policy's own counts."""
    done = [result(i, Status.COMPLETED, reward) for i, reward in enumerate([1.0, 3.0, 2.0])]
    found = summarise([], [*done, result(3, *last)])
    assert (found["scored"], found["unscored"], found["mean_reward"]) == (scored, 4 - scored, mean)

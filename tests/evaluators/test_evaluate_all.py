from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from polynya import evaluators
from polynya.errors import EvaluatorError, HarnessFailed, RuntimeFailure, TaskFileError
from polynya.evaluators import evaluate_all, evaluator, names, validate_all
from polynya.evaluators.base import EvalContext
from polynya.evaluators.completed import Completed
from polynya.schema import EvaluatorSpec, Score, Status

Make = Callable[..., EvalContext]


class Fixed:
    name = "fixed"

    def validate(self, settings: dict[str, Any]) -> None: ...

    async def evaluate(self, settings: dict[str, Any], context: EvalContext) -> Score:
        if "raises" in settings:
            raise settings["raises"]
        if "sleeps" in settings:
            await asyncio.sleep(settings["sleeps"])
        return Score(name=self.name, value=settings["value"])


@pytest.fixture(autouse=True)
def fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(evaluators.BUILT_IN, "fixed", Fixed)


def spec(weight: float = 1.0, label: str = "", **settings: Any) -> EvaluatorSpec:
    return EvaluatorSpec(name="fixed", weight=weight, label=label, settings=settings)


async def test_the_reward_is_the_weighted_mean(context: Make) -> None:
    reward, scores = await evaluate_all([spec(3.0, "a", value=1.0), spec(1.0, "b", value=0.0)], context())
    assert reward == 0.75
    assert [(score.label, score.weight, score.value) for score in scores] == [("a", 3.0, 1.0), ("b", 1.0, 0.0)]


@pytest.mark.parametrize(
    "error", [EvaluatorError("no tool", fix="install it"), RuntimeFailure("no sandbox"), ZeroDivisionError("bug")]
)
async def test_one_without_a_verdict_makes_the_reward_unknown_and_the_others_keep_their_score(
    context: Make, error: Exception
) -> None:
    reward, scores = await evaluate_all([spec(value=1.0), spec(raises=error), spec(value=0.5)], context())
    assert reward is None
    assert [score.value for score in scores] == [1.0, None, 0.5]
    assert scores[1].error is not None
    assert scores[1].error.message


async def test_an_error_that_the_policy_can_cause_is_a_score_of_0(context: Make) -> None:
    reward, scores = await evaluate_all([spec(raises=HarnessFailed("workspace too large"))], context())
    assert reward == 0.0
    assert scores[0].error is not None
    assert scores[0].error.kind == "HarnessFailed"


async def test_a_spent_budget_is_no_verdict(context: Make) -> None:
    reward, scores = await evaluate_all([spec(sleeps=1000, value=1.0)] * 2, context(timeout=0.05))
    assert reward is None
    assert [score.error.kind for score in scores if score.error] == ["EvaluatorError", "EvaluatorError"]


@pytest.mark.parametrize("value", [None, float("nan"), 1.5, -0.1, float("inf")])
async def test_a_score_that_is_none_is_an_error(context: Make, value: float | None) -> None:
    reward, scores = await evaluate_all([spec(value=value)], context())
    assert (reward, scores[0].value) == (None, None)


async def test_cancelling_is_not_a_verdict(context: Make) -> None:
    task = asyncio.ensure_future(evaluate_all([spec(sleeps=1000, value=1.0)], context()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(("status", "value"), [(Status.COMPLETED, 1.0), (Status.FAILED, 0.0), (Status.TIMEOUT, 0.0)])
async def test_completed_looks_at_the_status_alone(context: Make, status: Status, value: float) -> None:
    assert (await Completed().evaluate({}, context(status))).value == value


def test_what_cannot_grade_is_refused_before_anything_runs() -> None:
    with pytest.raises(TaskFileError, match="weights sum to 0"):
        validate_all([spec(0.0)])
    with pytest.raises(TaskFileError, match="command, completed"):
        evaluator("nowhere")
    with pytest.raises(TaskFileError, match="strict"):
        validate_all([EvaluatorSpec(name="completed", settings={"strict": True})])
    assert {"command", "completed", "tests"} <= set(names())

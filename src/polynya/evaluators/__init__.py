"""The evaluators, found by name, and the one reward that they make together.

Invariant: the reward is the weighted mean of all scores, or None as soon as one evaluator could give no verdict: a part
of a grade is not a grade. An error that the policy can cause (a workspace too large to copy) is a score of 0.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

import msgspec

from polynya.errors import EvaluatorError, PolynyaError, TaskFileError
from polynya.evaluators.base import EvalContext, Evaluator
from polynya.evaluators.command import Command
from polynya.evaluators.completed import Completed
from polynya.evaluators.tests import Tests, grading_binds
from polynya.schema import ErrorInfo, EvaluatorSpec, Score

__all__ = ["BUILT_IN", "evaluate_all", "evaluator", "grading_binds", "names", "validate_all"]

BUILT_IN: dict[str, Callable[[], Evaluator]] = {"command": Command, "completed": Completed, "tests": Tests}
GROUP = "polynya.evaluators"


def names() -> list[str]:
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


def evaluator(name: str) -> Evaluator:
    """The evaluator of that name. Raises TaskFileError that lists the known ones."""
    if name in BUILT_IN:
        return BUILT_IN[name]()
    for point in entry_points(group=GROUP, name=name):
        made: Evaluator = point.load()()
        return made
    raise TaskFileError(f"evaluator.name {name!r} is not known", fix=f"use one of {', '.join(names())}")


def validate_all(specs: Sequence[EvaluatorSpec]) -> None:
    """Refuse a task's evaluators before anything runs. Raises TaskFileError."""
    for spec in specs:
        evaluator(spec.name).validate(spec.settings)
    if not sum(spec.weight for spec in specs) > 0:
        raise TaskFileError("evaluator: the weights sum to 0, so there is no mean", fix="give one a weight above 0")


async def evaluate_all(specs: Sequence[EvaluatorSpec], context: EvalContext) -> tuple[float | None, list[Score]]:
    """One after another, within ``context.timeout`` together. Never raises for what an evaluator does."""
    deadline = time.monotonic() + context.timeout
    scores = []
    for spec in specs:
        left = msgspec.structs.replace(context, timeout=max(0.0, deadline - time.monotonic()))
        scores.append(await _evaluate(spec, left))
    return _mean(scores), scores


def _mean(scores: Sequence[Score]) -> float | None:
    total, weights = 0.0, 0.0
    for score in scores:
        if score.value is None:
            return None
        total += score.value * score.weight
        weights += score.weight
    return total / weights if weights > 0 else None


async def _evaluate(spec: EvaluatorSpec, context: EvalContext) -> Score:
    began = time.monotonic()
    try:
        score = await _bounded(spec, context)
    except PolynyaError as exc:
        score = _failed(spec, exc)
    except Exception as exc:
        score = _failed(spec, EvaluatorError(f"evaluator {spec.name} crashed: {type(exc).__name__}: {exc}"))
    return msgspec.structs.replace(score, label=spec.label, weight=spec.weight, seconds=time.monotonic() - began)


async def _bounded(spec: EvaluatorSpec, context: EvalContext) -> Score:
    spent = EvaluatorError(
        f"evaluator {spec.name}: the POSTRUN budget is spent ({context.timeout:.3g} s were left)",
        fix="raise budgets.postrun",
    )
    if context.timeout <= 0:
        raise spent
    try:
        score = await asyncio.wait_for(evaluator(spec.name).evaluate(spec.settings, context), context.timeout)
    except TimeoutError as exc:
        raise spent from exc
    if score.value is None or not (math.isfinite(score.value) and 0.0 <= score.value <= 1.0):
        raise EvaluatorError(f"evaluator {spec.name} gave {score.value!r}, not a number in [0, 1]")
    return score


def _failed(spec: EvaluatorSpec, exc: PolynyaError) -> Score:
    info = ErrorInfo(
        kind=exc.kind,
        boundary=exc.boundary,
        message=exc.message,
        fix=exc.fix,
        policy_can_cause=exc.policy_can_cause,
        retryable=exc.retryable,
    )
    return Score(name=spec.name, value=0.0 if exc.policy_can_cause else None, error=info)

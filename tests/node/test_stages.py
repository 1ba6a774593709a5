"""Stages: how each can end, and what a failure in it makes of the session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from polynya.engines.scripted import Script, Step
from polynya.errors import EvaluatorError, HarnessFailed, RuntimeFailure
from polynya.node import SessionOutput, job
from polynya.schema import Stage, Status

from .conftest import FakeEvaluator, FakeProvider, Lab, ask, forever

Make = Callable[..., Awaitable[Lab]]
TALK = Script(steps=[Step(text="said")])
SAID = TALK.expected("", 0).sampled_ids.size


class Bug(Exception):
    """Not one of polynya's errors: something that nobody foresaw."""


async def bug(*_: Any) -> None:
    raise Bug("oops")


def no_reward(output: SessionOutput, kind: str, boundary: str) -> None:
    result = output.result
    assert (result.status, result.reward) == (Status.INFRA_ERROR, None)
    assert result.error is not None
    assert (result.error.kind, result.error.boundary) == (kind, boundary)
    assert not result.error.policy_can_cause
    assert result.ledger.balanced()


def everything_is_built(output: SessionOutput, calls: int = 1) -> None:
    assert output.trajectory is not None
    assert output.result.ledger.calls_by_outcome == {"ok": calls}
    assert (output.result.ledger.captured, output.result.ledger.trained) == (SAID * calls, SAID * calls)


async def test_session_goes_through_its_stages_in_order(make_lab: Make, fake: FakeProvider) -> None:
    lab = await make_lab(TALK)
    fake.agent = lambda env: ask(env, "hi")
    output = await lab.submit().output()
    assert (output.result.status, output.result.reward) == (Status.COMPLETED, 1.0)
    assert lab.stages["t.0"] == [Stage.INIT, Stage.READY, Stage.RUNNING, Stage.POSTRUN, Stage.DONE]
    assert {"queued", "init", "ready", "running", "postrun", "total"} <= output.result.timings.keys()
    everything_is_built(output)
    lab.nothing_is_left()


async def test_runtime_that_takes_too_long_is_infrastructure(make_lab: Make, fake: FakeProvider) -> None:
    lab = await make_lab()
    fake.creating = forever
    output = await lab.submit(budgets={"init": 0.05}).output()
    no_reward(output, "StageTimeout", "node")
    assert output.result.error is not None and "budgets.init" in output.result.error.fix
    lab.nothing_is_left()


async def test_prepare_command_that_takes_too_long_is_killed(make_lab: Make) -> None:
    lab = await make_lab()
    output = await lab.submit(
        runtime={"name": "local", "prepare": ["sleep 600 & sleep 600"]}, budgets={"init": 1}
    ).output()
    no_reward(output, "StageTimeout", "node")
    lab.nothing_is_left()


async def test_agent_that_takes_too_long_is_scored_as_it_stands(make_lab: Make, fake: FakeProvider) -> None:
    async def agent(env: dict[str, str]) -> None:
        await ask(env, "hi")
        await forever()

    lab = await make_lab(TALK)
    fake.agent = agent
    output = await lab.submit(budgets={"run": 0.5}).output()
    assert (output.result.status, output.result.reward) == (Status.TIMEOUT, 0.0)
    assert output.result.error is not None and output.result.error.kind == "StageTimeout"
    everything_is_built(output)
    lab.nothing_is_left()


async def test_grader_that_takes_too_long_gives_no_reward(
    make_lab: Make, fake: FakeProvider, grader: FakeEvaluator
) -> None:
    lab = await make_lab(TALK)
    fake.agent = lambda env: ask(env, "hi")
    grader.verdict = forever
    output = await lab.submit(evaluator="fake", budgets={"postrun": 0.2}).output()
    assert output.result.reward is None
    assert output.result.error is not None and not output.result.error.policy_can_cause
    everything_is_built(output)
    lab.nothing_is_left()


async def test_runtime_that_cannot_be_made_is_infrastructure(make_lab: Make, fake: FakeProvider) -> None:
    async def creating() -> None:
        raise RuntimeFailure("no more sandboxes", fix="wait")

    lab = await make_lab()
    fake.creating = creating
    output = await lab.submit().output()
    no_reward(output, "RuntimeFailure", "runtime")
    assert output.trajectory is None
    assert lab.stages["t.0"] == [Stage.INIT, Stage.POSTRUN, Stage.DONE]
    lab.nothing_is_left()


@pytest.mark.parametrize("where", ["creating", "agent"])
async def test_bug_in_a_stage_is_never_a_reward(
    make_lab: Make, fake: FakeProvider, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    lab = await make_lab()
    setattr(fake, where, bug)
    output = await lab.submit().output()
    no_reward(output, "Bug", "polynya")
    assert output.result.error is not None and output.result.error.message == "oops"
    assert "oops" in caplog.text
    lab.nothing_is_left()


async def test_bug_in_the_builder_is_never_a_reward(
    make_lab: Make, fake: FakeProvider, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise Bug("oops")

    lab = await make_lab(TALK)
    fake.agent = lambda env: ask(env, "hi")
    monkeypatch.setattr(job, "trajectory_of", broken)
    no_reward(await lab.submit().output(), "Bug", "polynya")
    lab.nothing_is_left()


async def test_sandbox_that_cannot_be_destroyed_costs_its_session_only(
    make_lab: Make, fake: FakeProvider, caplog: pytest.LogCaptureFixture
) -> None:
    lab = await make_lab(TALK, init=1, ready=1, running=1, postrun=1)
    fake.agent = lambda env: ask(env, "hi")
    fake.on_destroy = bug
    output = await lab.submit().output()
    no_reward(output, "Bug", "polynya")
    everything_is_built(output)
    fake.on_destroy = lambda: asyncio.sleep(0)
    assert (await lab.submit(sample=1).output()).result.status == Status.COMPLETED
    lab.nothing_is_left()


async def test_cleanup_that_fails_takes_no_result_away(
    make_lab: Make, fake: FakeProvider, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stuck(*_: Any) -> None:
        raise RuntimeFailure("cannot remove the workspace")

    lab = await make_lab(TALK)
    fake.agent = lambda env: ask(env, "hi")
    monkeypatch.setattr(job, "remove_tree", stuck)
    output = await lab.submit().output()
    assert (output.result.status, output.result.reward) == (Status.COMPLETED, 1.0)
    assert output.result.flags == {"cleanup_failed": 1}
    assert "cannot remove the workspace" in caplog.text


@pytest.mark.parametrize("failure", [Bug("oops"), EvaluatorError("no tool"), RuntimeError("x")])
async def test_grader_that_crashes_gives_no_reward(
    make_lab: Make, fake: FakeProvider, grader: FakeEvaluator, failure: Exception
) -> None:
    async def verdict() -> None:
        raise failure

    lab = await make_lab(TALK)
    fake.agent = lambda env: ask(env, "hi")
    grader.verdict = verdict
    output = await lab.submit(evaluator="fake").output()
    assert (output.result.status, output.result.reward) == (Status.COMPLETED, None)
    assert output.result.error is not None and output.result.error.boundary == "evaluator"
    everything_is_built(output)
    lab.nothing_is_left()


async def test_one_grader_without_a_verdict_leaves_no_reward_of_the_others(
    make_lab: Make, fake: FakeProvider, grader: FakeEvaluator
) -> None:
    lab = await make_lab()
    grader.verdict = bug
    output = await lab.submit(evaluator=[{"name": "completed"}, {"name": "fake"}]).output()
    assert output.result.reward is None
    assert [score.value for score in output.result.scores] == [1.0, None]


async def test_grader_is_not_asked_about_a_failed_infrastructure(
    make_lab: Make, fake: FakeProvider, grader: FakeEvaluator
) -> None:
    asked: list[int] = []

    async def verdict() -> float:
        asked.append(1)
        return 1.0

    lab = await make_lab()
    fake.agent = bug
    grader.verdict = verdict
    no_reward(await lab.submit(evaluator="fake").output(), "Bug", "polynya")
    assert asked == []


async def test_harness_that_exits_badly_is_scored(make_lab: Make, fake: FakeProvider) -> None:
    async def agent(env: dict[str, str]) -> int:
        return 3

    lab = await make_lab()
    fake.agent = agent
    result = (await lab.submit().output()).result
    assert (result.status, result.exit_code, result.reward) == (Status.FAILED, 3, 0.0)
    assert result.error is not None and result.error.kind == "HarnessFailed" and result.error.policy_can_cause


async def test_failure_that_the_policy_can_cause_is_scored(
    make_lab: Make, fake: FakeProvider, grader: FakeEvaluator
) -> None:
    async def verdict() -> float:
        raise HarnessFailed("the workspace is too large")

    lab = await make_lab()
    grader.verdict = verdict
    result = (await lab.submit(evaluator="fake").output()).result
    assert (result.status, result.reward) == (Status.COMPLETED, 0.0)


async def test_agent_cannot_call_after_its_run(make_lab: Make, fake: FakeProvider) -> None:
    seen: list[dict[str, str]] = []

    async def agent(env: dict[str, str]) -> None:
        seen.append(env)

    lab = await make_lab(TALK)
    fake.agent = agent
    await lab.submit().output()
    with pytest.raises(Exception, match="410"):
        await ask(seen[0], "too late")
    assert lab.engine.desk.started == 0


async def test_attempts_of_one_session_have_folders_and_keys_of_their_own(make_lab: Make, fake: FakeProvider) -> None:
    lab = await make_lab(TALK)
    fake.agent = lambda env: ask(env, "hi")
    first = await lab.submit(attempt=1).output()
    second = await lab.submit(attempt=2).output()
    assert [output.result.attempt for output in (first, second)] == [1, 2]
    assert [label.rsplit(".", 1)[1] for label in fake.created] == ["a1", "a2"]
    for output in (first, second):
        everything_is_built(output)
    lab.nothing_is_left()


async def test_output_of_the_harness_is_kept_and_named(make_lab: Make) -> None:
    lab = await make_lab()
    output = await lab.submit("echo out; echo err >&2; kill -9 $$", runtime="local").output()
    logs = lab.work.parent / "logs"
    assert output.result.logs == {name: f"logs/t.0/{name}" for name in ("harness.stdout", "harness.stderr")}
    assert [(logs / "t.0" / name).read_text() for name in ("harness.stdout", "harness.stderr")] == ["out\n", "err\n"]
    assert (output.result.status, output.result.exit_code) == (Status.FAILED, -9)

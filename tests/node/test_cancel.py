"""Cancelling in every stage: it ends once, as cancelled; what was captured is built; nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from polynya.engines.scripted import Script, Step
from polynya.node import SessionOutput
from polynya.schema import Stage, Status

from .conftest import FakeEvaluator, FakeProvider, Lab, ask, forever

Make = Callable[..., Awaitable[Lab]]
TALK = Script(steps=[Step(text="first"), Step(text="held", hold=True)])
AGENT = """python3 - <<'PY'
import json, os, urllib.request
messages = []
for text in ("one", "two"):
    messages.append({"role": "user", "content": text})
    body = json.dumps({"model": "m", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    messages.append(json.load(urllib.request.urlopen(request))["choices"][0]["message"])
PY
"""
"""Its second call never ends."""


def cancelled_in(output: SessionOutput, stage: str) -> None:
    result = output.result
    assert (result.status, result.reward) == (Status.CANCELLED, None)
    assert result.error is not None
    assert (result.error.kind, result.error.message) == ("SessionCancelled", f"cancelled in stage {stage}")
    assert result.ledger.balanced()


def trained_first_call(output: SessionOutput) -> None:
    result, said = output.result, TALK.expected("", 0).sampled_ids.size
    assert output.trajectory is not None
    assert result.ledger.calls_by_outcome == {"ok": 1, "cancelled": 1}
    assert (result.ledger.captured, result.ledger.trained, len(output.trajectory.traces)) == (said, said, 1)


async def test_queued_session_never_gets_a_runtime(make_lab: Make, fake: FakeProvider) -> None:
    lab = await make_lab(init=1, ready=1, running=1)
    go = asyncio.Event()
    fake.agent = lambda env: go.wait()
    first, _, queued = [lab.submit(sample=i) for i in range(3)]
    await lab.until(lambda: lab.now[Stage.RUNNING] == 1 and lab.now[Stage.READY] == 1)
    queued.cancel()
    output = await queued.output()
    cancelled_in(output, "queued")
    assert len(fake.created) == 2
    assert lab.stages["t.2"][-1] == Stage.DONE and Stage.INIT not in lab.stages["t.2"]
    assert output.trajectory is None
    go.set()
    assert (await first.output()).result.status != Status.CANCELLED
    await lab.until(lambda: lab.now[Stage.DONE] == 3)
    lab.nothing_is_left()


async def test_session_that_waits_for_an_init_worker_is_cancelled_as_queued(make_lab: Make, fake: FakeProvider) -> None:
    lab = await make_lab(init=1, ready=4, running=4)
    fake.creating = forever
    first, second = lab.submit(sample=0), lab.submit(sample=1)
    await lab.until(lambda: lab.now[Stage.INIT] == 1)
    second.cancel()
    cancelled_in(await second.output(), "queued")
    first.cancel()
    cancelled_in(await first.output(), "init")
    lab.nothing_is_left()


async def test_runtime_that_is_being_made_is_given_up(make_lab: Make, fake: FakeProvider) -> None:
    lab = await make_lab()
    fake.creating = forever
    handle = lab.submit()
    await lab.until(lambda: lab.now[Stage.INIT] == 1)
    handle.cancel()
    cancelled_in(await handle.output(), "init")
    lab.nothing_is_left()


@pytest.mark.parametrize("runtime", ["local", pytest.param("bubblewrap", marks=pytest.mark.sandbox)])
async def test_prepare_commands_are_killed(make_lab: Make, tmp_path: Path, runtime: str) -> None:
    lab = await make_lab()
    handle = lab.submit(runtime={"name": runtime, "prepare": ["echo > ready; sleep 600 & sleep 600"]})
    workspace = lab.work / "t.0" / "a1" / "workspace"
    await lab.until(lambda: lab.now[Stage.INIT] == 1)
    await appears(workspace / "ready")
    handle.cancel()
    cancelled_in(await handle.output(), "init")
    lab.nothing_is_left()


async def test_prepared_session_lets_its_runtime_go(make_lab: Make, fake: FakeProvider) -> None:
    lab = await make_lab(running=1)
    fake.agent = forever
    handles = [lab.submit(sample=i) for i in range(2)]
    await lab.until(lambda: lab.now[Stage.RUNNING] == 1 and lab.now[Stage.READY] == 1)
    waiting = next(handle for handle in handles if handle.stage == Stage.READY)
    waiting.cancel()
    output = await waiting.output()
    cancelled_in(output, "ready")
    assert output.trajectory is not None and output.trajectory.calls == []
    assert fake.alive == 1
    await lab.node.stop()
    lab.nothing_is_left()


@pytest.mark.parametrize("runtime", ["local", pytest.param("bubblewrap", marks=pytest.mark.sandbox)])
async def test_running_agent_is_killed_and_its_calls_are_built(make_lab: Make, runtime: str) -> None:
    lab = await make_lab(TALK)
    handle = lab.submit(f"sleep 600 & {AGENT}", runtime=runtime)
    await lab.engine.until(lambda: lab.engine.desk.started == 2)
    handle.cancel()
    handle.cancel()
    output = await handle.output()
    cancelled_in(output, "run")
    trained_first_call(output)
    assert lab.engine.in_flight == 0
    lab.nothing_is_left()


async def test_evaluation_is_broken_off_and_gives_no_reward(
    make_lab: Make, fake: FakeProvider, grader: FakeEvaluator
) -> None:
    lab = await make_lab(TALK)
    begun = asyncio.Event()

    async def verdict() -> None:
        begun.set()
        await forever()

    fake.agent = lambda env: ask(env, "one")
    grader.verdict = verdict
    handle = lab.submit(evaluator="fake")
    await begun.wait()
    handle.cancel()
    output = await handle.output()
    cancelled_in(output, "postrun")
    assert output.result.ledger.calls_by_outcome == {"ok": 1}
    assert output.result.num_traces == 1
    lab.nothing_is_left()


async def test_session_that_waits_for_a_grader_is_built_and_not_graded(
    make_lab: Make, fake: FakeProvider, grader: FakeEvaluator
) -> None:
    lab = await make_lab(TALK, postrun=1)
    begun, go = asyncio.Event(), asyncio.Event()

    async def verdict() -> float:
        begun.set()
        await go.wait()
        return 1.0

    fake.agent = lambda env: ask(env, "one")
    grader.verdict = verdict
    first = lab.submit(evaluator="fake")
    await begun.wait()
    second = lab.submit(sample=1, evaluator="fake")
    await lab.until(lambda: Stage.RUNNING in lab.stages.get("t.1", []))
    await lab.engine.until(lambda: lab.engine.desk.finished == 2)
    await lab.settle()
    second.cancel()
    go.set()
    assert (await first.output()).result.reward == 1.0
    output = await second.output()
    assert (output.result.status, output.result.reward, output.result.num_calls) == (Status.CANCELLED, None, 1)
    lab.nothing_is_left()


async def test_cancelling_a_finished_session_changes_nothing(make_lab: Make, fake: FakeProvider) -> None:
    lab = await make_lab()
    handle = lab.submit()
    before = await handle.output()
    handle.cancel()
    assert await handle.output() is before
    assert before.result.status == Status.COMPLETED
    assert lab.stages["t.0"].count(Stage.DONE) == 1


async def test_stop_ends_sessions_in_all_stages_once(make_lab: Make, fake: FakeProvider, grader: FakeEvaluator) -> None:
    lab = await make_lab(init=1, ready=1, running=1, postrun=1)
    grading = asyncio.Event()

    async def verdict() -> None:
        grading.set()
        await forever()

    grader.verdict = verdict
    handles = [lab.submit(sample=0, evaluator="fake")]
    await grading.wait()
    fake.agent = forever
    handles += [lab.submit(sample=i, evaluator="fake") for i in range(1, 5)]
    await lab.until(lambda: [lab.now[stage] for stage in (Stage.READY, Stage.RUNNING, Stage.POSTRUN)] == [1, 1, 1])
    await lab.node.stop()
    outputs = [await handle.output() for handle in handles]
    assert {output.result.status for output in outputs} == {Status.CANCELLED}
    assert [lab.stages[f"t.{i}"].count(Stage.DONE) for i in range(5)] == [1] * 5
    assert fake.alive == 0
    lab.nothing_is_left()


async def appears(path: Path) -> None:
    """A program outside has no event to wait for; the loop turns until its file is there."""
    while not path.exists():  # noqa: ASYNC110
        await asyncio.sleep(0)

"""Pools: no stage holds another's workers, and no more runtimes are prepared than may wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from polynya.engines.scripted import Script, Step
from polynya.schema import Stage, Status

from .conftest import FakeEvaluator, FakeProvider, Lab, ask

Make = Callable[..., Awaitable[Lab]]


async def test_ready_buffer_bounds_prepared_runtimes_and_holds_no_init_worker(
    make_lab: Make, fake: FakeProvider
) -> None:
    lab = await make_lab(init=3, ready=2, running=1)
    turns = asyncio.Semaphore(0)
    fake.agent = _then_none(turns.acquire)
    handles = [lab.submit(sample=i) for i in range(8)]
    await lab.until(lambda: lab.now[Stage.READY] == 2 and lab.now[Stage.RUNNING] == 1)
    await lab.settle()
    assert (len(fake.created), lab.now[Stage.INIT]) == (3, 0)
    assert lab.node.pools.in_stage[Stage.INIT] == 0
    turns.release()
    await lab.until(lambda: len(fake.created) == 4 and lab.now[Stage.READY] == 2)
    await lab.settle()
    assert len(fake.created) == 4
    for _ in handles:
        turns.release()
    assert {(await handle.output()).result.status for handle in handles} == {Status.COMPLETED}
    # A place is given back before the next session is seen to run, so READY alone can be over its bound for a moment.
    assert lab.peak[Stage.READY] <= 2 + 1
    lab.nothing_is_left()


async def test_slow_init_holds_no_running_slot(make_lab: Make, fake: FakeProvider) -> None:
    lab = await make_lab(init=1, ready=2, running=2)
    gates = [asyncio.Event() for _ in range(2)]
    gates[0].set()
    fake.creating = lambda: gates[len(fake.created) - 1].wait()
    first, second = lab.submit(sample=0), lab.submit(sample=1)
    assert (await first.output()).result.status == Status.COMPLETED
    assert lab.stages["t.1"] == [Stage.INIT]
    gates[1].set()
    assert (await second.output()).result.status == Status.COMPLETED


async def test_slow_grading_holds_no_running_slot(make_lab: Make, fake: FakeProvider, grader: FakeEvaluator) -> None:
    lab = await make_lab(running=1, postrun=1)
    go = asyncio.Event()

    async def verdict() -> float:
        await go.wait()
        return 1.0

    grader.verdict = verdict
    handles = [lab.submit(sample=i, evaluator="fake") for i in range(4)]
    await lab.until(lambda: all(Stage.RUNNING in lab.stages.get(f"t.{i}", []) for i in range(4)))
    go.set()
    assert [(await handle.output()).result.reward for handle in handles] == [1.0] * 4
    assert lab.node.pools.peak[Stage.POSTRUN] == 1


async def test_peaks_keep_to_the_limits(make_lab: Make, fake: FakeProvider) -> None:
    lab = await make_lab(Script(steps=[Step(text="x")]), init=3, ready=2, running=4, postrun=2)
    fake.agent = lambda env: ask(env, "one", "two")
    handles = [lab.submit(sample=i) for i in range(16)]
    results = [(await handle.output()).result for handle in handles]
    assert {result.status for result in results} == {Status.COMPLETED}
    peak = lab.node.pools.peak
    assert 1 <= peak[Stage.INIT] <= 3
    assert 1 <= peak[Stage.RUNNING] <= 4
    assert peak[Stage.POSTRUN] <= 2
    assert lab.peak[Stage.READY] <= 2 + 4
    lab.nothing_is_left()


def _then_none(action: Callable[[], Awaitable[object]]) -> Callable[[dict[str, str]], Awaitable[None]]:
    async def agent(env: dict[str, str]) -> None:
        await action()

    return agent

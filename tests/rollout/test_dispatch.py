"""The dispatcher over a real registry, on a clock of the test's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polynya.config import DispatchSettings
from polynya.errors import QueueFull
from polynya.rollout.dispatch import Bell, ClaimAnswer, Dispatcher
from polynya.rollout.registry import InlineWorker, open_registry
from polynya.rollout.registry.base import Held, Outcome
from polynya.rollout.simulation.events import drive
from polynya.schema import ErrorInfo, Session, Status

from .registry.world import hello, result_of, task


class Desk:
    """A dispatcher that answers at once, and can be started again in another process's place."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.path = path
        self.settings = DispatchSettings(**settings)
        self.now = 500.0
        self.wall = 1.7e9
        self.start()

    def start(self) -> None:
        registry = open_registry(
            self.path, self.settings, workers=(InlineWorker(), InlineWorker()), wall=lambda: self.wall
        )
        self.dispatcher = Dispatcher(registry, self.settings, lambda: self.now)
        self.recovery = drive(self.dispatcher.start())

    def restart(self, now: float) -> None:
        self.close()
        self.now = now
        self.start()

    def close(self) -> None:
        drive(self.dispatcher.registry.close())

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.dispatcher, name)
        return lambda *args, **kwargs: drive(method(*args, **kwargs))

    def claim_of(self, node: str, slots: int = 1) -> ClaimAnswer:
        return self.claim(node, 1, slots)  # type: ignore[no-any-return]

    def fail(self, session: Session, boundary: str = "engine", kind: str = "EngineUnavailable") -> Any:
        error = ErrorInfo(kind=kind, boundary=boundary, message="gone", retryable=boundary == "engine")
        return self.complete("n", result_of(session, Status.INFRA_ERROR, error=error))


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    found = Desk(tmp_path / "r.db", max_queued=20, probe_seconds=4.0)
    yield found
    found.close()


def join(desk: Desk, *names: str) -> None:
    for name in names:
        assert desk.join(hello(name)).accepted


# --- admission


def test_full_queue_refuses_with_a_time_and_known_tasks_are_still_answered(desk: Desk) -> None:
    desk.submit(task("a", 20))
    with pytest.raises(QueueFull) as caught:
        desk.submit(task("b"))
    assert 1.0 <= caught.value.retry_after <= 60.0
    assert "20 sessions wait" in caught.value.message
    assert not desk.submit(task("a", 20)).created
    assert (desk.dispatcher.metrics.refused, desk.dispatcher.metrics.submitted) == (1, 1)
    join(desk, "n")
    desk.claim_of("n", 1)
    assert desk.submit(task("b")).created


def test_the_faster_results_come_the_sooner_a_refused_client_may_return(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "r.db", max_queued=1000)
    desk.submit(task("a", 2000))
    with pytest.raises(QueueFull) as before:
        desk.submit(task("b"))
    join(desk, "n")
    for session in desk.claim_of("n", 400).sessions:
        desk.now += 0.1
        desk.complete("n", result_of(session))
    with pytest.raises(QueueFull) as after:
        desk.submit(task("b"))
    assert after.value.retry_after < before.value.retry_after
    desk.close()


# --- nodes that fail


def test_suspected_node_gets_nothing_until_it_renews_and_soon_loses_what_it_has(desk: Desk) -> None:
    desk.submit(task("a", 2))
    join(desk, "n", "m")
    (session,) = desk.claim_of("n").sessions
    desk.beat("n", 1, 1, [Held(session.session_id, 1)])
    assert desk.suspect("n")
    assert desk.claim_of("n").sessions == []
    desk.now += 2.4
    assert desk.tick().gone == []
    desk.beat("n", 1, 2, [Held(session.session_id, 1)])
    desk.now += 2.4
    assert desk.tick().gone == []
    desk.suspect("n")
    desk.now += 2.6
    assert (desk.tick().gone, desk.dispatcher.metrics.expired) == (["n"], 1)
    assert [s.attempt for s in desk.claim_of("m", 2).sessions] == [2, 1]


def test_node_whose_engine_failed_gets_one_session_after_a_pause_and_a_longer_one_after_the_next(desk: Desk) -> None:
    desk.submit(task("a", 10, retries=10))
    join(desk, "n")
    first, second = desk.claim_of("n", 2).sessions
    desk.fail(first)
    desk.fail(second)
    assert desk.claim_of("n", 2).wait_seconds == 4.0
    desk.now += 4.0
    (probe,) = desk.claim_of("n", 2).sessions
    desk.fail(probe)
    assert desk.claim_of("n", 2).wait_seconds == 8.0
    desk.now += 8.0
    (probe,) = desk.claim_of("n", 2).sessions
    desk.complete("n", result_of(probe))
    assert len(desk.claim_of("n", 2).sessions) == 2


def test_task_that_nobody_can_lay_out_is_held_against_no_node(desk: Desk) -> None:
    desk.submit(task("a", 10))
    join(desk, "n")
    desk.fail(desk.claim_of("n").sessions[0], "runtime", "WorkspaceError")
    assert len(desk.claim_of("n", 2).sessions) == 2


def test_only_failures_of_infrastructure_run_again_and_within_their_bound(desk: Desk) -> None:
    desk.submit(task("a", 3, retries=1))
    join(desk, "n")
    a, b, c = desk.claim_of("n", 3).sessions
    assert desk.fail(a).outcome == Outcome.REQUEUED
    assert desk.fail(b, "evaluator", "EvaluatorError").outcome == Outcome.ACCEPTED
    assert desk.complete("n", result_of(c, Status.FAILED)).outcome == Outcome.ACCEPTED
    desk.now += 60
    desk.join(hello("n", 2))
    (again,) = desk.claim("n", 2, 3).sessions
    assert (again.session_id, again.attempt) == (a.session_id, 2)
    assert desk.fail(again).outcome == Outcome.ACCEPTED
    assert desk.dispatcher.metrics.requeued == 1


def test_draining_node_ends_what_it_has(desk: Desk) -> None:
    desk.submit(task("a", 2))
    join(desk, "n", "m")
    (session,) = desk.claim_of("n").sessions
    assert desk.drain("n")
    assert desk.claim_of("n").sessions == []
    assert desk.beat("n", 1, 1, [Held(session.session_id, 1)]).renewal.draining
    assert desk.complete("n", result_of(session)).outcome == Outcome.ACCEPTED
    assert desk.leave("n", 1).requeued == []
    assert not desk.claim_of("n").known


def test_dead_node_is_replaced_at_once_when_somebody_knows(desk: Desk) -> None:
    desk.submit(task("a"))
    join(desk, "n", "m")
    desk.claim_of("n")
    assert desk.leave("n").requeued == ["a.0"]
    assert [s.attempt for s in desk.claim_of("m").sessions] == [2]


# --- policy


def test_paused_policy_gives_nothing_out_and_lives_on_after_a_restart(desk: Desk) -> None:
    desk.submit(task("a", 2))
    join(desk, "n")
    desk.pause()
    assert desk.claim_of("n").sessions == []
    assert desk.claim_of("n").policy.paused
    desk.restart(3.0)
    assert desk.claim_of("n").sessions == []
    assert desk.beat("n", 1, 1, []).policy.paused
    desk.resume(version="8")
    answer = desk.claim_of("n")
    assert (len(answer.sessions), answer.policy.version, answer.policy.paused) == (1, "8", False)


def test_policies_of_other_models_do_not_pause_a_node(desk: Desk) -> None:
    desk.submit(task("a", 2))
    desk.join(hello("n", model="big"))
    desk.join(hello("m", model="small"))
    desk.pause("big")
    assert desk.claim_of("n").sessions == []
    assert len(desk.claim_of("m").sessions) == 1
    assert desk.set_policy("3", "big").paused


# --- R19, and restarts


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_jump_of_the_wall_clock_loses_no_lease(desk: Desk, jump: float) -> None:
    desk.submit(task("a"))
    join(desk, "n")
    (session,) = desk.claim_of("n").sessions
    for beat in range(1, 6):
        desk.wall += jump
        desk.now += 2.0
        assert not desk.beat("n", 1, beat, [Held(session.session_id, 1)]).renewal.lost
        assert desk.tick().requeued == []
    assert desk.complete("n", result_of(session)).outcome == Outcome.ACCEPTED


@pytest.mark.parametrize("now", [0.0, 1e9])
def test_restart_keeps_every_lease_for_one_lease_time_whatever_the_new_clock_says(desk: Desk, now: float) -> None:
    desk.submit(task("a", 2))
    join(desk, "n", "m")
    (mine,) = desk.claim_of("n").sessions
    desk.claim_of("m")
    desk.restart(now)
    assert (desk.recovery.nodes, desk.recovery.counts.leased) == (["m", "n"], 2)
    desk.now += 9.9
    assert desk.tick().gone == []
    assert desk.beat("n", 1, 1, [Held(mine.session_id, 1)]).renewal.known
    desk.now += 0.2
    assert (desk.tick().gone, desk.tick().requeued) == (["m"], [])
    assert desk.complete("n", result_of(mine)).outcome == Outcome.ACCEPTED


# --- callbacks


def test_callback_waits_longer_after_each_failure_and_is_given_up_at_last(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "r.db", callback_tries=4, callback_max_seconds=3.0)
    desk.submit(task("a", callback="http://receiver/"))
    join(desk, "n")
    desk.complete("n", result_of(desk.claim_of("n").sessions[0]))
    waits = []
    while due := desk.callbacks():
        assert [callback.delivery_id for callback in due] in (["a.0", "a:end"], ["a.0"])
        waits.append(desk.callback_failed(due[0], "500"))
        for callback in due[1:]:
            drive(desk.dispatcher.registry.callback_sent(callback.delivery_id))
        assert desk.callbacks() == []
        desk.now += waits[-1] or 0.0
    assert waits == [1.0, 2.0, 3.0, None]
    assert [d.delivery_id for d in drive(desk.dispatcher.registry.results())] == ["a.0", "a:end"]
    desk.close()


# --- waiting


async def test_bell_wakes_all_who_wait_and_nobody_misses_a_ring() -> None:
    bell = Bell()
    waiting = [asyncio.create_task(bell.wait(0, 60)) for _ in range(3)]
    await asyncio.sleep(0)
    bell.ring()
    assert await asyncio.gather(*waiting) == [True, True, True]
    assert await bell.wait(0, 60)
    assert not await bell.wait(1, 0.001)


def test_bells_ring_for_work_and_for_results(desk: Desk) -> None:
    work, delivered = desk.dispatcher.work, desk.dispatcher.delivered
    desk.submit(task("a"))
    assert (work.count, delivered.count) == (1, 0)
    desk.submit(task("a"))
    assert work.count == 1
    join(desk, "n")
    desk.complete("n", result_of(desk.claim_of("n").sessions[0]))
    assert delivered.count == 1
    desk.submit(task("b"))
    desk.cancel_task("b")
    assert (delivered.count, desk.dispatcher.metrics.cancelled) == (2, 1)

"""Tasks, sessions and groups by example, on both databases: what the state machine reaches seldom, and the field cases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from polynya.errors import QueueFull, RegistryInUse, TaskConflict, UnknownRecord
from polynya.rollout.registry import open_registry
from polynya.rollout.registry.base import GroupState, Held, NodeState, Outcome
from polynya.schema import ErrorInfo, Exclusion, Ledger, Session, Status

from .world import LEASE, Direct, completion, direct, hello, result_of, task


def claim(registry: Direct, slots: int = 1, node: str = "n", now: float = 0.0) -> list[Session]:
    return registry.claim(node, 1, slots, now, LEASE).sessions  # type: ignore[no-any-return]


def joined(registry: Direct, *nodes: str) -> Direct:
    for node in nodes or ("n",):
        registry.register(hello(node), 0.0, LEASE)
    return registry


def confirm(registry: Direct, leases: list[Session], node: str = "n", beat: int = 1) -> None:
    registry.renew(node, 1, beat, [Held(s.session_id, s.attempt) for s in leases], 0.0, LEASE)


def delivered(registry: Direct) -> list[tuple[str, str]]:
    return [
        (d.delivery_id, str(d.result.status if d.result else d.group.state))
        for d in registry.results(limit=1000, acked=True)
    ]


# --- submitting


def test_same_task_again_is_the_same_task(registry: Direct) -> None:
    first, again = registry.submit(task("a", 3)), registry.submit(task("a", 3))
    assert (first.created, again.created) == (True, False)
    assert first.task == again.task == registry.task("a")
    assert registry.counts().queued == 3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_samples": 4}, ["num_samples: task a", "with 2, now with 4"]),
        ({"num_samples": 2, "metadata": {"x": 1}}, ["metadata.x:", "with None, now with 1"]),
        ({"num_samples": 2, "priority": 5}, ["priority:", "with 0, now with 5"]),
    ],
)
def test_another_task_of_the_same_id_is_refused_by_its_field(
    registry: Direct, fields: dict[str, object], words: list[str]
) -> None:
    registry.submit(task("a", 2))
    with pytest.raises(TaskConflict) as caught:
        registry.submit(task("a", **fields))
    assert [word for word in words if word not in caught.value.message] == []
    assert "id of its own" in caught.value.fix
    assert registry.counts().tasks == 1


def test_field_case_76_task_is_found_at_once_and_its_result_until_it_is_acknowledged(registry: Direct) -> None:
    """A poll right after the submission was a 404, and a result was lost with its callback."""
    joined(registry).submit(task("a", callback="http://receiver/"))
    assert registry.task("a").state == GroupState.OPEN
    assert registry.session("a.0").attempt == 0
    registry.complete(completion(claim(registry)[0]))
    for now in (0.0, 1.0, 60.0):
        for callback in registry.callbacks(now):
            registry.callback_failed(callback.delivery_id, "connection refused", now + 1.0)
    assert [d.delivery_id for d in registry.results()] == ["a.0", "a:end"]
    assert [(c.delivery_id, c.tries) for c in registry.callbacks(61.0)] == [("a.0", 3), ("a:end", 3)]
    registry.ack("a.0")
    assert [d.delivery_id for d in registry.results()] == ["a:end"]
    assert [c.delivery_id for c in registry.callbacks(61.0)] == ["a.0", "a:end"]


def test_error_of_a_callback_may_be_any_text(registry: Direct) -> None:
    joined(registry).submit(task("a", callback="http://receiver/"))
    registry.complete(completion(claim(registry)[0]))
    registry.callback_failed("a.0", "\0 \ud800" + "x" * 10_000, 5.0)
    assert [c.tries for c in registry.callbacks(9.0) if c.delivery_id == "a.0"] == [1]


@pytest.mark.parametrize(
    "ask",
    [
        lambda r: r.task("nothing"), lambda r: r.spec("nothing"), lambda r: r.sessions("nothing"),
        lambda r: r.session("nothing.0"), lambda r: r.cancel_task("nothing"), lambda r: r.cancel_session("nothing.0"),
        lambda r: r.ack("nothing.0"),
    ],
)  # fmt: skip
def test_what_never_was_is_unknown(registry: Direct, ask: Callable[[Direct], object]) -> None:
    with pytest.raises(UnknownRecord, match="nothing"):
        ask(registry)


def test_queue_depth_is_bounded_by_a_high_water_mark_so_a_large_task_gets_in(registry: Direct) -> None:
    registry.submit(task("a", 50), max_queued=10)
    with pytest.raises(QueueFull):
        registry.submit(task("b"), max_queued=10)
    assert not registry.submit(task("a", 50), max_queued=10).created


def test_tasks_are_paged_in_order_of_submission(registry: Direct) -> None:
    for name in ("b", "a", "c"):
        registry.submit(task(name))
    first = registry.tasks(limit=2)
    assert [t.task_id for t in first] == ["b", "a"]
    assert [t.task_id for t in registry.tasks(first[-1].cursor, 2)] == ["c"]
    assert registry.spec("a") == task("a")


async def test_fifty_submissions_at_once_are_one_task(fresh: Callable[[], str]) -> None:
    """R22, on the threads of the product."""
    registry = open_registry(fresh())
    await registry.start(0.0, LEASE)
    answers = await asyncio.gather(*(registry.submit(task("a", 8)) for _ in range(50)))
    assert sorted(answer.created for answer in answers) == [False] * 49 + [True]
    assert (await registry.counts()).queued == 8
    await registry.close()


# --- who gets what


def test_higher_priority_first_then_the_oldest_group_to_its_end(registry: Direct) -> None:
    for name, priority in (("old", 0), ("new", 0), ("urgent", 5)):
        joined(registry).submit(task(name, 2, priority=priority))
    assert [s.session_id for s in claim(registry, 5)] == ["urgent.0", "urgent.1", "old.0", "old.1", "new.0"]


def test_group_that_was_begun_is_ended_before_another_is_begun(registry: Direct) -> None:
    joined(registry).submit(task("a", 2, retries=1))
    first, _ = claim(registry, 2)
    registry.submit(task("b", 2))
    registry.complete(completion(first, status=Status.INFRA_ERROR))
    assert [s.session_id for s in claim(registry, 2)] == ["a.0", "b.0"]


def test_task_runs_no_more_sessions_at_a_time_than_it_asks_for(registry: Direct) -> None:
    joined(registry).submit(task("a", 4, max_concurrent=2, priority=1))
    registry.submit(task("b", 1))
    first, _, other = claim(registry, 9)
    assert other.session_id == "b.0"
    registry.complete(completion(first))
    assert [s.session_id for s in claim(registry, 9)] == ["a.2"]


def test_no_more_is_given_out_in_all_than_the_server_allows(registry: Direct) -> None:
    joined(registry, "n", "m").submit(task("a", 9))
    assert len(registry.claim("n", 1, 5, 0.0, LEASE, max_leased=3).sessions) == 3
    assert registry.claim("m", 1, 5, 0.0, LEASE, max_leased=3).sessions == []


# --- fencing


def test_late_completion_is_fenced_and_a_repeated_one_acknowledged(registry: Direct) -> None:
    joined(registry, "n", "m").submit(task("a"))
    (old,) = claim(registry)
    registry.leave("n")
    assert registry.complete(completion(old)).outcome == Outcome.FENCED
    (new,) = claim(registry, node="m")
    assert registry.complete(completion(old)).outcome == Outcome.FENCED
    assert registry.complete(completion(new, node="n")).outcome == Outcome.FENCED
    assert registry.complete(completion(new, node="m", status=Status.FAILED)).outcome == Outcome.ACCEPTED
    assert registry.complete(completion(new, node="m")).outcome == Outcome.REPEATED
    assert registry.complete(completion(old)).outcome == Outcome.FENCED
    assert delivered(registry) == [("a.0", "failed"), ("a:end", "completed")]


def test_reported_failure_told_again_changes_nothing(registry: Direct) -> None:
    joined(registry).submit(task("a", retries=3))
    (session,) = claim(registry)
    outcomes = [registry.complete(completion(session, status=Status.INFRA_ERROR)).outcome for _ in range(2)]
    assert outcomes == [Outcome.REQUEUED, Outcome.REPEATED]
    assert registry.session("a.0").failures == 1


def test_claim_whose_answer_was_lost_costs_one_lease_time_and_is_no_loss(registry: Direct) -> None:
    joined(registry).submit(task("a"))
    claim(registry)
    for beat in (1, 2):
        assert registry.renew("n", 1, beat, [], 5.0, LEASE).dropped == []
    assert registry.expire(LEASE).requeued == ["a.0"]
    assert (registry.session("a.0").losses, registry.nodes()[0].state) == (0, NodeState.LIVE)


def test_claim_whose_answer_was_lost_before_a_restart_costs_one_lease_time_after_it(fresh: Callable[[], str]) -> None:
    place = fresh()
    first = joined(direct(place, now=500.0))
    first.submit(task("a"))
    first.claim("n", 1, 1, 500.0, LEASE)
    first.close()
    second = direct(place, now=3.0)
    second.renew("n", 1, 1, [], 9.0, LEASE)
    assert second.expire(3.0 + LEASE - 0.1).requeued == []
    assert second.expire(3.0 + LEASE).requeued == ["a.0"]
    second.close()


def test_session_that_loses_too_many_nodes_ends(fresh: Callable[[], str]) -> None:
    registry = direct(fresh(), max_losses=1)
    registry.submit(task("a"))
    for epoch in (1, 2):
        registry.register(hello("n", epoch), 0.0, LEASE)
        registry.claim("n", epoch, 1, 0.0, LEASE)
        registry.renew("n", epoch, 1, [Held("a.0", epoch)], 0.0, LEASE)
    assert registry.leave("n").ended == ["a.0"]
    (session, _) = registry.results()
    assert (session.result.status, session.result.reward, session.result.error.kind) == (
        "infra_error",
        None,
        "NodeLost",
    )
    registry.close()


def test_join_of_an_earlier_life_that_comes_late_takes_nothing_away(registry: Direct) -> None:
    registry.submit(task("a"))
    registry.register(hello("n", 7), 0.0, LEASE)
    registry.claim("n", 7, 1, 0.0, LEASE)
    late = registry.register(hello("n", 5), 0.0, LEASE)
    assert (late.accepted, late.epoch) == (False, 7)
    assert registry.register(hello("n", 7), 0.0, LEASE).accepted
    assert registry.session("a.0").node == "n"
    registry.leave("n")
    assert not registry.register(hello("n", 7), 0.0, LEASE).accepted
    assert registry.register(hello("n", 8), 0.0, LEASE).accepted


# --- ends


def test_tokens_of_attempts_that_failed_stand_in_the_ledger_as_lost(registry: Direct) -> None:
    joined(registry).submit(task("a", retries=2))
    for status in (Status.INFRA_ERROR, Status.INFRA_ERROR, Status.COMPLETED):
        (session,) = claim(registry)
        ledger = Ledger(captured=10, trained=10 if status == Status.COMPLETED else 0, calls=2)
        registry.complete(completion(session, status=status, ledger=ledger))
    found = registry.results()[0].result.ledger
    assert (found.captured, found.trained, found.excluded) == (30, 10, {Exclusion.ATTEMPT_LOST: 20})
    assert (found.balanced(), found.calls) == (True, 6)


def test_group_stops_early_once_and_keeps_what_comes_after(registry: Direct) -> None:
    joined(registry).submit(task("a", 6, early_stop=2))
    leases = claim(registry, 4)
    confirm(registry, leases)
    assert registry.complete(completion(leases[0])).cancel == []
    told = registry.complete(completion(leases[1])).cancel
    assert told == [Held("a.2", 1), Held("a.3", 1)]
    assert delivered(registry)[2:] == [("a.4", "cancelled"), ("a.5", "cancelled")]
    assert registry.renew("n", 1, 2, told, 0.0, LEASE).cancel == told
    assert registry.complete(completion(leases[2])).cancel == []
    registry.complete(completion(leases[3], status=Status.CANCELLED))
    end = registry.results(limit=100)[-1].group
    assert (end.state, end.statuses) == (GroupState.STOPPED, {"cancelled": 3, "completed": 3})
    assert registry.task("a").ended


def test_infrastructure_failures_do_not_count_towards_an_early_stop(registry: Direct) -> None:
    joined(registry).submit(task("a", 3, early_stop=1, retries=0))
    first, second = claim(registry, 2)
    registry.complete(completion(first, status=Status.INFRA_ERROR))
    assert registry.counts().queued == 1
    registry.complete(completion(second, status=Status.FAILED))
    assert delivered(registry)[-1] == ("a:end", "stopped")


def test_group_that_its_owner_cancelled_does_not_become_stopped(registry: Direct) -> None:
    joined(registry).submit(task("a", 3, early_stop=1))
    first, second = claim(registry, 2)
    registry.cancel_task("a")
    registry.complete(completion(first))
    registry.complete(completion(second))
    assert delivered(registry)[-1] == ("a:end", "cancelled")


def test_field_case_45_cancelled_group_ends_once_and_what_waited_never_starts(registry: Direct) -> None:
    """A cancel after 3 of 8 were given out left the group incomplete for ever."""
    joined(registry).submit(task("g", 8))
    leases = claim(registry, 3)
    confirm(registry, leases)
    found = registry.cancel_task("g")
    assert (found.ended, len(found.told)) == (5, 3)
    assert claim(registry, 8) == []
    registry.complete(completion(leases[0], status=Status.CANCELLED))
    registry.complete(completion(leases[1], status=Status.INFRA_ERROR))
    assert not registry.task("g").ended
    assert registry.leave("n").ended == ["g.2"]
    ends = [status for name, status in delivered(registry) if name == "g:end"]
    assert ends == ["cancelled"]
    assert registry.cancel_task("g").ended == 0
    assert len(delivered(registry)) == 9


@pytest.mark.parametrize("state", ["queued", "leased", "requeued", "done"])
def test_session_can_be_cancelled_in_every_state_once(registry: Direct, state: str) -> None:
    joined(registry).submit(task("a", 2, retries=1))
    leases = claim(registry) if state != "queued" else []
    if state == "requeued":
        registry.complete(completion(leases[0], status=Status.INFRA_ERROR))
    if state == "done":
        registry.complete(completion(leases[0]))
    first, again = registry.cancel_session("a.0"), registry.cancel_session("a.0")
    assert (first.ended, len(first.told)) == {"queued": (1, 0), "requeued": (1, 0), "leased": (0, 1), "done": (0, 0)}[
        state
    ]
    assert (again.ended, again.told) == (0, [])
    assert registry.session("a.1").cancelled is False


def test_cancelled_session_whose_node_fails_is_not_run_again(registry: Direct) -> None:
    joined(registry).submit(task("a", retries=5))
    (session,) = claim(registry)
    registry.cancel_session("a.0")
    assert registry.complete(completion(session, status=Status.INFRA_ERROR)).outcome == Outcome.ACCEPTED
    assert delivered(registry) == [("a.0", "cancelled"), ("a:end", "completed")]


def test_result_without_a_score_carries_no_reward(registry: Direct) -> None:
    joined(registry).submit(task("a"))
    (session,) = claim(registry)
    error = ErrorInfo(kind="DiskFull", boundary="capture", message="full")
    report = completion(session, status=Status.INFRA_ERROR, reward=0.5, error=error)
    registry.submit(task("b", retries=0))
    registry.complete(report)
    (session,) = claim(registry)
    registry.complete(completion(session, status=Status.CANCELLED, reward=0.5))
    assert [d.result.reward for d in registry.results() if d.result] == [None]


# --- restarts


def test_field_case_75_restart_loses_no_finished_sibling(fresh: Callable[[], str]) -> None:
    """The server died with 5 of 8 done: 3 run, 8 are delivered, under the delivery ids of before."""
    place = fresh()
    first = joined(direct(place))
    first.submit(task("a", 8, callback="http://receiver/"))
    leases = claim(first, 5)
    for session in leases:
        first.complete(completion(session))
    for callback in first.callbacks(0.0)[:3]:
        first.callback_sent(callback.delivery_id)
    first.close()
    second = direct(place, now=77.0)
    assert [c.delivery_id for c in second.callbacks(77.0)] == ["a.3", "a.4"]
    rest = second.claim("n", 1, 8, 77.0, LEASE).sessions
    assert [s.session_id for s in rest] == ["a.5", "a.6", "a.7"]
    assert {second.complete(completion(session)).outcome for session in leases} == {Outcome.REPEATED}
    for session in rest:
        second.complete(completion(session))
    assert [name for name, _ in delivered(second)] == [*(f"a.{i}" for i in range(8)), "a:end"]
    assert sorted(c.delivery_id for c in second.callbacks(77.0)) == [*(f"a.{i}" for i in range(3, 8)), "a:end"]
    second.close()


def test_sqlite_file_is_one_servers(tmp_path: Path) -> None:
    first = direct(tmp_path / "r.db")
    with pytest.raises(RegistryInUse, match=r"r\.db: another server"):
        direct(tmp_path / "r.db")
    first.close()
    direct(tmp_path / "r.db").close()


def test_result_keeps_its_reference_to_the_rows(registry: Direct) -> None:
    joined(registry).submit(task("a"))
    (session,) = claim(registry)
    report = completion(session)
    registry.complete(type(report)(node="n", result=result_of(session), trajectory="s3://rows/a.0"))
    assert registry.results()[0].trajectory == "s3://rows/a.0"

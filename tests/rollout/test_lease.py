"""A node's side of its leases: when it must stop by itself, and what late, lost and doubled answers do to it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polynya.config import DispatchSettings
from polynya.rollout.lease import LeaseKeeper, LeaseTerms, boot_clock
from polynya.rollout.registry.base import Held, Renewal
from polynya.schema import HarnessSpec, Session, TaskSpec

TERMS = LeaseTerms(lease_seconds=10, heartbeat_seconds=2, fence_seconds=8)
A, B = Held("t.0", 1), Held("t.1", 1)
FINE = Renewal(known=True)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keeper(clock: Clock) -> LeaseKeeper:
    return LeaseKeeper(TERMS, clock)


def sessions(leases: Sequence[Held]) -> list[Session]:
    task = TaskSpec(task_id="t", instruction="x", harness=HarnessSpec(name="shell"), num_samples=9)
    return [
        Session(session_id=lease.session_id, group_id="t", task=task, sample_index=i, attempt=lease.attempt)
        for i, lease in enumerate(leases)
    ]


def test_node_that_renews_nothing_must_stop_its_sessions_before_the_server_takes_them(
    keeper: LeaseKeeper, clock: Clock
) -> None:
    keeper.granted(sessions([A]), asked_at=clock.now)
    clock.now += 7.9
    assert keeper.fence() == []
    assert keeper.fence_in() == pytest.approx(0.1)
    clock.now += 0.1
    assert keeper.fence() == [A]
    assert (keeper.running, keeper.fence_in()) == ([], None)


def test_lease_counts_from_the_sending_of_what_was_answered(keeper: LeaseKeeper, clock: Clock) -> None:
    keeper.granted(sessions([A]), asked_at=clock.now)
    beat = keeper.beat()
    clock.now += 5
    keeper.renewed(beat, FINE)
    assert keeper.fence_in() == 3.0
    beat = keeper.beat()
    keeper.renewed(beat, FINE)
    assert keeper.fence_in() == 8.0


def test_answers_out_of_order_never_shorten_a_lease(keeper: LeaseKeeper, clock: Clock) -> None:
    keeper.granted(sessions([A]), asked_at=clock.now)
    early = keeper.beat()
    clock.now += 2
    late = keeper.beat()
    keeper.renewed(late, FINE)
    keeper.renewed(early, FINE)
    assert keeper.fence_in() == 8.0


def test_heartbeat_renews_only_what_it_named(keeper: LeaseKeeper, clock: Clock) -> None:
    beat = keeper.beat()
    keeper.granted(sessions([A]), asked_at=clock.now - 4)
    keeper.renewed(beat, FINE)
    assert keeper.fence_in() == 4.0


def test_stale_answer_renews_nothing(keeper: LeaseKeeper, clock: Clock) -> None:
    keeper.granted(sessions([A]), asked_at=clock.now)
    beat = keeper.beat()
    clock.now += 3
    keeper.renewed(beat, Renewal(known=True, stale=True))
    assert keeper.fence_in() == 5.0


def test_claim_that_was_answered_too_late_gives_nothing_to_run(keeper: LeaseKeeper, clock: Clock) -> None:
    asked_at = clock.now
    clock.now += 8
    assert keeper.granted(sessions([A]), asked_at) == []
    assert keeper.beat().held == []


def test_result_is_offered_until_it_is_answered_whatever_the_lease_does(keeper: LeaseKeeper, clock: Clock) -> None:
    keeper.granted(sessions([A, B]), asked_at=clock.now)
    assert keeper.finished(A)
    clock.now += 100
    assert keeper.fence() == [B]
    assert keeper.unreported == [A]
    assert keeper.beat().held == [A]
    keeper.reported(A)
    assert keeper.beat().held == []


def test_session_that_was_fenced_has_no_result_to_report(keeper: LeaseKeeper, clock: Clock) -> None:
    keeper.granted(sessions([A]), asked_at=clock.now)
    clock.now += 8
    keeper.fence()
    assert not keeper.finished(A)


def test_orders_name_only_what_still_runs(keeper: LeaseKeeper, clock: Clock) -> None:
    keeper.granted(sessions([A, B]), asked_at=clock.now)
    beat = keeper.beat()
    keeper.finished(B)
    orders = keeper.renewed(beat, Renewal(known=True, lost=[A], cancel=[B], draining=True))
    assert (orders.stop, orders.cancel, orders.rejoin, orders.draining) == ([A], [], False, True)
    assert keeper.running == []


def test_cancel_is_ordered_once_until_the_session_ends(keeper: LeaseKeeper, clock: Clock) -> None:
    keeper.granted(sessions([A]), asked_at=clock.now)
    asked = Renewal(known=True, cancel=[A])
    assert [keeper.renewed(keeper.beat(), asked).cancel for _ in range(3)] == [[A], [], []]
    assert keeper.running == [A]


def test_lost_result_is_offered_no_more(keeper: LeaseKeeper, clock: Clock) -> None:
    keeper.granted(sessions([A]), asked_at=clock.now)
    keeper.finished(A)
    keeper.renewed(keeper.beat(), Renewal(known=True, lost=[A]))
    assert keeper.unreported == []


def test_epoch_that_is_over_says_so_once_and_holds_nothing(keeper: LeaseKeeper, clock: Clock) -> None:
    keeper.granted(sessions([A]), asked_at=clock.now)
    beats = [keeper.beat(), keeper.beat()]
    first = keeper.renewed(beats[0], Renewal(known=False, lost=[A]))
    assert (first.stop, first.rejoin) == ([A], True)
    assert keeper.renewed(beats[1], Renewal(known=False, lost=[A])).rejoin is False
    assert keeper.unknown().rejoin is False
    assert keeper.granted(sessions([B]), asked_at=clock.now) == []
    assert keeper.renewed(beats[1], FINE).stop == []
    assert keeper.running == []


def test_heartbeats_are_due_at_their_distance(keeper: LeaseKeeper, clock: Clock) -> None:
    assert keeper.beat_in() == 2.0
    clock.now += 5
    assert keeper.beat_in() == 0.0
    assert [keeper.beat().number, keeper.beat().number] == [1, 2]
    assert keeper.beat_in() == 2.0


def test_clock_of_a_node_never_goes_back_and_is_ahead_of_the_monotonic_one() -> None:
    before = time.clock_gettime(time.CLOCK_MONOTONIC)
    times = [boot_clock() for _ in range(3)]
    assert [before, *times] == sorted([before, *times])


@given(st.lists(st.tuples(st.floats(0, 4), st.floats(0, 30), st.booleans()), max_size=12))
def test_whatever_answers_come_nothing_runs_beyond_its_lease(history: list[tuple[float, float, bool]]) -> None:
    """The server's lease begins no earlier than the sending, so it is checked against that."""
    clock = Clock()
    keeper = LeaseKeeper(TERMS, clock)
    keeper.granted(sessions([A]), asked_at=clock.now)
    server_until = clock.now + TERMS.lease_seconds
    for pause, delay, arrives in history:
        clock.now += pause
        if not keeper.fence():
            beat = keeper.beat()
            clock.now += delay
            if arrives:
                server_until = max(server_until, beat.sent_at + TERMS.lease_seconds)
                keeper.renewed(beat, FINE)
        keeper.fence()
        assert not keeper.running or clock.now < server_until


@pytest.mark.parametrize(
    "fields", [{"fence_seconds": 10.0}, {"fence_seconds": 2.0}, {"lease_seconds": 1.0}, {"heartbeat_seconds": 9.0}]
)
def test_terms_under_which_fencing_cannot_work_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="heartbeat_seconds < fence_seconds < lease_seconds"):
        DispatchSettings(**fields)

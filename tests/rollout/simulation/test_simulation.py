"""R3, and the issue's simulation: nothing lost, nothing doubled, no session on two nodes at once. `make soak` runs the long ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from polynya.rollout.simulation import Report, large, rough, simulate
from polynya.rollout.simulation.node import SimulatedNode
from polynya.rollout.simulation.world import World

pytestmark = pytest.mark.faults
SEEDS = 60


@pytest.fixture(scope="module")
def histories(memory_folder: Path) -> list[Report]:
    return [simulate(rough(hours=0.05), seed, memory_folder / f"{seed}.db") for seed in range(SEEDS)]


def test_no_history_of_five_nodes_loses_or_doubles_a_session(histories: list[Report]) -> None:
    unsound = {report.seed: (report.lost, report.doubled, report.overlaps) for report in histories if not report.sound}
    assert unsound == {}, (
        "seed → (lost, doubled, overlaps); see it with scripts/simulate.py rough --hours 0.05 --seed N"
    )
    assert all(report.results == report.sessions for report in histories)


def test_the_histories_hold_everything_that_can_go_wrong(histories: list[Report]) -> None:
    faults: Counter[str] = Counter()
    counters: Counter[str] = Counter()
    for report in histories:
        faults.update(report.faults)
        counters.update(report.counters)
    assert {"kill", "freeze", "cut off", "server death", "cancelled task", "clock jump"} <= faults.keys()
    assert all(counters[name] for name in ("fenced", "repeated", "expired", "requeued", "nodes_gone", "cancelled"))
    assert sum(report.attempts for report in histories) > sum(report.sessions for report in histories)


def test_a_seed_gives_one_history(tmp_path: Path) -> None:
    first, again = (simulate(rough(hours=0.05), 7, tmp_path / f"{i}.db") for i in range(2))
    assert first == again
    assert simulate(rough(hours=0.05), 8, tmp_path / "2.db").attempts != first.attempts


def test_cluster_of_a_hundred_nodes_ends_all_its_sessions(
    memory_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = simulate(large(nodes=100, slots=8, sessions=5000), 1, memory_folder / "large.db")
    with capsys.disabled():
        print(
            f"\n100 nodes, 5,000 sessions: {report.lost} lost, {report.doubled} doubled, utilisation {report.utilisation:.1%}, "
            f"wait p50 {report.wait.p50:.0f} s, p99 {report.wait.p99:.0f} s, "
            f"again after a node's death p50 {report.redispatch.p50:.1f} s, max {report.redispatch.max:.1f} s"
        )
    assert report.sound
    assert (report.results, report.statuses) == (5000, {"completed": 5000})
    assert report.faults["kill"] > 10
    assert report.faults["freeze"] > 10


def test_node_that_does_not_fence_itself_is_seen(tmp_path: Path) -> None:
    """The simulation can tell: without fences a session runs on two nodes at once."""

    class Fearless(SimulatedNode):
        def _fence(self) -> None:
            pass

        def _arm_fence(self) -> None:
            pass

    plan = rough(hours=0.1)
    world = World(plan, 3, tmp_path / "r.db", node_type=Fearless)
    world.run()
    assert world.report(3).overlaps > 0
    assert world.report(3).lost == world.report(3).doubled == 0
    world.server.stop()


def test_result_that_is_lost_or_doubled_is_seen(tmp_path: Path) -> None:
    world = World(rough(hours=0.05), 3, tmp_path / "r.db")
    world.run()
    some = next(iter(world.server.accepted))
    world.server.accepted[some] += 1
    assert world.report(3).doubled == 1
    world.server.accepted["t99.0"] += 1
    assert world.report(3).lost == 1
    world.server.stop()

"""The clusters that are simulated in the tests and in ``scripts/simulate.py``."""

from __future__ import annotations

from polynya.rollout.simulation.plan import Faults, Plan

_ROUGH = Faults(
    drop=0.05,
    duplicate=0.05,
    late=0.05,
    freeze_every=120,
    freeze_seconds=40,
    kill_every=300,
    cut_every=180,
    server_every=240,
    infra=0.03,
    slow_nodes=0.2,
    cancel=0.1,
    clock_jump=3600,
)


def rough(hours: float) -> Plan:
    """Five nodes to which everything happens all the time, the server's death included; tasks come for so long."""
    minutes = hours * 60
    return Plan(
        nodes=5,
        slots=4,
        tasks=max(1, round(minutes * 2.5)),
        samples=8,
        run_seconds=20,
        arrival_seconds=minutes * 60,
        horizon_seconds=minutes * 60 + 7200,
        faults=_ROUGH,
    )


def large(nodes: int, slots: int, sessions: int) -> Plan:
    """A cluster as one hopes to have it: a node in a hundred dies or freezes each half minute, some engines are slow."""
    faults = Faults(
        drop=0.005,
        duplicate=0.005,
        late=0.005,
        freeze_every=3600,
        freeze_seconds=60,
        kill_every=3600,
        down_seconds=60,
        cut_every=3600,
        infra=0.01,
        slow_nodes=0.05,
    )
    return Plan(
        nodes=nodes, slots=slots, tasks=sessions // 10, samples=10, run_seconds=60, arrival_seconds=30, faults=faults
    )

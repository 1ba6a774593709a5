"""What is simulated, what befalls it, and what came of it. Times in virtual seconds."""

from __future__ import annotations

import msgspec

from polynya.config import DispatchSettings


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Probabilities are of one message or session; ``…_every`` is the mean time between two for one node, 0: never."""

    drop: float = 0.0
    duplicate: float = 0.0
    late: float = 0.0
    """Of a message to be held up by ``late_seconds`` at most."""
    late_seconds: float = 15.0
    freeze_every: float = 0.0
    freeze_seconds: float = 40.0
    kill_every: float = 0.0
    down_seconds: float = 30.0
    cut_every: float = 0.0
    """The node is cut off: it runs, and nothing reaches it or the server from it."""
    cut_seconds: float = 40.0
    server_every: float = 0.0
    """Mean time between two deaths of the server."""
    server_down_seconds: float = 12.0
    infra: float = 0.0
    """Of a session to end in an infrastructure failure of its task."""
    slow_nodes: float = 0.0
    """Share of nodes whose engine is ``slow_factor`` times slower."""
    slow_factor: float = 4.0
    cancel: float = 0.0
    """Of a task to be cancelled at some time."""
    clock_jump: float = 0.0
    """The server's wall clock jumps by up to so many seconds, to and fro, about once a minute."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    nodes: int
    slots: int
    """Sessions that a node runs at a time."""
    tasks: int
    samples: int
    run_seconds: float = 60.0
    """Mean; the times are log-normal, so some sessions take several times as long."""
    arrival_seconds: float = 60.0
    """Tasks are submitted evenly over this time."""
    horizon_seconds: float = 7200.0
    """What has no result by then is lost."""
    faults: Faults = Faults()
    settings: DispatchSettings = DispatchSettings()


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds."""

    p50: float = 0.0
    p99: float = 0.0
    max: float = 0.0


def spread(values: list[float]) -> Spread:
    if not values:
        return Spread()
    ordered = sorted(values)
    at = [ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.99)]
    return Spread(p50=round(at[0], 3), p99=round(at[1], 3), max=round(ordered[-1], 3))


class Report(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    sessions: int
    results: int
    lost: int
    """Sessions without a result, and groups without an end."""
    doubled: int
    """Sessions with two results, accepted or delivered, and groups with two ends."""
    overlaps: int
    """Times that a session began on a node while another, not frozen, still ran it."""
    attempts: int
    statuses: dict[str, int]
    counters: dict[str, int]
    """The dispatcher's, over all lives of the server."""
    faults: dict[str, int]
    """What befell it: kills, freezes, …"""
    utilisation: float
    """Of the slots of living nodes, while sessions waited that had never begun; 0 to 1. Means little where tasks are cancelled."""
    wait: Spread
    """From submission to the first start."""
    redispatch: Spread
    """From the death of a node to the next start of what it had."""
    virtual_seconds: float

    @property
    def sound(self) -> bool:
        return self.lost == self.doubled == self.overlaps == 0

"""A node's side of its leases: what it holds, until when, and when it must stop by itself.

Invariant: a session is never run longer than ``fence_seconds`` after the *sending* of the last request whose answer named it as
the node's own. The server takes a lease back later than that, so while the clocks of both run at one speed a session never runs twice.
Does no I/O; the node agent sends what this makes and tells it what came back. A result that is ready is no running session:
it is offered until it is answered, however long that takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec

from polynya.rollout.registry.base import Held, Renewal
from polynya.schema import Session


def boot_clock() -> float:
    """Seconds that also pass while the machine sleeps: a node that was suspended knows on waking how old its leases are."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class LeaseTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Durations that a server gives its nodes, in seconds."""

    lease_seconds: float
    heartbeat_seconds: float
    fence_seconds: float


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """A heartbeat to send. ``sent_at`` is the node's own clock and stays there."""

    number: int
    held: list[Held]
    sent_at: float


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What a heartbeat's answer asks of the node."""

    stop: list[Held] = []
    """Not its own any more: kill, report nothing."""
    cancel: list[Held] = []
    """End and report. Each is said once."""
    rejoin: bool = False
    """Register again, as another epoch."""
    draining: bool = False


class LeaseKeeper:
    """For one epoch of a node; once the server does not know it any more it holds nothing and takes nothing, so answers that come
    late, to requests of an epoch that is over, do no harm.

    ``clock`` is monotonic and goes on while the machine sleeps.
    """

    def __init__(self, terms: LeaseTerms, clock: Callable[[], float] = boot_clock) -> None:
        self._terms = terms
        self._clock = clock
        self._until: dict[Held, float] = {}
        self._finished: dict[Held, None] = {}
        self._cancelling: set[Held] = set()
        self._over = False
        self._beats = 0
        self._next_beat = clock() + terms.heartbeat_seconds

    def granted(self, sessions: Iterable[Session], asked_at: float) -> list[Session]:
        """Take over what a claim gave that was sent at ``asked_at``. Returns those that may be started; an answer that took
        too long gives none, and the server finds them unnamed and takes them back."""
        until = asked_at + self._terms.fence_seconds
        if self._over or until <= self._clock():
            return []
        taken = list(sessions)
        self._until.update((Held(session.session_id, session.attempt), until) for session in taken)
        return taken

    def beat(self) -> Beat:
        """The next heartbeat: all that runs, and all results that are not answered yet."""
        self._beats += 1
        now = self._clock()
        self._next_beat = now + self._terms.heartbeat_seconds
        return Beat(number=self._beats, held=[*self._until, *self._finished], sent_at=now)

    def renewed(self, beat: Beat, renewal: Renewal) -> Orders:
        """The answer to a heartbeat, in whatever order answers come."""
        if self._over:
            return Orders()
        if not renewal.known:
            return self.unknown()
        stop = self._drop(renewal.lost)
        for lease in renewal.lost:
            self._finished.pop(lease, None)
        if not renewal.stale:
            until = beat.sent_at + self._terms.fence_seconds
            for lease in beat.held:
                if lease in self._until:
                    self._until[lease] = max(self._until[lease], until)
        cancel = [lease for lease in renewal.cancel if lease in self._until and lease not in self._cancelling]
        self._cancelling.update(cancel)
        return Orders(stop=stop, cancel=cancel, draining=renewal.draining)

    def unknown(self) -> Orders:
        """The server does not know this epoch (the answer to a heartbeat or a claim). ``rejoin`` is said once."""
        first, self._over = not self._over, True
        self._finished.clear()
        return Orders(stop=self._drop(list(self._until)), rejoin=first)

    def finished(self, lease: Held) -> bool:
        """A session ended by itself. True: its result is to be reported. False: it was fenced or lost before."""
        if not self._drop([lease]):
            return False
        self._finished[lease] = None
        return True

    def reported(self, lease: Held) -> None:
        """The server answered its result."""
        self._finished.pop(lease, None)

    def fence(self) -> list[Held]:
        """Sessions to kill now, since nothing was renewed in time. They are not held any more."""
        now = self._clock()
        return self._drop([lease for lease, until in self._until.items() if until <= now])

    def fence_in(self) -> float | None:
        """Seconds until ``fence`` has something to kill; None: nothing runs."""
        return max(0.0, min(self._until.values()) - self._clock()) if self._until else None

    def beat_in(self) -> float:
        """Seconds until a heartbeat is due."""
        return max(0.0, self._next_beat - self._clock())

    @property
    def running(self) -> list[Held]:
        return list(self._until)

    @property
    def unreported(self) -> list[Held]:
        return list(self._finished)

    def _drop(self, leases: Iterable[Held]) -> list[Held]:
        dropped = [lease for lease in leases if self._until.pop(lease, None) is not None]
        self._cancelling.difference_update(dropped)
        return dropped

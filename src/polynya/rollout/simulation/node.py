"""A node: it joins, claims, renews, runs, reports, fences itself — through the real lease keeper. Only its work is made up."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from polynya.rollout.dispatch import BeatAnswer, ClaimAnswer, Dispatcher, Welcome
from polynya.rollout.lease import LeaseKeeper, Orders
from polynya.rollout.registry.base import Completed, Held, NodeHello
from polynya.rollout.simulation.events import Events
from polynya.schema import Session, SessionResult, Status

T = TypeVar("T")
Call = Callable[[Dispatcher], Coroutine[Any, Any, T]]

_TIMEOUT = 3.0
_CANCEL_SECONDS = 1.0


class Surroundings(Protocol):
    """What a node needs of the world."""

    events: Events

    def send(self, node: SimulatedNode, call: Call[T], answered: Callable[[T], None]) -> None:
        """Ask the server; ``answered`` is called never, once or twice, some time later."""
        ...

    def work(self, node: SimulatedNode, session: Session) -> tuple[float, SessionResult]:
        """How long a session will take there, and how it will end."""
        ...

    def began(self, node: SimulatedNode, session: Session) -> None: ...

    def ended(self, node: SimulatedNode, lease: Held) -> None: ...


class SimulatedNode:
    def __init__(self, world: Surroundings, name: str, slots: int, slowness: float, clock_offset: float) -> None:
        self.name = name
        self.slots = slots
        self.slowness = slowness
        self.alive = False
        self.frozen_until = 0.0
        self.cut_until = 0.0
        """No message comes or goes before."""
        self.runs: dict[Held, SessionResult] = {}
        self._world = world
        self._clock_offset = clock_offset
        self._process = self._life = self._epoch = 0
        self._keeper: LeaseKeeper | None = None
        self._claiming = False
        self._fence_armed = False

    @property
    def frozen(self) -> bool:
        return self._world.events.now < self.frozen_until

    def start(self) -> None:
        """A new life, as another epoch."""
        self.alive = True
        self._life += 1
        self._epoch += 1
        self._keeper, self._claiming, self._fence_armed = None, False, False
        self._join()

    def kill(self) -> None:
        self.alive = False
        self._process += 1
        self._life += 1
        for lease in list(self.runs):
            self._end(lease)

    def freeze(self, seconds: float) -> None:
        self.frozen_until = self._world.events.now + seconds

    # --- time and messages

    def _clock(self) -> float:
        """Its own, which the server's has nothing to do with."""
        return self._world.events.now + self._clock_offset

    def _after(self, delay: float, what: Callable[[], None]) -> None:
        """In this epoch; what falls into a freeze happens at its end."""
        life = self._life
        self._later(delay, what, lambda: life == self._life)

    def _later(self, delay: float, what: Callable[[], None], still: Callable[[], bool]) -> None:
        events = self._world.events

        def fire() -> None:
            if not still():
                return
            if self.frozen:
                events.at(self.frozen_until, fire)
                return
            self._fence()
            what()

        events.after(delay, fire)

    def _ask(self, call: Call[T], answered: Callable[[T], None], failed: Callable[[], None] | None = None) -> None:
        """With ``failed``: one answer within the time-out, or none. Without: all answers, whenever they come."""
        over = False

        def take(answer: T) -> None:
            nonlocal over
            if not over:
                over = failed is not None
                answered(answer)

        def give_up() -> None:
            nonlocal over
            if not over and failed is not None:
                over = True
                failed()

        process = self._process
        # an answer of an earlier epoch still reaches the process: the lease keeper has to cope
        self._world.send(
            self, call, lambda answer: self._later(0.0, lambda: take(answer), lambda: process == self._process)
        )
        if failed is not None:
            self._after(_TIMEOUT, give_up)

    # --- the protocol

    def _join(self) -> None:
        hello = NodeHello(node=self.name, epoch=self._epoch, capacity=self.slots)
        self._ask(lambda d: d.join(hello), lambda welcome: self._joined(welcome, hello.epoch), failed=self._join)

    def _joined(self, welcome: Welcome, epoch: int) -> None:
        if epoch != self._epoch or self._keeper is not None:
            return
        if not welcome.accepted:
            self._epoch = welcome.epoch + 1
            self._join()
            return
        self._keeper = LeaseKeeper(welcome.terms, self._clock)
        self._beat_later()
        self._claim()

    def _beat_later(self) -> None:
        if self._keeper is not None:
            self._after(self._keeper.beat_in(), self._beat)

    def _beat(self) -> None:
        keeper, epoch = self._keeper, self._epoch
        if keeper is None:
            return
        beat = keeper.beat()

        def answered(answer: BeatAnswer) -> None:
            self._obey(keeper.renewed(beat, answer.renewal))

        self._ask(lambda d: d.beat(self.name, epoch, beat.number, beat.held), answered)
        self._beat_later()

    def _obey(self, orders: Orders) -> None:
        for lease in orders.stop:
            self._end(lease)
        if orders.rejoin:
            self.start()
            return
        for lease in orders.cancel:
            self._after(_CANCEL_SECONDS, lambda lease=lease: self._finish(lease, Status.CANCELLED))  # type: ignore[misc]
        self._arm_fence()

    def _claim(self) -> None:
        keeper, free = self._keeper, self.slots - len(self.runs)
        if keeper is None or self._claiming or free < 1:
            return
        self._claiming = True
        asked_at, epoch = self._clock(), self._epoch

        def answered(answer: ClaimAnswer) -> None:
            if not answer.known:
                self._obey(keeper.unknown())
                return
            for session in keeper.granted(answer.sessions, asked_at):
                self._run(session)
            self._arm_fence()
            if keeper is self._keeper:
                self._claim_after(answer.wait_seconds or 0.5)

        self._ask(lambda d: d.claim(self.name, epoch, free), answered, failed=lambda: self._claim_after(0.5))

    def _claim_after(self, seconds: float) -> None:
        def again() -> None:
            self._claiming = False
            self._claim()

        self._after(seconds, again)

    def _run(self, session: Session) -> None:
        seconds, result = self._world.work(self, session)
        lease = Held(session.session_id, session.attempt)
        self.runs[lease] = result
        self._world.began(self, session)
        self._after(seconds, lambda: self._finish(lease, result.status))

    def _finish(self, lease: Held, status: Status) -> None:
        keeper, result = self._keeper, self.runs.get(lease)
        if keeper is None or result is None or not keeper.finished(lease):
            return
        self._end(lease)
        self._report(keeper, lease, result if status == result.status else _cancelled(result))
        self._claim()

    def _report(self, keeper: LeaseKeeper, lease: Held, result: SessionResult) -> None:
        def answered(answer: Completed) -> None:
            keeper.reported(lease)

        self._ask(lambda d: d.complete(self.name, result), answered, failed=lambda: self._report(keeper, lease, result))

    # --- fencing

    def _arm_fence(self) -> None:
        keeper = self._keeper
        left = keeper.fence_in() if keeper is not None else None
        if left is None or self._fence_armed:
            return
        self._fence_armed = True

        def fire() -> None:
            self._fence_armed = False
            self._fence()
            self._arm_fence()

        self._after(left, fire)

    def _fence(self) -> None:
        """Before anything else that the node does: after a freeze its leases are over before it knows."""
        if self._keeper is not None:
            for lease in self._keeper.fence():
                self._end(lease)

    def _end(self, lease: Held) -> None:
        if self.runs.pop(lease, None) is not None:
            self._world.ended(self, lease)


def _cancelled(result: SessionResult) -> SessionResult:
    return SessionResult(
        session_id=result.session_id,
        task_id=result.task_id,
        group_id=result.group_id,
        sample_index=result.sample_index,
        attempt=result.attempt,
        status=Status.CANCELLED,
        reward=None,
        provenance=result.provenance,
    )

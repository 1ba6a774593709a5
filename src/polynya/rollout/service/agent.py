"""A gateway node at work: it joins, pulls sessions, keeps its leases, reports results, and stops by itself when nobody answers.

Invariant: a session runs only while ``LeaseKeeper`` says that it is this node's; what is fenced is killed and never reported. A
result is offered until the server answers. Its rows are in the archive before it is offered. Decides nothing about retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import msgspec

from polynya.errors import PolynyaError, RegistryError, ServerUnreachable
from polynya.node import Node, SessionHandle, SessionOutput
from polynya.node.job import error_info
from polynya.rollout.lease import LeaseKeeper, Orders
from polynya.rollout.registry.base import Held, NodeHello
from polynya.rollout.service.archive import Archive
from polynya.rollout.service.control import Control
from polynya.schema import Session, SessionResult, Status

T = TypeVar("T")
_log = logging.getLogger("polynya.node")
_CLAIM_WAIT = 20.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_AWAY = 1.0


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    capacity: int
    """Sessions that it takes at a time: those that run and those that wait prepared."""
    model: str = ""
    url: str = ""
    labels: dict[str, str] = {}


class NodeAgent:
    """``clock``: monotonic, through suspends. ``epochs``: gives a higher number with each call, across lives of the machine."""

    def __init__(
        self,
        control: Control,
        node: Node,
        archive: Archive,
        settings: AgentSettings,
        *,
        clock: Callable[[], float],
        epochs: Callable[[], int],
    ) -> None:
        self._control = control
        self._node = node
        self._archive = archive
        self._settings = settings
        self._clock = clock
        self._epochs = epochs
        self._runs: dict[Held, SessionHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._draining = False
        self._epoch = 0

    @property
    def running(self) -> list[Held]:
        return list(self._runs)

    def drain(self) -> None:
        """Take nothing new. ``run`` ends when all that it has is reported."""
        self._draining = True
        self._idle.set()

    async def run(self) -> None:
        """Until it is drained; cancelling it kills what runs, which the server then gives to others."""
        try:
            while not (self._draining and not self._tasks):
                keeper = await self._join()
                await self._life(keeper)
        finally:
            await self._stop()

    async def _join(self) -> LeaseKeeper:
        s = self._settings
        self._epoch = max(self._epoch + 1, self._epochs())
        while True:
            hello = NodeHello(
                node=s.name, epoch=self._epoch, capacity=s.capacity, model=s.model, url=s.url, labels=s.labels
            )
            welcome = await self._answered(lambda hello=hello: self._control.join(hello))  # type: ignore[misc]
            if welcome.accepted:
                return LeaseKeeper(welcome.terms, self._clock)
            self._epoch = welcome.epoch + 1

    async def _life(self, keeper: LeaseKeeper) -> None:
        """One epoch: until the server does not know it any more, or until it is drained and empty."""
        workers = [
            asyncio.create_task(work(keeper), name=f"{name} of {self._settings.name}")
            for name, work in (
                ("beats", self._beats),
                ("claims", self._claims),
                ("fence", self._fences),
                ("presence", self._attend),
            )
        ]
        try:
            done, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in workers:
                task.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _beats(self, keeper: LeaseKeeper) -> None:
        while True:
            await asyncio.sleep(keeper.beat_in())
            beat = keeper.beat()
            try:
                answer = await self._control.beat(self._settings.name, self._epoch, beat.number, beat.held)
            except (ServerUnreachable, RegistryError) as exc:
                _log.warning("node %s: no answer to a heartbeat: %s", self._settings.name, exc.message)
                continue
            if self._obey(keeper.renewed(beat, answer.renewal)):
                return

    async def _claims(self, keeper: LeaseKeeper) -> None:
        while True:
            if self._draining:
                while self._tasks:
                    await asyncio.wait(self._tasks)
                return
            free = self._settings.capacity - len(self._runs)
            if free < 1:
                self._idle.clear()
                await self._idle.wait()
                continue
            asked_at = self._clock()
            answer = await self._answered(
                lambda free=free: self._control.claim(self._settings.name, self._epoch, free, _CLAIM_WAIT)  # type: ignore[misc]
            )
            if not answer.known:
                self._obey(keeper.unknown())
                return
            # a claim that was held back for long is as old as its asking: the keeper refuses it, and the server takes it back
            for session in keeper.granted(answer.sessions, asked_at):
                self._start(keeper, session)
            if not answer.sessions and answer.policy.paused:
                await asyncio.sleep(answer.wait_seconds)

    async def _attend(self, keeper: LeaseKeeper) -> None:
        while True:
            with contextlib.suppress(ServerUnreachable):
                await self._control.attend(self._settings.name, self._epoch)
            await asyncio.sleep(_AWAY)

    async def _fences(self, keeper: LeaseKeeper) -> None:
        while True:
            left = keeper.fence_in()
            await asyncio.sleep(1.0 if left is None else min(left, 1.0))
            lost = keeper.fence()
            if lost:
                _log.error(
                    "node %s: no lease was renewed in time, %d sessions are killed", self._settings.name, len(lost)
                )
                self._kill(lost)

    def _obey(self, orders: Orders) -> bool:
        """True: this epoch is over."""
        self._kill(orders.stop)
        for lease in orders.cancel:
            if (handle := self._runs.get(lease)) is not None:
                handle.cancel()
        if orders.draining:
            self.drain()
        return orders.rejoin

    def _kill(self, leases: Iterable[Held]) -> None:
        """Not this node's any more: ended, and not reported (the keeper holds them no longer)."""
        for lease in leases:
            if (handle := self._runs.get(lease)) is not None:
                handle.cancel()

    def _start(self, keeper: LeaseKeeper, session: Session) -> None:
        lease = Held(session.session_id, session.attempt)
        handle = self._runs[lease] = self._node.submit(session)
        task = asyncio.create_task(self._follow(keeper, lease, handle), name=f"session {session.session_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, keeper: LeaseKeeper, lease: Held, handle: SessionHandle) -> None:
        try:
            output = await handle.output()
        finally:
            self._runs.pop(lease, None)
            self._idle.set()
        result, reference = await self._archived(output)
        if not keeper.finished(lease):
            _log.warning("session %s, attempt %d: lost before it ended, not reported", lease.session_id, lease.attempt)
            return
        answer = await self._answered(lambda: self._control.complete(self._settings.name, result, reference))
        keeper.reported(lease)
        _log.info("session %s, attempt %d: %s, %s", lease.session_id, lease.attempt, result.status, answer.outcome)

    async def _archived(self, output: SessionOutput) -> tuple[SessionResult, str | None]:
        """Without its rows a session has no result: then it failed for infrastructure."""
        if output.trajectory is None:
            return output.result, None
        try:
            return output.result, await asyncio.to_thread(self._archive.put, output.result, output.trajectory)
        except PolynyaError as exc:
            lost = msgspec.structs.replace(
                output.result, status=Status.INFRA_ERROR, reward=None, error=error_info(exc), num_traces=0
            )
            return lost, None

    async def _answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask until there is an answer."""
        pause = _FIRST_PAUSE
        while True:
            try:
                return await ask()
            except (ServerUnreachable, RegistryError) as exc:
                _log.warning("node %s: %s; asked again in %g s", self._settings.name, exc.message, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _stop(self) -> None:
        for handle in self._runs.values():
            handle.cancel()
        outputs = [handle.task for handle in self._runs.values() if handle.task is not None]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *outputs, return_exceptions=True)
        with contextlib.suppress(PolynyaError):
            await self._control.leave(self._settings.name, self._epoch)

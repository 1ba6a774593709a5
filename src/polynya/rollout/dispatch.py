"""The dispatcher: who gets work, who is trusted with it, what is let in.

Invariant: it changes nothing but through the registry, and what it keeps in memory (which node failed of late, how fast results
come) may be forgotten at any time: a restart loses speed, never a task. Reads no clock but the one that it is given; knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import msgspec

from polynya.config import DispatchSettings
from polynya.errors import QueueFull
from polynya.rollout.lease import LeaseTerms
from polynya.rollout.registry.base import (
    Callback,
    Cancelled,
    Completed,
    Completion,
    Expiry,
    Held,
    NodeHello,
    NodeState,
    Outcome,
    Policy,
    Recovery,
    Registry,
    Renewal,
    Submitted,
)
from polynya.rollout.retry import node_is_to_blame, worth_a_retry
from polynya.schema import Session, SessionResult, TaskSpec

_RETRY_AFTER_MAX = 60.0
_RATE_WINDOW = 30.0


@dataclass
class Metrics:
    """Since the start of this server."""

    submitted: int = 0
    refused: int = 0
    """Submissions that met a full queue."""
    claims: int = 0
    """Requests of nodes for work."""
    claimed: int = 0
    """Sessions given out, each attempt counted."""
    renewals: int = 0
    completed: int = 0
    """Completions that became a session's result."""
    repeated: int = 0
    """Completions that were told again."""
    fenced: int = 0
    """Completions of attempts that did not hold their session."""
    requeued: int = 0
    """Sessions that wait again after an infrastructure failure."""
    expired: int = 0
    """Sessions taken back from a node that did not renew, left or dropped them."""
    nodes_gone: int = 0
    cancelled: int = 0
    """Sessions that waited and were cancelled."""

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    accepted: bool
    """False: join again, with an epoch above ``epoch``."""
    epoch: int
    terms: LeaseTerms
    policy: Policy


class ClaimAnswer(msgspec.Struct, frozen=True, kw_only=True):
    known: bool
    """False: register first."""
    sessions: list[Session] = []
    wait_seconds: float = 0.0
    """When nothing was given: ask again after so long, or when there is work."""
    policy: Policy


class BeatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    renewal: Renewal
    policy: Policy


class Bell:
    """Wakes those who wait for something to have happened. ``count`` rises with each ring."""

    def __init__(self) -> None:
        self.count = 0
        self._waiting: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        self.count += 1
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def wait(self, seen: int, timeout: float) -> bool:
        """Until ``count`` is above ``seen``. False: it was not within ``timeout`` seconds."""
        if self.count > seen:
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await future
        self._waiting.discard(future)
        return self.count > seen


@dataclass
class _Health:
    errors: int
    until: float
    probing: bool = False
    """A session was given to see whether the node works again."""


class Dispatcher:
    """Drives one registry. ``clock`` is monotonic; ``tick`` is to be called about twice a second."""

    def __init__(
        self, registry: Registry, settings: DispatchSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.registry = registry
        self.settings = settings
        self.metrics = Metrics()
        self.work = Bell()
        """Rings when there may be something to claim."""
        self.delivered = Bell()
        """Rings when there is a new delivery."""
        self._clock = clock
        self._policies: dict[str, Policy] = {}
        self._models: dict[str, str] = {}
        self._health: dict[str, _Health] = {}
        self._rate = _Rate(clock())

    @property
    def terms(self) -> LeaseTerms:
        s = self.settings
        return LeaseTerms(
            lease_seconds=s.lease_seconds, heartbeat_seconds=s.heartbeat_seconds, fence_seconds=s.fence_seconds
        )

    async def start(self) -> Recovery:
        """Goes on where an earlier server ended."""
        recovery = await self.registry.start(self._clock(), self.settings.lease_seconds)
        self._policies = {policy.model: policy for policy in await self.registry.policies()}
        self._models = {node.node: node.model for node in await self.registry.nodes() if node.state != NodeState.GONE}
        return recovery

    # --- tasks ---------------------------------------------------------------------------------------------------

    async def submit(self, task: TaskSpec) -> Submitted:
        """Raises TaskConflict, QueueFull (with ``retry_after``)."""
        try:
            submitted = await self.registry.submit(task, max_queued=self.settings.max_queued)
        except QueueFull as exc:
            self.metrics.refused += 1
            raise QueueFull(exc.message, fix=exc.fix, retry_after=self._retry_after()) from exc
        if submitted.created:
            self.metrics.submitted += 1
            self.work.ring()
        return submitted

    def _retry_after(self) -> float:
        """Until about a hundredth of the queue is gone, at the speed of the last half minute."""
        rate = self._rate.per_second(self._clock())
        wanted = max(1.0, self.settings.max_queued / 100)
        return min(_RETRY_AFTER_MAX, max(1.0, wanted / rate)) if rate > 0 else _RETRY_AFTER_MAX / 2

    async def cancel_task(self, task_id: str) -> Cancelled:
        """Raises UnknownRecord."""
        return self._cancelled(await self.registry.cancel_task(task_id))

    async def cancel_session(self, session_id: str) -> Cancelled:
        """Raises UnknownRecord."""
        return self._cancelled(await self.registry.cancel_session(session_id))

    def _cancelled(self, cancelled: Cancelled) -> Cancelled:
        self.metrics.cancelled += cancelled.ended
        if cancelled.ended:
            self.delivered.ring()
        return cancelled

    # --- nodes ---------------------------------------------------------------------------------------------------

    async def join(self, hello: NodeHello) -> Welcome:
        """A node registers. What an earlier epoch of it held waits again."""
        registered = await self.registry.register(hello, self._clock(), self.settings.lease_seconds)
        if registered.accepted:
            self._taken_back(registered.taken_back)
            self._models[hello.node] = hello.model
        return Welcome(
            accepted=registered.accepted, epoch=registered.epoch, terms=self.terms, policy=self.policy(hello.model)
        )

    async def claim(self, node: str, epoch: int, slots: int) -> ClaimAnswer:
        """Up to ``slots`` sessions; none while the policy of the node is paused or the node has to prove itself."""
        self.metrics.claims += 1
        now, policy, health = self._clock(), self.policy(self._models.get(node, "")), self._health.get(node)
        pause = self.settings.heartbeat_seconds
        if policy.paused or slots < 1:
            return ClaimAnswer(known=node in self._models, wait_seconds=pause, policy=policy)
        if health is not None:
            if now < health.until:
                return ClaimAnswer(known=node in self._models, wait_seconds=health.until - now, policy=policy)
            slots = 1
        claimed = await self.registry.claim(
            node, epoch, slots, now, self.settings.lease_seconds, max_leased=self.settings.max_leased
        )
        self.metrics.claimed += len(claimed.sessions)
        if health is not None and claimed.sessions:
            health.until, health.probing = now + self._probe(health.errors), True
        return ClaimAnswer(
            known=claimed.known,
            sessions=claimed.sessions,
            wait_seconds=0.0 if claimed.sessions else pause,
            policy=policy,
        )

    async def beat(self, node: str, epoch: int, number: int, held: list[Held]) -> BeatAnswer:
        """A heartbeat. Answers what the node still has, and what it must end."""
        self.metrics.renewals += 1
        lease = self.settings.lease_seconds
        renewal = await self.registry.renew(node, epoch, number, held, self._clock(), lease)
        if renewal.dropped:
            self.metrics.expired += len(renewal.dropped)
            self.work.ring()
            self.delivered.ring()
        return BeatAnswer(renewal=renewal, policy=self.policy(self._models.get(node, "")))

    async def complete(self, node: str, result: SessionResult, trajectory: str | None = None) -> Completed:
        """A node reports how an attempt ended. Raises UnknownRecord."""
        completed = await self.registry.complete(
            Completion(node=node, result=result, retry=worth_a_retry(result), trajectory=trajectory)
        )
        if completed.outcome == Outcome.FENCED:
            self.metrics.fenced += 1
        elif completed.outcome == Outcome.REPEATED:
            self.metrics.repeated += 1
        else:
            self._judge(node, result)
            self._ended(completed.outcome)
        return completed

    def _ended(self, outcome: Outcome) -> None:
        self.work.ring()
        if outcome == Outcome.REQUEUED:
            self.metrics.requeued += 1
            return
        self.metrics.completed += 1
        self._rate.add(self._clock())
        self.delivered.ring()

    def _judge(self, node: str, result: SessionResult) -> None:
        """All failures of one outage are one error: only that of a probe, or one after the wait, is a further one."""
        if not node_is_to_blame(result):
            self._health.pop(node, None)
            return
        now, health = self._clock(), self._health.setdefault(node, _Health(0, -math.inf))
        if health.probing or now >= health.until:
            health.errors += 1
            health.until, health.probing = now + self._probe(health.errors), False

    def _probe(self, errors: int) -> float:
        return min(self.settings.probe_max_seconds, self.settings.probe_seconds * 2.0 ** min(errors - 1, 30))

    async def suspect(self, node: str) -> bool:
        """Somebody saw an error at this node: no new work, and unless it renews soon what it has is given to others."""
        return await self.registry.suspect(node, self._clock() + self.settings.suspect_seconds)

    async def drain(self, node: str) -> bool:
        return await self.registry.drain(node)

    async def leave(self, node: str, epoch: int | None = None) -> Expiry:
        """A node ended, or is known to be dead."""
        return self._taken_back(await self.registry.leave(node, epoch))

    async def tick(self) -> Expiry:
        """Take back what was not renewed in time."""
        return self._taken_back(await self.registry.expire(self._clock()))

    def _taken_back(self, expiry: Expiry) -> Expiry:
        self.metrics.nodes_gone += len(expiry.gone)
        self.metrics.expired += len(expiry.requeued) + len(expiry.ended)
        for node in expiry.gone:
            self._models.pop(node, None)
            self._health.pop(node, None)
        if expiry.requeued:
            self.work.ring()
        if expiry.ended:
            self.delivered.ring()
        return expiry

    # --- policy --------------------------------------------------------------------------------------------------

    def policy(self, model: str = "") -> Policy:
        """What a node with this model serves now."""
        return self._policies.get(model) or Policy(model=model)

    async def set_policy(self, version: str, model: str = "") -> Policy:
        return await self._set(model, version=version)

    async def pause(self, model: str = "") -> Policy:
        """Nothing new is given out; what runs is held by its gateway."""
        return await self._set(model, paused=True)

    async def resume(self, model: str = "", version: str | None = None) -> Policy:
        return await self._set(model, version=version, paused=False)

    async def _set(self, model: str, *, version: str | None = None, paused: bool | None = None) -> Policy:
        policy = self._policies[model] = await self.registry.set_policy(model, version=version, paused=paused)
        self.work.ring()
        return policy

    # --- callbacks -----------------------------------------------------------------------------------------------

    async def callbacks(self, limit: int = 100) -> list[Callback]:
        """Those that are due. Each is then ``callback_sent`` or ``callback_failed``; until then it is given again."""
        return await self.registry.callbacks(self._clock(), limit)

    async def callback_failed(self, callback: Callback, error: str) -> float | None:
        """Returns the seconds until the next try; None: given up."""
        s = self.settings
        if callback.tries + 1 >= s.callback_tries:
            await self.registry.callback_failed(callback.delivery_id, error, None)
            return None
        wait = min(s.callback_max_seconds, s.callback_seconds * 2.0 ** min(callback.tries, 30))
        await self.registry.callback_failed(callback.delivery_id, error, self._clock() + wait)
        return wait


class _Rate:
    """Events a second, those of long ago counting less and less."""

    def __init__(self, now: float) -> None:
        self._value = 0.0
        self._at = now

    def add(self, now: float) -> None:
        self._value = self.per_second(now) + 1.0 / _RATE_WINDOW
        self._at = now

    def per_second(self, now: float) -> float:
        return self._value * math.exp((self._at - now) / _RATE_WINDOW)

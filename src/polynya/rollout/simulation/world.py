"""The rest of a simulation: the network, the server and its deaths, the faults, and the book of what really happened."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from polynya.rollout.dispatch import Dispatcher
from polynya.rollout.registry import InlineWorker, open_registry
from polynya.rollout.registry.base import Completed, DeliveryKind, Held, Outcome
from polynya.rollout.simulation.events import Events, drive
from polynya.rollout.simulation.node import SimulatedNode
from polynya.rollout.simulation.plan import Plan, Report, spread
from polynya.schema import ErrorInfo, HarnessSpec, Provenance, Session, SessionResult, Status, TaskSpec

T = TypeVar("T")

_TICK = 0.5
_PAGE = 5000


class Witnessed(Dispatcher):
    """The dispatcher, and somebody who counts which completions it accepted."""

    accepted: Counter[str]

    async def complete(self, node: str, result: SessionResult, trajectory: str | None = None) -> Completed:
        completed = await super().complete(node, result, trajectory)
        if completed.outcome == Outcome.ACCEPTED:
            self.accepted[result.session_id] += 1
        return completed


class Server:
    """A dispatcher over a registry in a file, and its deaths. Each life has a clock of its own."""

    def __init__(self, plan: Plan, path: Path, events: Events, rng: random.Random) -> None:
        self._plan = plan
        self._path = path
        self._events = events
        self._rng = rng
        self._retired: Counter[str] = Counter()
        self.wall = 1.7e9
        self.accepted: Counter[str] = Counter()
        """Session → completions that were taken as its result, in all lives."""
        self.dispatcher: Witnessed | None = None

    def start(self) -> None:
        offset = self._rng.uniform(-1e6, 1e6)
        registry = open_registry(
            self._path, self._plan.settings, workers=(InlineWorker(), InlineWorker()), wall=lambda: self.wall
        )
        self.dispatcher = Witnessed(registry, self._plan.settings, lambda: self._events.now + offset)
        self.dispatcher.accepted = self.accepted
        drive(self.dispatcher.start())

    def stop(self) -> None:
        if self.dispatcher is not None:
            self._retired.update(self.dispatcher.metrics.as_dict())
            drive(self.dispatcher.registry.close())
            self.dispatcher = None

    def counters(self) -> dict[str, int]:
        current = self.dispatcher.metrics.as_dict() if self.dispatcher else dict.fromkeys(self._retired, 0)
        return {name: self._retired[name] + value for name, value in current.items()}


class World:
    def __init__(self, plan: Plan, seed: int, path: Path, *, node_type: type[SimulatedNode] = SimulatedNode) -> None:
        self.plan = plan
        self.events = Events()
        self.rng = random.Random(seed)
        self.server = Server(plan, path, self.events, self.rng)
        self.happened: Counter[str] = Counter()
        self.submitted: dict[str, float] = {}
        self.waits: list[float] = []
        self.redispatches: list[float] = []
        self.attempts = self.overlaps = 0
        self._begun: set[str] = set()
        self._orphaned: dict[str, float] = {}
        self._running: dict[str, list[SimulatedNode]] = {}
        self._to_submit = plan.tasks
        self._busy = self._alive = self._done = 0
        self._area = self._capacity_area = self._measured_at = 0.0
        slow = round(plan.nodes * plan.faults.slow_nodes)
        self.nodes = [
            node_type(
                self, f"n{i}", plan.slots, plan.faults.slow_factor if i < slow else 1.0, self.rng.uniform(-1e5, 1e5)
            )
            for i in range(plan.nodes)
        ]

    # --- what nodes need

    def send(
        self,
        node: SimulatedNode,
        call: Callable[[Dispatcher], Coroutine[Any, Any, T]],
        answered: Callable[[T], None],
    ) -> None:
        def arrive() -> None:
            if self.server.dispatcher is not None:
                answer = drive(call(self.server.dispatcher))
                self._carry(node, lambda: answered(answer))

        for _ in range(1 + (self.rng.random() < self.plan.faults.duplicate)):
            self._carry(node, arrive)

    def _carry(self, node: SimulatedNode, arrived: Callable[[], None]) -> None:
        """One message, either way."""
        if self.events.now >= node.cut_until and self.rng.random() >= self.plan.faults.drop:
            self.events.after(self._latency(), arrived)

    def _latency(self) -> float:
        late = self.rng.random() < self.plan.faults.late
        return self.rng.uniform(0.0, self.plan.faults.late_seconds) if late else self.rng.expovariate(50.0)

    def work(self, node: SimulatedNode, session: Session) -> tuple[float, SessionResult]:
        failed = self.rng.random() < self.plan.faults.infra
        error = ErrorInfo(kind="WorkspaceError", boundary="runtime", message="simulated") if failed else None
        result = SessionResult(
            session_id=session.session_id,
            task_id=session.task.task_id,
            group_id=session.group_id,
            sample_index=session.sample_index,
            attempt=session.attempt,
            status=Status.INFRA_ERROR if failed else Status.COMPLETED,
            reward=None if failed else 1.0,
            error=error,
            provenance=Provenance(polynya="simulated"),
        )
        return self.rng.lognormvariate(-0.32, 0.8) * self.plan.run_seconds * node.slowness, result

    def began(self, node: SimulatedNode, session: Session) -> None:
        self._measure()
        self._busy += 1
        self.attempts += 1
        name = session.session_id
        if name not in self._begun:
            self._begun.add(name)
            self.waits.append(self.events.now - self.submitted[name])
        if name in self._orphaned:
            self.redispatches.append(self.events.now - self._orphaned.pop(name))
        others = self._running.setdefault(name, [])
        self.overlaps += sum(not other.frozen for other in others)
        others.append(node)

    def ended(self, node: SimulatedNode, lease: Held) -> None:
        self._measure()
        self._busy -= 1
        self._running[lease.session_id].remove(node)
        if not self._running[lease.session_id]:
            del self._running[lease.session_id]
        if not node.alive:
            self._orphaned[lease.session_id] = self.events.now

    def _measure(self) -> None:
        """Slot-seconds used and there, while something waits that never began."""
        now = self.events.now
        if len(self._begun) < len(self.submitted):
            self._area += self._busy * (now - self._measured_at)
            self._capacity_area += self._alive * self.plan.slots * (now - self._measured_at)
        self._measured_at = now

    # --- the course of things

    def run(self) -> None:
        plan, faults, events = self.plan, self.plan.faults, self.events
        self.server.start()
        for i in range(plan.tasks):
            self._submit_at(i, plan.arrival_seconds * i / plan.tasks)
        for node in self.nodes:
            events.after(self.rng.uniform(0.0, 2.0), partial(self._up, node))
            for every, what in (
                (faults.freeze_every, self._freeze), (faults.kill_every, self._kill), (faults.cut_every, self._cut)
            ):  # fmt: skip
                self._now_and_then(every, partial(what, node))
        self._now_and_then(faults.server_every, self._server_dies)
        self._now_and_then(60.0 if faults.clock_jump else 0.0, self._clock_jumps)
        self._tick()
        events.run(plan.horizon_seconds, self._over)
        if self.server.dispatcher is None:
            self.server.start()

    def _tick(self) -> None:
        if self.server.dispatcher is not None:
            drive(self.server.dispatcher.tick())
            counts = drive(self.server.dispatcher.registry.counts())
            self._done = counts.done
        self.events.after(_TICK, self._tick)

    def _over(self) -> bool:
        return self._to_submit == 0 and self._done == self.plan.tasks * self.plan.samples

    def _submit_at(self, index: int, when: float) -> None:
        task = TaskSpec(
            task_id=f"t{index}",
            instruction="simulated",
            harness=HarnessSpec(name="shell"),
            num_samples=self.plan.samples,
            retries=2,
        )

        def submit() -> None:
            dispatcher = self.server.dispatcher
            if dispatcher is None:
                self.events.after(1.0, submit)
                return
            self._measure()
            drive(dispatcher.submit(task))
            self._to_submit -= 1
            self.submitted.update((f"{task.task_id}.{i}", self.events.now) for i in range(task.num_samples))
            if self.rng.random() < self.plan.faults.cancel:
                self.events.after(self.rng.uniform(0.0, 2 * self.plan.run_seconds), cancel)

        def cancel() -> None:
            if self.server.dispatcher is not None:
                drive(self.server.dispatcher.cancel_task(task.task_id))
                self.happened["cancelled task"] += 1

        self.events.at(when, submit)

    def _now_and_then(self, mean: float, what: Callable[[], None]) -> None:
        """Again and again, at random times."""
        if mean <= 0:
            return

        def fire() -> None:
            what()
            self.events.after(self.rng.expovariate(1.0 / mean), fire)

        self.events.after(self.rng.expovariate(1.0 / mean), fire)

    def _up(self, node: SimulatedNode) -> None:
        self._measure()
        self._alive += 1
        node.start()

    def _kill(self, node: SimulatedNode) -> None:
        if node.alive:
            self.happened["kill"] += 1
            node.kill()
            self._measure()
            self._alive -= 1
            self.events.after(self.rng.expovariate(1.0 / self.plan.faults.down_seconds), lambda: self._up(node))

    def _cut(self, node: SimulatedNode) -> None:
        if node.alive:
            self.happened["cut off"] += 1
            node.cut_until = self.events.now + self.rng.uniform(0.0, self.plan.faults.cut_seconds)

    def _freeze(self, node: SimulatedNode) -> None:
        if node.alive and not node.frozen:
            self.happened["freeze"] += 1
            node.freeze(self.rng.uniform(0.0, self.plan.faults.freeze_seconds))

    def _server_dies(self) -> None:
        if self.server.dispatcher is not None:
            self.happened["server death"] += 1
            self.server.stop()
            self.events.after(self.rng.uniform(0.0, self.plan.faults.server_down_seconds), self.server.start)

    def _clock_jumps(self) -> None:
        self.happened["clock jump"] += 1
        jump = self.plan.faults.clock_jump
        self.server.wall += self.rng.uniform(-jump, jump)

    # --- what came of it

    def report(self, seed: int) -> Report:
        dispatcher = self.server.dispatcher
        if dispatcher is None:
            raise RuntimeError("run first")
        delivered: Counter[str] = Counter()
        ended: Counter[str] = Counter()
        statuses: Counter[str] = Counter()
        cursor = 0
        while page := drive(dispatcher.registry.results(cursor, _PAGE)):
            cursor = page[-1].cursor
            for delivery in page:
                (delivered if delivery.kind == DeliveryKind.SESSION else ended)[delivery.delivery_id] += 1
                if delivery.result is not None:
                    statuses[delivery.result.status] += 1
        sessions, groups = self.plan.tasks * self.plan.samples, self.plan.tasks
        twice = sum(n > 1 for book in (delivered, ended, self.server.accepted) for n in book.values())
        return Report(
            seed=seed,
            sessions=sessions,
            results=len(delivered),
            lost=(sessions - len(delivered))
            + (groups - len(ended))
            + sum(k not in delivered for k in self.server.accepted),
            doubled=twice,
            overlaps=self.overlaps,
            attempts=self.attempts,
            statuses={str(status): n for status, n in sorted(statuses.items())},
            counters=self.server.counters(),
            faults=dict(sorted(self.happened.items())),
            utilisation=round(self._area / self._capacity_area, 4) if self._capacity_area else 0.0,
            wait=spread(self.waits),
            redispatch=spread(self.redispatches),
            virtual_seconds=round(self.events.now, 3),
        )


def simulate(plan: Plan, seed: int, path: Path) -> Report:
    """One history. ``path``: where the registry's file is to be, in an empty folder."""
    world = World(plan, seed, path)
    try:
        world.run()
        return world.report(seed)
    finally:
        world.server.stop()

"""What the registry should do, as plain Python over dicts: the judge of the state machine.

Written from the sentences of ``registry.base``, not from its SQL; slow and obvious on purpose.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from polynya.schema import Status, TaskSpec

LEASE = 10.0
UNSCORED = (Status.INFRA_ERROR, Status.CANCELLED)


@dataclass
class S:
    id: str
    task: T
    index: int
    state: str = "queued"
    attempt: int = 0
    reported: int = 0
    node: str | None = None
    confirmed: bool = False
    until: float = 0.0
    failures: int = 0
    losses: int = 0
    cancelled: bool = False
    status: str = ""


@dataclass
class T:
    spec: TaskSpec
    order: int
    sessions: list[S] = field(default_factory=list)
    begun: bool = False
    stop: str = ""
    ended: bool = False

    def count(self, state: str) -> int:
        return sum(s.state == state for s in self.sessions)

    @property
    def scored(self) -> int:
        return sum(s.state == "done" and s.status not in UNSCORED for s in self.sessions)

    @property
    def room(self) -> bool:
        bound = self.spec.max_concurrent
        return self.count("queued") > 0 and (bound is None or self.count("leased") < bound)


@dataclass
class N:
    epoch: int
    until: float
    beat: int = 0
    suspect: bool = False
    draining: bool = False
    gone: bool = False

    @property
    def state(self) -> str:
        return "gone" if self.gone else "draining" if self.draining else "suspect" if self.suspect else "live"


class Model:
    """Each method returns what the registry's should say, cut down to what is compared."""

    def __init__(self, max_losses: int) -> None:
        self.max_losses = max_losses
        self.tasks: dict[str, T] = {}
        self.sessions: dict[str, S] = {}
        self.nodes: dict[str, N] = {}
        self.deliveries: list[tuple[str, str]] = []
        """(delivery id, status), in order."""
        self.acked: set[str] = set()
        self.outbox: dict[str, float | None] = {}

    # --- tasks

    def submit(self, spec: TaskSpec) -> bool:
        if spec.task_id in self.tasks:
            return False
        t = self.tasks[spec.task_id] = T(spec, len(self.tasks))
        t.sessions = [S(f"{spec.task_id}.{i}", t, i) for i in range(spec.num_samples)]
        self.sessions.update((s.id, s) for s in t.sessions)
        return True

    def cancel_task(self, task_id: str) -> tuple[int, list[tuple[str, int]]]:
        t = self.tasks[task_id]
        return (0, []) if t.stop or t.ended else self._stop(t, "cancelled")

    def cancel_session(self, session_id: str) -> tuple[int, list[tuple[str, int]]]:
        s = self.sessions[session_id]
        if s.state == "done" or s.cancelled:
            return 0, []
        s.cancelled = True
        if s.state == "leased":
            return 0, [(s.id, s.attempt)]
        self._settle(s, Status.CANCELLED)
        return 1, []

    def _stop(self, t: T, why: str) -> tuple[int, list[tuple[str, int]]]:
        t.stop = why
        told = [(s.id, s.attempt) for s in t.sessions if s.state == "leased" and not s.cancelled]
        waiting = [s for s in t.sessions if s.state == "queued"]
        for s in t.sessions:
            s.cancelled |= s.state != "done"
        for s in waiting:
            self._settle(s, Status.CANCELLED)
        return len(waiting), told

    def _settle(self, s: S, status: Status) -> list[tuple[str, int]]:
        s.state, s.status, s.confirmed = "done", status, False
        self._deliver(s.id, status, s.task)
        told: list[tuple[str, int]] = []
        t = s.task
        bound = t.spec.early_stop
        if (
            status not in UNSCORED
            and bound is not None
            and t.scored >= bound
            and not t.stop
            and t.count("done") < len(t.sessions)
        ):
            told = self._stop(t, "stopped")[1]
        if t.count("done") == len(t.sessions) and not t.ended:
            t.ended = True
            self._deliver(f"{t.spec.task_id}:end", t.stop or "completed", t)
        return told

    def _deliver(self, delivery_id: str, status: str, t: T) -> None:
        self.deliveries.append((delivery_id, str(status)))
        if t.spec.callback:
            self.outbox[delivery_id] = 0.0

    # --- nodes

    def _requeue(self, s: S, *, loss: bool) -> bool:
        if s.cancelled:
            self._settle(s, Status.CANCELLED)
            return False
        if s.losses + loss > self.max_losses:
            self._settle(s, Status.INFRA_ERROR)
            return False
        s.losses += loss
        s.state, s.node, s.confirmed = "queued", None, False
        return True

    def _of(self, node: str) -> list[S]:
        return sorted((s for s in self.sessions.values() if s.state == "leased" and s.node == node), key=lambda s: s.id)

    def _take_back(self, nodes: list[str]) -> dict[str, list[str]]:
        answer: dict[str, list[str]] = {"gone": nodes, "requeued": [], "ended": []}
        for node in nodes:
            n = self.nodes[node]
            n.gone, n.suspect, n.draining = True, False, False
            for s in self._of(node):
                again = self._requeue(s, loss=s.confirmed)
                answer["requeued" if again else "ended"].append(s.id)
        return answer

    def register(self, node: str, epoch: int, now: float) -> tuple[bool, int, dict[str, list[str]]]:
        known = self.nodes.get(node)
        nothing: dict[str, list[str]] = {"gone": [], "requeued": [], "ended": []}
        if known is not None and (epoch < known.epoch or (epoch == known.epoch and known.gone)):
            return False, known.epoch, nothing
        if known is not None and known.epoch == epoch:
            known.until, known.suspect = now + LEASE, False
            return True, epoch, nothing
        answer = self._take_back([node] if known and not known.gone else [])
        self.nodes[node] = N(epoch, now + LEASE)
        return True, epoch, answer

    def claim(self, node: str, epoch: int, slots: int, now: float, max_leased: int | None) -> Any:
        n = self.nodes.get(node)
        if n is None or n.epoch != epoch or n.gone:
            return False, [], "gone"
        if n.draining or n.suspect:
            return True, [], n.state
        if max_leased is not None:
            slots = min(slots, max_leased - sum(s.state == "leased" for s in self.sessions.values()))
        given: list[tuple[str, int]] = []
        while len(given) < slots:
            open_ = [t for t in self.tasks.values() if t.room]
            if not open_:
                break
            t = min(open_, key=lambda t: (-t.spec.priority, not t.begun, t.order))
            s = next(s for s in t.sessions if s.state == "queued")
            s.state, s.node, s.confirmed, s.until = "leased", node, False, now + LEASE
            s.attempt += 1
            t.begun = True
            given.append((s.id, s.attempt))
        if given:
            n.until = max(n.until, now + LEASE)
        return True, given, "live"

    def renew(self, node: str, epoch: int, beat: int, held: list[tuple[str, int]], now: float) -> dict[str, Any]:
        n = self.nodes.get(node)
        if n is None or n.epoch != epoch or n.gone:
            return {"known": False, "stale": False, "lost": held, "cancel": [], "dropped": [], "draining": False}
        answer: dict[str, Any] = {
            "known": True,
            "stale": beat < n.beat,
            "lost": [],
            "cancel": [],
            "dropped": [],
            "draining": n.draining,
        }
        if answer["stale"]:
            return answer
        mine = {(s.id, s.attempt): s for s in self._of(node)}
        before = {s.id for s in mine.values() if s.confirmed}
        for lease in held:
            s = mine.get(lease)
            if s is None:
                answer["lost"].append(lease)
                continue
            s.confirmed = True
            if s.cancelled:
                answer["cancel"].append(lease)
        answer["dropped"] = sorted(before - {lease[0] for lease in held if lease in mine})
        for session_id in answer["dropped"]:
            self._requeue(self.sessions[session_id], loss=True)
        n.until, n.beat, n.suspect = now + LEASE, beat, False
        return answer

    def expire(self, now: float) -> dict[str, list[str]]:
        answer = self._take_back(sorted(k for k, n in self.nodes.items() if not n.gone and n.until <= now))
        late = [s for s in self.sessions.values() if s.state == "leased" and not s.confirmed and s.until <= now]
        for s in sorted(late, key=lambda s: s.id):
            answer["requeued" if self._requeue(s, loss=False) else "ended"].append(s.id)
        return answer

    def leave(self, node: str, epoch: int | None) -> dict[str, list[str]]:
        n = self.nodes.get(node)
        fits = n is not None and not n.gone and epoch in (None, n.epoch)
        return self._take_back([node] if fits else [])

    def suspect(self, node: str, until: float) -> bool:
        n = self.nodes.get(node)
        if n is None or n.gone:
            return False
        n.suspect, n.until = True, min(n.until, until)
        return True

    def drain(self, node: str) -> bool:
        n = self.nodes.get(node)
        if n is None or n.gone:
            return False
        n.draining = True
        return True

    def complete(self, node: str, session_id: str, attempt: int, status: Status, retry: bool) -> Any:
        s = self.sessions[session_id]
        if s.state != "leased" or s.attempt != attempt or s.node != node:
            return ("repeated" if s.reported == attempt else "fenced"), []
        s.reported = attempt
        if status == Status.INFRA_ERROR and not s.cancelled and retry and s.failures < s.task.spec.retries:
            s.failures += 1
            s.state, s.node, s.confirmed = "queued", None, False
            return "requeued", []
        if s.cancelled and status == Status.INFRA_ERROR:
            status = Status.CANCELLED
        return "accepted", self._settle(s, status)

    # --- life of the server

    def restart(self, now: float) -> None:
        for n in self.nodes.values():
            if not n.gone:
                n.until, n.suspect = now + LEASE, False
        for s in self.sessions.values():
            s.until = now + LEASE
        self.outbox = {key: None if due is None else now for key, due in self.outbox.items()}

    # --- what can be seen

    def views(self) -> dict[str, Any]:
        return {
            "tasks": [
                (k, t.stop or "completed" if t.ended else "open", t.count("queued"), t.count("leased"), t.count("done"), t.scored)
                for k, t in self.tasks.items()
            ],
            "sessions": [
                (s.id, s.state, s.attempt, s.node, s.cancelled, s.failures, s.losses)
                for t in self.tasks.values() for s in t.sessions
            ],
            "nodes": [(k, n.epoch, n.state, len(self._of(k)), n.until) for k, n in sorted(self.nodes.items())],
            "deliveries": [(i + 1, k, status, k in self.acked) for i, (k, status) in enumerate(self.deliveries)],
            "counts": Counter(s.state for s in self.sessions.values()),
        }  # fmt: skip

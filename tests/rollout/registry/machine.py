"""The state machine of R1 and R2: random histories, asked of one or more registries and of the model, every answer compared."""

from __future__ import annotations

import shutil
import tempfile
from abc import abstractmethod
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from polynya.errors import TaskConflict
from polynya.rollout.registry.base import Completion, Expiry, Held, Renewal
from polynya.schema import Status

from ..conftest import IN_MEMORY
from .model import LEASE, Model
from .world import Direct, direct, hello, result, task

MAX_LOSSES = 2
TASK_IDS = st.sampled_from(["a", "b", "c", "a.1"])
"""``a.1`` is a task and a session's id."""
NODES = st.sampled_from(["n1", "n2", "n3"])
SPECS = st.fixed_dictionaries(
    {
        "num_samples": st.integers(1, 4),
        "priority": st.integers(0, 2),
        "retries": st.integers(0, 2),
        "max_concurrent": st.none() | st.integers(1, 2),
        "early_stop": st.none() | st.integers(1, 3),
        "callback": st.none() | st.just("http://receiver/x"),
    }
)
STATUSES = st.sampled_from([Status.COMPLETED, Status.COMPLETED, Status.INFRA_ERROR, Status.INFRA_ERROR, *Status])


class Backend:
    """A registry that can be thrown away in the middle and opened again."""

    registry: Direct

    @abstractmethod
    def crash(self, now: float) -> None:
        """As if the process had been killed; then a new one starts at ``now``."""

    @abstractmethod
    def drop(self) -> None: ...


class SqliteBackend(Backend):
    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=IN_MEMORY))
        self.lives = 0
        self.registry = direct(self.folder / "0" / "r.db", max_losses=MAX_LOSSES)

    def crash(self, now: float) -> None:
        """What the kernel has of the files is what a killed process leaves: they are copied, and the copy is opened."""
        before, after = (self.folder / str(n) for n in (self.lives, self.lives + 1))
        shutil.copytree(before, after, ignore=shutil.ignore_patterns("*-shm", "*.lock"))
        self.registry.close()
        self.lives += 1
        self.registry = direct(after / "r.db", now=now, max_losses=MAX_LOSSES)

    def drop(self) -> None:
        self.registry.close()
        shutil.rmtree(self.folder)


def pairs(leases: list[Held]) -> list[tuple[str, int]]:
    return [(lease.session_id, lease.attempt) for lease in leases]


def taken(expiry: Expiry) -> dict[str, list[str]]:
    return {"gone": expiry.gone, "requeued": expiry.requeued, "ended": expiry.ended}


def renewed(renewal: Renewal) -> dict[str, Any]:
    return {
        "known": renewal.known, "stale": renewal.stale, "lost": pairs(renewal.lost), "cancel": pairs(renewal.cancel),
        "dropped": renewal.dropped, "draining": renewal.draining,
    }  # fmt: skip


class RegistryMachine(RuleBasedStateMachine):
    """Subclasses say which registries."""

    def backends(self) -> list[Backend]:
        return [SqliteBackend()]

    def __init__(self) -> None:
        super().__init__()
        self.used = self.backends()
        self.model = Model(MAX_LOSSES)
        self.now = 0.0
        self.epochs = 0
        self.beats = 0
        self.attempts: list[tuple[str, str, int]] = []
        """(node, session, attempt) of every claim there ever was."""
        self.highest: dict[str, int] = {}

    def teardown(self) -> None:
        try:
            self.compare_views()
        finally:
            for backend in self.used:
                backend.drop()

    def ask(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """All registries give one answer."""
        first, *others = [getattr(backend.registry, name)(*args, **kwargs) for backend in self.used]
        for other in others:
            assert other == first, name
        return first

    @initialize(fields=SPECS)
    def begin(self, fields: dict[str, Any]) -> None:
        """Something to do, and somebody who can: most histories without them are short of events."""
        self.submit("a", fields)
        self.register("n1", "new")
        self.register("n2", "new")

    # --- tasks

    @rule(task_id=TASK_IDS, fields=SPECS)
    def submit(self, task_id: str, fields: dict[str, Any]) -> None:
        spec = task(task_id, **fields)
        known = self.model.tasks.get(task_id)
        if known is not None and known.spec != spec:
            for backend in self.used:
                try:
                    backend.registry.submit(spec)
                except TaskConflict as exc:
                    assert exc.message.split(":")[0] in {k for k in fields if getattr(known.spec, k) != fields[k]}
                else:
                    raise AssertionError("another task of the same id was taken")
            return
        created = self.model.submit(spec)
        for backend in self.used:
            assert backend.registry.submit(spec).created is created

    @precondition(lambda self: self.model.tasks)
    @rule(data=st.data())
    def cancel_task(self, data: st.DataObject) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.model.tasks)))
        found = self.ask("cancel_task", task_id)
        assert (found.ended, pairs(found.told)) == self.model.cancel_task(task_id)

    @precondition(lambda self: self.model.tasks)
    @rule(data=st.data())
    def cancel_session(self, data: st.DataObject) -> None:
        session_id = data.draw(st.sampled_from(sorted(self.model.sessions)))
        found = self.ask("cancel_session", session_id)
        assert (found.ended, pairs(found.told)) == self.model.cancel_session(session_id)

    # --- nodes

    @rule(node=NODES, which=st.sampled_from(["new", "new", "same", "old"]))
    def register(self, node: str, which: str) -> None:
        known = self.model.nodes.get(node)
        self.epochs += 1
        epoch = self.epochs if which == "new" or known is None else max(1, known.epoch - (which == "old"))
        found = self.ask("register", hello(node, epoch), self.now, LEASE)
        wanted = self.model.register(node, epoch, self.now)
        assert (found.accepted, found.epoch, taken(found.taken_back)) == wanted

    @rule(
        node=NODES, slots=st.integers(1, 5), max_leased=st.sampled_from([None, None, None, 1, 4]), old=st.integers(0, 9)
    )
    def claim(self, node: str, slots: int, max_leased: int | None, old: int) -> None:
        live = [name for name, n in sorted(self.model.nodes.items()) if n.state == "live"]
        if live and old < 8:
            node = live[slots % len(live)]
        epoch = 99 if old == 0 or node not in self.model.nodes else self.model.nodes[node].epoch
        found = self.ask("claim", node, epoch, slots, self.now, LEASE, max_leased=max_leased)
        given = [(session.session_id, session.attempt) for session in found.sessions]
        assert (found.known, given, str(found.state)) == self.model.claim(node, epoch, slots, self.now, max_leased)
        for session in found.sessions:
            self.attempts.append((node, session.session_id, session.attempt))
            assert session.attempt > self.highest.get(session.session_id, 0)
            assert session.task == self.model.sessions[session.session_id].task.spec
            self.highest[session.session_id] = session.attempt

    @rule(node=NODES, slots=st.integers(1, 5))
    def claim_and_confirm(self, node: str, slots: int) -> None:
        """What a node does that nothing befalls."""
        if node not in self.model.nodes or self.model.nodes[node].gone:
            self.register(node, "new")
        self.claim(node, slots, None, 9)
        for name in self.model.nodes:
            self.beat(name, self.held_by(name), late=False)

    @precondition(lambda self: self.model.nodes)
    @rule(data=st.data(), all_of_it=st.integers(0, 3), late=st.integers(0, 5))
    def renew(self, data: st.DataObject, all_of_it: int, late: int) -> None:
        node = data.draw(st.sampled_from(sorted(self.model.nodes)))
        own = sorted({(s, attempt) for n, s, attempt in self.attempts if n == node})
        some = own and not all_of_it
        held = data.draw(st.lists(st.sampled_from(own), unique=True, max_size=4)) if some else self.held_by(node)
        self.beat(node, held, late=late == 0)

    def held_by(self, node: str) -> list[tuple[str, int]]:
        return [(s.id, s.attempt) for s in self.model._of(node)]

    def beat(self, node: str, held: list[tuple[str, int]], *, late: bool) -> None:
        self.beats += 1
        beat = max(0, self.beats - 3) if late else self.beats
        epoch = self.model.nodes[node].epoch
        found = self.ask("renew", node, epoch, beat, [Held(*lease) for lease in held], self.now, LEASE)
        assert renewed(found) == self.model.renew(node, epoch, beat, held, self.now)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), status=STATUSES, retry=st.booleans(), latest=st.integers(0, 3), stranger=st.integers(0, 9))
    def complete(self, data: st.DataObject, status: Status, retry: bool, latest: int, stranger: int) -> None:
        held = [(s.node, s.id, s.attempt) for s in self.model.sessions.values() if s.state == "leased" and s.node]
        node, session_id, attempt = data.draw(st.sampled_from(held if held and latest else self.attempts))
        node = "n-other" if stranger == 0 else node
        report = Completion(node=node, result=result(session_id, attempt, status), retry=retry)
        found = self.ask("complete", report)
        wanted = self.model.complete(node, session_id, attempt, status, retry)
        assert (str(found.outcome), pairs(found.cancel)) == wanted

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0, 10.0, 11.0]))
    def time_goes_by(self, seconds: float) -> None:
        self.now += seconds
        self.expire()

    @rule()
    def expire(self) -> None:
        assert taken(self.ask("expire", self.now)) == self.model.expire(self.now)

    @rule(node=NODES, how=st.sampled_from(["suspect", "drain", "leave", "leave any"]))
    def node_fares_ill(self, node: str, how: str) -> None:
        if how == "suspect":
            assert self.ask("suspect", node, self.now + 2.5) == self.model.suspect(node, self.now + 2.5)
        elif how == "drain":
            assert self.ask("drain", node) == self.model.drain(node)
        else:
            known = self.model.nodes.get(node)
            epoch = None if how == "leave any" or known is None else known.epoch
            assert taken(self.ask("leave", node, epoch)) == self.model.leave(node, epoch)

    # --- deliveries

    @precondition(lambda self: self.model.deliveries)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        delivery_id, _ = data.draw(st.sampled_from(self.model.deliveries))
        assert self.ask("ack", delivery_id) is (delivery_id not in self.model.acked)
        self.model.acked.add(delivery_id)

    @rule(cursor=st.integers(0, 8), limit=st.integers(1, 4))
    def results(self, cursor: int, limit: int) -> None:
        found = [(d.cursor, d.delivery_id) for d in self.ask("results", cursor, limit)]
        wanted = [
            (i, k) for i, (k, _) in enumerate(self.model.deliveries, 1) if i > cursor and k not in self.model.acked
        ]
        assert found == wanted[:limit]

    @rule(works=st.booleans(), again=st.sampled_from([1.0, 20.0, None]))
    def callbacks(self, works: bool, again: float | None) -> None:
        due = {k for k, at in self.model.outbox.items() if at is not None and at <= self.now}
        found = self.ask("callbacks", self.now)
        assert {callback.delivery_id for callback in found} == due
        for callback in found[:2]:
            if works:
                self.ask("callback_sent", callback.delivery_id)
                del self.model.outbox[callback.delivery_id]
            else:
                at = None if again is None else self.now + again
                self.ask("callback_failed", callback.delivery_id, "500", at)
                self.model.outbox[callback.delivery_id] = at

    # --- life of the server

    @rule()
    def crash(self) -> None:
        """The new server's clock starts anew: nothing of the old one's means anything."""
        self.now = 3.0
        for backend in self.used:
            backend.crash(self.now)
        self.model.restart(self.now)

    @rule()
    def look(self) -> None:
        self.compare_views()

    # --- what must hold whatever happened

    @invariant()
    def counts_are_sums(self) -> None:
        found = self.ask("counts")
        states = self.model.views()["counts"]
        assert (found.queued, found.leased, found.done) == tuple(states[k] for k in ("queued", "leased", "done"))
        assert found.deliveries == len(self.model.deliveries)

    @invariant()
    def bounds_hold(self) -> None:
        for t in self.model.tasks.values():
            assert t.spec.max_concurrent is None or t.count("leased") <= t.spec.max_concurrent
            ends = [k for k, _ in self.model.deliveries if k.partition(":")[0] == t.spec.task_id and ":" in k]
            assert len(ends) == (t.count("done") == len(t.sessions))
        assert len({k for k, _ in self.model.deliveries}) == len(self.model.deliveries)

    def compare_views(self) -> None:
        wanted = self.model.views()
        for backend in self.used:
            assert seen(backend.registry) == {k: wanted[k] for k in ("tasks", "sessions", "nodes", "deliveries")}


def seen(registry: Direct) -> dict[str, Any]:
    """All that can be asked for, in the model's words."""
    tasks = registry.tasks()
    return {
        "tasks": [(t.task_id, str(t.state), t.queued, t.leased, t.done, t.scored) for t in tasks],
        "sessions": [
            (s.session_id, str(s.state), s.attempt, s.node, s.cancelled, s.failures, s.losses)
            for t in tasks for s in registry.sessions(t.task_id)
        ],
        "nodes": [(n.node, n.epoch, str(n.state), n.leased, n.lease_until) for n in registry.nodes()],
        "deliveries": [
            (d.cursor, d.delivery_id, str(d.result.status if d.result else d.group.state), d.acked)
            for d in registry.results(limit=1000, acked=True)
        ],
    }  # fmt: skip

"""Nodes: they join, claim, renew, are suspected, drain, leave, or are lost.

A lease has two halves. Until a heartbeat names it, it is the session's own: an answer that never reached the node costs one lease
time. From then on it is the node's: one row is renewed for all that it holds.
"""

from __future__ import annotations

from typing import Any

import msgspec

from polynya.rollout.registry import work
from polynya.rollout.registry.base import (
    Claimed,
    Expiry,
    Held,
    NodeHello,
    NodeState,
    NodeView,
    Policy,
    Registered,
    Renewal,
    json_of,
)
from polynya.rollout.registry.database import Database
from polynya.schema import Session, TaskSpec

_VIEW = "node, epoch, capacity, model, url, labels, lease_until, suspect, draining, gone"


def register(db: Database, hello: NodeHello, until: float, max_losses: int) -> Registered:
    known = db.execute("SELECT epoch, gone FROM nodes WHERE node = ?", (hello.node,))
    current, gone = known[0] if known else (0, 1)
    if hello.epoch < current or (hello.epoch == current and gone):
        return Registered(accepted=False, epoch=int(current), taken_back=Expiry())
    again = hello.epoch == current
    lost = _take_back(db, [hello.node], max_losses) if not gone and not again else Expiry()
    beat, draining = ("nodes.beat", "nodes.draining") if again else ("0", "0")
    db.execute(
        f"""INSERT INTO nodes (node, epoch, capacity, model, url, labels, lease_until, beat, suspect, draining, gone)
            VALUES (?, ?, ?, ?, ?, ?, ?, 0, 0, 0, 0)
            ON CONFLICT (node) DO UPDATE SET epoch = excluded.epoch, capacity = excluded.capacity, model = excluded.model,
            url = excluded.url, labels = excluded.labels, lease_until = excluded.lease_until, beat = {beat},
            suspect = 0, draining = {draining}, gone = 0""",
        (hello.node, hello.epoch, hello.capacity, hello.model, hello.url, json_of(hello.labels), until),
    )
    return Registered(accepted=True, epoch=hello.epoch, taken_back=lost)


def claim(
    db: Database, node: str, epoch: int, slots: int, until: float, max_leased: int | None, specs: dict[str, TaskSpec]
) -> Claimed:
    """``specs`` keeps decoded tasks from claim to claim."""
    found = db.execute("SELECT epoch, gone, draining, suspect FROM nodes WHERE node = ?", (node,))
    if not found or found[0][0] != epoch or found[0][1]:
        return Claimed(known=False, state=NodeState.GONE)
    _, _, draining, suspect = found[0]
    if draining or suspect:
        return Claimed(known=True, state=NodeState.DRAINING if draining else NodeState.SUSPECT)
    if max_leased is not None:
        leased = db.execute("SELECT value FROM meta WHERE name = 'leased'")[0][0]
        slots = min(slots, max_leased - leased)
    sessions: list[Session] = []
    while len(sessions) < slots:
        some = _from_next_task(db, node, slots - len(sessions), until, specs)
        if not some:
            break
        sessions += some
    if sessions:
        db.execute(
            "UPDATE nodes SET lease_until = CASE WHEN lease_until < ? THEN ? ELSE lease_until END WHERE node = ?",
            (until, until, node),
        )
    return Claimed(known=True, sessions=sessions)


def _from_next_task(db: Database, node: str, slots: int, until: float, specs: dict[str, TaskSpec]) -> list[Session]:
    found = db.execute(
        """SELECT task_id, queued, max_concurrent - leased FROM tasks WHERE ready = 1
            ORDER BY priority DESC, seq LIMIT 1"""
    )
    if not found:
        return []
    task_id, queued, room = found[0]
    number = min(slots, queued, queued if room is None else room)
    rows = db.execute(
        """UPDATE sessions SET state = 'leased', attempt = attempt + 1, node = ?, confirmed = 0, lease_until = ?
            WHERE session_id IN (SELECT session_id FROM sessions WHERE task_id = ? AND state = 'queued'
                ORDER BY sample_index LIMIT ?)
            RETURNING session_id, sample_index, attempt""",
        (node, until, task_id, number),
    )
    work.count(db, task_id, queued=-len(rows), leased=len(rows))
    task = specs.get(task_id)
    if task is None:
        text = db.execute("SELECT spec FROM tasks WHERE task_id = ?", (task_id,))[0][0]
        task = specs[task_id] = msgspec.json.decode(text, type=TaskSpec)
    rows.sort(key=lambda row: row[1])
    return [
        Session(session_id=session_id, group_id=task_id, task=task, sample_index=int(index), attempt=int(attempt))
        for session_id, index, attempt in rows
    ]


def renew(db: Database, node: str, epoch: int, beat: int, held: list[Held], until: float, max_losses: int) -> Renewal:
    """A heartbeat that was overtaken by a later one renews nothing and takes nothing away."""
    found = db.execute("SELECT epoch, gone, draining, beat FROM nodes WHERE node = ?", (node,))
    if not found or found[0][0] != epoch or found[0][1]:
        return Renewal(known=False, lost=held)
    _, _, draining, last = found[0]
    if beat < last:
        return Renewal(known=True, stale=True, draining=bool(draining))
    mine: dict[str, tuple[Any, ...]] = {
        row[0]: row
        for row in db.execute(
            "SELECT session_id, attempt, confirmed, cancelled FROM sessions WHERE node = ? AND state = 'leased'",
            (node,),
        )
    }
    lost: list[Held] = []
    cancel: list[Held] = []
    for lease in held:
        row = mine.get(lease.session_id)
        if row is None or row[1] != lease.attempt:
            lost.append(lease)
            continue
        if not row[2]:
            db.execute("UPDATE sessions SET confirmed = 1 WHERE session_id = ?", (lease.session_id,))
        if row[3]:
            cancel.append(lease)
    named = {lease.session_id for lease in held if lease not in lost}
    dropped = sorted(session_id for session_id, row in mine.items() if row[2] and session_id not in named)
    for session_id in dropped:
        work.requeue(db, work.select(db, "session_id = ?", (session_id,))[0], loss=True, max_losses=max_losses)
    db.execute("UPDATE nodes SET lease_until = ?, beat = ?, suspect = 0 WHERE node = ?", (until, beat, node))
    return Renewal(known=True, lost=lost, cancel=cancel, dropped=dropped, draining=bool(draining))


def expire(db: Database, now: float, max_losses: int) -> Expiry:
    rows = db.execute("SELECT node FROM nodes WHERE gone = 0 AND lease_until <= ? ORDER BY node", (now,))
    lost = _take_back(db, [row[0] for row in rows], max_losses)
    requeued, ended = list(lost.requeued), list(lost.ended)
    late = work.select(db, "state = 'leased' AND confirmed = 0 AND lease_until <= ? ORDER BY session_id", (now,))
    for row in late:
        again = work.requeue(db, row, loss=False, max_losses=max_losses)
        (requeued if again else ended).append(row.session_id)
    return Expiry(gone=lost.gone, requeued=requeued, ended=ended)


def _take_back(db: Database, nodes: list[str], max_losses: int) -> Expiry:
    """These nodes are gone; what they had waits again. A lease that they never named is no loss: they may not know of it."""
    requeued: list[str] = []
    ended: list[str] = []
    for node in nodes:
        db.execute("UPDATE nodes SET gone = 1, suspect = 0, draining = 0 WHERE node = ?", (node,))
        confirmed = {
            row[0]
            for row in db.execute(
                "SELECT session_id FROM sessions WHERE node = ? AND state = 'leased' AND confirmed = 1", (node,)
            )
        }
        for row in work.select(db, "node = ? AND state = 'leased' ORDER BY session_id", (node,)):
            again = work.requeue(db, row, loss=row.session_id in confirmed, max_losses=max_losses)
            (requeued if again else ended).append(row.session_id)
    return Expiry(gone=list(nodes), requeued=requeued, ended=ended)


def leave(db: Database, node: str, epoch: int | None, max_losses: int) -> Expiry:
    found = db.execute("SELECT epoch FROM nodes WHERE node = ? AND gone = 0", (node,))
    if not found or epoch not in (None, found[0][0]):
        return Expiry()
    return _take_back(db, [node], max_losses)


def suspect(db: Database, node: str, until: float) -> bool:
    """A suspicion shortens a lease, never lengthens it."""
    return bool(
        db.execute(
            """UPDATE nodes SET suspect = 1, lease_until = CASE WHEN lease_until < ? THEN lease_until ELSE ? END
                WHERE node = ? AND gone = 0 RETURNING node""",
            (until, until, node),
        )
    )


def drain(db: Database, node: str) -> bool:
    return bool(db.execute("UPDATE nodes SET draining = 1 WHERE node = ? AND gone = 0 RETURNING node", (node,)))


def view(db: Database) -> list[NodeView]:
    rows = db.execute("SELECT node, COUNT(*) FROM sessions WHERE state = 'leased' GROUP BY node")
    leased = {row[0]: int(row[1]) for row in rows}
    return [_view(row, leased.get(row[0], 0)) for row in db.execute(f"SELECT {_VIEW} FROM nodes ORDER BY node")]


def _view(row: tuple[Any, ...], leased: int) -> NodeView:
    node, epoch, capacity, model, url, labels, lease_until, suspected, draining, gone = row
    states = [(gone, NodeState.GONE), (draining, NodeState.DRAINING), (suspected, NodeState.SUSPECT)]
    return NodeView(
        node=node,
        epoch=int(epoch),
        state=next((state for flag, state in states if flag), NodeState.LIVE),
        capacity=int(capacity),
        model=model,
        url=url,
        labels=msgspec.json.decode(labels),
        leased=leased,
        lease_until=float(lease_until),
    )


def policies(db: Database) -> list[Policy]:
    rows = db.execute("SELECT model, version, paused FROM policies ORDER BY model")
    return [Policy(model=model, version=version, paused=bool(paused)) for model, version, paused in rows]


def set_policy(db: Database, model: str, version: str | None, paused: bool | None) -> Policy:
    db.execute(
        "INSERT INTO policies (model, version, paused) VALUES (?, NULL, 0) ON CONFLICT (model) DO NOTHING", (model,)
    )
    rows = db.execute("SELECT version, paused FROM policies WHERE model = ?", (model,))
    version = rows[0][0] if version is None else version
    paused = bool(rows[0][1]) if paused is None else paused
    db.execute("UPDATE policies SET version = ?, paused = ? WHERE model = ?", (version, int(paused), model))
    return Policy(model=model, version=version, paused=paused)

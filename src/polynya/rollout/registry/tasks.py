"""Tasks come in, are looked at, and are called off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from polynya.errors import QueueFull, TaskConflict, UnknownRecord
from polynya.rollout.registry import work
from polynya.rollout.registry.base import (
    Cancelled,
    Completed,
    Completion,
    Counts,
    GroupState,
    SessionState,
    SessionView,
    Submitted,
    TaskView,
)
from polynya.rollout.registry.database import Database, bump, counters
from polynya.schema import TaskSpec, session_id_of

_VIEW = "task_id, seq, stop, ended, num_samples, priority, queued, leased, done, scored, created_at"


def submit(db: Database, task: TaskSpec, spec: str, max_queued: int | None, created_at: float) -> Submitted:
    """``spec`` is the task as JSON, encoded before the database is held."""
    if found := db.execute("SELECT spec FROM tasks WHERE task_id = ?", (task.task_id,)):
        _same(task.task_id, found[0][0], spec)
        return Submitted(task=view(db, task.task_id), created=False)
    waiting = counters(db)["queued"]
    if max_queued is not None and waiting >= max_queued:
        raise QueueFull(
            f"task {task.task_id}: {waiting} sessions wait, and at {max_queued} nothing more is let in",
            fix="submit it again later, or add nodes",
        )
    n = task.num_samples
    db.execute(
        """INSERT INTO tasks (task_id, seq, spec, created_at, priority, num_samples, retries, max_concurrent, early_stop,
            callback, queued, leased, done, scored, ready, stop, ended)
            VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0, 0, 0, NULL, 0)""",
        (
            task.task_id, bump(db, "tasks"), spec, created_at, task.priority, n, task.retries, task.max_concurrent,
            task.early_stop, task.callback,
        ),
    )  # fmt: skip
    db.many(
        """INSERT INTO sessions (session_id, task_id, sample_index, state, attempt, reported, node, confirmed, lease_until,
            failures, losses, cancelled, lost_tokens, lost_calls) VALUES (?, ?, ?, 'queued', 0, 0, NULL, 0, NULL, 0, 0, 0, 0, 0)""",
        [(session_id_of(task.task_id, i), task.task_id, i) for i in range(n)],
    )
    work.count(db, task.task_id, queued=n)
    return Submitted(task=view(db, task.task_id), created=True)


def _same(task_id: str, before: str, now: str) -> None:
    if before == now:
        return
    path, was, wanted = _difference(msgspec.json.decode(before), msgspec.json.decode(now), "")
    raise TaskConflict(
        f"{path}: task {task_id} was submitted with {was!r:.80}, now with {wanted!r:.80}",
        fix="give the changed task an id of its own",
    )


def _difference(before: Any, now: Any, path: str) -> tuple[str, Any, Any]:
    """The first field, in the order of their names, that is not the same."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in sorted({*before, *now}):
            if before.get(key) != now.get(key) or (key in before) != (key in now):
                return _difference(before.get(key), now.get(key), f"{path}.{key}" if path else key)
    return path or "task", before, now


def view(db: Database, task_id: str) -> TaskView:
    found = db.execute(f"SELECT {_VIEW} FROM tasks WHERE task_id = ?", (task_id,))
    if not found:
        raise _unknown("task", task_id)
    return _task_view(found[0])


def _task_view(row: tuple[Any, ...]) -> TaskView:
    task_id, seq, stop, ended, num_samples, priority, queued, leased, done, scored, created_at = row
    return TaskView(
        task_id=task_id,
        cursor=int(seq),
        state=GroupState(stop or GroupState.COMPLETED) if ended else GroupState.OPEN,
        num_samples=int(num_samples),
        priority=int(priority),
        queued=int(queued),
        leased=int(leased),
        done=int(done),
        scored=int(scored),
        ended=bool(ended),
        created_at=float(created_at),
    )


def page(db: Database, cursor: int, limit: int) -> list[TaskView]:
    rows = db.execute(f"SELECT {_VIEW} FROM tasks WHERE seq > ? ORDER BY seq LIMIT ?", (cursor, limit))
    return [_task_view(row) for row in rows]


def spec_text(db: Database, task_id: str) -> str:
    found = db.execute("SELECT spec FROM tasks WHERE task_id = ?", (task_id,))
    if not found:
        raise _unknown("task", task_id)
    return str(found[0][0])


def session(db: Database, session_id: str) -> SessionView:
    return _session_view(_row(db, session_id))


def sessions(db: Database, task_id: str) -> list[SessionView]:
    view(db, task_id)
    return [_session_view(row) for row in work.select(db, "task_id = ? ORDER BY sample_index", (task_id,))]


def _row(db: Database, session_id: str) -> work.Row:
    rows = work.select(db, "session_id = ?", (session_id,))
    if not rows:
        raise _unknown("session", session_id)
    return rows[0]


def _session_view(row: work.Row) -> SessionView:
    return SessionView(
        session_id=row.session_id,
        task_id=row.task_id,
        sample_index=row.sample_index,
        state=SessionState(row.state),
        attempt=row.attempt,
        node=row.node,
        cancelled=bool(row.cancelled),
        failures=row.failures,
        losses=row.losses,
    )


def complete(db: Database, completion: Completion) -> Completed:
    return work.complete(db, completion, _row(db, completion.result.session_id))


def cancel_task(db: Database, task_id: str) -> Cancelled:
    view(db, task_id)
    if not db.execute("SELECT 1 FROM tasks WHERE task_id = ? AND stop IS NULL AND ended = 0", (task_id,)):
        return Cancelled()
    return work.stop_group(db, task_id, GroupState.CANCELLED)


def cancel_session(db: Database, session_id: str) -> Cancelled:
    row = _row(db, session_id)
    if row.state == SessionState.DONE or row.cancelled:
        return Cancelled()
    db.execute("UPDATE sessions SET cancelled = 1 WHERE session_id = ?", (session_id,))
    if row.state == SessionState.LEASED:
        return Cancelled(told=[row.held])
    work.end_waiting(db, row, "cancelled before it was given out")
    return Cancelled(ended=1)


def counts(db: Database) -> Counts:
    found = counters(db)
    return Counts(
        queued=found["queued"],
        leased=found["leased"],
        done=found["done"],
        tasks=found["tasks"],
        deliveries=found["deliveries"],
    )


def _unknown(what: str, name: str) -> UnknownRecord:
    return UnknownRecord(f"there is no {what} {name!r:.140}", fix="check the id; `GET /v1/tasks` lists the tasks")

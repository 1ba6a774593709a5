"""Sessions through their states: queued → leased → done, and the counters that say so.

Invariant: every change of a session's state goes through ``requeue`` or ``settle`` here, or is a claim; each keeps the counts of
its task and of all in the same transaction. ``settle`` is the one place where a result, and a group's end, comes to be.
"""

from __future__ import annotations

from typing import Any

import msgspec

from polynya import __version__
from polynya.rollout.registry.base import (
    UNSCORED,
    Cancelled,
    Completed,
    Completion,
    DeliveryKind,
    GroupEnd,
    GroupState,
    Held,
    Outcome,
    SessionState,
    infra,
    json_of,
)
from polynya.rollout.registry.database import Database, bump
from polynya.schema import ErrorInfo, Provenance, SessionResult, Status
from polynya.tokens.ledger import lost, total

_COLUMNS = "session_id, task_id, sample_index, state, attempt, reported, node, failures, losses, cancelled, lost_tokens, lost_calls"

_AT_ONCE = -1e300
"""Due whatever the clock says."""


class Row(msgspec.Struct, frozen=True):
    """A session, as it stands in the database."""

    session_id: str
    task_id: str
    sample_index: int
    state: str
    attempt: int
    reported: int
    node: str | None
    failures: int
    losses: int
    cancelled: int
    lost_tokens: int
    lost_calls: int

    @property
    def held(self) -> Held:
        return Held(self.session_id, self.attempt)


def select(db: Database, where: str, params: tuple[Any, ...]) -> list[Row]:
    return [Row(*row) for row in db.execute(f"SELECT {_COLUMNS} FROM sessions WHERE {where}", params)]


def count(db: Database, task_id: str, *, queued: int = 0, leased: int = 0, done: int = 0, scored: int = 0) -> None:
    """Move sessions between the states of a task and of all; the numbers are changes."""
    db.execute(
        """UPDATE tasks SET queued = queued + ?, leased = leased + ?, done = done + ?, scored = scored + ?,
            ready = CASE WHEN queued + ? > 0 AND (max_concurrent IS NULL OR leased + ? < max_concurrent) THEN 1 ELSE 0 END
            WHERE task_id = ?""",
        (queued, leased, done, scored, queued, leased, task_id),
    )
    db.execute(
        """UPDATE meta SET value = value + CASE name WHEN 'queued' THEN ? WHEN 'leased' THEN ? ELSE ? END
            WHERE name IN ('queued', 'leased', 'done')""",
        (queued, leased, done),
    )


def requeue(db: Database, row: Row, *, loss: bool, max_losses: int) -> bool:
    """A leased session whose node is lost to it waits again; ``loss``: the node may have begun it.

    False: it ended instead, since it was cancelled or was lost with more than ``max_losses`` nodes.
    """
    losses = row.losses + loss
    if row.cancelled:
        error = infra("SessionCancelled", "cancelled; its node was lost before it reported")
        settle(db, row, unreported(row, Status.CANCELLED, error))
        return False
    if losses > max_losses:
        error = infra(
            "NodeLost", f"its node was lost {losses} times", "look at what the session does to its node; max_losses"
        )
        settle(db, row, unreported(row, Status.INFRA_ERROR, error))
        return False
    db.execute(
        """UPDATE sessions SET state = 'queued', node = NULL, confirmed = 0, lease_until = NULL, losses = ?
            WHERE session_id = ?""",
        (losses, row.session_id),
    )
    count(db, row.task_id, queued=1, leased=-1)
    return True


def unreported(row: Row, status: Status, error: ErrorInfo) -> SessionResult:
    """The result of a session that no node reported on."""
    return SessionResult(
        session_id=row.session_id,
        task_id=row.task_id,
        group_id=row.task_id,
        sample_index=row.sample_index,
        attempt=row.attempt,
        status=status,
        reward=None,
        error=error,
        provenance=Provenance(polynya=__version__),
    )


def complete(db: Database, completion: Completion, row: Row) -> Completed:
    """Decide on a completion of a session that exists."""
    result = completion.result
    if row.state != SessionState.LEASED or (row.attempt, row.node) != (result.attempt, completion.node):
        return Completed(outcome=Outcome.REPEATED if row.reported == result.attempt else Outcome.FENCED)
    if (
        result.status == Status.INFRA_ERROR
        and not row.cancelled
        and completion.retry
        and row.failures < _retries(db, row)
    ):
        db.execute(
            """UPDATE sessions SET state = 'queued', node = NULL, confirmed = 0, lease_until = NULL, reported = attempt,
                failures = failures + 1, lost_tokens = lost_tokens + ?, lost_calls = lost_calls + ? WHERE session_id = ?""",
            (result.ledger.captured, result.ledger.calls, row.session_id),
        )
        count(db, row.task_id, queued=1, leased=-1)
        return Completed(outcome=Outcome.REQUEUED)
    db.execute("UPDATE sessions SET reported = attempt WHERE session_id = ?", (row.session_id,))
    if row.cancelled and result.status == Status.INFRA_ERROR:
        result = msgspec.structs.replace(result, status=Status.CANCELLED)
    return Completed(outcome=Outcome.ACCEPTED, cancel=settle(db, row, result, completion.trajectory))


def _retries(db: Database, row: Row) -> int:
    return int(db.execute("SELECT retries FROM tasks WHERE task_id = ?", (row.task_id,))[0][0])


def settle(db: Database, row: Row, result: SessionResult, trajectory: str | None = None) -> list[Held]:
    """End a session with its one result. Returns the leases that the end of its group made pointless."""
    if row.lost_tokens or row.lost_calls:
        ledger = total([lost(row.lost_tokens, row.lost_calls), result.ledger])
        result = msgspec.structs.replace(result, ledger=ledger)
    if result.status in UNSCORED and result.reward is not None:
        result = msgspec.structs.replace(result, reward=None)
    db.execute(
        "UPDATE sessions SET state = 'done', confirmed = 0, lease_until = NULL WHERE session_id = ?", (row.session_id,)
    )
    leased = row.state == SessionState.LEASED
    scored = result.status not in UNSCORED
    count(db, row.task_id, queued=-(not leased), leased=-int(leased), done=1, scored=int(scored))
    _deliver(db, row.session_id, DeliveryKind.SESSION, row.task_id, result.status, json_of(result), trajectory)
    told = _stop_early(db, row.task_id) if scored else []
    _end_group(db, row.task_id)
    return told


def _deliver(
    db: Database, delivery_id: str, kind: DeliveryKind, task_id: str, status: str, payload: str, trajectory: str | None
) -> None:
    db.execute(
        """INSERT INTO deliveries (seq, delivery_id, kind, task_id, status, payload, trajectory, acked)
            VALUES (?, ?, ?, ?, ?, ?, ?, 0)""",
        (bump(db, "deliveries"), delivery_id, str(kind), task_id, str(status), payload, trajectory),
    )
    db.execute(
        """INSERT INTO outbox (delivery_id, url, due, tries, error)
            SELECT ?, callback, CAST(? AS DOUBLE PRECISION), 0, '' FROM tasks WHERE task_id = ? AND callback IS NOT NULL""",
        (delivery_id, _AT_ONCE, task_id),
    )


def _stop_early(db: Database, task_id: str) -> list[Held]:
    reached = db.execute(
        "SELECT 1 FROM tasks WHERE task_id = ? AND stop IS NULL AND scored >= early_stop AND done < num_samples",
        (task_id,),
    )
    return stop_group(db, task_id, GroupState.STOPPED).told if reached else []


def stop_group(db: Database, task_id: str, state: GroupState) -> Cancelled:
    """What waits is over, what runs is marked. The caller has seen that the group was neither stopped before nor ended."""
    db.execute("UPDATE tasks SET stop = ? WHERE task_id = ?", (str(state), task_id))
    waiting = select(db, "task_id = ? AND state = 'queued' ORDER BY sample_index", (task_id,))
    running = select(db, "task_id = ? AND state = 'leased' AND cancelled = 0 ORDER BY sample_index", (task_id,))
    db.execute("UPDATE sessions SET cancelled = 1 WHERE task_id = ? AND state <> 'done'", (task_id,))
    for row in waiting:
        end_waiting(db, row, f"its group was {state}")
    return Cancelled(ended=len(waiting), told=[row.held for row in running])


def end_waiting(db: Database, row: Row, why: str) -> None:
    settle(db, row, unreported(row, Status.CANCELLED, infra("SessionCancelled", why)))


def _end_group(db: Database, task_id: str) -> None:
    """The last session of a group ends it, in whatever way it ended; a group ends once."""
    found = db.execute(
        """UPDATE tasks SET ended = 1 WHERE task_id = ? AND done = num_samples AND ended = 0
            RETURNING num_samples, stop""",
        (task_id,),
    )
    if not found:
        return
    (num_samples, stop), *_ = found
    statuses = db.execute(
        """SELECT status, COUNT(*) FROM deliveries WHERE task_id = ? AND kind = 'session'
            GROUP BY status ORDER BY status""",
        (task_id,),
    )
    end = GroupEnd(
        task_id=task_id,
        state=GroupState(stop or GroupState.COMPLETED),
        num_samples=int(num_samples),
        statuses={status: int(n) for status, n in statuses},
    )
    _deliver(db, f"{task_id}:end", DeliveryKind.GROUP, task_id, end.state, json_of(end), None)

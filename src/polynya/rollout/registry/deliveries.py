"""What is owed: results pulled by cursor until they are acknowledged, callbacks until they were taken.

The two do not touch each other: a callback that fails for ever delays no pull, and an acknowledgement stops no callback.
"""

from __future__ import annotations

from typing import Any

import msgspec

from polynya.errors import UnknownRecord
from polynya.rollout.registry.base import Callback, Delivery, DeliveryKind, GroupEnd
from polynya.rollout.registry.database import Database
from polynya.schema import SessionResult

_COLUMNS = "d.seq, d.delivery_id, d.kind, d.task_id, d.acked, d.payload, d.trajectory"


def results(db: Database, cursor: int, limit: int, task_id: str | None, acked: bool) -> list[Delivery]:
    where, params = ["d.seq > ?"], [cursor]
    wanted: list[Any] = [*params]
    if task_id is not None:
        where.append("d.task_id = ?")
        wanted.append(task_id)
    if not acked:
        where.append("d.acked = 0")
    sql = f"SELECT {_COLUMNS} FROM deliveries d WHERE {' AND '.join(where)} ORDER BY d.seq LIMIT ?"
    return [_delivery(row) for row in db.execute(sql, (*wanted, limit))]


def _delivery(row: tuple[Any, ...]) -> Delivery:
    seq, delivery_id, kind, task_id, acked, payload, trajectory = row
    one = kind == DeliveryKind.SESSION
    return Delivery(
        cursor=int(seq),
        delivery_id=delivery_id,
        kind=DeliveryKind(kind),
        task_id=task_id,
        acked=bool(acked),
        result=msgspec.json.decode(payload, type=SessionResult) if one else None,
        group=None if one else msgspec.json.decode(payload, type=GroupEnd),
        trajectory=trajectory,
    )


def ack(db: Database, delivery_id: str) -> bool:
    if db.execute("UPDATE deliveries SET acked = 1 WHERE delivery_id = ? AND acked = 0 RETURNING seq", (delivery_id,)):
        return True
    if not db.execute("SELECT 1 FROM deliveries WHERE delivery_id = ?", (delivery_id,)):
        raise UnknownRecord(f"there is no delivery {delivery_id!r:.140}", fix="take the id from a result")
    return False


def callbacks(db: Database, now: float, limit: int) -> list[Callback]:
    rows = db.execute(
        f"""SELECT o.url, o.tries, {_COLUMNS} FROM outbox o JOIN deliveries d ON d.delivery_id = o.delivery_id
            WHERE o.due <= ? ORDER BY o.due, d.seq LIMIT ?""",
        (now, limit),
    )
    return [
        Callback(delivery_id=row[1], url=url, tries=int(tries), delivery=_delivery(tuple(row)))
        for url, tries, *row in rows
    ]


def callback_sent(db: Database, delivery_id: str) -> None:
    db.execute("DELETE FROM outbox WHERE delivery_id = ?", (delivery_id,))


def callback_failed(db: Database, delivery_id: str, error: str, retry_at: float | None) -> None:
    db.execute(
        "UPDATE outbox SET tries = tries + 1, error = ?, due = ? WHERE delivery_id = ?",
        (error.encode("utf-8", "replace").decode().replace("\0", "")[:500], retry_at, delivery_id),
    )

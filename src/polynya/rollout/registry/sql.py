"""The registry over a database: each operation is one transaction on the one thread that writes.

Nothing here knows which database it is. Reads that may be long go to a connection of their own, so that a page of results holds no
claim back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import msgspec

from polynya.rollout.registry import database, deliveries, nodes, tasks, tokens
from polynya.rollout.registry.base import (
    Callback,
    Cancelled,
    Claimed,
    Completed,
    Completion,
    Counts,
    Delivery,
    Expiry,
    Held,
    NodeHello,
    NodeView,
    Policy,
    Recovery,
    Registered,
    Renewal,
    SessionView,
    Submitted,
    TaskView,
    TokenRecord,
)
from polynya.rollout.registry.database import Database
from polynya.schema import TaskSpec

P = ParamSpec("P")
T = TypeVar("T")

_SPECS_KEPT = 1024


class Worker(Protocol):
    """Where a connection lives: what it is given runs there, one after the other, in the order of asking."""

    async def run(self, work: Callable[[], T]) -> T: ...

    def close(self) -> None: ...


class ThreadWorker:
    """A thread of its own: the event loop never waits for the disk."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        self._pool.shutdown(wait=True)


class InlineWorker:
    """The caller's own thread, at once: for simulations, whose only clock is virtual."""

    async def run(self, work: Callable[[], T]) -> T:
        return work()

    def close(self) -> None:
        pass


class SqlRegistry:
    """Implements ``Registry``. ``connect(write)`` opens a connection; it is called in the worker that will use it."""

    def __init__(
        self,
        connect: Callable[[bool], Database],
        *,
        workers: tuple[Worker, Worker],
        max_losses: int,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._connect = connect
        self._writer, self._reader = workers
        self._max_losses = max_losses
        self._wall = wall
        self._db: Database | None = None
        self._reads: Database | None = None
        self._specs: dict[str, TaskSpec] = {}

    async def start(self, now: float, lease: float) -> Recovery:
        def open_writer() -> Recovery:
            self._db = self._connect(True)
            database.transact(self._db, database.prepare)
            return database.transact(self._db, _resume, now, now + lease)

        def open_reader() -> None:
            self._reads = self._connect(False)

        try:
            recovery = await self._writer.run(open_writer)
            await self._reader.run(open_reader)
            return recovery
        except BaseException:
            await self._disconnect()
            raise

    async def close(self) -> None:
        await self._disconnect()
        self._reader.close()
        self._writer.close()

    async def _disconnect(self) -> None:
        db, reads, self._db, self._reads = self._db, self._reads, None, None
        if reads is not None:
            await self._reader.run(reads.close)
        if db is not None:
            await self._writer.run(db.close)

    async def _write(self, operation: Callable[Concatenate[Database, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        db = self._db
        if db is None:
            raise RuntimeError("the registry is not open")
        return await self._writer.run(partial(database.transact, db, operation, *args, **kwargs))

    async def _read(self, operation: Callable[Concatenate[Database, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        db = self._reads
        if db is None:
            raise RuntimeError("the registry is not open")
        return await self._reader.run(partial(database.read, db, operation, *args, **kwargs))

    async def submit(self, task: TaskSpec, *, max_queued: int | None = None) -> Submitted:
        text = msgspec.json.encode(task, order="sorted").decode()
        return await self._write(tasks.submit, task, text, max_queued, self._wall())

    async def task(self, task_id: str) -> TaskView:
        return await self._read(tasks.view, task_id)

    async def spec(self, task_id: str) -> TaskSpec:
        return msgspec.json.decode(await self._read(tasks.spec_text, task_id), type=TaskSpec)

    async def tasks(self, cursor: int = 0, limit: int = 100) -> list[TaskView]:
        return await self._read(tasks.page, cursor, limit)

    async def session(self, session_id: str) -> SessionView:
        return await self._read(tasks.session, session_id)

    async def sessions(self, task_id: str) -> list[SessionView]:
        return await self._read(tasks.sessions, task_id)

    async def cancel_task(self, task_id: str) -> Cancelled:
        return await self._write(tasks.cancel_task, task_id)

    async def cancel_session(self, session_id: str) -> Cancelled:
        return await self._write(tasks.cancel_session, session_id)

    async def register(self, hello: NodeHello, now: float, lease: float) -> Registered:
        return await self._write(nodes.register, hello, now + lease, self._max_losses)

    async def claim(
        self, node: str, epoch: int, slots: int, now: float, lease: float, *, max_leased: int | None = None
    ) -> Claimed:
        if len(self._specs) > _SPECS_KEPT:
            self._specs = {}
        return await self._write(nodes.claim, node, epoch, slots, now + lease, max_leased, self._specs)

    async def renew(self, node: str, epoch: int, beat: int, held: list[Held], now: float, lease: float) -> Renewal:
        return await self._write(nodes.renew, node, epoch, beat, held, now + lease, self._max_losses)

    async def complete(self, completion: Completion) -> Completed:
        return await self._write(tasks.complete, completion)

    async def expire(self, now: float) -> Expiry:
        return await self._write(nodes.expire, now, self._max_losses)

    async def suspect(self, node: str, until: float) -> bool:
        return await self._write(nodes.suspect, node, until)

    async def drain(self, node: str) -> bool:
        return await self._write(nodes.drain, node)

    async def leave(self, node: str, epoch: int | None = None) -> Expiry:
        return await self._write(nodes.leave, node, epoch, self._max_losses)

    async def nodes(self) -> list[NodeView]:
        return await self._read(nodes.view)

    async def results(
        self, cursor: int = 0, limit: int = 100, *, task_id: str | None = None, acked: bool = False
    ) -> list[Delivery]:
        return await self._read(deliveries.results, cursor, limit, task_id, acked)

    async def ack(self, delivery_id: str) -> bool:
        return await self._write(deliveries.ack, delivery_id)

    async def callbacks(self, now: float, limit: int = 100) -> list[Callback]:
        return await self._read(deliveries.callbacks, now, limit)

    async def callback_sent(self, delivery_id: str) -> None:
        await self._write(deliveries.callback_sent, delivery_id)

    async def callback_failed(self, delivery_id: str, error: str, retry_at: float | None) -> None:
        await self._write(deliveries.callback_failed, delivery_id, error, retry_at)

    async def policies(self) -> list[Policy]:
        return await self._read(nodes.policies)

    async def set_policy(self, model: str, *, version: str | None = None, paused: bool | None = None) -> Policy:
        return await self._write(nodes.set_policy, model, version, paused)

    async def add_token(self, record: TokenRecord) -> None:
        await self._write(tokens.add, record)

    async def token(self, kid: str) -> TokenRecord | None:
        return await self._read(tokens.find, kid)

    async def revoke_token(self, kid: str) -> bool:
        return await self._write(tokens.revoke, kid)

    async def counts(self) -> Counts:
        return await self._read(tasks.counts)


def _resume(db: Database, now: float, until: float) -> Recovery:
    """Times of an earlier life mean nothing now: every lease gets one more lease time, every callback is due."""
    found = db.execute("UPDATE nodes SET lease_until = ?, suspect = 0 WHERE gone = 0 RETURNING node", (until,))
    db.execute("UPDATE sessions SET lease_until = ? WHERE state = 'leased'", (until,))
    owed = db.execute("UPDATE outbox SET due = ? WHERE due IS NOT NULL RETURNING delivery_id", (now,))
    return Recovery(counts=tasks.counts(db), nodes=sorted(row[0] for row in found), callbacks=len(owed))

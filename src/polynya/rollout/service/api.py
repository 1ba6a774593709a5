"""What users ask: tasks in, results out, sessions looked at, policy set.

Invariant: answers to polls carry no token arrays; pages are cut and go on by a cursor. A delivery is shown until it is acknowledged,
under one id that never changes; following a task ends with its one group event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse

from polynya import __version__
from polynya.errors import ConfigError, PolynyaError, UnknownRecord
from polynya.rollout.dispatch import Dispatcher
from polynya.rollout.registry.base import (
    Cancelled,
    Counts,
    Delivery,
    DeliveryKind,
    NodeView,
    Policy,
    SessionView,
    Submitted,
    TaskView,
)
from polynya.rollout.service.access import ADMINS, USERS
from polynya.rollout.service.archive import TABLES, Archive
from polynya.rollout.service.http import Asked, Endpoint, Handler, refuse, reply
from polynya.rollout.service.metrics import exposition
from polynya.schema import SessionResult, TaskSpec

PAGE = 500
_POLL = 15.0


class TaskPage(msgspec.Struct, frozen=True, kw_only=True):
    tasks: list[TaskView]
    next_cursor: int
    """For the next page; the same when there is none yet."""


class TaskDetail(msgspec.Struct, frozen=True, kw_only=True):
    task: TaskView
    sessions: list[SessionView]


class SessionDetail(msgspec.Struct, frozen=True, kw_only=True):
    session: SessionView
    result: SessionResult | None = None
    trajectory: str | None = None


class Acked(msgspec.Struct, frozen=True, kw_only=True):
    first: bool
    """False: it was acknowledged before."""


class PolicyChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str = ""
    version: str | None = None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    counts: Counts
    metrics: dict[str, int]
    nodes: list[NodeView]
    policies: list[Policy]


class UserApi:
    def __init__(self, dispatcher: Dispatcher, archive: Archive, validate: Callable[[TaskSpec], None]) -> None:
        self._dispatcher = dispatcher
        self._registry = dispatcher.registry
        self._archive = archive
        self._validate = validate
        self._closing = asyncio.Event()

    def close(self) -> None:
        """Those who follow are let go."""
        self._closing.set()
        self._dispatcher.delivered.ring()

    def endpoints(self) -> list[Endpoint]:
        def user(method: str, path: str, handler: Handler, summary: str, **more: Any) -> Endpoint:
            return Endpoint(method=method, path=path, handler=handler, summary=summary, kinds=USERS, **more)

        page = ("cursor", "limit")
        return [
            Endpoint(method="GET", path="/healthz", handler=self._health, summary="Is it there", kinds=None),
            user("POST", "/v1/tasks", self._submit, "Submit a task; again is a no-op", body=TaskSpec, answer=Submitted),
            user("GET", "/v1/tasks", self._tasks, "Tasks in order of submission", answer=TaskPage, query=page),
            user("GET", "/v1/tasks/{task_id}", self._task, "A task and its sessions", answer=TaskDetail),
            user("DELETE", "/v1/tasks/{task_id}", self._cancel, "Cancel what is left of a task", answer=Cancelled),
            user(
                "GET", "/v1/tasks/{task_id}/results", self._task_results, "Deliveries of a task, one JSON a line",
                answer=Delivery, query=(*page, "follow", "acked"),
            ),
            user(
                "GET", "/v1/results", self._results, "Deliveries of all tasks, one JSON a line",
                answer=Delivery, query=(*page, "follow", "acked"),
            ),
            user("POST", "/v1/results/{delivery_id}/ack", self._ack, "Acknowledge a delivery", answer=Acked),
            user("GET", "/v1/sessions/{session_id}", self._session, "A session and its result", answer=SessionDetail),
            user("DELETE", "/v1/sessions/{session_id}", self._cancel_session, "Cancel a session", answer=Cancelled),
            user("GET", "/v1/sessions/{session_id}/trajectory", self._traces, "Its rows, as Parquet"),
            user("GET", "/v1/sessions/{session_id}/calls", self._calls, "Its model calls, as Parquet"),
            user("GET", "/v1/status", self._status, "Counts, nodes, policies", answer=Status),
            user("GET", "/v1/nodes", self._nodes, "Nodes, also those that are gone", answer=list[NodeView]),
            user("POST", "/v1/policy", self._policy, "New weights", body=PolicyChange, answer=Policy),
            user("POST", "/v1/policy/pause", self._pause, "Give nothing out", body=PolicyChange, answer=Policy),
            user("POST", "/v1/policy/resume", self._resume, "Give out again", body=PolicyChange, answer=Policy),
            user("GET", "/metrics", self._metrics, "Prometheus metrics"),
            Endpoint(
                method="POST", path="/v1/nodes/{node}/drain", handler=self._drain, summary="No new work for a node", kinds=ADMINS
            ),
        ]  # fmt: skip

    async def _health(self, asked: Asked) -> dict[str, str]:
        return {"status": "ok", "version": __version__}

    async def _submit(self, asked: Asked) -> Response:
        try:
            self._validate(asked.body)
        except PolynyaError as exc:
            return refuse(400, exc.kind, exc.message, exc.fix)
        submitted = await self._dispatcher.submit(asked.body)
        return reply(submitted, 201 if submitted.created else 200)

    async def _tasks(self, asked: Asked) -> TaskPage:
        cursor = asked.number("cursor", 0)
        tasks = await self._registry.tasks(cursor, asked.number("limit", 100, least=1, most=PAGE))
        return TaskPage(tasks=tasks, next_cursor=tasks[-1].cursor if tasks else cursor)

    async def _task(self, asked: Asked) -> TaskDetail:
        task_id = asked.path["task_id"]
        return TaskDetail(task=await self._registry.task(task_id), sessions=await self._registry.sessions(task_id))

    async def _cancel(self, asked: Asked) -> Cancelled:
        return await self._dispatcher.cancel_task(asked.path["task_id"])

    async def _cancel_session(self, asked: Asked) -> Cancelled:
        return await self._dispatcher.cancel_session(asked.path["session_id"])

    async def _task_results(self, asked: Asked) -> Response:
        task_id = asked.path["task_id"]
        await self._registry.task(task_id)
        return self._lines(asked, task_id)

    async def _results(self, asked: Asked) -> Response:
        return self._lines(asked, None)

    def _lines(self, asked: Asked, task_id: str | None) -> Response:
        cursor, limit = asked.number("cursor", 0), asked.number("limit", PAGE, least=1, most=PAGE)
        follow, acked = asked.text("follow") == "1", asked.text("acked") == "1"
        if asked.text("follow", "0") not in ("0", "1") or asked.text("acked", "0") not in ("0", "1"):
            raise ConfigError("follow and acked are 0 or 1")
        lines = self._followed(task_id, cursor, limit, follow=follow, acked=acked)
        return StreamingResponse(lines, media_type="application/x-ndjson")

    async def _followed(
        self, task_id: str | None, cursor: int, limit: int, *, follow: bool, acked: bool
    ) -> AsyncIterator[bytes]:
        """An empty line goes out now and then, so that both sides notice when the other is gone."""
        while not self._closing.is_set():
            seen = self._dispatcher.delivered.count
            found = await self._registry.results(cursor, limit, task_id=task_id, acked=acked)
            for delivery in found:
                cursor = delivery.cursor
                yield msgspec.json.encode(delivery) + b"\n"
                if task_id is not None and delivery.kind == DeliveryKind.GROUP:
                    return
            if not follow:
                return
            if not found and not await self._dispatcher.delivered.wait(seen, _POLL):
                yield b"\n"

    async def _ack(self, asked: Asked) -> Acked:
        return Acked(first=await self._registry.ack(asked.path["delivery_id"]))

    async def _session(self, asked: Asked) -> SessionDetail:
        view = await self._registry.session(asked.path["session_id"])
        delivery = await self._delivery(view)
        if delivery is None:
            return SessionDetail(session=view)
        return SessionDetail(session=view, result=delivery.result, trajectory=delivery.trajectory)

    async def _delivery(self, view: SessionView) -> Delivery | None:
        cursor = 0
        while page := await self._registry.results(cursor, PAGE, task_id=view.task_id, acked=True):
            for delivery in page:
                if delivery.result is not None and delivery.result.session_id == view.session_id:
                    return delivery
            cursor = page[-1].cursor
        return None

    async def _traces(self, asked: Asked) -> Response:
        return await self._table(asked, TABLES[0])

    async def _calls(self, asked: Asked) -> Response:
        return await self._table(asked, TABLES[1])

    async def _table(self, asked: Asked, table: str) -> Response:
        view = await self._registry.session(asked.path["session_id"])
        delivery = await self._delivery(view)
        if delivery is None or delivery.trajectory is None:
            raise UnknownRecord(
                f"session {view.session_id} has no {table}", fix="wait for its result, and see its status"
            )
        rows = await asyncio.to_thread(self._archive.read, delivery.trajectory, table)
        return Response(rows, media_type="application/vnd.apache.parquet")

    async def _status(self, asked: Asked) -> Status:
        return Status(
            version=__version__,
            counts=await self._registry.counts(),
            metrics=self._dispatcher.metrics.as_dict(),
            nodes=await self._registry.nodes(),
            policies=await self._registry.policies(),
        )

    async def _nodes(self, asked: Asked) -> list[NodeView]:
        return await self._registry.nodes()

    async def _policy(self, asked: Asked) -> Policy:
        change: PolicyChange = asked.body
        if change.version is None:
            raise ConfigError("version: is missing", fix="say which weights are served now")
        return await self._dispatcher.set_policy(change.version, change.model)

    async def _pause(self, asked: Asked) -> Policy:
        return await self._dispatcher.pause(asked.body.model)

    async def _resume(self, asked: Asked) -> Policy:
        return await self._dispatcher.resume(asked.body.model, asked.body.version)

    async def _metrics(self, asked: Asked) -> Response:
        text = exposition(await self._status(asked))
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _drain(self, asked: Asked) -> dict[str, bool]:
        node = asked.path["node"]
        if not await self._dispatcher.drain(node):
            raise UnknownRecord(f"node {node} is not there", fix="see GET /v1/nodes")
        return {"draining": True}

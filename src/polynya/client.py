"""The client of a rollout server: what a trainer needs is ``async for group in client.groups(task_ids)``.

Invariant: a group is given when its last session ended, and what it was made of is acknowledged only when the next one is asked for,
so a trainer that dies in between is given it again, under the same delivery ids. Rows are read from Parquet, never from JSON.
"""

from __future__ import annotations

import asyncio
import io
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
import msgspec
import pyarrow.parquet as pq

from polynya.errors import ConfigError, ServerRefused, ServerUnreachable
from polynya.schema import SessionResult, TaskSpec
from polynya.trainers.rows import Row, rows_of

T = TypeVar("T")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_SILENCE = 60.0
"""A server that follows sends an empty line more often than this."""
DEFAULT_STATE = Path(".polynya")


class TaskState(msgspec.Struct, frozen=True, kw_only=True):
    """``state``: ``open``, ``completed``, ``stopped`` (early) or ``cancelled``."""

    task_id: str
    state: str
    num_samples: int
    queued: int
    leased: int
    done: int


class GroupEnd(msgspec.Struct, frozen=True, kw_only=True):
    task_id: str
    state: str
    num_samples: int
    statuses: dict[str, int]


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """Something that the server tells once; ``result`` or ``group`` is set."""

    cursor: int
    delivery_id: str
    task_id: str
    result: SessionResult | None = None
    group: GroupEnd | None = None
    trajectory: str | None = None


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One session and its trainable rows."""

    result: SessionResult
    rows: list[Row]


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """All sessions of a task. ``reward`` is null in those that say nothing about the policy: leave them out of the baseline."""

    task_id: str
    state: str
    rollouts: list[Rollout]

    @property
    def scored(self) -> list[Rollout]:
        return [rollout for rollout in self.rollouts if rollout.result.reward is not None]


class _Submitted(msgspec.Struct):
    task: TaskState
    created: bool


class _Detail(msgspec.Struct):
    task: TaskState


class _Problem(msgspec.Struct):
    kind: str = ""
    message: str = ""
    fix: str = ""


class _Refused(msgspec.Struct):
    error: _Problem


def find_server(state: Path | None = None) -> tuple[str, str]:
    """``(url, token)``: of ``$POLYNYA_URL`` and ``$POLYNYA_TOKEN``, else of the server on this machine that uses the state folder.

    Raises ConfigError.
    """
    if url := os.environ.get("POLYNYA_URL"):
        token = os.environ.get("POLYNYA_TOKEN", "")
        if not token:
            raise ConfigError("POLYNYA_TOKEN is not set", fix="set it to a user token of the server at POLYNYA_URL")
        return url, token
    folder = state or Path(os.environ.get("POLYNYA_STATE") or DEFAULT_STATE)
    try:
        url = str(msgspec.json.decode((folder / "server.json").read_bytes())["url"])
        return url, (folder / "user.token").read_text().strip()
    except (OSError, msgspec.DecodeError, KeyError, TypeError) as exc:
        raise ConfigError(
            f"no rollout server uses {folder}",
            fix="start one with `polynya serve`, name its folder with --state, or set POLYNYA_URL and POLYNYA_TOKEN",
        ) from exc


class AsyncClient:
    """``async with AsyncClient() as client``. Without arguments it finds the server on this machine."""

    def __init__(self, url: str | None = None, token: str | None = None, *, state: Path | None = None) -> None:
        if url is None or token is None:
            url, token = find_server(state)
        self.url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}"}
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def submit(self, task: TaskSpec | dict[str, Any]) -> TaskState:
        """Again is a no-op. Raises ServerRefused (409 for another task of this id, 429 when the queue is full)."""
        body = msgspec.json.encode(task)
        return msgspec.json.decode(await self._ask("POST", "/v1/tasks", body), type=_Submitted).task

    async def task(self, task_id: str) -> TaskState:
        return msgspec.json.decode(await self._ask("GET", f"/v1/tasks/{task_id}"), type=_Detail).task

    async def cancel(self, task_id: str) -> None:
        await self._ask("DELETE", f"/v1/tasks/{task_id}")

    async def status(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode(await self._ask("GET", "/v1/status"))
        return found

    async def pause(self, model: str = "") -> None:
        """Nothing new is given out, as while weights are changed."""
        await self._ask("POST", "/v1/policy/pause", msgspec.json.encode({"model": model}))

    async def resume(self, version: str | None = None, model: str = "") -> None:
        await self._ask("POST", "/v1/policy/resume", msgspec.json.encode({"model": model, "version": version}))

    async def set_policy(self, version: str, model: str = "") -> None:
        await self._ask("POST", "/v1/policy", msgspec.json.encode({"model": model, "version": version}))

    async def rows(self, session_id: str) -> list[Row]:
        """Its trainable rows; none when it has none."""
        try:
            found = await self._ask("GET", f"/v1/sessions/{session_id}/trajectory")
        except ServerRefused as exc:
            if exc.status == 404:
                return []
            raise
        return await asyncio.to_thread(lambda: list(rows_of(pq.ParquetFile(io.BytesIO(found)))))

    async def ack(self, delivery_id: str) -> None:
        await self._ask("POST", f"/v1/results/{delivery_id}/ack")

    async def deliveries(
        self, task_id: str | None = None, *, cursor: int = 0, follow: bool = True, acked: bool = False
    ) -> AsyncIterator[Delivery]:
        """In order. With ``follow`` it goes on, over restarts of the server, for a task until its group event."""
        path = "/v1/results" if task_id is None else f"/v1/tasks/{task_id}/results"
        pause = _FIRST_PAUSE
        while True:
            query = f"{path}?cursor={cursor}&follow={int(follow)}&acked={int(acked)}"
            heard = False
            try:
                async for line in self._lines(query):
                    heard, pause = True, _FIRST_PAUSE
                    if not line.strip():
                        continue
                    delivery = msgspec.json.decode(line, type=Delivery)
                    cursor = delivery.cursor
                    yield delivery
                    if task_id is not None and delivery.group is not None:
                        return
            except ServerUnreachable:
                if not follow:
                    raise
            if not follow:
                if not heard:
                    return
                continue
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def groups(self, task_ids: Collection[str] | None = None, *, ack: bool = True) -> AsyncIterator[Group]:
        """Groups as they complete; of these tasks, or of all that come. Ends when all named ones were given."""
        wanted = None if task_ids is None else set(task_ids)
        held: dict[str, list[Delivery]] = {}
        if wanted is not None and not wanted:
            return
        async for delivery in self.deliveries(acked=not ack):
            if wanted is not None and delivery.task_id not in wanted:
                continue
            held.setdefault(delivery.task_id, []).append(delivery)
            if delivery.group is None:
                continue
            parts = held.pop(delivery.task_id)
            yield await self._group(delivery.group, parts)
            if ack:
                await asyncio.gather(*(self.ack(part.delivery_id) for part in parts))
            if wanted is not None:
                wanted.discard(delivery.task_id)
                if not wanted:
                    return

    async def _group(self, end: GroupEnd, parts: list[Delivery]) -> Group:
        results = [part.result for part in parts if part.result is not None]
        rows = await asyncio.gather(*(self.rows(result.session_id) for result in results))
        rollouts = [Rollout(result=result, rows=found) for result, found in zip(results, rows, strict=True)]
        rollouts.sort(key=lambda rollout: rollout.result.sample_index)
        return Group(task_id=end.task_id, state=end.state, rollouts=rollouts)

    def _client(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(headers=self._headers, read_bufsize=2**20)
        return self._http

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        headers = {} if body is None else {"content-type": "application/json"}
        try:
            async with self._client().request(
                method, self.url + path, data=body, headers=headers, allow_redirects=False
            ) as response:
                text = await response.read()
                if response.status >= 300:
                    raise _refusal(response.status, text, method, path)
                return text
        except (TimeoutError, aiohttp.ClientError, OSError) as exc:
            raise self._unreachable(exc) from exc

    async def _lines(self, path: str) -> AsyncIterator[bytes]:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE)
        try:
            async with self._client().get(self.url + path, timeout=timeout, allow_redirects=False) as response:
                if response.status >= 300:
                    raise _refusal(response.status, await response.read(), "GET", path)
                part = b""
                async for chunk in response.content.iter_any():
                    *lines, part = (part + chunk).split(b"\n")
                    for line in lines:
                        yield line
        except (TimeoutError, aiohttp.ClientError, OSError) as exc:
            raise self._unreachable(exc) from exc

    def _unreachable(self, exc: BaseException) -> ServerUnreachable:
        return ServerUnreachable(
            f"the rollout server at {self.url} gives no answer: {type(exc).__name__}", fix="see whether it runs"
        )


def _refusal(status: int, text: bytes, method: str, path: str) -> ServerRefused | ServerUnreachable:
    try:
        said = msgspec.json.decode(text, type=_Refused).error
    except msgspec.DecodeError:
        said = _Problem(message=text[:300].decode("utf-8", "replace"))
    words = f"{method} {path.partition('?')[0]}: {status} {said.kind}: {said.message}"
    if status in (502, 503, 504):
        return ServerUnreachable(words, fix=said.fix)
    return ServerRefused(words, fix=said.fix, status=status)


class Client:
    """The same, blocking: ``for group in client.groups(task_ids)``. Its requests run on a thread of its own."""

    def __init__(self, url: str | None = None, token: str | None = None, *, state: Path | None = None) -> None:
        self._async = AsyncClient(url, token, state=state)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="polynya client", daemon=True)
        self._thread.start()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._thread.is_alive():
            self._run(self._async.close)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def submit(self, task: TaskSpec | dict[str, Any]) -> TaskState:
        return self._run(lambda: self._async.submit(task))

    def task(self, task_id: str) -> TaskState:
        return self._run(lambda: self._async.task(task_id))

    def cancel(self, task_id: str) -> None:
        self._run(lambda: self._async.cancel(task_id))

    def status(self) -> dict[str, Any]:
        return self._run(self._async.status)

    def pause(self, model: str = "") -> None:
        self._run(lambda: self._async.pause(model))

    def resume(self, version: str | None = None, model: str = "") -> None:
        self._run(lambda: self._async.resume(version, model))

    def set_policy(self, version: str, model: str = "") -> None:
        self._run(lambda: self._async.set_policy(version, model))

    def rows(self, session_id: str) -> list[Row]:
        return self._run(lambda: self._async.rows(session_id))

    def ack(self, delivery_id: str) -> None:
        self._run(lambda: self._async.ack(delivery_id))

    def deliveries(
        self, task_id: str | None = None, *, cursor: int = 0, follow: bool = True, acked: bool = False
    ) -> Iterator[Delivery]:
        return self._each(self._async.deliveries(task_id, cursor=cursor, follow=follow, acked=acked))

    def groups(self, task_ids: Collection[str] | None = None, *, ack: bool = True) -> Iterator[Group]:
        return self._each(self._async.groups(task_ids, ack=ack))

    def _each(self, source: AsyncIterator[T]) -> Iterator[T]:
        while True:
            try:
                yield self._run(source.__anext__)
            except StopAsyncIteration:
                return

    def _run(self, ask: Callable[[], Awaitable[T]]) -> T:
        async def asked() -> T:
            return await ask()

        return asyncio.run_coroutine_threadsafe(asked(), self._loop).result()

"""One HTTP exchange over ASGI: the whole body in, a whole or a streamed reply out, and news of a client that goes away.

``Turn`` is what answering a request needs of the way it came: over HTTP, or as one message of a WebSocket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Protocol
from urllib.parse import parse_qs

from polynya.gateway.protocol import GONE

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_SSE: Headers = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_JSON: Headers = [(b"content-type", b"application/json")]


class BodyTooLarge(Exception):
    """The body is longer than allowed; the rest of it was not read."""


class ClientGone(Exception):
    """The client closed the connection before its request was whole."""


class Turn(Protocol):
    """One request, whose body is read already, and its reply."""

    @property
    def method(self) -> str: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    @property
    def client_gone(self) -> bool: ...

    def query(self, name: str) -> str: ...

    def watch(self) -> asyncio.Future[None]: ...

    async def reply(self, status: int, body: bytes, headers: Headers | None = None) -> None: ...

    async def begin_events(self) -> None: ...

    async def event(self, data: bytes) -> None: ...

    async def end_events(self, data: bytes = b"") -> None: ...


class Head:
    """The first line and the headers of a request."""

    def __init__(self, scope: Scope) -> None:
        self.method: str = scope.get("method", "GET")
        self.path: str = scope["path"]
        self.headers: dict[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self._query: bytes = scope.get("query_string", b"")

    def query(self, name: str) -> str:
        return (parse_qs(self._query.decode("latin-1")).get(name) or [""])[0]


class Exchange(Head):
    """One request and its reply."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope)
        self._receive = receive
        self._send = send
        self._gone: asyncio.Future[None] | None = (scope.get("extensions") or {}).get(GONE)
        self._watching: asyncio.Task[None] | None = None
        self.begun = False
        """Something of the reply was sent."""

    async def body(self, limit: int) -> bytes:
        if int(self.headers.get("content-length") or 0) > limit:
            raise BodyTooLarge
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise BodyTooLarge
            parts.append(part)
            if not message.get("more_body"):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def watch(self) -> asyncio.Future[None]:
        """Done when the client goes away. Call after the body is read."""
        if self._gone is None:
            self._gone = self._watching = asyncio.create_task(self._wait_for_disconnect())
        return self._gone

    @property
    def client_gone(self) -> bool:
        return self._gone is not None and self._gone.done()

    async def close(self) -> None:
        if self._watching is not None and not self._watching.done():
            self._watching.cancel()
            await asyncio.wait([self._watching])

    async def reply(self, status: int, body: bytes, headers: Headers | None = None) -> None:
        self.begun = True
        fields = [*_JSON, (b"content-length", str(len(body)).encode()), *(headers or [])]
        await self._send({"type": "http.response.start", "status": status, "headers": fields})
        await self._send({"type": "http.response.body", "body": b"" if self.method == "HEAD" else body})

    async def begin_events(self) -> None:
        self.begun = True
        await self._send({"type": "http.response.start", "status": 200, "headers": _SSE})

    async def event(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_events(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data})

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

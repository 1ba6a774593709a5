"""OpenAI Responses over a WebSocket: each ``response.create`` message is a request, its reply the events of the stream.

Invariants: a request that comes this way goes through the same steps as one by POST and is captured alike; it is always
streamed; requests of one ``stream_id`` are answered in the order in which they came. When the client goes away its calls
are cancelled in the engine. Refuses message types other than ``response.create``, and more requests at a time than
``MAX_WAITING``, with the provider's error message; the connection stays open.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from polynya.dialects.base import Fault, WireError
from polynya.dialects.responses_reply import error, error_frame, frames
from polynya.gateway.connection import ClientGone, Head, Headers, Receive, Scope, Send

MAX_WAITING = 64
"""Requests of one connection that are answered or wait."""
OFF_LOOP_BYTES = 512 * 1024
"""Bodies with more than this that is new are parsed in a thread (a megabyte of chat JSON takes milliseconds)."""
_log = logging.getLogger("polynya.gateway")


class Frame(msgspec.Struct):
    """What of a message says how it is to be answered; the whole of it is the request."""

    type: str
    generate: bool | None = None
    """False: the client only wants an id that a later request can continue."""
    stream_id: str | None = None
    client_metadata: dict[str, Any] | None = None


_frame = msgspec.json.Decoder(Frame)
Answer = Callable[["SocketTurn", bytes, Frame], Awaitable[None]]


class SocketTurn:
    """One request and its reply, with the face of an HTTP ``Exchange``."""

    method = "POST"

    def __init__(self, socket: ResponsesSocket, frame: Frame) -> None:
        self._socket = socket
        self._stream_id = frame.stream_id or ""
        self.path = socket.path
        self.headers: Mapping[str, str] = socket.headers
        if frame.client_metadata:
            # What Codex sends as headers with a POST stands here; the headers are those of the first request.
            own = {key: value for key, value in frame.client_metadata.items() if isinstance(value, str)}
            self.headers = {**socket.headers, **{key.lower(): value for key, value in own.items()}}

    def query(self, name: str) -> str:
        return ""

    def watch(self) -> asyncio.Task[None]:
        return self._socket.reading

    @property
    def client_gone(self) -> bool:
        return self._socket.reading.done()

    async def reply(self, status: int, body: bytes, headers: Headers | None = None) -> None:
        """An error, before anything of the reply was sent."""
        said = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers or []}
        await self._socket.send(error_frame(status, body, said, self._stream_id))

    async def begin_events(self) -> None:
        """There is nothing to begin: each message stands for itself."""

    async def event(self, data: bytes) -> None:
        for frame in frames(data, self._stream_id):
            await self._socket.send(frame)

    async def end_events(self, data: bytes = b"") -> None:
        await self.event(data)


class ResponsesSocket(Head):
    """One connection. ``run`` after the key was found good, else ``refuse``."""

    reading: asyncio.Task[None]
    """Ends when the client is gone."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope)
        self._receive = receive
        self._send = send
        self._turns: set[asyncio.Task[None]] = set()
        self._last: dict[str, asyncio.Task[None]] = {}
        """Stream id → the newest request in it."""

    async def refuse(self, status: int, body: bytes) -> None:
        """At the handshake, with an HTTP status."""
        await self._receive()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._send({"type": "websocket.http.response.start", "status": status, "headers": headers})
        await self._send({"type": "websocket.http.response.body", "body": body})

    async def run(self, answer: Answer) -> None:
        """Returns when the client is gone and nothing of it is worked on any more."""
        await self._receive()
        await self._send({"type": "websocket.accept"})
        self.reading = asyncio.create_task(self._read(answer), name="websocket")
        try:
            await asyncio.wait([self.reading])
            while self._turns:
                await asyncio.wait(self._turns)
        finally:
            for task in (self.reading, *self._turns):
                task.cancel()

    async def send(self, text: str) -> None:
        try:
            await self._send({"type": "websocket.send", "text": text})
        except OSError as exc:
            raise ClientGone from exc

    async def _read(self, answer: Answer) -> None:
        while (message := await self._receive())["type"] != "websocket.disconnect":
            text = message.get("text")
            body = message.get("bytes") or b"" if text is None else text.encode("utf-8", "surrogatepass")
            found = await asyncio.to_thread(_read_frame, body) if len(body) > OFF_LOOP_BYTES else _read_frame(body)
            lane = found.stream_id or "" if isinstance(found, Frame) else ""
            crowded = len(self._turns) >= MAX_WAITING
            turn = asyncio.create_task(self._turn(answer, body, found, self._last.get(lane), crowded=crowded))
            if not crowded:
                self._last[lane] = turn
            self._turns.add(turn)
            turn.add_done_callback(functools.partial(self._ended, lane))

    def _ended(self, lane: str, turn: asyncio.Task[None]) -> None:
        self._turns.discard(turn)
        if self._last.get(lane) is turn:
            del self._last[lane]

    async def _turn(
        self,
        answer: Answer,
        body: bytes,
        frame: Frame | WireError,
        before: asyncio.Task[None] | None,
        *,
        crowded: bool,
    ) -> None:
        if before is not None and not crowded:
            await asyncio.wait([before])
        if self.reading.done():
            return
        turn = SocketTurn(self, frame if isinstance(frame, Frame) else Frame(type=""))
        try:
            if isinstance(frame, WireError):
                await turn.reply(frame.status, error(frame))
            elif crowded:
                full = WireError(fault=Fault.RATE_LIMITED, message=f"{MAX_WAITING} requests wait on this connection")
                await turn.reply(full.status, error(full), [(b"retry-after", b"1")])
            else:
                await answer(turn, body, frame)
        except ClientGone:
            pass
        except Exception as exc:
            _log.exception("a request on a WebSocket failed")
            broken = WireError(fault=Fault.INTERNAL, message=f"internal error in the gateway: {type(exc).__name__}")
            with contextlib.suppress(ClientGone):
                await turn.reply(broken.status, error(broken))


def _read_frame(body: bytes) -> Frame | WireError:
    try:
        frame = _frame.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        return WireError(fault=Fault.BAD_REQUEST, message=f"message is not a request: {exc}")
    if frame.type != "response.create":
        message = f"type: {frame.type!r:.80} is not served; send response.create"
        return WireError(fault=Fault.BAD_REQUEST, message=message, field="type")
    return frame

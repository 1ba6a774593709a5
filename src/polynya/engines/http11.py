"""A pooled HTTP/1.1 client for one origin: large bodies out without joining them, large replies read straight into place.

Invariant: a reply is whole or it is an exception; a connection is used again only after a reply that ended exactly where
its framing said. A cancelled request aborts its connection, so that the server sees it within a second. The pool has no
limit: one smaller than the number of sessions would queue calls where nobody sees it. Refuses to follow redirects, and to
send a header with a line break in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import ssl
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

IDLE_SECONDS = 60.0
"""An unused connection is closed after this; servers close theirs after 5 to 75 s, which is noticed."""
_SCRATCH = 16 * 1024
_MAX_HEAD = 256 * 1024
_MAX_BODY = 1024 * 1024 * 1024
_HEAD_END = b"\r\n\r\n"
_BODILESS = frozenset({204, 304})
_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes, _new_bytes.restype = [ctypes.c_void_p, ctypes.c_ssize_t], ctypes.py_object
_address_of = ctypes.pythonapi.PyBytes_AsString
_address_of.argtypes, _address_of.restype = [ctypes.py_object], ctypes.c_void_p
_view_of = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of.argtypes, _view_of.restype = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int], ctypes.py_object
_WRITABLE = 0x200


class ConnectFailed(Exception):
    """No connection: nothing was sent."""


class ConnectionLost(Exception):
    """The connection broke; ``started``: after the first byte of the reply."""

    def __init__(self, why: str, *, started: bool) -> None:
        super().__init__(why)
        self.started = started


class Garbled(Exception):
    """The answer is no HTTP."""


class Silence(Exception):
    """No byte for the read time-out."""


class Reply(msgspec.Struct, frozen=True):
    status: int
    headers: dict[str, str]
    """Names in lower case; of repeated ones the last."""
    body: bytes


def unwritten(size: int) -> tuple[bytes, memoryview]:
    """Bytes, and a view through which the kernel fills them: whole, they are handed on as they are, without a copy.

    The bytes are whatever stood in memory: nobody may see them before all are written, nor drop them before the view.
    """
    whole: bytes = _new_bytes(None, size)
    view: memoryview = _view_of(_address_of(whole), size, _WRITABLE)
    return whole, view


class Origin:
    """``http[s]://host[:port][/prefix]``."""

    def __init__(self, base_url: str) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConnectFailed(f"{base_url!r} is no http:// or https:// URL")
        self.host = parts.hostname
        try:
            self.port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as exc:
            raise ConnectFailed(f"{base_url!r}: {exc}") from exc
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.prefix = parts.path.rstrip("/")
        self.authority = parts.netloc.rpartition("@")[2]


class Http11Client:
    """Used from one event loop."""

    def __init__(
        self, base_url: str, headers: Mapping[str, str], *, connect_timeout: float, read_timeout: float
    ) -> None:
        self.origin = Origin(base_url)
        self._head = _lines({"Host": self.origin.authority, **headers})
        self._connect_timeout = connect_timeout
        self._read_timeout = read_timeout
        self._idle: deque[_Connection] = deque()
        self._live: set[_Connection] = set()

    async def request(
        self,
        method: str,
        path: str,
        parts: Sequence[bytes] = (),
        headers: Mapping[str, str] | None = None,
        *,
        fresh: bool = False,
    ) -> Reply:
        """Send one request, its body in pieces; ``fresh``: over a new connection.

        Raises ConnectFailed, ConnectionLost, Garbled, Silence; ValueError for a header.
        """
        size = sum(map(len, parts))
        head = b"%b %b HTTP/1.1\r\n%b%bContent-Length: %d\r\n\r\n" % (
            method.encode(), (self.origin.prefix + path).encode(), self._head, _lines(headers or {}), size,
        )  # fmt: skip
        connection = (None if fresh else self._pooled()) or await self._connect()
        try:
            reply = await connection.exchange([head, *parts], self._read_timeout, bodiless=method == "HEAD")
        except BaseException:
            connection.abort()
            raise
        if connection.reusable:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.abort()
        return reply

    async def close(self) -> None:
        for connection in list(self._live):
            connection.abort()
        self._idle.clear()

    def _pooled(self) -> _Connection | None:
        """The connection used last, so that the others can grow old."""
        oldest = asyncio.get_running_loop().time() - IDLE_SECONDS
        while self._idle and (self._idle[0].closed or self._idle[0].idle_since < oldest):
            self._idle.popleft().abort()
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(
                    lambda: _Connection(loop, self._live), self.origin.host, self.origin.port, ssl=self.origin.tls
                )
        except TimeoutError as exc:
            raise ConnectFailed(f"no connection within {self._connect_timeout:g} s") from exc
        except OSError as exc:
            raise ConnectFailed(str(exc)) from exc
        if not connection.closed:
            self._live.add(connection)  # not before: uvloop drops one whose connecting was cancelled without a word
        return connection


def _lines(headers: Mapping[str, str]) -> bytes:
    lines = [f"{name}: {value}" for name, value in headers.items()]
    for line in lines:
        if "\r" in line or "\n" in line:
            raise ValueError(f"header {line!r} holds a line break")
    return "".join(line + "\r\n" for line in lines).encode("latin-1")


class _Connection(asyncio.BufferedProtocol):
    """One connection: one exchange at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, live: set[_Connection]) -> None:
        self._loop = loop
        self._live = live
        self._transport: asyncio.Transport | None = None
        self._scratch = bytearray(_SCRATCH)
        self._head = bytearray()
        self._status = 0
        self._headers: dict[str, str] = {}
        self._body = b""
        self._view: memoryview | None = None
        """Of ``_body``, while it is read."""
        self._at = 0
        self._framed: _Framed | None = None
        self._waiter: asyncio.Future[Reply] | None = None
        self._bodiless = False
        self._timer: asyncio.TimerHandle | None = None
        self._heard = 0.0
        self._lost = ""
        self.reusable = False
        self.closed = False
        self.idle_since = 0.0

    async def exchange(self, parts: Sequence[bytes], read_timeout: float, *, bodiless: bool) -> Reply:
        if self._transport is None or self.closed:
            raise ConnectionLost(self._lost or "closed", started=False)
        self._status, self._framed, self._bodiless, self.reusable = 0, None, bodiless, False
        self._waiter = self._loop.create_future()
        self._heard = self._loop.time()
        self._timer = self._loop.call_later(read_timeout, self._check, read_timeout)
        try:
            self._transport.writelines(parts)
            return await self._waiter
        finally:
            self._timer.cancel()
            self._waiter = None
            self._view, self._body = None, b""
            self._head = bytearray()

    def abort(self) -> None:
        if self._transport is not None and not self.closed:
            self._transport.abort()
        self.closed = True

    # asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview | bytearray:
        return self._view[self._at :] if self._view is not None else self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        self._heard = self._loop.time()
        if self._waiter is None or self._waiter.done():
            self.abort()  # a byte that nobody asked for: the next reply could not be told from it
        elif self._view is not None:
            self._at += nbytes
            if self._at == len(self._view):
                self._finish(self._body)
        else:
            self._take(bytes(memoryview(self._scratch)[:nbytes]))

    def eof_received(self) -> bool:
        if self._framed is not None and self._framed.until_eof:
            self._finish(b"".join(self._framed.parts), reusable=False)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._live.discard(self)
        self._lost = str(exc) if exc else "the server closed the connection"
        started = bool(self._head) or self._status > 0
        self._fail(ConnectionLost(self._lost, started=started))

    # reading

    def _take(self, data: bytes) -> None:
        try:
            if self._framed is not None:
                self._framed.feed(data)
            else:
                self._head += data
                self._read_head()
            if self._framed is not None and self._framed.complete:
                self._finish(b"".join(self._framed.parts), reusable=not self._framed.surplus)
        except (ValueError, httptools.HttpParserError) as exc:
            self._fail(Garbled(f"it is no HTTP/1.1: {exc}"))
            self.abort()

    def _read_head(self) -> None:
        """Parse the head once it is whole, and choose how the body is read."""
        status = 100
        while 100 <= status < 200:
            end = self._head.find(_HEAD_END)
            if end < 0:
                if len(self._head) > _MAX_HEAD:
                    raise ValueError(f"its head is longer than {_MAX_HEAD} bytes")
                return
            head = bytes(self._head[:end])
            status, headers = _parse_head(head)
            del self._head[: end + 4]
        rest = bytes(self._head)
        self._status, self._headers = status, headers
        if self._bodiless or status in _BODILESS:
            self._finish(b"", reusable=not rest)
        elif "transfer-encoding" in headers or "content-length" not in headers:
            self._framed = _Framed(chunked="chunked" in headers.get("transfer-encoding", "").lower())
            self._framed.feed((head + _HEAD_END if self._framed.chunked else b"") + rest)
        else:
            self._read_sized(_content_length(headers["content-length"]), rest)

    def _read_sized(self, size: int, rest: bytes) -> None:
        if len(rest) >= size:
            self._finish(rest[:size], reusable=len(rest) == size)
            return
        self._body, self._view = unwritten(size)
        self._view[: len(rest)] = rest
        self._at = len(rest)

    def _finish(self, body: bytes, *, reusable: bool = True) -> None:
        self._view = None
        with contextlib.suppress(zlib.error):  # an undecodable body is handed on: its reader says what it is
            if self._headers.get("content-encoding", "identity").lower() in ("gzip", "deflate"):
                body = zlib.decompress(body, wbits=47)
        transport = self._transport
        unsent = transport is None or transport.get_write_buffer_size() > 0
        self.reusable = reusable and not unsent and self._headers.get("connection", "").lower() != "close"
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(Reply(self._status, self._headers, body))

    def _fail(self, error: Exception) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    def _check(self, read_timeout: float) -> None:
        left = self._heard + read_timeout - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check, read_timeout)
            return
        self._fail(Silence())


class _Framed:
    """A body that has no length: chunked, or up to the end of the connection."""

    def __init__(self, *, chunked: bool) -> None:
        self.chunked = chunked
        self.until_eof = not chunked
        self.parts: list[bytes] = []
        self.complete = False
        self.surplus = False
        """Bytes came after its end."""
        self._size = 0
        self._parser = httptools.HttpResponseParser(self) if chunked else None

    def feed(self, data: bytes) -> None:
        if self._parser is not None:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserError:
                if not self.complete:
                    raise
                self.surplus = True
        elif data:
            self.on_body(data)

    def on_message_begin(self) -> None:
        self.surplus = self.complete

    def on_body(self, data: bytes) -> None:
        if self.complete:
            return
        self._size += len(data)
        if self._size > _MAX_BODY:
            raise ValueError(f"its body is longer than {_MAX_BODY} bytes")
        self.parts.append(data)

    def on_message_complete(self) -> None:
        self.complete = True


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    code = rest[:3]
    if not version.startswith("HTTP/1.") or not code.isdigit():
        raise ValueError(f"it starts with {first[:60]!r}")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    if version == "HTTP/1.0":
        headers.setdefault("connection", "close")
    return int(code), headers


def _content_length(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) > _MAX_BODY:
        raise ValueError(f"Content-Length is {text[:40]!r}")
    return int(text)

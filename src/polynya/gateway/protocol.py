"""The gateway's HTTP/1.1 connection: uvicorn's own, save that a large body of known length is read straight into place.

An agent's request is half a megabyte with every turn. uvicorn hands such a body on in pieces, each of them copied three times
and each pausing the socket; here the kernel writes into the final buffer, and the application gets it in one piece.
Invariant: everything else (heads, keep-alive, pipelining, upgrades, replies) is uvicorn's own code. Refuses nothing itself;
a length above ``DIRECT_BYTES`` takes uvicorn's path, where the application can say 413 before the body has come.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from polynya.engines.http11 import unwritten

DIRECT_BYTES = 64 * 1024 * 1024
"""The buffer is not filled beforehand, and unwritten pages cost nothing: a client that lies about its length gains nothing."""
GONE = "polynya.gone"
"""Extension of the ASGI scope: a future that is done when the connection is lost."""
_SCRATCH = 16 * 1024
_SMALL = 16 * 1024
"""Bodies up to this come whole in one read; nothing is gained."""


class _HeadFirst:
    """The transport of one reply: its head waits for what is written next, and goes out with that or a moment later.

    A reply that is there at once is one write then, and wakes the client once.
    """

    __slots__ = ("_head", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = b""
        """Empty: not there yet; None: it has gone."""

    def write(self, data: bytes) -> None:
        if self._head is None:
            self._transport.write(data)
        elif self._head:
            self._transport.writelines([self._head, data])
            self._head = None
        else:
            self._head = data
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _flush(self) -> None:
        head, self._head = self._head, None
        if head and not self._transport.is_closing():
            self._transport.write(head)


class _Http(HttpToolsProtocol):
    """uvicorn's protocol, with the body of the request under way in a buffer of its own."""

    whole: memoryview | None = None
    at = 0
    _body = b""
    """Which ``whole`` fills."""
    declined = False
    """The head that was just read asks for an upgrade that is not served."""
    gone: asyncio.Future[None] | None = None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self.gone is None:
            self.gone = self.loop.create_future()
        cast("dict[str, Any]", self.scope)["extensions"] = {GONE: self.gone}

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.gone is not None and not self.gone.done():
            self.gone.set_result(None)

    def data_received(self, data: bytes) -> None:
        """An upgrade that is not served is passed over (clients in Java ask for one with each request); its body is read."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self.declined:
                if self._should_upgrade():
                    self.handle_websocket_upgrade()
                return
            head = [
                self.parser.get_method(),
                b" ",
                self.url,
                b" HTTP/",
                self.parser.get_http_version().encode(),
                b"\r\n",
            ]
            for name, value in self.headers:
                tokens = [token for token in value.split(b",") if token.strip().lower() == b"close"]
                if name != b"upgrade":
                    head += [name, b": ", b",".join(tokens) if name == b"connection" else value, b"\r\n"]
            self.declined = False
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
            self.data_received(b"".join([*head, b"\r\n", data[upgrade.args[0] :]]))
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and not self._should_upgrade() and self.parser.get_method() != b"CONNECT":
            self.declined = True
            return
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self.cycle.transport = cast("asyncio.Transport", _HeadFirst(self.transport, self.loop))
        length = next((value for name, value in self.headers if name == b"content-length"), b"")
        chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        if (
            length.isdigit()
            and not chunked
            and _SMALL < int(length) <= DIRECT_BYTES
            and not self.parser.should_upgrade()
        ):
            self._body, self.whole = unwritten(int(length))
            self.at = 0

    def on_body(self, body: bytes) -> None:
        if self.whole is None:
            super().on_body(body)
        else:
            self.whole[self.at : self.at + len(body)] = body
            self.at += len(body)

    def on_message_complete(self) -> None:
        if self.declined:
            return
        if self.whole is not None:
            self._hand_on()
        super().on_message_complete()

    def body_read(self) -> None:
        """The last byte of ``whole`` was read past the parser, which therefore knows nothing of it."""
        if self.whole is not None:
            self._hand_on()
        self.parser = httptools.HttpRequestParser(self)
        if not self.cycle.response_complete:
            self.cycle.more_body = False
            self.cycle.message_event.set()

    def _hand_on(self) -> None:
        body, self._body, self.whole = self._body, b"", None
        if not self.cycle.response_complete:
            self.cycle.body = cast("bytearray", body)


class GatewayProtocol(asyncio.BufferedProtocol):
    """Given to uvicorn as ``http=``."""

    def __init__(self, **settings: Any) -> None:
        self._http = _Http(**settings)
        self._scratch = bytearray(_SCRATCH)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._http.connection_made(cast("asyncio.Transport", transport))

    def connection_lost(self, exc: Exception | None) -> None:
        self._http.connection_lost(exc)

    def eof_received(self) -> None:
        self._http.eof_received()

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    def get_buffer(self, sizehint: int) -> memoryview | bytearray:
        whole = self._http.whole
        return self._scratch if whole is None else whole[self._http.at :]

    def buffer_updated(self, nbytes: int) -> None:
        http = self._http
        if http.whole is None:
            http.data_received(bytes(memoryview(self._scratch)[:nbytes]))
            return
        http.at += nbytes
        if http.at == len(http.whole):
            http.body_read()

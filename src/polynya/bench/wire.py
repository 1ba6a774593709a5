"""HTTP/1.1 as cheaply as Python can: one buffer a connection, whole messages, no parser objects.

Only what the bench's own programs speak: bodies with a length, or chunked ones that end the message (never pipelined).
"""

from __future__ import annotations

import asyncio
from typing import cast

_FIRST = 64 * 1024
_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


class Peer(asyncio.BufferedProtocol):
    """One end of a connection. ``message`` is called for each whole message; the buffer is valid during that call only."""

    def __init__(self) -> None:
        self.buffer = bytearray(_FIRST)
        self.transport: asyncio.Transport | None = None
        self._have = 0
        self._head = b""
        self._head_end = 0
        self._total = 0
        """Bytes of the message that is being read; 0: its head is not whole yet, -1: until the last chunk."""

    def message(self, head: bytes, body_at: int, end: int) -> None:
        """The head in lower case; the body is ``buffer[body_at:end]``."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes
        self.transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._have == len(self.buffer):
            self._grow(2 * self._have)
        return memoryview(self.buffer)[self._have :]

    def buffer_updated(self, nbytes: int) -> None:
        self._have += nbytes
        while self._have and self._step():
            pass

    def _step(self) -> bool:
        if self._total == 0 and not self._read_head():
            return False
        if self._total < 0:
            end = self._have
            if self.buffer[end - len(_LAST_CHUNK) : end] != _LAST_CHUNK:
                return False
        else:
            end = self._total
            if self._have < end:
                return False
        head, body_at, rest = self._head, self._head_end, self._have - end
        self._total = 0
        self.message(head, body_at, end)
        if rest:
            self.buffer[:rest] = self.buffer[end : end + rest]
        self._have = rest
        return True

    def _read_head(self) -> bool:
        end = self.buffer.find(_HEAD_END, 0, self._have)
        if end < 0:
            return False
        self._head_end = end + len(_HEAD_END)
        self._head = bytes(memoryview(self.buffer)[: self._head_end]).lower()
        if b"\r\ntransfer-encoding: chunked" in self._head:
            self._total = -1
        else:
            self._total = self._head_end + content_length(self._head)
            if self._total > len(self.buffer):
                self._grow(self._total)
        return True

    def _grow(self, size: int) -> None:
        bigger = bytearray(size)
        bigger[: self._have] = memoryview(self.buffer)[: self._have]
        self.buffer = bigger


def content_length(head: bytes) -> int:
    at = head.find(b"\r\ncontent-length:")
    return int(head[at + 17 : head.index(b"\r\n", at + 17)]) if at >= 0 else 0


def status_of(head: bytes) -> int:
    """Of a response."""
    return int(head[9:12])


def json_answer(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)

"""What a dialect is, and how a path names one.

A dialect's parse refuses what it cannot represent, with ``BadRequest`` naming the field: the client gets a 400 in its own
words, never a silent default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from polynya.dialects.history import History
from polynya.dialects.neutral import ChatReply, ChatRequest, ReplyHead


class BadRequest(Exception):
    """The client's own mistake. ``field`` is the path in its JSON."""

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class Fault(StrEnum):
    """What went wrong, as a dialect says it to its client."""

    BAD_REQUEST = "bad_request"
    UNAUTHORISED = "unauthorised"
    NOT_FOUND = "not_found"
    GONE = "gone"
    TOO_LARGE = "too_large"
    CONTEXT_OVERFLOW = "context_overflow"
    RATE_LIMITED = "rate_limited"
    NOT_IMPLEMENTED = "not_implemented"
    INTERNAL = "internal"
    STORAGE_FULL = "storage_full"
    UNAVAILABLE = "unavailable"


HTTP_STATUS: Mapping[Fault, int] = {
    Fault.BAD_REQUEST: 400,
    Fault.UNAUTHORISED: 401,
    Fault.NOT_FOUND: 404,
    Fault.GONE: 410,
    Fault.TOO_LARGE: 413,
    Fault.CONTEXT_OVERFLOW: 400,
    Fault.RATE_LIMITED: 429,
    Fault.NOT_IMPLEMENTED: 501,
    Fault.INTERNAL: 500,
    Fault.STORAGE_FULL: 507,
    Fault.UNAVAILABLE: 503,
}


class WireError(msgspec.Struct, frozen=True, kw_only=True):
    fault: Fault
    message: str
    field: str = ""
    retry_after: float | None = None
    """Seconds, for the ``Retry-After`` header."""

    @property
    def status(self) -> int:
        return HTTP_STATUS[self.fault]


class Dialect(Protocol):
    name: str

    def parse(self, body: bytes, path: str, history: History[Any] | None = None) -> ChatRequest:
        """Raises BadRequest. ``history``: what the same session sent before in this dialect, to be gone on with."""
        ...

    def render(self, request: ChatRequest, reply: ChatReply, head: ReplyHead) -> bytes: ...

    def echoed(self, request: ChatRequest, reply: ChatReply) -> ChatReply:
        """The reply as ``parse`` finds it when a client sends on what it was shown; the same object where nothing is lost."""
        ...

    def keepalive(self, head: ReplyHead, number: int = 1) -> bytes:
        """A no-op event of the dialect's own shape (a comment breaks some clients and does not reset others' timers).

        ``number`` counts those of one stream from 0: some SDKs want their opening event before any other.
        """
        ...

    def stream(self, request: ChatRequest, reply: ChatReply, head: ReplyHead, waited: int = 0) -> Iterator[bytes]:
        """The events of a whole reply, in order; the last item is the terminal one. ``waited``: no-op events before it."""
        ...

    def error(self, error: WireError) -> bytes: ...

    def stream_error(self, error: WireError, head: ReplyHead, waited: int = 0) -> bytes:
        """The same, as an event of a stream that began already; ``head`` and ``waited`` as in ``stream``."""
        ...

    def token_count(self, count: int) -> bytes:
        """The answer to a request to count tokens."""
        ...

    def models(self, names: list[str], created: int) -> bytes:
        """The answer to a model list."""
        ...


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """What a path asks for."""

    dialect: str
    action: str
    """``generate``, ``models``, ``count_tokens``, or ``stored`` and ``forget`` for a reply that was given earlier."""


def likely_dialect(path: str, headers: Mapping[str, str]) -> str:
    """In whose words a path that is not served is refused: those of the SDK that sends such headers."""
    if "anthropic-version" in headers:
        return "anthropic_messages"
    return "google_generate" if "/v1beta/" in path or "x-goog-api-key" in headers else "openai_chat"


def route(method: str, path: str, headers: Mapping[str, str]) -> Route | None:
    """The dialect and action that a request asks for; None: no model endpoint.

    The path names the dialect, headers settle the rest (a model list is asked for by one path in two dialects).
    The User-Agent is never read: several clients send each other's.
    """
    path = path.rstrip("/")
    anthropic = "anthropic-version" in headers
    if method == "GET" and path.endswith("/models"):
        dialect = (
            "google_generate" if "/v1beta/" in f"{path}/" else "anthropic_messages" if anthropic else "openai_chat"
        )
        return Route(dialect=dialect, action="models")
    if method in ("GET", "DELETE") and path.rpartition("/")[0].endswith("/responses"):
        return Route(dialect="openai_responses", action="stored" if method == "GET" else "forget")
    if method != "POST":
        return None
    if path.endswith("/chat/completions"):
        return Route(dialect="openai_chat", action="generate")
    if path.endswith(("/responses", "/responses/compact")):
        return Route(dialect="openai_responses", action="generate")
    if path.endswith("/responses/input_tokens"):
        return Route(dialect="openai_responses", action="count_tokens")
    if path.endswith("/messages/count_tokens"):
        return Route(dialect="anthropic_messages", action="count_tokens")
    if path.endswith("/messages"):
        return Route(dialect="anthropic_messages", action="generate")
    if path.endswith((":generateContent", ":streamGenerateContent")):
        return Route(dialect="google_generate", action="generate")
    if path.endswith(":countTokens"):
        return Route(dialect="google_generate", action="count_tokens")
    return None

"""A thin pooled HTTP client for engines: requests, bounded retries, and transport failures as ``polynya.errors``.

Invariant: an answer is whole or it is an error; a body that broke off is never handed on. A cancelled task closes its
connection, so that the server aborts. Retried are only: no connection, a connection lost before the answer was whole, JSON
that stops before its end, and the statuses that say "later" (``RETRY_STATUSES``). Nobody has seen an answer that broke off,
so asking again costs one generation; handed on into an open stream, it ends the run of some agents for good. A request that
may have been worked on and is sent again is counted in ``Answer.resent``. Refuses to wait longer than ``retry_after_cap``.
"""

from __future__ import annotations

import asyncio
import email.utils
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from polynya.engines.http11 import ConnectFailed, ConnectionLost, Garbled, Http11Client, Silence
from polynya.engines.overflow import context_overflow
from polynya.errors import EngineError, EngineProtocolError, EngineRejected, EngineTimeout, EngineUnavailable

RETRY_STATUSES = frozenset({429, 502, 503, 529})
_MISCONFIGURED = frozenset({401, 403, 404, 405, 407})
"""4xx that no request of a policy can cause: a wrong URL, key or model name."""


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    connect_timeout: float = 30.0
    read_timeout: float = 1800.0
    """Seconds without a byte from the engine; a whole generation lies in it, since replies are not streamed."""
    retries: int = 3
    """Further tries of one request."""
    backoff_base: float = 0.25
    backoff_cap: float = 8.0
    retry_after_cap: float = 30.0


class Answer(msgspec.Struct, frozen=True):
    body: bytes
    retries: int = 0
    resent: int = 0
    """Of the retries, those after which the engine may have worked on the request already."""

    @property
    def flags(self) -> dict[str, int]:
        counted = {"upstream_retries": self.retries, "upstream_resent": self.resent}
        return {name: count for name, count in counted.items() if count}


class _ErrorBody(msgspec.Struct):
    message: str | None = None
    type: str | None = None
    code: Any = None


class _Envelope(msgspec.Struct):
    error: _ErrorBody | str | None = None
    message: str | None = None
    detail: Any = None
    type: str | None = None
    code: Any = None


class EngineHttp:
    """One engine's base URL. ``sleep`` is replaceable, so that tests need not wait."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        settings: HttpSettings | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.settings = settings or HttpSettings()
        self._sleep = sleep
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._client: Http11Client | None = None

    def _http(self) -> Http11Client:
        if self._client is None:
            self._client = Http11Client(
                self.base_url,
                self._headers,
                connect_timeout=self.settings.connect_timeout,
                read_timeout=self.settings.read_timeout,
            )
        return self._client

    async def get(self, path: str) -> Answer:
        return await self.request("GET", path)

    async def post(self, path: str, *body: bytes, headers: dict[str, str] | None = None) -> Answer:
        """The body may come in pieces, which are not joined."""
        return await self.request("POST", path, body, headers=headers)

    async def request(
        self, method: str, path: str, body: Sequence[bytes] = (), *, headers: dict[str, str] | None = None
    ) -> Answer:
        """Send, and send again where that is right. Raises the errors named above."""
        resent = 0
        for attempt in range(self.settings.retries + 1):
            failure, wait, worked = await self._once(method, path, body, headers, fresh=resent > 0)
            if isinstance(failure, bytes):
                return Answer(failure, attempt, resent)
            if wait is None or attempt == self.settings.retries or wait > self.settings.retry_after_cap:
                raise failure
            resent += worked
            ceiling = min(self.settings.backoff_cap, self.settings.backoff_base * 2**attempt)
            await self._sleep(max(wait, random.uniform(ceiling / 2, ceiling)))
        raise AssertionError("unreachable")

    async def _once(
        self, method: str, path: str, body: Sequence[bytes], headers: dict[str, str] | None, *, fresh: bool
    ) -> tuple[bytes | EngineError, float | None, bool]:
        """``(body or failure, seconds to wait at least or None: do not retry, may the engine have worked on it)``.

        ``fresh``: where one kept connection was dead, the others of its age may be so too.
        """
        url = self.base_url + path
        try:
            answer = await self._http().request(method, path, body, headers, fresh=fresh)
        except ConnectFailed as exc:
            return self._unreachable(url, str(exc)), 0.0, False
        except Silence:
            text = f"engine at {url}: no byte for {self.settings.read_timeout:g} s"
            return EngineTimeout(text, fix="raise the engine timeout, or lower max_tokens"), None, True
        except Garbled as exc:
            return self._unreachable(url, f"answer cannot be read: {exc}"), None, True
        except ConnectionLost as exc:
            why = "answer broke off" if exc.started else "connection lost"
            return self._unreachable(url, f"{why}: {exc}"), 0.0, True
        if answer.status < 300 and _is_cut(answer.headers.get("content-type", ""), answer.body):
            return _cut_short(url, answer.body), 0.0, True
        if answer.status < 300:
            return answer.body, None, False
        after = retry_after_seconds(answer.headers.get("retry-after"))
        failure = status_error(answer.status, answer.body, url, after)
        return failure, (after or 0.0) if answer.status in RETRY_STATUSES else None, False

    def _unreachable(self, url: str, why: str) -> EngineUnavailable:
        return EngineUnavailable(f"engine at {url}: {why}", fix="check that the server runs and the base URL is right")

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None


def _is_cut(content_type: str, body: bytes) -> bool:
    """JSON that does not reach its own end, in a body that is whole for HTTP: something on the way cut it."""
    return content_type.startswith("application/json") and body[-64:].rstrip()[-1:] not in (b"", b"}", b"]")


def _cut_short(url: str, body: bytes) -> EngineProtocolError:
    return EngineProtocolError(
        f"engine at {url}: the JSON of its answer stops after {len(body)} bytes, at {body[-40:]!r}",
        fix="see what stands between polynya and the engine: a router that cuts bodies, or a crash",
    )


def status_error(status: int, body: bytes, url: str, retry_after: float | None = None) -> EngineError:
    """The error of an answer that is no success."""
    words, kind = error_words(body)
    said = f"engine answered HTTP {status} at {url}: {words or 'no text'}"
    if status < 500 and status != 429:
        if (overflow := context_overflow(words, kind)) is not None:
            return overflow
        if status in _MISCONFIGURED:
            return EngineUnavailable(said, status=status, fix="check the base URL, the API key and the model name")
        return EngineRejected(words or said, status=status)
    # some servers say a full window with a 500
    if (overflow := context_overflow(words, kind)) is not None:
        return overflow
    after = 1.0 if retry_after is None else retry_after
    return EngineUnavailable(said, status=status, retry_after=after, fix="see the engine's own log")


def error_words(body: bytes) -> tuple[str, str]:
    """``(message, type and code)`` of an error body in any of the engines' shapes; the text itself when it is none."""
    try:
        found = msgspec.json.decode(body, type=_Envelope)
    except msgspec.DecodeError:
        return body[:500].decode("utf-8", "replace").strip(), ""
    if isinstance(found.error, _ErrorBody):
        return found.error.message or "", f"{found.error.type or ''} {found.error.code or ''}"
    words = found.error or found.message or (str(found.detail) if found.detail is not None else "")
    return words, f"{found.type or ''} {found.code or ''}"


def retry_after_seconds(value: str | None) -> float | None:
    """Seconds of a ``Retry-After`` header, in either of its two forms; None when absent or unreadable."""
    if value is None:
        return None
    try:
        return max(float(value), 0.0)
    except ValueError:
        pass
    try:
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except ValueError:
        return None


T = TypeVar("T")


def decode(body: bytes, kind: type[T], what: str) -> T:
    """Typed JSON, or EngineProtocolError that names the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as exc:
        raise EngineProtocolError(
            f"{what}: {exc}; the answer starts with {body[:80]!r}",
            fix="the engine's version may have changed its answers: see docs for the tested ones",
        ) from exc

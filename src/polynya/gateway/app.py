"""The ASGI application: who asks, in which dialect, and how the answer goes out.

Invariant: each path out of here is a whole reply in the client's own dialect. The terminal event of a stream goes last,
after the record is durable; a streaming client gets a no-op event of its dialect while the engine works.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

import msgspec

from polynya.config import GatewaySettings
from polynya.dialects.base import BadRequest, Dialect, Fault, Route, WireError, likely_dialect, route
from polynya.dialects.neutral import ChatRequest, ReplyHead
from polynya.dialects.registry import DIALECTS
from polynya.gateway.calls import Answer, CallFailed, CallRun, Calls, body_digest
from polynya.gateway.connection import BodyTooLarge, ClientGone, Exchange, Headers, Receive, Scope, Send
from polynya.gateway.lanes import lane_of
from polynya.gateway.sessions import GatewaySession, Keyring

_OFF_LOOP_BYTES = 512 * 1024
"""Bodies above this are parsed in a thread (a megabyte of chat JSON takes about a millisecond)."""
_RETRY_HEADERS = ("x-stainless-retry-count", "x-polynya-retry")
_log = logging.getLogger("polynya.gateway")


class GatewayApp:
    def __init__(
        self,
        calls: Calls,
        keyring: Keyring,
        settings: GatewaySettings,
        model_names: list[str],
        clock: Callable[[], float],
    ) -> None:
        self._calls = calls
        self._keyring = keyring
        self._settings = settings
        self._model_names = model_names
        self._clock = clock
        self.side_requests: Counter[str] = Counter()
        """Answered here without generation, by kind."""
        self.active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"scope type {scope['type']!r} is not served")
        exchange = Exchange(scope, receive, send)
        self.active += 1
        try:
            await self._serve(exchange)
        except ClientGone:
            self.side_requests["client_gone_in_request"] += 1
        finally:
            self.active -= 1
            await exchange.close()

    async def _serve(self, exchange: Exchange) -> None:
        key, path = _split_key(exchange)
        if path in ("/healthz", "/health"):
            await exchange.reply(200, b'{"status":"ok"}')
            return
        if exchange.method == "HEAD" or (path in ("", "/") and exchange.method == "GET"):
            self.side_requests["probe"] += 1
            await exchange.reply(200, b'{"polynya":"gateway"}')
            return
        found = route(exchange.method, path, exchange.headers)
        dialect = DIALECTS[found.dialect if found else likely_dialect(path, exchange.headers)]
        session = self._keyring.find(key)
        if isinstance(session, Fault):
            self.side_requests["ended_key" if session == Fault.GONE else "unknown_key"] += 1
            await _refuse(exchange, dialect, _key_error(session))
        elif found is None:
            served = "/v1/chat/completions, /v1/responses, /v1/messages, /v1beta/models/MODEL:generateContent"
            message = f"{exchange.method} {path or '/'} is not served; POST to one of {served}"
            await _refuse(exchange, dialect, WireError(fault=Fault.NOT_FOUND, message=message))
        elif found.action == "models":
            self.side_requests["models"] += 1
            await exchange.reply(200, dialect.models(self._model_names, int(self._clock())))
        else:
            await self._ask(exchange, dialect, session, found, path)

    async def _ask(
        self, exchange: Exchange, dialect: Dialect, session: GatewaySession, found: Route, path: str
    ) -> None:
        """Read and parse the body, then count or generate."""
        try:
            body = await exchange.body(self._settings.max_body_bytes)
            if (encoding := exchange.headers.get("content-encoding", "identity")) != "identity":
                field = "content-encoding"
                raise BadRequest(f"{field}: {encoding!r} is not served; send the body as it is", field=field)
            if len(body) > _OFF_LOOP_BYTES:
                request = await asyncio.to_thread(dialect.parse, body, path)
            else:
                request = dialect.parse(body, path)
        except BodyTooLarge:
            message = f"the body is larger than {self._settings.max_body_bytes} bytes"
            await _refuse(exchange, dialect, WireError(fault=Fault.TOO_LARGE, message=message))
            return
        except BadRequest as exc:
            session.flags["bad_requests"] += 1
            await _refuse(exchange, dialect, WireError(fault=Fault.BAD_REQUEST, message=exc.message, field=exc.field))
            return
        if request.images and not self._calls.takes_images:
            where = request.images[0]
            blind = WireError(fault=Fault.BAD_REQUEST, message=f"{where}: the model takes no images", field=where)
            await _refuse(exchange, dialect, blind)
            return
        continued = session.with_history(request)
        if isinstance(continued, WireError):
            await _refuse(exchange, dialect, continued)
        elif found.action == "count_tokens":
            await self._count(exchange, dialect, continued)
        else:
            await self._generate(exchange, dialect, session, continued, body, path)

    async def _count(self, exchange: Exchange, dialect: Dialect, request: ChatRequest) -> None:
        self.side_requests["count_tokens"] += 1
        try:
            count = await self._calls.count_tokens(request)
        except CallFailed as exc:
            await _refuse(exchange, dialect, exc.error)
            return
        await exchange.reply(200, dialect.token_count(count))

    async def _generate(
        self,
        exchange: Exchange,
        dialect: Dialect,
        session: GatewaySession,
        request: ChatRequest,
        body: bytes,
        path: str,
    ) -> None:
        _count_dropped(session, request)
        digest = body_digest(path, body)
        is_retry = any(exchange.headers.get(name, "0") not in ("", "0") for name in _RETRY_HEADERS)
        lane = lane_of(exchange.headers, request)
        run = self._calls.start(session, request, digest, len(body), lane=lane, is_retry=is_retry)
        try:
            if request.stream and not _as_array(exchange, request):
                answer = await self._stream(exchange, dialect, session, request, run)
            else:
                answer = await self._whole(exchange, dialect, session, request, run)
        finally:
            run.leave()
        if answer is not None and not exchange.client_gone:
            self._calls.delivered(session, answer)

    async def _whole(
        self, exchange: Exchange, dialect: Dialect, session: GatewaySession, request: ChatRequest, run: CallRun
    ) -> Answer | None:
        """Answer, or None when there was nothing to deliver (refused, or the client is gone)."""
        if not await _first(run, exchange.watch(), None):
            return None
        answer = _outcome(run, session)
        if isinstance(answer, WireError):
            await _refuse(exchange, dialect, answer)
            return None
        whole = dialect.render(request, answer.reply, answer.head)
        await exchange.reply(200, b"[" + whole + b"]" if _as_array(exchange, request) else whole)
        return answer

    async def _stream(
        self, exchange: Exchange, dialect: Dialect, session: GatewaySession, request: ChatRequest, run: CallRun
    ) -> Answer | None:
        gone = exchange.watch()
        await _first(run, gone, self._settings.first_event_grace)
        if run.task.done() and isinstance(early := _outcome(run, session), WireError):
            await _refuse(exchange, dialect, early)
            return None
        await exchange.begin_events()
        session.streams += 1
        stream_id = f"chatcmpl-{session.session_id}.s{session.streams}"
        waiting = ReplyHead(reply_id=stream_id, created=int(self._clock()), model=request.model)
        waited = 0
        while not run.task.done() and not gone.done():
            if not await _first(run, gone, self._settings.keepalive_seconds) and not gone.done():
                await exchange.event(dialect.keepalive(waiting, waited))
                waited += 1
        if gone.done():
            return None
        answer = _outcome(run, session)
        if isinstance(answer, WireError):
            await exchange.end_events(dialect.stream_error(answer, waiting, waited))
            return None
        head = answer.head
        if waited:
            # an SDK that was told of a response wants the same one to be completed
            head = waiting
            session.also_respond_as(head, answer)
        *events, terminal = dialect.stream(request, answer.reply, head, waited)
        await exchange.event(b"".join(events))
        await exchange.end_events(terminal)
        return answer


def _count_dropped(session: GatewaySession, request: ChatRequest) -> None:
    """What the model will not see is in the session's flags; a field that is ignored is logged, once."""
    for rule, count in request.dropped.items():
        session.flags[f"dropped_{rule}"] += count
    if not request.leftovers.keys() <= session.ignored_fields:
        names = sorted(request.leftovers.keys() - session.ignored_fields)
        session.ignored_fields.update(names)
        _log.info("session %s: fields without a use here: %s", session.session_id, ", ".join(names))


def _outcome(run: CallRun, session: GatewaySession) -> Answer | WireError:
    """The end of a finished call. A bug of polynya's own is an error in the client's dialect, and marks the session."""
    if run.task.cancelled():
        return WireError(fault=Fault.GONE, message="this session has ended; the call was cancelled")
    failure = run.task.exception()
    if failure is None:
        return run.task.result()
    if isinstance(failure, CallFailed):
        return failure.error
    _log.error("call of session %s failed", session.session_id, exc_info=failure)
    session.capture_error = f"internal error in the gateway: {type(failure).__name__}: {failure}"
    return WireError(fault=Fault.INTERNAL, message=session.capture_error)


def _as_array(exchange: Exchange, request: ChatRequest) -> bool:
    """Google streams a JSON array where ``alt=sse`` is not asked for; one whole element is a valid one."""
    return request.stream and request.dialect == "google_generate" and exchange.query("alt") != "sse"


async def _first(run: CallRun, gone: asyncio.Task[None], timeout: float | None) -> bool:
    """Wait until the call is done (True), the client is gone, or the time is over (False)."""
    await asyncio.wait([run.task, gone], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    return run.task.done()


def _split_key(exchange: Exchange) -> tuple[str, str]:
    """The session key and the path without its prefix. The prefix wins; then the places where clients put API keys."""
    path = exchange.path
    if path.startswith("/s/"):
        key, slash, rest = path[3:].partition("/")
        return key, slash + rest
    authorization = exchange.headers.get("authorization", "")
    scheme, _, token = authorization.partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    headers = exchange.headers
    return bearer or headers.get("x-api-key", "") or headers.get("x-goog-api-key", "") or exchange.query("key"), path


def _key_error(fault: Fault) -> WireError:
    if fault == Fault.GONE:
        return WireError(fault=fault, message="this session has ended; its key is revoked")
    return WireError(
        fault=fault, message="unknown session key; use the base URL that polynya gave, with its /s/<key> prefix"
    )


async def _refuse(exchange: Exchange, dialect: Dialect, error: WireError) -> None:
    headers: Headers = []
    if error.retry_after is not None:
        headers.append((b"retry-after", str(max(1, round(error.retry_after))).encode()))
    _log.debug("refused %s %s: %s", exchange.method, error.fault, msgspec.json.encode(error.message).decode())
    await exchange.reply(error.status, dialect.error(error), headers)

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
from polynya.dialects import responses_reply
from polynya.dialects.base import BadRequest, Dialect, Fault, Route, WireError, likely_dialect, route
from polynya.dialects.neutral import ChatRequest, ReplyHead
from polynya.dialects.registry import DIALECTS
from polynya.gateway.calls import Answer, CallFailed, CallRun, Calls, body_digest
from polynya.gateway.connection import BodyTooLarge, ClientGone, Exchange, Head, Headers, Receive, Scope, Send, Turn
from polynya.gateway.lanes import maker_of
from polynya.gateway.sessions import GatewaySession, Keyring
from polynya.gateway.websocket import OFF_LOOP_BYTES, Frame, ResponsesSocket, SocketTurn

_ONE_WRITE = 64 * 1024
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
        if scope["type"] not in ("http", "websocket"):
            raise RuntimeError(f"scope type {scope['type']!r} is not served")
        self.active += 1
        try:
            if scope["type"] == "websocket":
                await self._serve_socket(ResponsesSocket(scope, receive, send))
            else:
                await self._serve_exchange(Exchange(scope, receive, send))
        finally:
            self.active -= 1

    async def _serve_exchange(self, exchange: Exchange) -> None:
        try:
            await self._serve(exchange)
        except ClientGone:
            self.side_requests["client_gone_in_request"] += 1
        finally:
            await exchange.close()

    async def _serve_socket(self, socket: ResponsesSocket) -> None:
        """A key that is unknown or ended is refused at the handshake, with the status that it has over HTTP."""
        key, path = _split_key(socket)
        found = route("POST", path, socket.headers)
        dialect = DIALECTS["openai_responses"]
        session = self._keyring.find(key)
        if isinstance(session, Fault):
            error = _key_error(session)
        elif found is None or found.dialect != dialect.name or found.action != "generate":
            message = f"WebSocket {path or '/'} is not served; open one at /v1/responses"
            error = WireError(fault=Fault.NOT_FOUND, message=message)
        else:

            async def answer(turn: SocketTurn, body: bytes, frame: Frame) -> None:
                await self._answer_frame(turn, dialect, session, path, body, frame)

            await socket.run(answer)
            return
        await socket.refuse(error.status, dialect.error(error))

    async def _answer_frame(
        self, turn: Turn, dialect: Dialect, session: GatewaySession, path: str, body: bytes, frame: Frame
    ) -> None:
        if session.closed:
            await _refuse(turn, dialect, _key_error(Fault.GONE))
            return
        request = await self._read(turn, dialect, session, body, path)
        if request is None:
            return
        if frame.generate is not False:
            await self._generate(turn, dialect, session, msgspec.structs.replace(request, stream=True), body, path)
            return
        self.side_requests["prewarm"] += 1
        reply_id = f"{session.session_id}.warm{self.side_requests['prewarm']}"
        session.remember_input(request, reply_id)
        head = ReplyHead(reply_id=reply_id, created=int(self._clock()), model=request.model)
        await turn.end_events(b"".join(responses_reply.prewarmed(head)))

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
        elif found.action in ("stored", "forget"):
            await self._stored(exchange, dialect, session, path.rstrip("/").rpartition("/")[2], found.action)
        else:
            try:
                await self._ask(exchange, dialect, session, found, path)
            except ClientGone:
                raise
            except Exception as exc:
                _log.exception("a request of session %s failed", session.session_id)
                session.flags["internal_errors"] += 1
                if exchange.begun:
                    raise
                broken = f"internal error in the gateway: {type(exc).__name__}"
                await _refuse(exchange, dialect, WireError(fault=Fault.INTERNAL, message=broken))

    async def _ask(
        self, exchange: Exchange, dialect: Dialect, session: GatewaySession, found: Route, path: str
    ) -> None:
        """Read and parse the body, then count or generate."""
        try:
            body = await exchange.body(self._settings.max_body_bytes)
        except BodyTooLarge:
            message = f"the body is larger than {self._settings.max_body_bytes} bytes"
            await _refuse(exchange, dialect, WireError(fault=Fault.TOO_LARGE, message=message))
            return
        request = await self._read(exchange, dialect, session, body, path)
        if request is None:
            return
        if found.action == "count_tokens":
            await self._count(exchange, dialect, request)
        else:
            await self._generate(exchange, dialect, session, request, body, path)

    async def _read(
        self, turn: Turn, dialect: Dialect, session: GatewaySession, body: bytes, path: str
    ) -> ChatRequest | None:
        """The request with its history, or None when it was refused."""
        try:
            if (encoding := turn.headers.get("content-encoding", "identity")) != "identity":
                field = "content-encoding"
                raise BadRequest(f"{field}: {encoding!r} is not served; send the body as it is", field=field)
            history = session.history(dialect.name)
            if len(body) - history.chars > OFF_LOOP_BYTES:
                request = await asyncio.to_thread(dialect.parse, body, path, history)
            else:
                request = dialect.parse(body, path, history)
        except BadRequest as exc:
            session.flags["bad_requests"] += 1
            await _refuse(turn, dialect, WireError(fault=Fault.BAD_REQUEST, message=exc.message, field=exc.field))
            return None
        if request.images and not self._calls.takes_images:
            where = request.images[0]
            blind = WireError(fault=Fault.BAD_REQUEST, message=f"{where}: the model takes no images", field=where)
            await _refuse(turn, dialect, blind)
            return None
        continued = session.with_history(request)
        if isinstance(continued, WireError):
            await _refuse(turn, dialect, continued)
            return None
        return session.regrouped(continued)

    async def _stored(
        self, exchange: Exchange, dialect: Dialect, session: GatewaySession, response_id: str, action: str
    ) -> None:
        """A reply that the session was given before, by its id."""
        self.side_requests[action] += 1
        kept = session.stored.get(response_id)
        if kept is None:
            message = f"response {response_id!r:.120} is not stored in this session"
            await _refuse(exchange, dialect, WireError(fault=Fault.NOT_FOUND, message=message, field="response_id"))
        elif action == "forget":
            session.forget_response(response_id)
            await exchange.reply(200, responses_reply.deleted(response_id))
        else:
            request, answer = kept
            await exchange.reply(200, dialect.render(request, answer.reply, answer.head))

    async def _count(self, exchange: Turn, dialect: Dialect, request: ChatRequest) -> None:
        self.side_requests["count_tokens"] += 1
        try:
            count = await self._calls.count_tokens(request)
        except CallFailed as exc:
            await _refuse(exchange, dialect, exc.error)
            return
        await exchange.reply(200, dialect.token_count(count))

    async def _generate(
        self,
        exchange: Turn,
        dialect: Dialect,
        session: GatewaySession,
        request: ChatRequest,
        body: bytes,
        path: str,
    ) -> None:
        if session.closed:
            # It ended while the body came or was parsed: the call is none of its, and no failure of it.
            await _refuse(exchange, dialect, _key_error(Fault.GONE))
            return
        _count_dropped(session, request)
        digest = body_digest(path, body)
        is_retry = any(exchange.headers.get(name, "0") not in ("", "0") for name in _RETRY_HEADERS)
        maker = maker_of(exchange.headers, request)
        run = self._calls.start(session, request, digest, len(body), maker=maker, is_retry=is_retry)
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
        self, exchange: Turn, dialect: Dialect, session: GatewaySession, request: ChatRequest, run: CallRun
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
        self, exchange: Turn, dialect: Dialect, session: GatewaySession, request: ChatRequest, run: CallRun
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
        said = b"".join(events)
        if len(said) > _ONE_WRITE:
            # the terminal event waits until the client has taken the rest, else a reply that nobody read counts as delivered
            await exchange.event(said)
            said = b""
        await exchange.end_events(said + terminal)
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


def _as_array(exchange: Turn, request: ChatRequest) -> bool:
    """Google streams a JSON array where ``alt=sse`` is not asked for; one whole element is a valid one."""
    return request.stream and request.dialect == "google_generate" and exchange.query("alt") != "sse"


async def _first(run: CallRun, gone: asyncio.Future[None], timeout: float | None) -> bool:
    """Wait until the call is done (True), the client is gone, or the time is over (False)."""
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def wake(_: object = None) -> None:
        if not woken.done():
            woken.set_result(None)

    timer = loop.call_later(timeout, wake) if timeout is not None else None
    run.task.add_done_callback(wake)
    gone.add_done_callback(wake)
    try:
        await woken
    finally:
        run.task.remove_done_callback(wake)
        gone.remove_done_callback(wake)
        if timer is not None:
            timer.cancel()
    return run.task.done()


def _split_key(exchange: Head) -> tuple[str, str]:
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


async def _refuse(exchange: Turn, dialect: Dialect, error: WireError) -> None:
    headers: Headers = []
    if error.retry_after is not None:
        headers.append((b"retry-after", str(max(1, round(error.retry_after))).encode()))
    _log.debug("refused %s %s: %s", exchange.method, error.fault, msgspec.json.encode(error.message).decode())
    await exchange.reply(error.status, dialect.error(error), headers)

"""One call: retry check → sampling → intent → engine → judgement → durable outcome → answer.

Invariants: equal requests in flight are one engine call; an answer exists only when its record is durable; a call whose
clients are all gone is cancelled in the engine and closed as ``cancelled``. What makes a call untrainable is recorded and
never keeps the answer from the harness.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import xxhash

from polynya.capture.calls import StoredCall
from polynya.capture.prompts import Placed, longest_match, place
from polynya.capture.store import CallEnd, CallStart, CaptureStore, SessionCapture
from polynya.config import GatewaySettings
from polynya.dialects.base import Fault, WireError
from polynya.dialects.neutral import ChatReply, ChatRequest, ReplyHead, Usage
from polynya.dialects.openai_chat import assistant_message
from polynya.dialects.registry import echoes
from polynya.dialects.wire import kept
from polynya.engines.base import EffectiveSampling, Engine, EngineReply, EngineRequest
from polynya.engines.http import RETRY_STATUSES
from polynya.errors import (
    CaptureError,
    ContextOverflow,
    DiskFull,
    EngineError,
    EngineProtocolError,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    NotContinuable,
)
from polynya.gateway.aborts import generate_whole
from polynya.gateway.continuation import Continuation, Continued, Place
from polynya.gateway.lanes import CompactionWatch, Maker
from polynya.gateway.markup import with_unread_calls
from polynya.gateway.sampling import effective
from polynya.gateway.sessions import FREE_FINAL_ANSWERS, GatewaySession
from polynya.tokens.printed import PrintedIds
from polynya.tokens.routing import aligned
from polynya.tokens.validate import judge

_BYTES_PER_TOKEN = 2
"""No real tokenizer packs prose or JSON looser than this, so a body of n bytes holds at most n / 2 prompt tokens."""
_OFF_LOOP_PRINT = 64 * 1024
"""Characters of printed ids above which they are read in a thread (they take about 4 ns each)."""
MAIN = Maker()


class CallFailed(Exception):
    """The call has no answer; ``error`` is what the client is told."""

    def __init__(self, error: WireError) -> None:
        super().__init__(error.message)
        self.error = error


class Answer(msgspec.Struct, kw_only=True):
    """A reply that may be shown: its record is durable."""

    reply: ChatReply
    head: ReplyHead
    call: StoredCall | None
    """None for a reply that polynya made itself (budget spent)."""
    delivered: bool = False


class CallRun:
    """An engine call under way, shared by the clients that wait for it."""

    def __init__(self, task: asyncio.Task[Answer]) -> None:
        self.task = task
        self.clients = 1

    def leave(self) -> None:
        """A client is gone. The last one cancels the call."""
        self.clients -= 1
        if self.clients == 0:
            self.task.cancel()


def body_digest(path: str, body: bytes) -> bytes:
    hasher = xxhash.xxh3_128(path.encode() + b"\0")
    hasher.update(body)
    return hasher.digest()


class Calls:
    def __init__(
        self, engine: Engine, store: CaptureStore, settings: GatewaySettings, clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._store = store
        self._settings = settings
        self._clock = clock
        self._continuation = Continuation(engine, settings)

    @property
    def continues(self) -> bool:
        """Later turns are prompted with the ids of the captured ones."""
        return self._continuation.on

    @property
    def takes_images(self) -> bool:
        return self._engine.info.images

    def start(
        self,
        session: GatewaySession,
        request: ChatRequest,
        digest: bytes,
        body_size: int,
        *,
        maker: Maker = MAIN,
        is_retry: bool,
    ) -> CallRun:
        """Join, replay or begin a call. The run's task ends with an Answer, CallFailed or CancelledError."""
        running = session.in_flight.get(digest)
        if running is not None and not running.task.done() and running.clients > 0:
            running.clients += 1
            session.flags["joined_requests"] += 1
            return running
        earlier = session.replies.get(digest)
        if earlier is not None and (is_retry or not earlier.delivered):
            session.flags["replayed_replies"] += 1
            return CallRun(asyncio.ensure_future(_done(earlier)))
        run = CallRun(
            asyncio.create_task(
                self._call(session, request, digest, body_size, maker), name=f"call {session.session_id}"
            )
        )
        session.in_flight[digest] = run
        session.tasks.add(run.task)
        run.task.add_done_callback(session.tasks.discard)
        run.task.add_done_callback(lambda _: _forget(session, digest, run))
        return run

    async def count_tokens(self, request: ChatRequest) -> int:
        """Prompt tokens of this request, by the engine's own tokenizer. Raises CallFailed."""
        try:
            return await self._engine.count_tokens(request)
        except EngineError as exc:
            raise CallFailed(wire_error_of(exc)) from exc

    def delivered(self, session: GatewaySession, answer: Answer) -> None:
        """A client got the whole of it."""
        if not answer.delivered:
            answer.delivered = True
            if answer.call is not None:
                self._store.delivered(session.capture, answer.call)

    async def _call(
        self, session: GatewaySession, request: ChatRequest, digest: bytes, body_size: int, maker: Maker
    ) -> Answer:
        async with session.slots:
            if session.budget_spent:
                return self._final_answer(session, request)
            if not session.compactions.allows(maker):
                raise self._compacts_for_ever(session)
            session.calls_begun += 1
            messages = [message.raw for message in request.messages]
            tools = session.capture.same_tools(bytes(request.tools_raw) if request.tools_raw is not None else b"[]")
            place = await self._continuation.place(session, request, messages, tools)
            sampling = await self._sampling(session, request, place, messages, tools, body_size)
            start = CallStart(
                dialect=request.dialect,
                lane=maker.lane,
                lane_rule=maker.rule,
                agent=maker.agent,
                parent_agent=maker.parent_agent,
                model=request.model,
                body_digest=digest,
                messages=messages,
                tools=tools,
                sampling=msgspec.to_builtins(sampling),
                continues=place.continued.parent.call_id if place.continued is not None else "",
            )
            try:
                call = await self._store.begin(session.capture, start)
            except CaptureError as exc:
                raise self._capture_failed(session, exc) from exc
            try:
                asked = EngineRequest(chat=request, sampling=sampling, affinity=session.session_id)
                reply, prompt = await self._generate(session, call, asked, place)
                reply = with_unread_calls(request, reply)
            except (CallFailed, asyncio.CancelledError) as exc:
                if not (isinstance(exc, CallFailed) and exc.error.fault == Fault.CONTEXT_OVERFLOW):
                    session.compactions.came_to_nothing(maker)
                raise
            answer = Answer(reply=_with_usage(reply, prompt), head=self._head(call.call_id, request), call=call)
            end = _end_of(reply, prompt, answer.reply, request, self._engine.info.vocab_size)
            await self._commit(session, call, end)
            place.commit(session, echoes(request, answer.reply), call, thought=bool(reply.reply.reasoning))
            session.made_good(call, start.messages)
            session.remember_calls(call, answer.reply)
            session.flags.update(reply.flags)
            session.keep_reply(digest, answer)
            session.remember_response(request, answer)
            return answer

    async def _sampling(
        self,
        session: GatewaySession,
        request: ChatRequest,
        place: Place,
        messages: list[bytes],
        tools: bytes,
        body_size: int,
    ) -> EffectiveSampling:
        """With ``max_tokens`` clamped to what the window leaves; the prompt is counted only where no bound settles it."""
        sampling = effective(request.sampling, session.grant.sampling)
        if place.continued is not None:
            window, limit = self._engine.info.window, sampling.max_tokens
            if window is None or limit is None:
                return sampling
            return msgspec.structs.replace(sampling, max_tokens=min(limit, window - place.continued.length))
        if not self._fits(sampling, body_size // _BYTES_PER_TOKEN) and not self._fits(
            sampling, _prompt_bound(session.capture, messages, tools)
        ):
            return await self._clamped(request, sampling)
        return sampling

    async def _generate(
        self, session: GatewaySession, call: StoredCall, request: EngineRequest, place: Place
    ) -> tuple[EngineReply, Placed | None]:
        """The engine's reply, and its prompt in its place among what the session holds."""
        try:
            async with asyncio.timeout(self._settings.engine_timeout_seconds):
                if place.continued is not None:
                    return await self._continue(session, request, place, place.continued)
                reply = await generate_whole(self._engine, request)
                return reply, await _placed(session.capture, reply)
        except asyncio.CancelledError:
            closing = asyncio.ensure_future(
                self._commit(session, call, CallEnd(outcome="cancelled", error="the client is gone"))
            )
            await asyncio.shield(closing)
            raise
        except TimeoutError as exc:
            seconds = self._settings.engine_timeout_seconds
            late = EngineTimeout(
                f"the engine gave no answer in {seconds:g} s", fix="raise engine_timeout_seconds or lower the load"
            )
            raise await self._engine_failed(session, call, late) from exc
        except EngineError as exc:
            raise await self._engine_failed(session, call, exc) from exc

    async def _continue(
        self, session: GatewaySession, request: EngineRequest, place: Place, continued: Continued
    ) -> tuple[EngineReply, Placed | None]:
        """The same with the prompt given as ids; when the engine refuses them, with messages."""
        route = self._continuation.route
        try:
            given = msgspec.structs.replace(request, prompt=continued.given(session.capture))
            reply = await generate_whole(self._engine, given)
        except EngineError as exc:
            if not _of_the_ids(exc):
                raise
            place.continued = None
            reply = await generate_whole(self._engine, request)
            if not isinstance(exc, ContextOverflow | NotContinuable):
                await self._continuation.refused(exc.message, route)
            return _flagged(reply, "continuation_rejected"), await _placed(session.capture, reply)
        prompt = await _placed(session.capture, reply)
        if prompt is None:
            if reply.prompt is None:
                await self._continuation.step_down("the engine does not say which ids it conditioned on", route)
            return _flagged(reply, "continuation_echo_absent"), None
        if not continued.is_prompt(prompt):
            # What it did condition on is in the echo: the call is sound, and the first of a chain of its own.
            place.continued = None
            await self._continuation.step_down("the engine conditioned on other ids than it was given", route)
            return _flagged(reply, "continuation_echo_mismatch"), prompt
        self._continuation.taken()
        return _flagged(reply, "continued", continued.bridge.flags), prompt

    async def _engine_failed(self, session: GatewaySession, call: StoredCall, error: EngineError) -> CallFailed:
        session.flags[f"engine_{error.kind}"] += 1
        if not error.policy_can_cause:
            session.engine_failures.append((call.index, call.messages, str(error)))
        await self._commit(session, call, CallEnd(outcome="failed", error=f"{error.kind}: {error}"))
        return CallFailed(wire_error_of(error))

    async def _commit(self, session: GatewaySession, call: StoredCall, end: CallEnd) -> None:
        try:
            await self._store.finish(session.capture, call, end)
        except CaptureError as exc:
            raise self._capture_failed(session, exc) from exc

    def _capture_failed(self, session: GatewaySession, error: CaptureError) -> CallFailed:
        session.capture_error = str(error)
        fault = Fault.STORAGE_FULL if isinstance(error, DiskFull) else Fault.INTERNAL
        return CallFailed(WireError(fault=fault, message=str(error)))

    def _fits(self, sampling: EffectiveSampling, at_most: int) -> bool:
        """Whether a prompt of at most so many tokens leaves room in the window for ``max_tokens``."""
        window = self._engine.info.window
        return window is None or sampling.max_tokens is None or at_most + sampling.max_tokens <= window

    async def _clamped(self, request: ChatRequest, sampling: EffectiveSampling) -> EffectiveSampling:
        """``max_tokens`` beyond the window is clamped, not refused; for that the prompt is counted."""
        window = self._engine.info.window
        if window is None or sampling.max_tokens is None:
            return sampling
        try:
            room = window - await self._engine.count_tokens(request)
        except EngineError:
            return msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, window))
        return msgspec.structs.replace(sampling, max_tokens=max(1, min(sampling.max_tokens, room)))

    def _compacts_for_ever(self, session: GatewaySession) -> CallFailed:
        """No answer would help: the agents that can end take an overflow in a compaction for the end."""
        session.flags["compaction_loop"] += 1
        message = (
            f"the prompt is too long: {CompactionWatch.IN_A_ROW} compactions in a row made no room, so what the harness always "
            f"sends does not fit a window of {self._engine.info.window} tokens; use a model with a larger one"
        )
        return CallFailed(WireError(fault=Fault.CONTEXT_OVERFLOW, message=message, field="messages"))

    def _final_answer(self, session: GatewaySession, request: ChatRequest) -> Answer:
        """The budget is spent: a whole, tool-free reply that no engine sampled and that nothing trains."""
        session.flags["budget_exhausted"] += 1
        if session.flags["budget_exhausted"] > FREE_FINAL_ANSWERS:
            raise CallFailed(
                WireError(
                    fault=Fault.RATE_LIMITED, message="the session's call or token budget is spent", retry_after=3600
                )
            )
        reply = ChatReply(text="The budget of this session is spent. I stop here.", finish_reason="stop")
        reply_id = f"{session.session_id}.budget{session.flags['budget_exhausted']}"
        answer = Answer(reply=reply, head=self._head(reply_id, request), call=None)
        session.remember_response(request, answer)
        return answer

    def _head(self, reply_id: str, request: ChatRequest) -> ReplyHead:
        return ReplyHead(reply_id=f"chatcmpl-{reply_id}", created=int(self._clock()), model=request.model)


def wire_error_of(error: EngineError) -> WireError:
    """What a client is told of an engine failure."""
    match error:
        case ContextOverflow():
            return WireError(fault=Fault.CONTEXT_OVERFLOW, message=error.message, field="messages")
        case EngineRejected():
            return WireError(fault=Fault.BAD_REQUEST, message=error.message)
        case EngineUnavailable():
            return WireError(fault=Fault.UNAVAILABLE, message=error.message, retry_after=error.retry_after)
        case _:
            return WireError(fault=Fault.INTERNAL, message=error.message)


def _prompt_bound(capture: SessionCapture, messages: list[bytes], tools: bytes) -> int:
    """Tokens that a prompt of these messages cannot exceed, by what the call before it was counted at."""
    base, keep, same_tools = capture.base_of(messages, tools)
    if base is None or not same_tools or not base.prompt_len:
        return sum(map(len, messages)) + len(tools)
    return base.prompt_len + sum(map(len, messages[keep:])) // _BYTES_PER_TOKEN


async def _placed(capture: SessionCapture, reply: EngineReply) -> Placed | None:
    """Raises EngineProtocolError when the engine's prompt is no list of ids."""
    prompt = reply.prompt
    if prompt is None:
        return None
    leaves = capture.leaves()
    try:
        if not isinstance(prompt, PrintedIds):
            return place(prompt, leaves)
        match = longest_match(prompt, leaves)
        if len(prompt) - (match.at if match else 0) > _OFF_LOOP_PRINT:
            return await asyncio.to_thread(place, prompt, leaves, match)
        return place(prompt, leaves, match)
    except ValueError as exc:
        raise EngineProtocolError(f"prompt_token_ids: {exc}", fix="see the engine's own log") from exc


def _with_usage(reply: EngineReply, prompt: Placed | None) -> ChatReply:
    """Usage that clients can rely on: by ids where there are ids."""
    usage = reply.reply.usage
    if prompt is not None and reply.sampled_ids is not None:
        usage = Usage(
            prompt_tokens=prompt.length,
            completion_tokens=len(reply.sampled_ids),
            cached_tokens=usage.cached_tokens,
        )
    return msgspec.structs.replace(reply.reply, usage=usage)


def _of_the_ids(failure: EngineError) -> bool:
    """The engine is there and did not take, or could not answer, this prompt of ids: as messages it may be served."""
    if isinstance(failure, EngineUnavailable):
        return failure.status is not None and failure.status not in RETRY_STATUSES
    return isinstance(failure, EngineRejected | EngineProtocolError)


def _end_of(
    reply: EngineReply, prompt: Placed | None, shown: ChatReply, request: ChatRequest, vocab_size: int | None
) -> CallEnd:
    known, context = (0, None) if prompt is None else prompt.to_judge(vocab_size)
    verdict = judge(
        prompt_ids=context,
        known=known,
        sampled_ids=reply.sampled_ids,
        logprobs=reply.logprobs,
        vocab_size=vocab_size,
        guided=request.guided and "guidance_not_enforced" not in reply.flags,
    )
    message: dict[str, Any] = assistant_message(shown)
    routing, flags = None, reply.flags
    if reply.routing is not None and prompt is not None and reply.sampled_ids is not None:
        routing = aligned(reply.routing, prompt.length + len(reply.sampled_ids))
        if routing is None:
            flags = {**flags, "routing_misaligned": 1}
    return CallEnd(
        outcome="ok",
        finish_reason=reply.finish_reason,
        prompt_ids=prompt,
        sampled_ids=reply.sampled_ids,
        sampled_text=reply.sampled_text,
        logprobs=reply.logprobs,
        routing=routing,
        routing_shape=[] if routing is None or reply.routing is None else reply.routing.shape,
        usage=(shown.usage.prompt_tokens, shown.usage.completion_tokens),
        policy_spans=reply.policy_spans,
        exclusion=verdict.exclusion,
        exclusion_at=verdict.position,
        exclusion_detail=verdict.detail,
        reply=kept(message),
        upstream_id=reply.upstream_id,
        flags=flags,
    )


def _flagged(reply: EngineReply, name: str, more: Mapping[str, int] = MappingProxyType({})) -> EngineReply:
    return msgspec.structs.replace(reply, flags={**reply.flags, name: 1, **more})


async def _done(answer: Answer) -> Answer:
    return answer


def _forget(session: GatewaySession, digest: bytes, run: CallRun) -> None:
    if session.in_flight.get(digest) is run:
        del session.in_flight[digest]
    if not run.task.cancelled():
        run.task.exception()

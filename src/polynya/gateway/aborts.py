"""Replies that the engine broke off, as it does when it takes new weights: gone on with, and joined.

Invariant: the joined ids are what the engine sampled, in order, each part after all that stands before it (its echo proves
it), each with its own policy version. A part that was sampled after anything else is not joined: it stands for itself, and
the tokens before it are counted in ``abort_discarded``. The harness sees one whole reply.
"""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import xxhash

from polynya.dialects.neutral import ChatReply, ToolCall, Usage
from polynya.engines import toolparse
from polynya.engines.base import Engine, EngineReply, EngineRequest
from polynya.errors import NotContinuable
from polynya.schema import PolicySpan
from polynya.tokens.printed import GivenIds

_FIRST_WAIT, _LONGEST_WAIT = 0.05, 2.0


async def generate_whole(engine: Engine, request: EngineRequest) -> EngineReply:
    """As ``engine.generate``, until the reply ends by itself. The caller bounds the time."""
    reply = await engine.generate(request)
    wait = _FIRST_WAIT
    while reply.finish_reason == "abort":
        await asyncio.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT)
        reply = await _go_on(engine, request, reply)
    return reply


async def _go_on(engine: Engine, request: EngineRequest, reply: EngineReply) -> EngineReply:
    prompt, sampled, limit = reply.prompt_ids, reply.sampled_ids, request.sampling.max_tokens
    if prompt is None or sampled is None or not sampled.size or not engine.token_route:
        return _discarding(await engine.generate(request), reply)
    if limit is not None and limit <= len(sampled):
        # Broken off at its last token: it has nothing left to say.
        return msgspec.structs.replace(
            reply,
            reply=msgspec.structs.replace(reply.reply, finish_reason="length"),
            finish_reason="length",
            flags={**reply.flags, "aborts": reply.flags.get("aborts", 0) + 1},
        )
    before = np.concatenate([prompt, sampled])
    left = None if limit is None else limit - len(sampled)
    sampling = msgspec.structs.replace(request.sampling, max_tokens=left)
    try:
        rest = await engine.generate(msgspec.structs.replace(request, prompt=GivenIds(before), sampling=sampling))
    except NotContinuable:
        return _discarding(await engine.generate(request), reply)
    echoed = rest.prompt_ids
    if echoed is None or rest.sampled_ids is None or not np.array_equal(echoed, before):
        return _discarding(rest, reply)
    return _joined(request, reply, rest)


def _discarding(reply: EngineReply, broken: EngineReply) -> EngineReply:
    lost = 0 if broken.sampled_ids is None else len(broken.sampled_ids)
    flags = {**reply.flags, "aborts": broken.flags.get("aborts", 0) + 1}
    discarded = lost + broken.flags.get("abort_discarded", 0)
    return msgspec.structs.replace(reply, flags=flags | ({"abort_discarded": discarded} if discarded else {}))


def _joined(request: EngineRequest, first: EngineReply, rest: EngineReply) -> EngineReply:
    assert first.sampled_ids is not None and rest.sampled_ids is not None
    offset = len(first.sampled_ids)
    logprobs = None
    if first.logprobs is not None and rest.logprobs is not None:
        logprobs = np.concatenate([first.logprobs, rest.logprobs])
    flags = {**rest.flags, "aborts": first.flags.get("aborts", 0) + 1}
    sampled = np.concatenate([first.sampled_ids, rest.sampled_ids])
    call_prefix = f"call_{xxhash.xxh3_128_hexdigest(sampled.tobytes())[:20]}"
    return EngineReply(
        reply=_said(request, first.reply, rest.reply, call_prefix),
        prompt=first.prompt,
        sampled_ids=sampled,
        logprobs=logprobs,
        routing=rest.routing,
        finish_reason=rest.finish_reason,
        policy_spans=_spans(first, 0) + _spans(rest, offset),
        upstream_id=rest.upstream_id,
        flags=flags,
    )


def _spans(reply: EngineReply, offset: int) -> list[PolicySpan]:
    assert reply.sampled_ids is not None
    spans = reply.policy_spans or [PolicySpan(None, 0, len(reply.sampled_ids))]
    return [PolicySpan(span.version, span.start + offset, span.end + offset) for span in spans if span.end > span.start]


def _said(request: EngineRequest, first: ChatReply, rest: ChatReply, call_prefix: str) -> ChatReply:
    """A call that was cut in two came as text in both parts: it is read from the joined text."""
    text = first.text + rest.text
    calls = [*first.tool_calls, *rest.tool_calls]
    parsed = toolparse.parse_calls(text, {tool.name for tool in request.chat.tools})
    if parsed.calls and not rest.tool_calls:
        text = parsed.text
        calls += [
            ToolCall(id=f"{call_prefix}{i}", name=call.name, arguments=call.arguments)
            for i, call in enumerate(parsed.calls)
        ]
    finish = "tool_calls" if calls and rest.finish_reason == "stop" else rest.finish_reason
    usage = Usage(
        prompt_tokens=first.usage.prompt_tokens,
        completion_tokens=first.usage.completion_tokens + rest.usage.completion_tokens,
        cached_tokens=first.usage.cached_tokens,
    )
    return ChatReply(
        text=text, reasoning=first.reasoning + rest.reasoning, tool_calls=calls, finish_reason=finish, usage=usage
    )

"""Reading (and asking for) OpenAI-chat-shaped replies that carry token ids: vLLM's shape and SGLang's.

Invariant: ids, logprobs and tool-call arguments are the engine's own, byte for byte; what is absent or unreadable is ``None``,
a null or NaN logprob is NaN. Prompt ids never become Python integers: their text is cut out of the raw body before the rest is
decoded (an unescaped key cannot occur inside a JSON string, so a byte search that finds it once is exact). Pure.
"""

from __future__ import annotations

import array
import json
from typing import Any, cast

import msgspec
import numpy as np

from polynya.dialects.neutral import ChatReply, ChatRequest, ToolCall, Usage
from polynya.engines.base import EngineReply
from polynya.errors import EngineProtocolError
from polynya.schema import Float32Array, Int32Array, PolicySpan
from polynya.tokens.printed import PrintedIds, listed, read_printed
from polynya.tokens.routing import Routing, read_routing

THREAD_BYTES = 256 * 1024
"""Bodies above this are read off the event loop."""
_PROMPT_KEY = b'"prompt_token_ids":['
_ID_PREFIX = "token_id:"


class _Function(msgspec.Struct):
    name: str = ""
    arguments: str | None = None


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _Logprob(msgspec.Struct, gc=False):
    logprob: float | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Meta(msgspec.Struct):
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    weight_version: str | None = None
    routed_experts: msgspec.Raw = msgspec.Raw(b"null")


class _Choice(msgspec.Struct):
    message: _Message
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    token_ids: msgspec.Raw = msgspec.Raw(b"null")
    response_token_ids: msgspec.Raw = msgspec.Raw(b"null")
    meta_info: _Meta | None = None
    routed_experts: msgspec.Raw = msgspec.Raw(b"null")


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    id: str = ""
    usage: _Usage | None = None


class _PromptOnlyChoice(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


class _PromptOnly(msgspec.Struct):
    prompt_token_ids: list[int] | None = None
    choices: list[_PromptOnlyChoice] = []


class _NamedToken(msgspec.Struct):
    token: str = ""


class _NamedLogprobs(msgspec.Struct):
    content: list[_NamedToken] | None = None


class _NamedChoice(msgspec.Struct):
    logprobs: _NamedLogprobs | None = None


class _Named(msgspec.Struct):
    choices: list[_NamedChoice]


_completion = msgspec.json.Decoder(_Completion)


def chat_fields(chat: ChatRequest, extra: dict[str, Any] | None = None, *, whole: bool = False) -> list[bytes]:
    """One JSON object: the messages and tools as the client sent them, then ``extra``. In pieces: it may be megabytes.

    ``whole`` adds what steers the generation and not the prompt: tool choice, response format, parallel calls.
    """
    parts = [b","] * (2 * len(chat.messages))
    parts[1::2] = [message.raw for message in chat.messages]
    parts[:1] = [b'{"messages":[']
    parts.append(b"]")
    raw: list[tuple[bytes, msgspec.Raw | None]] = [
        (b"tools", chat.tools_raw),
        (b"chat_template_kwargs", chat.template_kwargs),
    ]
    if whole:
        # an engine refuses a tool choice without tools
        raw.append((b"tool_choice", chat.tool_choice if chat.tools_raw is not None else None))
        raw.append((b"response_format", chat.response_format))
    parts += [b',"%b":%b' % (key, bytes(value)) for key, value in raw if value is not None]
    if whole and chat.parallel_tool_calls is not None and chat.tools_raw is not None:
        parts.append(b',"parallel_tool_calls":' + (b"true" if chat.parallel_tool_calls else b"false"))
    if extra:
        parts.append(b"," + msgspec.json.encode(extra)[1:-1])
    parts.append(b"}")
    return parts


def read_chat(body: bytes, what: str, prompt: PrintedIds | None = None) -> EngineReply:
    """An ``EngineReply`` of a whole answer. Raises EngineProtocolError naming the field that cannot be read.

    ``prompt``: what ``cut_prompt`` took out of the body.
    """
    rest, found = _decoded(body, what)
    if not found.choices:
        raise EngineProtocolError(f"{what}: choices is empty", fix="see the engine's own log")
    choice = found.choices[0]
    message = choice.message
    calls = [
        ToolCall(id=call.id or "", name=call.function.name, arguments=call.function.arguments or "")
        for call in message.tool_calls or []
    ]
    said = choice.finish_reason or "stop"
    usage = found.usage or _Usage()
    details = usage.prompt_tokens_details
    reply = ChatReply(
        text=message.content or "",
        reasoning=message.reasoning or message.reasoning_content or "",
        tool_calls=calls,
        finish_reason="tool_calls" if calls and said == "stop" else said,
        usage=Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens or 0,
            cached_tokens=(details.cached_tokens or 0) if details is not None else 0,
        ),
    )
    sampled, sampled_text = _sampled_ids(rest, choice, what)
    version = choice.meta_info.weight_version if choice.meta_info is not None else None
    spans = [PolicySpan(version, 0, int(sampled.size))] if version is not None and sampled is not None else []
    return EngineReply(
        reply=reply,
        prompt=prompt if prompt is not None else _decoded_prompt(rest, what),
        sampled_ids=sampled,
        sampled_text=sampled_text,
        logprobs=_logprobs(choice),
        routing=_routing(choice),
        finish_reason=said,
        policy_spans=spans,
        upstream_id=found.id,
    )


def _decoded(body: bytes, what: str) -> tuple[bytes, _Completion]:
    try:
        return body, _completion.decode(body)
    except msgspec.DecodeError as exc:
        if not isinstance(exc, msgspec.ValidationError) and (b"NaN" in body or b"Infinity" in body):
            # servers in Python write NaN and Infinity, which JSON does not have; null is read as NaN
            return _without_nan(body, exc, what)
        raise _unreadable(exc, body, what) from exc


def _without_nan(body: bytes, cause: msgspec.DecodeError, what: str) -> tuple[bytes, _Completion]:
    try:
        clean = msgspec.json.encode(json.loads(body))
        return clean, msgspec.json.decode(clean, type=_Completion)
    except (ValueError, RecursionError) as exc:
        raise _unreadable(cause, body, what) from exc


def _unreadable(exc: Exception, body: bytes, what: str) -> EngineProtocolError:
    return EngineProtocolError(
        f"{what}: {exc}; the answer starts with {body[:80]!r}",
        fix="the engine's version may have changed its answers",
    )


def cut_prompt(body: bytes) -> tuple[bytes, PrintedIds | None]:
    """The body without its prompt ids, and those, where they can be found by their key alone."""
    start = body.find(_PROMPT_KEY) + len(_PROMPT_KEY)
    end = body.find(b"]", start) if start >= len(_PROMPT_KEY) else -1
    if end < 0 or body.find(_PROMPT_KEY, end) >= 0:
        return body, None
    return body[:start] + body[end:], PrintedIds(body, start, end)


def _decoded_prompt(body: bytes, what: str) -> Int32Array | None:
    """The prompt ids at the reply's top level (vLLM) or in its first choice (SGLang)."""
    if b'"prompt_token_ids"' not in body:
        return None
    try:
        found = msgspec.json.decode(body, type=_PromptOnly)
    except msgspec.DecodeError as exc:
        raise _unreadable(exc, body, what) from exc
    ids = found.prompt_token_ids
    if ids is None and found.choices:
        ids = found.choices[0].prompt_token_ids
    return listed(ids) if ids is not None else None


def _read_printed(text: bytes, what: str, field: str) -> tuple[Int32Array | None, bool]:
    try:
        return read_printed(text)
    except ValueError as exc:
        raise EngineProtocolError(f"{what}: {field} is {exc}") from exc


def _sampled_ids(body: bytes, choice: _Choice, what: str) -> tuple[Int32Array | None, bytes]:
    """The ids, and their text where they were printed as a list in canonical form."""
    for field, raw in (("token_ids", choice.token_ids), ("response_token_ids", choice.response_token_ids)):
        text = bytes(raw)
        if text.startswith(b"["):
            inner = text[1:-1]
            ids, canonical = _read_printed(inner, what, field)
            return ids, inner if ids is not None and canonical else b""
    if choice.meta_info is not None and choice.meta_info.output_token_logprobs is not None:
        return listed([entry[1] for entry in choice.meta_info.output_token_logprobs]), b""
    if choice.logprobs is not None and choice.logprobs.content is not None:
        return _named_ids(body, what), b""
    return None, b""


def _named_ids(body: bytes, what: str) -> Int32Array | None:
    """Ids of tokens that are spelled ``token_id:N``. One that is not makes all of them unusable, never a shorter list."""
    try:
        found = msgspec.json.decode(body, type=_Named)
    except msgspec.DecodeError as exc:
        raise _unreadable(exc, body, what) from exc
    named = found.choices[0].logprobs
    texts = [entry.token for entry in named.content or []] if named is not None else []
    digits = [text.removeprefix(_ID_PREFIX) for text in texts if text.startswith(_ID_PREFIX)]
    if not texts or len(digits) != len(texts) or not all(text.isascii() and text.isdigit() for text in digits):
        return None
    return listed([min(int(text[:12]), 2**31) for text in digits])


def _routing(choice: _Choice) -> Routing | None:
    for raw in (choice.routed_experts, choice.meta_info.routed_experts if choice.meta_info is not None else b"null"):
        if bytes(raw) != b"null":
            return read_routing(bytes(raw))
    return None


def _logprobs(choice: _Choice) -> Float32Array | None:
    """NaN for a null."""
    if choice.logprobs is not None and choice.logprobs.content is not None:
        values = [entry.logprob for entry in choice.logprobs.content]
        try:
            return np.frombuffer(array.array("f", cast("list[float]", values)), dtype=np.float32)
        except TypeError:  # a null among them
            return np.array(values, dtype=np.float32)
    if choice.meta_info is not None and choice.meta_info.output_token_logprobs is not None:
        return np.array([entry[0] for entry in choice.meta_info.output_token_logprobs], dtype=np.float32)
    return None

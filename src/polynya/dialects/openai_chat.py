"""OpenAI Chat Completions.

Messages keep their raw bytes, so what the engine reads is what the client sent, except ``developer`` and ``function``
roles, which no chat template knows: they go upstream as ``system`` and ``tool``. Source of shapes: the recorded traffic of
real clients and OpenAI's API reference. A file that is text becomes a text part. Refuses ``n > 1`` (one capture is one
sample) and, by their place, parts that no engine is given (``media``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from polynya.dialects import media
from polynya.dialects.base import BadRequest, Fault, WireError
from polynya.dialects.history import History
from polynya.dialects.neutral import (
    TEXT_PARTS,
    ChatMessage,
    ChatReply,
    ChatRequest,
    ReplyHead,
    Role,
    SamplingParams,
    ToolSpec,
    Usage,
    WireMessage,
)
from polynya.dialects.wire import Reader, bounded, decode_as, encode, kept, pieces

_NULL = msgspec.Raw(b"null")


class _ImageUrl(msgspec.Struct):
    url: str = ""


class _File(msgspec.Struct):
    file_data: str = ""
    file_id: str = ""


class _Part(msgspec.Struct):
    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    image_url: _ImageUrl | None = None
    file: _File | None = None


class _ToolFunction(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw(b"{}")


class _WireTool(msgspec.Struct):
    type: str = "function"
    function: _ToolFunction | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _WireRequest(msgspec.Struct):
    model: str
    messages: msgspec.Raw
    tools: msgspec.Raw = _NULL
    tool_choice: msgspec.Raw = _NULL
    response_format: msgspec.Raw = _NULL
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    chat_template_kwargs: msgspec.Raw = _NULL


_KNOWN = {field.name for field in msgspec.structs.fields(_WireRequest)}
_request = msgspec.json.Decoder(_WireRequest)
_message = msgspec.json.Decoder(WireMessage)
_part = msgspec.json.Decoder(_Part)
_tool = msgspec.json.Decoder(_WireTool)
_tool_list = msgspec.json.Decoder(list[msgspec.Raw] | None)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_MEDIA_PARTS = {"image_url", "input_audio", "file", "video_url", "audio_url"}


class OpenAIChat:
    name = "openai_chat"

    def parse(self, body: bytes, path: str, history: History[media.Read[ChatMessage]] | None = None) -> ChatRequest:
        frame, read = _reader(history, body)
        if not read:
            raise BadRequest("messages: [] is empty; send at least one message", field="messages")
        notes = media.Notes()
        for each in read:
            notes.add(each.notes)
        return msgspec.structs.replace(frame, messages=[each.value for each in read], images=notes.images)

    def render(self, request: ChatRequest, reply: ChatReply, head: ReplyHead) -> bytes:
        choice = {
            "index": 0,
            "message": assistant_message(reply),
            "logprobs": None,
            "finish_reason": _finish(reply),
        }
        return encode(_envelope(head, "chat.completion") | {"choices": [choice], "usage": _usage(reply.usage)})

    def echoed(self, request: ChatRequest, reply: ChatReply) -> ChatReply:
        return reply

    def keepalive(self, head: ReplyHead, number: int = 1) -> bytes:
        return self._chunk(head, {})

    def stream(self, request: ChatRequest, reply: ChatReply, head: ReplyHead, waited: int = 0) -> Iterator[bytes]:
        yield self._chunk(head, {"role": "assistant", "content": ""})
        for piece in pieces(reply.reasoning):
            yield self._chunk(head, {"reasoning_content": piece})
        for piece in pieces(reply.text):
            yield self._chunk(head, {"content": piece})
        for index, call in enumerate(reply.tool_calls):
            first = {
                "index": index,
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": ""},
            }
            yield self._chunk(head, {"tool_calls": [first]})
            for piece in pieces(call.arguments):
                yield self._chunk(head, {"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        last = self._chunk(head, {}, finish_reason=_finish(reply))
        if request.include_usage:
            last += _event(_envelope(head, "chat.completion.chunk") | {"choices": [], "usage": _usage(reply.usage)})
        yield last + b"data: [DONE]\n\n"

    def error(self, error: WireError) -> bytes:
        return encode({"error": _error_object(error)})

    def stream_error(self, error: WireError, head: ReplyHead, waited: int = 0) -> bytes:
        return _event({"error": _error_object(error)})

    def token_count(self, count: int) -> bytes:
        return encode({"object": "response.input_tokens", "input_tokens": count})

    def models(self, names: list[str], created: int) -> bytes:
        data = [{"id": name, "object": "model", "created": created, "owned_by": "polynya"} for name in names]
        return encode({"object": "list", "data": data})

    def _chunk(self, head: ReplyHead, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return _event(_envelope(head, "chat.completion.chunk") | {"choices": [choice]})


def assistant_message(reply: ChatReply) -> dict[str, Any]:
    """The reply as a message of the history, in the shape that clients echo."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or (None if reply.tool_calls else "")}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.tool_calls
        ]
    return message


def _given(raw: msgspec.Raw) -> msgspec.Raw | None:
    """A copy that does not hold the whole body, or None for null. (msgspec decodes ``Raw | None`` as null only.)"""
    value = bytes(raw)
    return None if value == b"null" else msgspec.Raw(value)


def _frame(text: bytes, wire: _WireRequest) -> ChatRequest:
    """The request without its messages."""
    if wire.n is not None and wire.n != 1:
        raise BadRequest(f"n: {wire.n} is not possible here, one call is one sample; send {wire.n} requests", field="n")
    max_tokens = wire.max_completion_tokens if wire.max_completion_tokens is not None else wire.max_tokens
    if max_tokens is not None and max_tokens < 1:
        raise BadRequest(f"max_tokens: {max_tokens} is below 1", field="max_tokens")
    tools = _tools(wire.tools)
    others = {key: msgspec.Raw(bytes(value)) for key, value in _object.decode(text).items() if key not in _KNOWN}
    return ChatRequest(
        dialect=OpenAIChat.name,
        model=wire.model,
        messages=[],
        tools=tools,
        tools_raw=msgspec.Raw(bytes(wire.tools)) if tools else None,
        tool_choice=_given(wire.tool_choice),
        response_format=_given(wire.response_format),
        parallel_tool_calls=wire.parallel_tool_calls,
        sampling=_sampling(wire, max_tokens),
        stream=bool(wire.stream),
        include_usage=bool(wire.stream_options and wire.stream_options.include_usage),
        template_kwargs=_given(wire.chat_template_kwargs),
        leftovers=others,
    )


def _parse_message(raw: msgspec.Raw, where: str) -> media.Read[ChatMessage]:
    wire: WireMessage = decode_as(_message, raw, where)
    role = _ROLES.get(wire.role)
    if role is None:
        raise BadRequest(
            f"{where}.role: {wire.role!r} is unknown; use one of {', '.join(_ROLES)}", field=f"{where}.role"
        )
    notes = media.Notes()
    parts = _rewritten(wire.content, where, notes) if isinstance(wire.content, list) else None
    changed = ({"role": role} if role != wire.role else {}) | ({"content": parts} if parts is not None else {})
    whole = kept(_object.decode(raw) | changed) if changed else bytes(raw)
    return media.Read(ChatMessage(role=role, raw=whole, media=len(notes.images)), notes.taken)


def _rewritten(content: list[msgspec.Raw], where: str, notes: media.Notes) -> list[msgspec.Raw] | None:
    """The parts where they cannot go up as they are."""
    parts: list[msgspec.Raw] = []
    rewritten = False
    for i, raw in enumerate(content):
        place = f"{where}.content[{i}]"
        part: _Part = decode_as(_part, raw, place)
        if part.type not in TEXT_PARTS and (text := _media_part(part, place, notes)) is not None:
            raw, rewritten = msgspec.Raw(encode({"type": "text", "text": text})), True
        parts.append(raw)
    return parts if rewritten else None


def _media_part(part: _Part, where: str, notes: media.Notes) -> str | None:
    """The text of a file that is text; None for an image, which goes up as it is."""
    if part.type not in _MEDIA_PARTS:
        known = ", ".join(sorted(TEXT_PARTS | _MEDIA_PARTS))
        raise BadRequest(f"{where}.type: {part.type!r} is unknown; use one of {known}", field=f"{where}.type")
    if part.type == "image_url" and part.image_url is not None:
        media.image(notes, part.image_url.url, where)
        return None
    if part.type == "file" and part.file is not None and not part.file.file_id:
        found = media.data_url(notes, part.file.file_data, where)
        if found["type"] == "text":
            return str(found["text"])
        raise media.unserved(where, "an image as a file")
    raise media.unserved(where, "a file by id" if part.type == "file" else f"a part of type {part.type!r}")


def _tools(listed: msgspec.Raw) -> list[ToolSpec]:
    specs = []
    for i, raw in enumerate(decode_as(_tool_list, listed, "tools") or []):
        tool: _WireTool = decode_as(_tool, raw, f"tools[{i}]")
        if tool.type != "function" or tool.function is None:
            raise BadRequest(f"tools[{i}].type: {tool.type!r} is not served; use 'function'", field=f"tools[{i}].type")
        function = tool.function
        parameters = msgspec.Raw(bytes(function.parameters))
        specs.append(ToolSpec(name=function.name, description=function.description or "", parameters=parameters))
    return specs


def _sampling(wire: _WireRequest, max_tokens: int | None) -> SamplingParams:
    return bounded(
        SamplingParams(
            temperature=wire.temperature,
            top_p=wire.top_p,
            top_k=wire.top_k,
            min_p=wire.min_p,
            presence_penalty=wire.presence_penalty,
            frequency_penalty=wire.frequency_penalty,
            repetition_penalty=wire.repetition_penalty,
            max_tokens=max_tokens,
            stop=[wire.stop] if isinstance(wire.stop, str) else list(wire.stop or []),
            seed=wire.seed,
            logit_bias=wire.logit_bias,
        ),
        {},
    )


def _finish(reply: ChatReply) -> str:
    return "tool_calls" if reply.tool_calls and reply.finish_reason == "stop" else reply.finish_reason


def _envelope(head: ReplyHead, kind: str) -> dict[str, Any]:
    return {"id": head.reply_id, "object": kind, "created": head.created, "model": head.model}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


_ERROR_TYPES = {
    Fault.UNAUTHORISED: ("authentication_error", "invalid_api_key"),
    Fault.GONE: ("invalid_request_error", "session_ended"),
    Fault.NOT_FOUND: ("invalid_request_error", "not_found"),
    Fault.CONTEXT_OVERFLOW: ("invalid_request_error", "context_length_exceeded"),
    Fault.RATE_LIMITED: ("rate_limit_error", "rate_limit_exceeded"),
    Fault.UNAVAILABLE: ("server_error", "service_unavailable"),
    Fault.INTERNAL: ("server_error", "internal_error"),
    Fault.STORAGE_FULL: ("server_error", "insufficient_storage"),
    Fault.NOT_IMPLEMENTED: ("invalid_request_error", "not_implemented"),
}


def _error_object(error: WireError) -> dict[str, Any]:
    kind, code = _ERROR_TYPES.get(error.fault, ("invalid_request_error", None))
    return {"message": error.message, "type": kind, "param": error.field or None, "code": code}


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + encode(payload) + b"\n\n"


_reader = Reader("messages", _request, lambda wire: wire.messages, _parse_message, _frame)

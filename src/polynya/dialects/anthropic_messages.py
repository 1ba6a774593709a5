"""Anthropic Messages.

A user message with ``tool_result`` blocks becomes one ``tool`` message a block, in block order, then one ``user`` message with
the rest; consecutive assistant messages merge; a ``system`` message in the middle stays where it is. Thinking with a signature
of ours is reasoning again, with a foreign one it is dropped (and counted) and its message kept. Sources: recorded traffic of
Claude Code and the SDKs, the provider's API reference. Refuses block types that it cannot pass on, naming them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from polynya.dialects import media
from polynya.dialects.base import BadRequest, Fault, WireError
from polynya.dialects.history import History
from polynya.dialects.neutral import ChatMessage, ChatReply, ChatRequest, ReplyHead, SamplingParams, ToolCall, ToolSpec
from polynya.dialects.wire import (
    Reader,
    arguments_json,
    arguments_object,
    arguments_text,
    bounded,
    chat_message,
    decode_as,
    encode,
    event,
    function_tools,
    is_ours,
    pieces,
    sign,
    with_argument_objects,
)

_VOLATILE = ("x-anthropic-billing-header:",)
"""System blocks that change from request to request and say nothing to the model; kept in ``leftovers``."""


class _Source(msgspec.Struct):
    type: str = "base64"
    media_type: str = "application/octet-stream"
    data: str = ""
    url: str = ""
    content: str | list[msgspec.Raw] = ""


class _Block(msgspec.Struct):
    type: str = "text"
    text: str = ""
    thinking: str = ""
    signature: str = ""
    id: str = ""
    name: str = ""
    input: Any = None
    tool_use_id: str = ""
    tool_name: str = ""
    content: str | list[msgspec.Raw] | None = None
    is_error: bool | None = None
    source: _Source | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Block]


class _Tool(msgspec.Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: msgspec.Raw = msgspec.Raw(b"{}")


class _Tools(msgspec.Struct):
    specs: list[ToolSpec]
    raw: msgspec.Raw | None
    dropped: list[str]


class _ToolChoice(msgspec.Struct):
    type: str = "auto"
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class _Format(msgspec.Struct):
    type: str = ""
    schema: msgspec.Raw = msgspec.Raw(b"{}")


class _OutputConfig(msgspec.Struct):
    format: _Format | None = None


class _Request(msgspec.Struct):
    model: str
    messages: msgspec.Raw
    max_tokens: int | None = None
    system: str | list[_Block] | None = None
    tools: msgspec.Raw = msgspec.Raw(b"null")
    tool_choice: _ToolChoice | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    output_config: _OutputConfig | None = None


_KNOWN = {field.name for field in msgspec.structs.fields(_Request)} - {"output_config"}
"""(Of the output configuration the format only has a use here.)"""
_request = msgspec.json.Decoder(_Request)
_tool_list = msgspec.json.Decoder(list[_Tool] | None)
_message = msgspec.json.Decoder(_Message)
_block = msgspec.json.Decoder(_Block)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


class AnthropicMessages:
    name = "anthropic_messages"

    def parse(
        self, body: bytes, path: str, history: History[media.Read[list[ChatMessage]]] | None = None
    ) -> ChatRequest:
        frame, read = _reader(history, body)
        if not read:
            raise BadRequest("messages: at least one message is required", field="messages")
        notes = media.Notes(dropped=dict(frame.dropped))
        for each in read:
            if each.notes is not None:
                notes.add(each.notes)
        messages = _merged(frame.messages + [message for each in read for message in each.value])
        return msgspec.structs.replace(frame, messages=messages, images=notes.images, dropped=notes.dropped)

    def render(self, request: ChatRequest, reply: ChatReply, head: ReplyHead) -> bytes:
        content = [
            {**block, "input": arguments_object(block["input"])} if block["type"] == "tool_use" else block
            for block in _reply_blocks(reply)
        ]
        usage = _usage(reply) | {"output_tokens": reply.usage.completion_tokens}
        return encode(_envelope(head) | {"content": content, "stop_reason": _stop_reason(reply), "usage": usage})

    def echoed(self, request: ChatRequest, reply: ChatReply) -> ChatReply:
        return with_argument_objects(reply)

    def keepalive(self, head: ReplyHead, number: int = 1) -> bytes:
        return event("ping", {"type": "ping"})

    def stream(self, request: ChatRequest, reply: ChatReply, head: ReplyHead, waited: int = 0) -> Iterator[bytes]:
        started = _envelope(head) | {"content": [], "stop_reason": None, "usage": _usage(reply) | {"output_tokens": 1}}
        yield event("message_start", {"type": "message_start", "message": started})
        for index, block in enumerate(_reply_blocks(reply)):
            yield from _block_events(index, block)
        delta = {"stop_reason": _stop_reason(reply), "stop_sequence": None}
        usage = _usage(reply) | {"output_tokens": reply.usage.completion_tokens}
        yield event("message_delta", {"type": "message_delta", "delta": delta, "usage": usage})
        yield event("message_stop", {"type": "message_stop"})

    def error(self, error: WireError) -> bytes:
        return encode(_error(error))

    def stream_error(self, error: WireError, head: ReplyHead, waited: int = 0) -> bytes:
        return event("error", _error(error))

    def models(self, names: list[str], created: int) -> bytes:
        data = [
            {"type": "model", "id": name, "display_name": name, "created_at": "2026-01-01T00:00:00Z"} for name in names
        ]
        first, last = (names[0], names[-1]) if names else (None, None)
        return encode({"data": data, "has_more": False, "first_id": first, "last_id": last})

    def token_count(self, count: int) -> bytes:
        return encode({"input_tokens": count})


def _system(system: str | list[_Block] | None, leftovers: dict[str, Any], notes: media.Notes) -> list[ChatMessage]:
    texts = [system] if isinstance(system, str) else _only_texts(system or [], "system")
    volatile = [text for text in texts if text.startswith(_VOLATILE)]
    if volatile:
        leftovers["volatile_system"] = volatile
        notes.drop("volatile_system", len(volatile))
    text = "\n".join(text for text in texts if text and not text.startswith(_VOLATILE))
    return [chat_message("system", text=text)] if text else []


def _tools(raw: msgspec.Raw) -> _Tools:
    given: list[_Tool] = decode_as(_tool_list, raw, "tools") or []
    specs = [
        ToolSpec(name=tool.name, description=tool.description or "", parameters=_copied(tool.input_schema))
        for tool in given
        if tool.type in (None, "custom")
    ]
    dropped = [tool.type for tool in given if tool.type is not None and tool.type != "custom"]
    return _Tools(specs, function_tools(specs), dropped)


def _frame(text: bytes, wire: _Request) -> ChatRequest:
    """The request without its messages; the system prompt alone stands there."""
    if wire.max_tokens is not None and wire.max_tokens < 1:
        raise BadRequest(f"max_tokens: {wire.max_tokens} is below 1", field="max_tokens")
    leftovers: dict[str, Any] = {key: value for key, value in _object.decode(text).items() if key not in _KNOWN}
    media.refuse_held_elsewhere(
        leftovers, {"container": "send what it holds", "mcp_servers": "send their tools as tools"}
    )
    notes = media.Notes()
    system = _system(wire.system, leftovers, notes)
    tools = _tools(wire.tools)
    if tools.dropped:
        leftovers["dropped_tools"] = tools.dropped
        notes.drop("provider_tool", len(tools.dropped))
    choice = wire.tool_choice
    sampling = SamplingParams(
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=wire.top_k,
        max_tokens=wire.max_tokens,
        stop=wire.stop_sequences or [],
    )
    return ChatRequest(
        dialect=AnthropicMessages.name,
        model=wire.model,
        messages=system,
        tools=tools.specs,
        tools_raw=tools.raw,
        tool_choice=_choice(choice),
        response_format=_response_format(wire.output_config),
        parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
        sampling=bounded(sampling, {}),
        stream=bool(wire.stream),
        dropped=notes.dropped,
        leftovers={
            key: _copied(value) if isinstance(value, msgspec.Raw) else value for key, value in leftovers.items()
        },
    )


def _only_texts(blocks: list[_Block], where: str) -> list[str]:
    for i, block in enumerate(blocks):
        if block.type != "text":
            raise BadRequest(
                f"{where}[{i}].type: {block.type!r} is not served here; send text", field=f"{where}[{i}].type"
            )
    return [block.text for block in blocks]


def _read_message(raw: msgspec.Raw, where: str) -> media.Read[list[ChatMessage]]:
    notes = media.Notes()
    return media.Read(_messages(decode_as(_message, raw, where), where, notes), notes.taken)


def _messages(message: _Message, where: str, notes: media.Notes) -> list[ChatMessage]:
    blocks = [_Block(text=message.content)] if isinstance(message.content, str) else message.content
    if message.role == "assistant":
        return [_assistant(blocks, where, notes)]
    if message.role == "system":
        return [chat_message("system", text="\n".join(filter(None, _only_texts(blocks, f"{where}.content"))))]
    if message.role != "user":
        raise BadRequest(
            f"{where}.role: {message.role!r} is unknown; use user, assistant or system", field=f"{where}.role"
        )
    results = [
        _tool_result(block, f"{where}.content[{i}]", notes)
        for i, block in enumerate(blocks)
        if block.type == "tool_result"
    ]
    rest = [(i, block) for i, block in enumerate(blocks) if block.type != "tool_result"]
    if not rest:
        return results
    parts = [_part(block, f"{where}.content[{i}]", notes) for i, block in rest]
    return [*results, _with_parts("user", parts)]


def _assistant(blocks: list[_Block], where: str, notes: media.Notes) -> ChatMessage:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for i, block in enumerate(blocks):
        match block.type:
            case "text":
                texts.append(block.text)
            case "thinking":
                # (Edited text under our signature stays: it is not what the model thought, and must not pass for it.)
                if is_ours(block.signature):
                    reasoning.append(block.thinking)
                else:
                    notes.drop("foreign_reasoning")
            case "redacted_thinking":
                notes.drop("foreign_reasoning")
            case "tool_use":
                calls.append(ToolCall(id=block.id, name=block.name, arguments=arguments_text(block.input)))
            case other:
                raise BadRequest(
                    f"{where}.content[{i}].type: {other!r} is not served in an assistant message",
                    field=f"{where}.content[{i}].type",
                )
    text = "\n".join(text for text in texts if text)
    return chat_message("assistant", text=text, reasoning="\n".join(filter(None, reasoning)), tool_calls=calls)


def _tool_result(block: _Block, where: str, notes: media.Notes) -> ChatMessage:
    content = block.content
    if not isinstance(content, list):
        return chat_message("tool", text=content or "", tool_call_id=block.tool_use_id)
    parts = [
        _part(decode_as(_block, raw, f"{where}.content[{i}]"), f"{where}.content[{i}]", notes)
        for i, raw in enumerate(content)
    ]
    message = _with_parts("tool", parts)
    if not message.media:
        return chat_message("tool", text=message.text, tool_call_id=block.tool_use_id)
    return chat_message("tool", text=message.text, parts=parts, tool_call_id=block.tool_use_id)


def _with_parts(role: Any, parts: list[dict[str, Any]]) -> ChatMessage:
    text = "\n".join(part["text"] for part in parts if part["type"] == "text" and part["text"])
    if all(part["type"] == "text" for part in parts):
        return chat_message(role, text=text)
    return chat_message(role, text=text, parts=parts)


def _part(block: _Block, where: str, notes: media.Notes) -> dict[str, Any]:
    source = block.source
    match block.type:
        case "text":
            return {"type": "text", "text": block.text}
        case "tool_reference":
            # what a client-side tool search found; the tool itself stands among the tools
            return {"type": "text", "text": f"Tool found: {block.tool_name}"}
        case "image" if source is not None:
            if source.type != "base64":
                raise media.unserved(f"{where}.source", f"an image by {source.type}")
            return media.blob(notes, source.media_type, source.data, where)
        case "document" if source is not None:
            return _document(source, where, notes)
        case other:
            raise BadRequest(
                f"{where}.type: {other!r} is not served; send text, image or document", field=f"{where}.type"
            )


def _document(source: _Source, where: str, notes: media.Notes) -> dict[str, Any]:
    match source.type:
        case "text":
            return {"type": "text", "text": source.data}
        case "base64":
            return media.blob(notes, source.media_type, source.data, f"{where}.source")
        case "content":
            content, place = source.content, f"{where}.source.content"
            if not isinstance(content, str):
                blocks = [decode_as(_block, raw, f"{place}[{i}]") for i, raw in enumerate(content)]
                content = "\n".join(_only_texts(blocks, place))
            return {"type": "text", "text": content}
        case other:
            raise media.unserved(f"{where}.source", f"a document by {other}")


def _merged(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Consecutive assistant messages are one turn."""
    merged: list[ChatMessage] = []
    for message in messages:
        last = merged[-1] if merged else None
        if last is not None and last.role == message.role == "assistant":
            merged[-1] = chat_message(
                "assistant",
                text="\n".join(text for text in (last.text, message.text) if text),
                reasoning="\n".join(text for text in (last.reasoning, message.reasoning) if text),
                tool_calls=last.tool_calls + message.tool_calls,
            )
        else:
            merged.append(message)
    return merged


def _choice(choice: _ToolChoice | None) -> msgspec.Raw | None:
    if choice is None:
        return None
    if choice.type == "tool":
        return msgspec.Raw(encode({"type": "function", "function": {"name": choice.name}}))
    named = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
    if named is None:
        raise BadRequest(
            f"tool_choice.type: {choice.type!r} is unknown; use auto, any, tool or none", field="tool_choice.type"
        )
    return msgspec.Raw(encode(named))


def _response_format(config: _OutputConfig | None) -> msgspec.Raw | None:
    wanted = config.format if config is not None else None
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        field = "output_config.format.type"
        raise BadRequest(f"{field}: {wanted.type!r} is unknown; use json_schema", field=field)
    schema = {"name": "response", "schema": msgspec.Raw(bytes(wanted.schema))}
    return msgspec.Raw(encode({"type": "json_schema", "json_schema": schema}))


def _copied(raw: msgspec.Raw) -> msgspec.Raw:
    return msgspec.Raw(bytes(raw))


def _reply_blocks(reply: ChatReply) -> list[dict[str, Any]]:
    """Content blocks; a tool call's ``input`` is JSON text: the model's own where it is an object, as clients parse it."""
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": sign(reply.reasoning)})
    if reply.text:
        blocks.append({"type": "text", "text": reply.text})
    return blocks + [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments_json(call.arguments)}
        for call in reply.tool_calls
    ]


def _block_events(index: int, block: dict[str, Any]) -> Iterator[bytes]:
    def delta(kind: str, field: str, value: str) -> bytes:
        payload = {"type": "content_block_delta", "index": index, "delta": {"type": kind, field: value}}
        return event("content_block_delta", payload)

    kind = block["type"]
    blanks: dict[str, dict[str, Any]] = {
        "text": {"text": ""},
        "thinking": {"thinking": "", "signature": ""},
        "tool_use": {"input": {}},
    }
    empty = blanks[kind]
    yield event(
        "content_block_start", {"type": "content_block_start", "index": index, "content_block": {**block, **empty}}
    )
    field, name = {
        "text": ("text", "text_delta"),
        "thinking": ("thinking", "thinking_delta"),
        "tool_use": ("input", "input_json_delta"),
    }[kind]
    for piece in pieces(block[field]):
        yield delta(name, "partial_json" if kind == "tool_use" else field, piece)
    if kind == "thinking":
        yield delta("signature_delta", "signature", block["signature"])
    yield event("content_block_stop", {"type": "content_block_stop", "index": index})


def _envelope(head: ReplyHead) -> dict[str, Any]:
    return {
        "id": f"msg_{head.reply_id}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "stop_sequence": None,
    }


def _stop_reason(reply: ChatReply) -> str:
    return (
        "tool_use"
        if reply.tool_calls and reply.finish_reason == "stop"
        else _STOP_REASONS.get(reply.finish_reason, "end_turn")
    )


def _usage(reply: ChatReply) -> dict[str, Any]:
    cached = reply.usage.cached_tokens
    return {
        "input_tokens": reply.usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


_ERROR_TYPES = {
    Fault.UNAUTHORISED: "authentication_error",
    Fault.NOT_FOUND: "not_found_error",
    Fault.TOO_LARGE: "request_too_large",
    Fault.RATE_LIMITED: "rate_limit_error",
    Fault.UNAVAILABLE: "overloaded_error",
    Fault.INTERNAL: "api_error",
    Fault.STORAGE_FULL: "api_error",
}


def _error(error: WireError) -> dict[str, Any]:
    message = error.message
    if error.fault == Fault.CONTEXT_OVERFLOW and not message.startswith("prompt is too long"):
        message = f"prompt is too long: {message}"
    return {
        "type": "error",
        "error": {"type": _ERROR_TYPES.get(error.fault, "invalid_request_error"), "message": message},
    }


_reader = Reader("messages", _request, lambda wire: wire.messages, _read_message, _frame)

"""OpenAI Responses: replies, whole and as the event sequence that the provider sends.

Event order of each item: added, its deltas, done; ``response.completed`` (or ``incomplete``) goes last and holds the whole.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterator
from typing import Any

import msgspec

from polynya.dialects.base import Fault, WireError
from polynya.dialects.neutral import ChatReply, ChatRequest, ReplyHead, ToolAlias, ToolCall
from polynya.dialects.responses_tools import (
    custom_arguments,
    custom_input,
    shell_action,
    shell_arguments,
    upstream_name,
)
from polynya.dialects.wire import decode, encode, event, pieces, sign, with_calls


def render(request: ChatRequest, reply: ChatReply, head: ReplyHead) -> bytes:
    return encode(_response(head, reply, _items(request, reply, head)))


def echoed(request: ChatRequest, reply: ChatReply) -> ChatReply:
    """The reply as a client sends it on: of custom and shell tools the client knows another form than the model's."""

    def spelled(call: ToolCall) -> ToolCall:
        alias = request.tool_aliases.get(call.name, ToolAlias(name=call.name))
        name, arguments = upstream_name(alias.name, alias.namespace), call.arguments
        if alias.kind == "custom":
            arguments = custom_arguments(custom_input(call))
        elif alias.kind == "local_shell":
            name, arguments = "local_shell", shell_arguments(encode(shell_action(call)))
        return msgspec.structs.replace(call, name=name, arguments=arguments)

    return with_calls(reply, spelled)


def waiting(head: ReplyHead, number: int) -> bytes:
    """The no-op event of a stream that waits: it was created, then it is in progress."""
    kind = "response.in_progress" if number else "response.created"
    return event(kind, {"type": kind, "sequence_number": number, "response": _response(head, None, [])})


def stream(request: ChatRequest, reply: ChatReply, head: ReplyHead, waited: int) -> Iterator[bytes]:
    """``waited``: events that were sent already; the numbers go on, and the response is not created twice."""
    numbers = itertools.count(waited)

    def send(kind: str, **fields: Any) -> bytes:
        return event(kind, {"type": kind, "sequence_number": next(numbers), **fields})

    if not waited:
        yield send("response.created", response=_response(head, None, []))
    yield send("response.in_progress", response=_response(head, None, []))
    items = _items(request, reply, head)
    for index, item in enumerate(items):
        yield from _item_events(send, index, item)
    whole = _response(head, reply, items)
    yield send(f"response.{whole['status']}", response=whole)


def prewarmed(head: ReplyHead) -> Iterator[bytes]:
    """The reply to a request that asked for no generation: a response without output, for a later one to continue."""
    yield event("response.created", {"type": "response.created", "response": _response(head, None, [])})
    whole = {**_response(head, ChatReply(), []), "status": "completed"}
    yield event("response.completed", {"type": "response.completed", "response": whole})


def frames(events: bytes, stream_id: str) -> Iterator[str]:
    """The same events as WebSocket messages, one JSON object each; JSON holds no raw line break."""
    mark = b',"stream_id":' + encode(stream_id) if stream_id else b""
    for one in events.split(b"\n\n"):
        if payload := one.partition(b"\ndata: ")[2]:
            yield (payload[:-1] + mark + b"}").decode()


def error_frame(status: int, error: bytes, headers: dict[str, str], stream_id: str) -> str:
    """An error before the first event of a response. ``error``: the body that it has over HTTP."""
    found: dict[str, Any] = {"type": "error", "status": status, **decode(error)}
    if headers:
        found["headers"] = headers
        found["error"] = {**found["error"], "headers": headers}
    if stream_id:
        found["stream_id"] = stream_id
    return encode(found).decode()


def deleted(response_id: str) -> bytes:
    return encode({"id": response_id, "object": "response", "deleted": True})


def error(error: WireError) -> bytes:
    return encode({"error": _error_object(error)})


def stream_error(error: WireError, head: ReplyHead, waited: int) -> bytes:
    why = {"code": _code(error) or "server_error", "message": error.message}
    failed = _response(head, None, []) | {"status": "failed", "error": why}
    opening = b"" if waited else waiting(head, 0)
    sent = {"type": "response.failed", "sequence_number": max(waited, 1), "response": failed}
    return opening + event("response.failed", sent)


def _item_events(send: Any, index: int, item: dict[str, Any]) -> Iterator[bytes]:
    place = {"item_id": item["id"], "output_index": index}
    match item["type"]:
        case "reasoning":
            yield send("response.output_item.added", output_index=index, item={**item, "summary": []})
            text = item["summary"][0]["text"]
            place["summary_index"] = 0
            blank, whole = {"type": "summary_text", "text": ""}, {"type": "summary_text", "text": text}
            yield send("response.reasoning_summary_part.added", **place, part=blank)
            for piece in pieces(text):
                yield send("response.reasoning_summary_text.delta", **place, delta=piece)
            yield send("response.reasoning_summary_text.done", **place, text=text)
            yield send("response.reasoning_summary_part.done", **place, part=whole)
        case "message":
            yield send(
                "response.output_item.added", output_index=index, item={**item, "status": "in_progress", "content": []}
            )
            part = item["content"][0]
            place["content_index"] = 0
            yield send("response.content_part.added", **place, part={**part, "text": ""})
            for piece in pieces(part["text"]):
                yield send("response.output_text.delta", **place, delta=piece, logprobs=[])
            yield send("response.output_text.done", **place, text=part["text"], logprobs=[])
            yield send("response.content_part.done", **place, part=part)
        case "function_call":
            yield send(
                "response.output_item.added",
                output_index=index,
                item={**item, "status": "in_progress", "arguments": ""},
            )
            for piece in pieces(item["arguments"]):
                yield send("response.function_call_arguments.delta", **place, delta=piece)
            yield send("response.function_call_arguments.done", **place, arguments=item["arguments"])
        case "custom_tool_call":
            yield send(
                "response.output_item.added", output_index=index, item={**item, "status": "in_progress", "input": ""}
            )
            for piece in pieces(item["input"]):
                yield send("response.custom_tool_call_input.delta", **place, delta=piece)
            yield send("response.custom_tool_call_input.done", **place, input=item["input"])
        case _:
            yield send("response.output_item.added", output_index=index, item=item)
    yield send("response.output_item.done", output_index=index, item=item)


def _items(request: ChatRequest, reply: ChatReply, head: ReplyHead) -> list[dict[str, Any]]:
    tag = head.reply_id
    if request.compaction:
        summary = base64.b64encode(reply.text.encode("utf-8", "surrogatepass")).decode()
        return [{"id": f"cmp_{tag}", "type": "compaction", "encrypted_content": summary}]
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        summary_part = {"type": "summary_text", "text": reply.reasoning}
        items.append(
            {
                "id": f"rs_{tag}",
                "type": "reasoning",
                "summary": [summary_part],
                "encrypted_content": sign(reply.reasoning),
            }
        )
    if reply.text or not (reply.tool_calls or reply.reasoning):
        part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        items.append(
            {"id": f"msg_{tag}", "type": "message", "status": "completed", "role": "assistant", "content": [part]}
        )
    return items + [_call_item(request, call, f"{tag}_{i}") for i, call in enumerate(reply.tool_calls)]


def _call_item(request: ChatRequest, call: ToolCall, tag: str) -> dict[str, Any]:
    alias = request.tool_aliases.get(call.name, ToolAlias(name=call.name))
    shared = {"status": "completed", "call_id": call.id}
    if alias.kind == "custom":
        text = custom_input(call)
        item = {"id": f"ctc_{tag}", "type": "custom_tool_call", **shared, "name": alias.name, "input": text}
    elif alias.kind == "local_shell":
        return {"id": f"lsh_{tag}", "type": "local_shell_call", **shared, "action": shell_action(call)}
    else:
        item = {"id": f"fc_{tag}", "type": "function_call", **shared, "name": alias.name, "arguments": call.arguments}
    if alias.namespace:
        item["namespace"] = alias.namespace
    return item


def _response(head: ReplyHead, reply: ChatReply | None, items: list[dict[str, Any]]) -> dict[str, Any]:
    cut = reply is not None and reply.finish_reason in ("length", "content_filter")
    reason = "max_output_tokens" if reply is not None and reply.finish_reason == "length" else "content_filter"
    response: dict[str, Any] = {
        "id": f"resp_{head.reply_id}",
        "object": "response",
        "created_at": head.created,
        "status": "in_progress" if reply is None else "incomplete" if cut else "completed",
        "model": head.model,
        "output": items,
        "error": None,
        "incomplete_details": {"reason": reason} if cut else None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "temperature": 1.0,
        "top_p": 1.0,
    }
    if reply is not None:
        usage = reply.usage
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
    return response


_CODES = {
    Fault.UNAUTHORISED: ("authentication_error", "invalid_api_key"),
    Fault.GONE: ("invalid_request_error", "session_ended"),
    Fault.NOT_FOUND: ("invalid_request_error", "not_found"),
    Fault.CONTEXT_OVERFLOW: ("invalid_request_error", "context_length_exceeded"),
    Fault.RATE_LIMITED: ("rate_limit_error", "rate_limit_exceeded"),
    Fault.UNAVAILABLE: ("server_error", "server_error"),
    Fault.INTERNAL: ("server_error", "server_error"),
    Fault.STORAGE_FULL: ("server_error", "server_error"),
}


def _code(error: WireError) -> str | None:
    if error.field == "previous_response_id":
        return "previous_response_not_found"
    return _CODES.get(error.fault, ("", None))[1]


def _error_object(error: WireError) -> dict[str, Any]:
    kind = _CODES.get(error.fault, ("invalid_request_error", None))[0]
    return {"message": error.message, "type": kind, "param": error.field or None, "code": _code(error)}

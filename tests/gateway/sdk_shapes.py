"""Replies as the providers' own SDKs type them: strictly read, and what a client makes of them.

Strict means: pydantic's strict mode on the SDK's own types, no field that the type does not name (but those in ``EXTRA``),
and integers where clients read integers.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pydantic
from anthropic.types import Message, RawMessageStreamEvent
from google.genai.types import GenerateContentResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

EXTRA = {
    ("ChatCompletionMessage", "reasoning_content"),
    ("ChoiceDelta", "reasoning_content"),
    ("ResponseCustomToolCall", "status"),
}
"""Fields that are sent and that the SDK's type does not name: the first two are what every compatible server sends, the third
is in the provider's own replies."""
_anthropic_event: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(RawMessageStreamEvent)
_responses_event: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


class Said(msgspec.Struct):
    """What a client shows of a reply."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, str]] = []
    """Id, name (namespace first), arguments."""
    finish: str = ""
    usage: tuple[int, int] = (-1, -1)


def whole(dialect: str, body: bytes) -> Said:
    kinds: dict[str, type[pydantic.BaseModel]] = {
        "openai_chat": ChatCompletion,
        "openai_responses": Response,
        "anthropic_messages": Message,
        "google_generate": GenerateContentResponse,
    }
    return of_whole(dialect, _strict(kinds[dialect], body))


def streamed(dialect: str, body: bytes) -> Said:
    payloads = [
        line.removeprefix("data: ") for line in body.decode().replace("\r\n", "\n").split("\n") if line[:5] == "data:"
    ]
    if dialect == "openai_chat":
        assert payloads.pop() == "[DONE]"
        return of_events(dialect, [_strict(ChatCompletionChunk, payload) for payload in payloads])
    if dialect == "google_generate":
        return of_events(dialect, [_strict(GenerateContentResponse, payload) for payload in payloads])
    adapter = _responses_event if dialect == "openai_responses" else _anthropic_event
    events = [payload for payload in payloads if json.loads(payload)["type"] != "ping"]
    return of_events(dialect, [_known(adapter.validate_json(payload, strict=True)) for payload in events])


def of_whole(dialect: str, reply: Any) -> Said:
    """The same of what an SDK gave back."""
    match dialect:
        case "openai_chat":
            return _chat(reply)
        case "openai_responses":
            return _response(reply)
        case "anthropic_messages":
            return _message(reply)
        case _:
            return _google([reply])


def of_events(dialect: str, events: list[Any]) -> Said:
    match dialect:
        case "openai_chat":
            return _chunks(events)
        case "openai_responses":
            return _response_events(events)
        case "anthropic_messages":
            return _message_events(events)
        case _:
            return _google(events)


def _strict(kind: type[pydantic.BaseModel], raw: str | bytes) -> Any:
    return _known(kind.model_validate_json(raw, strict=True))


def _known(value: Any) -> Any:
    """The value, after a look that no model in it has a field of unknown name."""
    if isinstance(value, pydantic.BaseModel):
        extra = {(type(value).__name__, name) for name in value.model_extra or {}}
        assert extra <= EXTRA, extra - EXTRA
        for name in type(value).model_fields:
            _known(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            _known(item)
    return value


def _chat(reply: ChatCompletion) -> Said:
    (choice,) = reply.choices
    message, usage = choice.message, reply.usage
    assert usage is not None and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    return Said(
        text=message.content or "",
        reasoning=(message.model_extra or {}).get("reasoning_content", ""),
        calls=[(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or []],  # type: ignore[union-attr]
        finish=choice.finish_reason,
        usage=(usage.prompt_tokens, usage.completion_tokens),
    )


def _chunks(chunks: list[ChatCompletionChunk]) -> Said:
    said = Said()
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        if chunk.usage is not None:
            said.usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        for choice in chunk.choices:
            said.text += choice.delta.content or ""
            said.reasoning += (choice.delta.model_extra or {}).get("reasoning_content", "")
            said.finish = choice.finish_reason or said.finish
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                known = calls.setdefault(call.index, [call.id or "", call.function.name or "", ""])
                known[2] += call.function.arguments or ""
    said.calls = [(i, name, arguments) for _, (i, name, arguments) in sorted(calls.items())]
    return said


def _response(reply: Response) -> Said:
    usage = reply.usage
    assert usage is not None
    said = Said(finish=reply.status or "", usage=(usage.input_tokens, usage.output_tokens))
    for item in reply.output:
        match item.type:
            case "message":
                said.text += "".join(part.text for part in item.content if part.type == "output_text")
            case "reasoning":
                said.reasoning += "".join(part.text for part in item.summary)
            case "function_call":
                said.calls.append((item.call_id, "__".join(filter(None, (item.namespace, item.name))), item.arguments))
            case "custom_tool_call":
                said.calls.append((item.call_id, item.name, item.input))
            case "local_shell_call":
                said.calls.append((item.call_id, "local_shell", json.dumps(item.action.command)))
            case "compaction":
                said.text += item.encrypted_content
            case other:
                raise AssertionError(other)
    return said


def _response_events(events: list[Any]) -> Said:
    """Deltas must add up to the items of the terminal event."""
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas: dict[str, str] = {}
    done = []
    for event in events:
        if event.type.endswith(".delta"):
            deltas[event.item_id] = deltas.get(event.item_id, "") + event.delta
        elif event.type == "response.output_item.done":
            done.append(event.item)
    final = events[-1].response
    assert done == final.output
    said = _response(final)
    for item in final.output:
        texts = {
            "message": lambda item: item.content[0].text,
            "reasoning": lambda item: item.summary[0].text,
            "function_call": lambda item: item.arguments,
            "custom_tool_call": lambda item: item.input,
        }
        if item.type in texts:
            assert deltas.get(item.id, "") == texts[item.type](item)
    return said


def _message(reply: Message) -> Said:
    said = Said(finish=reply.stop_reason or "", usage=(reply.usage.input_tokens, reply.usage.output_tokens))
    for block in reply.content:
        match block.type:
            case "text":
                said.text += block.text
            case "thinking":
                said.reasoning += block.thinking
            case "tool_use":
                said.calls.append((block.id, block.name, json.dumps(block.input)))
            case other:
                raise AssertionError(other)
    return said


def _message_events(events: list[Any]) -> Said:
    start, *middle, delta, stop = events
    assert (start.type, delta.type, stop.type) == ("message_start", "message_delta", "message_stop")
    said = Said(finish=delta.delta.stop_reason, usage=(start.message.usage.input_tokens, delta.usage.output_tokens))
    blocks: list[Any] = []
    partial = ""
    for event in middle:
        match event.type:
            case "content_block_start":
                assert event.index == len(blocks)
                blocks.append(event.content_block)
                partial = ""
            case "content_block_delta":
                assert event.index == len(blocks) - 1
                match event.delta.type:
                    case "text_delta":
                        said.text += event.delta.text
                    case "thinking_delta":
                        said.reasoning += event.delta.thinking
                    case "input_json_delta":
                        partial += event.delta.partial_json
                    case "signature_delta":
                        assert event.delta.signature
            case "content_block_stop":
                if blocks[-1].type == "tool_use":
                    said.calls.append((blocks[-1].id, blocks[-1].name, partial))
    return said


def _google(replies: list[GenerateContentResponse]) -> Said:
    said = Said()
    for reply in replies:
        usage = reply.usage_metadata
        if usage is None and reply.text == "":
            # a no-op event: nothing but an empty text
            continue
        assert usage is not None
        prompt, sampled = usage.prompt_token_count, usage.candidates_token_count
        assert isinstance(prompt, int) and isinstance(sampled, int) and usage.total_token_count == prompt + sampled
        said.usage = (prompt, sampled)
        (candidate,) = reply.candidates or []
        assert candidate.content is not None
        for part in candidate.content.parts or []:
            if part.function_call is not None:
                call = part.function_call
                said.calls.append((call.id or "", call.name or "", json.dumps(call.args)))
            elif part.thought:
                said.reasoning += part.text or ""
            else:
                said.text += part.text or ""
        said.finish = candidate.finish_reason.value if candidate.finish_reason else said.finish
    return said

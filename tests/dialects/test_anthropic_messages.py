"""Anthropic Messages in, neutral form, Anthropic Messages out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given

from polynya.dialects.anthropic_messages import AnthropicMessages
from polynya.dialects.base import BadRequest, Fault, WireError
from polynya.dialects.neutral import ChatReply, ChatRequest, ToolCall
from polynya.dialects.wire import sign

from .conftest import HEAD, REPLIES, recorded, sse

DIALECT = AnthropicMessages()


def parse(messages: list[Any], **fields: Any) -> ChatRequest:
    body = {"model": "m", "max_tokens": 10, "messages": messages, **fields}
    return DIALECT.parse(json.dumps(body).encode(), "/v1/messages")


def upstream(request: ChatRequest) -> list[Any]:
    return [json.loads(bytes(message.raw)) for message in request.messages]


@pytest.mark.parametrize("row", recorded("/v1/messages"), ids=lambda row: row["from"])
def test_recorded_request_is_understood(row: dict[str, Any]) -> None:
    request = DIALECT.parse(json.dumps(row["body"]).encode(), row["path"])
    sent = row["body"]["messages"]
    results = [b for m in sent if isinstance(m["content"], list) for b in m["content"] if b["type"] == "tool_result"]
    uses = [b for m in sent if isinstance(m["content"], list) for b in m["content"] if b["type"] == "tool_use"]
    assert [m.tool_call_id for m in request.messages if m.role == "tool"] == [b["tool_use_id"] for b in results]
    calls = [call for m in request.messages for call in m.tool_calls]
    assert [(c.id, c.name, json.loads(c.arguments)) for c in calls] == [(b["id"], b["name"], b["input"]) for b in uses]
    assert [tool.name for tool in request.tools] == [tool["name"] for tool in row["body"].get("tools", [])]
    assert request.stream is row["body"].get("stream", False)


def test_billing_header_is_cut_from_the_prompt_and_kept_in_the_record() -> None:
    block = {"type": "text", "text": "x-anthropic-billing-header: cch=aaaaa;"}
    first = parse([{"role": "user", "content": "hi"}], system=[block, {"type": "text", "text": "You are an agent."}])
    assert upstream(first)[0] == {"role": "system", "content": "You are an agent."}
    assert first.leftovers["volatile_system"] == [block["text"]]


def test_tool_results_become_tool_messages_in_block_order_and_the_rest_a_user_message() -> None:
    result = {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "B"}]}
    blocks = [
        {"type": "text", "text": "a reminder"},
        result,
        {"type": "tool_result", "tool_use_id": "a", "content": "A"},
    ]
    assert upstream(parse([{"role": "user", "content": blocks}])) == [
        {"role": "tool", "content": "B", "tool_call_id": "b"},
        {"role": "tool", "content": "A", "tool_call_id": "a"},
        {"role": "user", "content": "a reminder"},
    ]


def test_string_and_one_text_block_are_the_same_message() -> None:
    as_blocks = parse(
        [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}]
    )
    assert upstream(as_blocks) == upstream(parse([{"role": "user", "content": "x"}]))


def test_system_message_in_the_middle_stays_where_it_is() -> None:
    request = parse(
        [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}, {"role": "user", "content": "c"}]
    )
    assert [(m.role, m.text) for m in request.messages] == [("user", "a"), ("system", "b"), ("user", "c")]


def test_consecutive_assistant_messages_merge() -> None:
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    request = parse([{"role": "assistant", "content": "a"}, {"role": "assistant", "content": [use]}])
    assert upstream(request) == [
        {"role": "assistant", "content": "a", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    ]  # fmt: skip


def test_our_thinking_round_trips_and_a_foreign_one_leaves_its_message() -> None:
    ours = {"type": "thinking", "thinking": "why", "signature": sign("why")}
    foreign = {"type": "thinking", "thinking": "else", "signature": "abc"}
    request = parse(
        [
            {"role": "assistant", "content": [ours]},
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": [foreign]},
        ]
    )
    assert [m.reasoning for m in request.messages] == ["why", "", ""]
    assert [m.role for m in request.messages] == ["assistant", "user", "assistant"]


def test_images_are_passed_on_in_order() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
    (message,) = upstream(parse([{"role": "user", "content": [{"type": "text", "text": "see"}, image]}]))
    assert message["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}},
    ]


def test_provider_side_tools_are_dropped_and_named() -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}, {"name": "f", "input_schema": {"type": "object"}}]
    request = parse([{"role": "user", "content": "x"}], tools=tools)
    assert [tool.name for tool in request.tools] == ["f"]
    assert request.leftovers["dropped_tools"] == ["web_search_20250305"]


@pytest.mark.parametrize(
    ("choice", "wire"),
    [({"type": "auto"}, "auto"), ({"type": "any"}, "required"), ({"type": "none"}, "none"),
     ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}})],
)  # fmt: skip
def test_tool_choice_is_translated(choice: Any, wire: Any) -> None:
    request = parse([{"role": "user", "content": "x"}], tool_choice=choice)
    assert json.loads(bytes(request.tool_choice or b"null")) == wire
    assert request.guided is (choice["type"] in ("any", "tool"))


@pytest.mark.parametrize(
    ("messages", "fields", "field"),
    [
        ([], {}, "messages"),
        ([{"role": "alien", "content": "x"}], {}, "messages[0].role"),
        ([{"role": "user", "content": [{"type": "alien"}]}], {}, "messages[0].content[0].type"),
        ([{"role": "assistant", "content": [{"type": "image"}]}], {}, "messages[0].content[0].type"),
        ([{"role": "user", "content": "x"}], {"max_tokens": 0}, "max_tokens"),
        ([{"role": "user", "content": "x"}], {"tool_choice": {"type": "alien"}}, "tool_choice.type"),
        ([{"role": "user", "content": 5}], {}, "messages[0].content"),
    ],
)
def test_what_cannot_be_passed_on_is_refused_by_name(messages: list[Any], fields: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(messages, **fields)
    assert caught.value.field.replace("[...]", "[0]") == field


def _streamed_inputs(events: list[dict[str, Any]]) -> list[str]:
    """The JSON text of each tool call, as a client joins it."""
    found: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            found[event["index"]] = ""
        elif event["type"] == "content_block_delta":
            found[event["index"]] = found.get(event["index"], "") + event["delta"].get("partial_json", "")
    return [text for text in found.values() if text]


@given(reply=REPLIES)
def test_stream_holds_exactly_the_reply(reply: ChatReply) -> None:
    request = parse([{"role": "user", "content": "x"}])
    events = sse(list(DIALECT.stream(request, reply, HEAD)))
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == reply.text
    assert "".join(delta.get("thinking", "") for delta in deltas) == reply.reasoning
    inputs = _streamed_inputs(events)
    whole = json.loads(DIALECT.render(request, reply, HEAD))["content"]
    assert [json.loads(text) for text in inputs] == [block["input"] for block in whole if block["type"] == "tool_use"]
    for text, call in zip(inputs, reply.tool_calls, strict=True):
        assert text == call.arguments or json.loads(text) in ({}, {"_raw_arguments": call.arguments})
    started = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [(b["id"], b["name"]) for b in started if b["type"] == "tool_use"] == [
        (c.id, c.name) for c in reply.tool_calls
    ]
    assert [event["type"] for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    assert events[0]["message"]["usage"]["input_tokens"] == reply.usage.prompt_tokens
    assert events[-2]["usage"]["output_tokens"] == reply.usage.completion_tokens


@given(reply=REPLIES)
def test_whole_reply_echoed_back_is_the_same_turn(reply: ChatReply) -> None:
    request = parse([{"role": "user", "content": "x"}])
    message = json.loads(DIALECT.render(request, reply, HEAD))
    (echoed,) = parse([{"role": "assistant", "content": message["content"]}]).messages
    assert (echoed.text, echoed.reasoning) == (reply.text, reply.reasoning)
    assert [(c.id, c.name) for c in echoed.tool_calls] == [(c.id, c.name) for c in reply.tool_calls]


def test_malformed_arguments_survive_the_round_trip() -> None:
    reply = ChatReply(tool_calls=[ToolCall(id="1", name="f", arguments='{"a": ')])
    message = json.loads(DIALECT.render(parse([{"role": "user", "content": "x"}]), reply, HEAD))
    assert message["content"][0]["input"] == {"_raw_arguments": '{"a": '}
    (echoed,) = parse([{"role": "assistant", "content": message["content"]}]).messages
    assert echoed.tool_calls[0].arguments == '{"a": '


@pytest.mark.parametrize(
    ("reply", "reason"),
    [(ChatReply(), "end_turn"), (ChatReply(finish_reason="length"), "max_tokens"),
     (ChatReply(tool_calls=[ToolCall(id="1", name="f", arguments="{}")]), "tool_use")],
)  # fmt: skip
def test_stop_reason_is_the_providers_word(reply: ChatReply, reason: str) -> None:
    request = parse([{"role": "user", "content": "x"}])
    assert json.loads(DIALECT.render(request, reply, HEAD))["stop_reason"] == reason


def test_errors_have_the_providers_shape_and_overflow_its_words() -> None:
    error = json.loads(DIALECT.error(WireError(fault=Fault.CONTEXT_OVERFLOW, message="9 > 8")))
    assert error == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "prompt is too long: 9 > 8"},
    }
    (event,) = sse([DIALECT.stream_error(WireError(fault=Fault.UNAVAILABLE, message="down"), HEAD)])
    assert event["error"]["type"] == "overloaded_error"


def test_what_the_model_will_not_see_is_counted_by_rule() -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cch=aaaaa;"}
    thought = {"type": "thinking", "thinking": "t", "signature": "theirs"}
    request = parse(
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": [thought]}],
        system=[billing],
        tools=[{"type": "web_search_20250305", "name": "web_search"}],
    )
    assert request.dropped == {"volatile_system": 1, "foreign_reasoning": 1, "provider_tool": 1}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ],
)
def test_what_would_be_lost_in_silence_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse([{"role": "user", "content": "x"}], **fields)
    assert caught.value.field == field


def test_documents_of_blocks_are_their_text() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for source in ({"type": "content", "content": content}, {"type": "content", "content": "a\nb"}):
        (message,) = parse([{"role": "user", "content": [{"type": "document", "source": source}]}]).messages
        assert message.text == "a\nb"

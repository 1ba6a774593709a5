"""OpenAI Chat: what is refused, what is kept byte for byte, and that a stream says exactly what the reply says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polynya.dialects.base import BadRequest, Fault, WireError
from polynya.dialects.neutral import ChatReply, ChatRequest, ReplyHead, ToolCall, Usage
from polynya.dialects.openai_chat import OpenAIChat, assistant_message

DIALECT = OpenAIChat()
HEAD = ReplyHead(reply_id="chatcmpl-1", created=7, model="asked")
FIELDS = [
    "model", "messages", "role", "content", "tools", "function", "name", "arguments", "tool_calls", "type", "text", "n",
    "stream", "stop", "max_tokens", "temperature", "stream_options", "parameters", "tool_choice", "refusal", "logit_bias",
]  # fmt: skip

NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8) | st.sampled_from(FIELDS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=4), inner),
    max_leaves=12,
)
"""JSON that is often nearly a request."""
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "function"])},
    optional={
        "content": st.none()
        | st.text()
        | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text()})),
        "name": st.text(max_size=5),
        "tool_call_id": st.text(max_size=5),
        "x_own_field": JSON,
    },
)
REPLIES = st.builds(
    ChatReply,
    text=st.text(max_size=700),
    reasoning=st.text(max_size=300),
    tool_calls=st.lists(st.builds(ToolCall, id=st.text(), name=st.text(), arguments=st.text(max_size=600)), max_size=3),
    finish_reason=st.sampled_from(["stop", "length"]),
    usage=st.builds(Usage, prompt_tokens=st.integers(0, 9), completion_tokens=st.integers(0, 9)),
)


def parse(body: Any) -> ChatRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return DIALECT.parse(raw, "/v1/chat/completions")


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(body: bytes) -> None:
    refused_or_parsed(body)


@given(JSON)
def test_any_json_is_parsed_or_refused(body: Any) -> None:
    refused_or_parsed(json.dumps(body).encode())


@given(JSON, st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_any_field_of_a_request_is_parsed_or_refused(message: Any, fields: dict[str, Any]) -> None:
    refused_or_parsed(json.dumps({"model": "m", "messages": [message], **fields}).encode())


@given(st.binary(max_size=12), st.sampled_from([b'"q":"%s"', b'"%s":1', b'"q":%s']), st.integers(0, 2))
def test_any_bytes_inside_a_request_are_parsed_or_refused(junk: bytes, field: bytes, place: int) -> None:
    parts = [b"", b"", b""]
    parts[place] = b"," + field.replace(b"%s", junk)
    tool = b'{"type":"function","function":{"name":"f","parameters":{}%s}}' % parts[0]
    refused_or_parsed(
        b'{"model":"m","messages":[{"role":"developer","content":"x"%s}],"tools":[%s]%s}' % (parts[1], tool, parts[2])
    )


def refused_or_parsed(body: bytes) -> None:
    """Nothing but BadRequest comes out, and what is let in can be stored and sent on as text."""
    try:
        request = parse(body)
    except BadRequest as exc:
        assert exc.message
        return
    for raw in [*(message.raw for message in request.messages), request.tools_raw, request.tool_choice]:
        if raw is not None:
            bytes(raw).decode()


@pytest.mark.parametrize("depth", [50, 1_000, 5_000, 200_000])
def test_deep_nesting_is_parsed_or_refused(depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    refused_or_parsed(b'{"model":"m","messages":[{"role":"developer","content":"x","q":%s}],"z":%s}' % (deep, deep))


@given(st.lists(MESSAGES, min_size=1, max_size=5), st.sampled_from([None, 2]), st.booleans())
def test_messages_are_kept_byte_for_byte(messages: list[dict[str, Any]], indent: int | None, ascii_only: bool) -> None:
    raws = [json.dumps(message, indent=indent, ensure_ascii=ascii_only).encode() for message in messages]
    request = parse(b'{"model":"m","messages":[' + b" ,\n".join(raws) + b"]}")
    for sent, raw, message in zip(messages, raws, request.messages, strict=True):
        if sent["role"] == "developer":
            assert message.role == "system"
            assert json.loads(bytes(message.raw)) == {**sent, "role": "system"}
        elif sent["role"] == "function":
            assert message.role == "tool"
        else:
            assert (message.role, bytes(message.raw)) == (sent["role"], raw)


@given(st.text(), st.sampled_from(["\ud83d", "\udc00", "\udbff"]), st.text())
def test_half_a_surrogate_pair_costs_one_character_and_not_the_call(before: str, half: str, after: str) -> None:
    body = ask(messages=[{"role": "user", "content": f"{before}\\{half}{after}\U0001f600\\ud83d"}])
    (message,) = parse(body).messages
    assert message.text == f"{before}\\\ufffd{after}\U0001f600\\ud83d"


@given(REPLIES, st.booleans())
def test_stream_says_exactly_what_the_reply_says(reply: ChatReply, include_usage: bool) -> None:
    request = parse(ask(stream=True, stream_options={"include_usage": include_usage}))
    events = list(DIALECT.stream(request, reply, HEAD))
    assert events[-1].endswith(b"data: [DONE]\n\n")
    chunks = [json.loads(line[6:]) for line in b"".join(events).split(b"\n\n") if line and line != b"data: [DONE]"]
    assert {(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in chunks} == {
        ("chatcmpl-1", "chat.completion.chunk", 7, "asked")
    }
    if include_usage:
        assert chunks.pop()["usage"]["completion_tokens"] == reply.usage.completion_tokens
    said = assembled([chunk["choices"][0]["delta"] for chunk in chunks])
    assert said == (reply.text, reply.reasoning, [(call.id, call.name, call.arguments) for call in reply.tool_calls])
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    whole = json.loads(DIALECT.render(request, reply, HEAD))["choices"][0]
    assert finishes == [None] * (len(chunks) - 1) + [whole["finish_reason"]]


def assembled(deltas: list[dict[str, Any]]) -> tuple[str, str, list[tuple[str, str, str]]]:
    """What a client makes of the deltas."""
    calls: dict[int, dict[str, str]] = {}
    for delta in deltas:
        for part in delta.get("tool_calls", []):
            call = calls.setdefault(part["index"], {"arguments": ""})
            call |= {"id": part["id"], "name": part["function"]["name"]} if "id" in part else {}
            call["arguments"] += part["function"]["arguments"]
    text = "".join(delta.get("content") or "" for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    return text, reasoning, [(call["id"], call["name"], call["arguments"]) for _, call in sorted(calls.items())]


@given(REPLIES)
def test_reply_that_a_client_echoes_is_read_as_it_was_said(reply: ChatReply) -> None:
    (message,) = parse(ask(messages=[assistant_message(reply)])).messages
    assert (message.text, message.reasoning, message.tool_calls) == (reply.text, reply.reasoning, reply.tool_calls)


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"messages": []}, "messages", "at least one message"),
        ({"n": 2}, "n", "send 2 requests"),
        ({"max_tokens": 0}, "max_tokens", "below 1"),
        ({"messages": [{"role": "poet", "content": "x"}]}, "messages[0].role", "'poet' is unknown"),
        ({"messages": [{"content": "x"}]}, "messages[0]", "missing required field `role`"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages[0].content[0].type", "'smell'"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search' is not served"),
        ({"temperature": "hot"}, "temperature", "Expected `float"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "Expected `bool"),
    ],
)
def test_refusal_names_the_field(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(ask(**fields))
    assert caught.value.field == field
    assert words in caught.value.message


def test_parts_are_joined_and_media_counted() -> None:
    parts = [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}},
        {"type": "input_text", "text": "here"},
    ]
    (message,) = parse(ask(messages=[{"role": "user", "content": parts}])).messages
    assert (message.text, message.media) == ("look\nhere", 1)


def test_null_is_not_given() -> None:
    request = parse(
        ask(tools=None, tool_choice=None, stop=None, stream=None, response_format=None, chat_template_kwargs=None)
    )
    assert (request.tools, request.tools_raw, request.tool_choice, request.template_kwargs) == ([], None, None, None)
    assert not request.guided
    assert request.leftovers == {}


@pytest.mark.parametrize(
    ("fields", "guided"),
    [
        ({"tool_choice": "auto"}, False),
        ({"tool_choice": "none"}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": {"type": "json_object"}}, True),
    ],
)
def test_guided_requests_are_known(fields: dict[str, Any], guided: bool) -> None:
    assert parse(ask(**fields)).guided is guided


def test_fields_without_a_use_are_kept_beside() -> None:
    leftovers = parse(ask(user="u", store=False)).leftovers
    assert {name: bytes(raw) for name, raw in leftovers.items()} == {"user": b'"u"', "store": b"false"}


@pytest.mark.parametrize("fault", list(Fault))
def test_error_has_the_shape_of_the_provider(fault: Fault) -> None:
    error = WireError(fault=fault, message="why", field="messages")
    shown = json.loads(DIALECT.error(error))["error"]
    assert (shown["message"], shown["param"]) == ("why", "messages")
    assert shown["type"] and 400 <= error.status < 600
    assert json.loads(DIALECT.stream_error(error, HEAD).removeprefix(b"data: "))["error"] == shown


def test_keepalive_changes_nothing_at_the_client() -> None:
    event = json.loads(DIALECT.keepalive(HEAD).removeprefix(b"data: "))
    assert event["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}]


def test_models_are_listed() -> None:
    listed = json.loads(DIALECT.models(["a", "b"], 3))
    assert [(item["id"], item["object"], item["created"]) for item in listed["data"]] == [
        ("a", "model", 3),
        ("b", "model", 3),
    ]

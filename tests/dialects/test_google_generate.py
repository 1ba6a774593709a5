"""Google generateContent in, neutral form, generateContent out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given

from polynya.dialects.base import BadRequest, Fault, WireError
from polynya.dialects.google_generate import GoogleGenerate
from polynya.dialects.neutral import ChatReply, ChatRequest

from .conftest import HEAD, REPLIES, recorded, sse

DIALECT = GoogleGenerate()
PATH = "/v1beta/models/org/m-1:streamGenerateContent"


def parse(contents: list[Any], path: str = PATH, **fields: Any) -> ChatRequest:
    return DIALECT.parse(json.dumps({"contents": contents, **fields}).encode(), path)


def upstream(request: ChatRequest) -> list[Any]:
    return [json.loads(bytes(message.raw)) for message in request.messages]


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def model(*parts: Any) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


@pytest.mark.parametrize("row", recorded("GenerateContent"), ids=lambda row: row["from"])
def test_recorded_request_is_understood(row: dict[str, Any]) -> None:
    request = DIALECT.parse(json.dumps(row["body"]).encode(), row["path"])
    parts = [part for content in row["body"]["contents"] for part in content["parts"]]
    calls = [call for message in request.messages for call in message.tool_calls]
    sent = [part["functionCall"] for part in parts if "functionCall" in part]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        (call["name"], call["args"]) for call in sent
    ]
    answered = [message.tool_call_id for message in request.messages if message.role == "tool"]
    assert len(answered) == sum("functionResponse" in part for part in parts)
    assert answered == [call.id for call in calls if call.id in answered]
    declared = [item["name"] for tool in row["body"].get("tools", []) for item in tool["functionDeclarations"]]
    assert [tool.name for tool in request.tools] == declared
    assert request.stream is ("streamGenerateContent" in row["path"])
    assert (request.messages[0].role == "system") is ("systemInstruction" in row["body"])


def test_model_comes_from_the_path_slashes_and_all() -> None:
    assert parse([user({"text": "x"})]).model == "org/m-1"


def test_calls_without_ids_get_ordinal_ones_and_results_find_them_by_name_in_order() -> None:
    contents = [
        model({"functionCall": {"name": "f", "args": {"a": 1}}}, {"functionCall": {"name": "g", "args": {}}}),
        user(
            {"functionResponse": {"name": "g", "response": {"output": "G"}}},
            {"functionResponse": {"name": "f", "response": {"error": "E"}}},
        ),
    ]
    messages = upstream(parse(contents))
    assert [call["id"] for call in messages[0]["tool_calls"]] == ["call_1_0", "call_1_1"]
    assert messages[1:] == [
        {"role": "tool", "content": "G", "tool_call_id": "call_1_1"},
        {"role": "tool", "content": '{"error":"E"}', "tool_call_id": "call_1_0"},
    ]


def test_contents_of_one_stream_are_one_turn_of_the_model() -> None:
    """The SDK's own chats keep one content for each chunk."""
    call = {"functionCall": {"name": "f", "args": {}}}
    chunks = [
        model({"text": "why", "thought": True}),
        model({"text": "I "}),
        model({"text": "look."}),
        model(call, call),
    ]
    result = {"functionResponse": {"name": "f", "response": {"output": "x"}}}
    first, turn, *results, last = parse(
        [user({"text": "go"}), *chunks, user(result, result), model({"text": "ok"})]
    ).messages
    assert (first.text, last.text) == ("go", "ok")
    assert (turn.text, turn.reasoning) == ("I look.", "why")
    assert [made.id for made in turn.tool_calls] == [made.tool_call_id for made in results] == ["call_1_0", "call_1_1"]


def test_part_that_is_not_served_is_named_by_its_own_content() -> None:
    with pytest.raises(BadRequest) as caught:
        parse([user({"text": "go"}), model({"text": "a"}), model({"text": "b"}, {"executableCode": {}})])
    assert caught.value.field == "contents[2].parts[1]"


def test_thoughts_are_reasoning_and_not_text() -> None:
    (message,) = parse([model({"text": "why", "thought": True}, {"text": "so"})]).messages
    assert (message.text, message.reasoning) == ("so", "why")


def test_schema_types_are_written_as_json_schema() -> None:
    declared = {"name": "f", "parameters": {"type": "OBJECT", "properties": {"p": {"type": "STRING"}}}}
    request = parse([user({"text": "x"})], tools=[{"functionDeclarations": [declared]}, {"googleSearch": {}}])
    assert json.loads(bytes(request.tools[0].parameters)) == {"type": "object", "properties": {"p": {"type": "string"}}}
    assert request.leftovers["dropped_tools"] == ["googleSearch"]


def test_generation_config_is_read() -> None:
    config = {"temperature": 0.5, "topP": 0.9, "topK": 64.0, "maxOutputTokens": 7, "stopSequences": ["x"], "seed": 3}
    sampling = parse([user({"text": "x"})], generationConfig=config).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 64, 7)
    assert (sampling.stop, sampling.seed) == (["x"], 3)


def test_json_schema_answers_are_guided() -> None:
    config = {"responseMimeType": "application/json", "responseSchema": {"type": "OBJECT"}}
    request = parse([user({"text": "x"})], generationConfig=config)
    assert request.guided
    assert json.loads(bytes(request.response_format or b""))["json_schema"]["schema"] == {"type": "object"}


def test_count_tokens_takes_both_request_shapes() -> None:
    inner = {"contents": [user({"text": "x"})], "systemInstruction": {"parts": [{"text": "s"}]}}
    path = "/v1beta/models/m:countTokens"
    wrapped = DIALECT.parse(json.dumps({"generateContentRequest": inner}).encode(), path)
    assert upstream(wrapped) == upstream(DIALECT.parse(json.dumps(inner).encode(), path))
    assert json.loads(DIALECT.token_count(5)) == {"totalTokens": 5}


@pytest.mark.parametrize(
    ("contents", "fields", "field"),
    [
        ([], {}, "contents"),
        ([{"role": "alien", "parts": []}], {}, "contents[0].role"),
        ([user({"executableCode": {}})], {}, "contents[0].parts[0]"),
        ([user({"text": "x"})], {"generationConfig": {"candidateCount": 2}}, "generationConfig.candidateCount"),
        ([user({"text": "x"})], {"toolConfig": {"functionCallingConfig": {"mode": "ALIEN"}}},
         "toolConfig.functionCallingConfig.mode"),
    ],
)  # fmt: skip
def test_what_cannot_be_passed_on_is_refused_by_name(contents: list[Any], fields: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(contents, **fields)
    assert caught.value.field == field


@given(reply=REPLIES)
def test_stream_holds_exactly_the_reply_and_ends_once(reply: ChatReply) -> None:
    events = sse(list(DIALECT.stream(parse([user({"text": "x"})]), reply, HEAD)))
    candidates = [event["candidates"][0] for event in events]
    parts = [part for candidate in candidates for part in candidate["content"]["parts"]]
    assert "".join(part.get("text", "") for part in parts if not part.get("thought")) == reply.text
    assert "".join(part["text"] for part in parts if part.get("thought")) == reply.reasoning
    calls = [part["functionCall"] for part in parts if "functionCall" in part]
    assert [(call["id"], call["name"]) for call in calls] == [(call.id, call.name) for call in reply.tool_calls]
    assert ["finishReason" in candidate for candidate in candidates] == [False] * (len(events) - 1) + [True]
    assert all(event["usageMetadata"]["promptTokenCount"] == reply.usage.prompt_tokens for event in events)


@given(reply=REPLIES)
def test_whole_reply_echoed_back_is_the_same_turn(reply: ChatReply) -> None:
    whole = json.loads(DIALECT.render(parse([user({"text": "x"})]), reply, HEAD))
    content = whole["candidates"][0]["content"]
    (echoed,) = parse([content or model()]).messages
    assert (echoed.text, echoed.reasoning) == (reply.text, reply.reasoning)
    assert [(c.id, c.name) for c in echoed.tool_calls] == [(c.id, c.name) for c in reply.tool_calls]


def test_errors_have_the_providers_shape() -> None:
    error = json.loads(DIALECT.error(WireError(fault=Fault.UNAVAILABLE, message="down")))
    assert error == {"error": {"code": 503, "message": "down", "status": "UNAVAILABLE"}}


def test_keys_are_read_in_both_spellings_and_those_of_tools_stay() -> None:
    """The provider's Python SDK writes ``mime_type`` inside ``inlineData``."""
    args = {"mime_type": "x", "inline_data": {"file_uri": 1}}
    schema = {"type": "object", "properties": {"mime_type": {"type": "string"}}}
    body = {
        "contents": [
            user({"text": '{"mime_type": 1}'}, {"inline_data": {"mime_type": "image/png", "data": "QUJD"}}),
            model({"function_call": {"name": "f", "args": args}}),
            user({"function_response": {"name": "f", "response": {"mime_type": "y"}}}),
        ],
        "tools": [{"function_declarations": [{"name": "f", "parameters_json_schema": schema}]}],
        "generation_config": {"max_output_tokens": 7, "stop_sequences": ["x"]},
        "system_instruction": {"parts": [{"text": "sys"}]},
    }
    request = DIALECT.parse(json.dumps(body).encode(), "/v1beta/models/m:generateContent")
    system, asked, called, answered = upstream(request)
    assert system["content"] == "sys"
    assert asked["content"][0]["text"] == '{"mime_type": 1}'
    assert asked["content"][1]["image_url"]["url"] == "data:image/png;base64,QUJD"
    assert json.loads(called["tool_calls"][0]["function"]["arguments"]) == args
    assert json.loads(answered["content"]) == {"mime_type": "y"}
    assert json.loads(bytes(request.tools[0].parameters)) == schema
    assert (request.sampling.max_tokens, request.sampling.stop) == (7, ["x"])

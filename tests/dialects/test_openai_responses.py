"""OpenAI Responses in, neutral form, Responses out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given

from polynya.dialects.base import BadRequest, Fault, WireError
from polynya.dialects.neutral import ChatReply, ChatRequest, ToolCall
from polynya.dialects.openai_responses import COMPACTION_REQUEST, OpenAIResponses, regrouped

from .conftest import HEAD, REPLIES, recorded, sse

DIALECT = OpenAIResponses()


def parse(items: Any, path: str = "/v1/responses", **fields: Any) -> ChatRequest:
    return DIALECT.parse(json.dumps({"model": "m", "input": items, **fields}).encode(), path)


def upstream(request: ChatRequest) -> list[Any]:
    return [json.loads(bytes(message.raw)) for message in request.messages]


def call(call_id: str, name: str = "f") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}"}


def output(call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": f"out {call_id}"}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


@pytest.mark.parametrize("row", recorded("/v1/responses"), ids=lambda row: row["from"])
def test_recorded_request_is_understood(row: dict[str, Any]) -> None:
    request = DIALECT.parse(json.dumps(row["body"]).encode(), row["path"])
    items = row["body"]["input"]
    calls = [message_call for message in request.messages for message_call in message.tool_calls]
    sent = [item for item in items if item.get("type") == "function_call"]
    assert [(c.id, c.name, c.arguments) for c in calls] == [
        (i["call_id"], "__".join(filter(None, (i.get("namespace"), i["name"]))), i["arguments"]) for i in sent
    ]
    outputs = [item["call_id"] for item in items if item.get("type") == "function_call_output"]
    assert [message.tool_call_id for message in request.messages if message.role == "tool"] == outputs
    assert request.tools or not row["body"].get("tools")
    assert "developer" not in {message["role"] for message in upstream(request)}


def test_items_of_one_turn_are_one_assistant_message() -> None:
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "why"}]}
    request = parse(
        [{"role": "user", "content": "go"}, reasoning, said("hello"), call("1"), call("2"), output("1"), output("2")]
    )
    assert [message.role for message in request.messages] == ["user", "assistant", "tool", "tool"]
    turn = request.messages[1]
    assert (turn.text, turn.reasoning, [c.id for c in turn.tool_calls]) == ("hello", "why", ["1", "2"])


def test_outputs_that_interleave_with_the_calls_of_one_reply_come_after_them() -> None:
    request = parse([call("1"), output("1"), call("2"), output("2")])
    assert [message.role for message in request.messages] == ["assistant", "tool", "tool"]


def test_text_after_outputs_begins_a_new_turn() -> None:
    request = parse([call("1"), output("1"), said("next"), call("2"), output("2")])
    assert [message.role for message in request.messages] == ["assistant", "tool", "assistant", "tool"]


def test_instructions_and_developer_messages_are_system_where_they_stand() -> None:
    request = parse([{"role": "user", "content": "a"}, {"role": "developer", "content": "b"}], instructions="first")
    assert [(m.role, m.text) for m in request.messages] == [("system", "first"), ("user", "a"), ("system", "b")]


def test_namespace_custom_and_shell_tools_go_up_as_functions_and_come_back_as_they_were() -> None:
    tools = [
        {
            "type": "namespace",
            "name": "fs",
            "tools": [{"type": "function", "name": "read", "parameters": {"type": "object"}}],
        },
        {
            "type": "custom",
            "name": "apply_patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
        },
        {"type": "local_shell"},
        {"type": "web_search"},
    ]
    request = parse("go", tools=tools)
    assert [tool.name for tool in request.tools] == ["fs__read", "apply_patch", "local_shell"]
    assert request.leftovers["dropped_tools"] == ["web_search"]
    reply = ChatReply(
        tool_calls=[
            ToolCall(id="1", name="fs__read", arguments="{}"),
            ToolCall(id="2", name="apply_patch", arguments='{"input": "*** patch"}'),
            ToolCall(id="3", name="local_shell", arguments='{"command": ["ls"]}'),
        ]
    )
    items = json.loads(DIALECT.render(request, reply, HEAD))["output"]
    assert [(i["type"], i.get("namespace"), i.get("name")) for i in items] == [
        ("function_call", "fs", "read"), ("custom_tool_call", None, "apply_patch"), ("local_shell_call", None, None),
    ]  # fmt: skip
    assert items[1]["input"] == "*** patch"
    (echoed,) = parse(items, tools=tools).messages
    assert [(c.id, c.name) for c in echoed.tool_calls] == [
        ("1", "fs__read"),
        ("2", "apply_patch"),
        ("3", "local_shell"),
    ]


def test_name_collision_of_tools_is_refused_naming_both() -> None:
    function = {"type": "function", "name": "fs__read"}
    with pytest.raises(BadRequest, match=r"fs/read.*fs__read"):
        parse(
            "x", tools=[function, {"type": "namespace", "name": "fs", "tools": [{"type": "function", "name": "read"}]}]
        )


def test_long_tool_names_are_shortened_and_stay_apart() -> None:
    names = ["x" * 80 + "a", "x" * 80 + "b"]
    request = parse(
        "x", tools=[{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": n} for n in names]}]
    )
    assert len({tool.name for tool in request.tools}) == 2
    assert all(len(tool.name) <= 64 for tool in request.tools)


def test_additional_tools_items_are_tools() -> None:
    item = {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "f"}]}
    request = parse([item, {"role": "user", "content": "x"}])
    assert [tool.name for tool in request.tools] == ["f"]
    assert len(request.messages) == 1


@pytest.mark.parametrize(
    ("items", "path"), [([{"type": "compaction_trigger"}], "/v1/responses"), ([], "/v1/responses/compact")]
)
def test_compaction_gives_exactly_one_item_that_carries_the_summary_on(items: list[Any], path: str) -> None:
    request = parse([{"role": "user", "content": "x"}, *items], path)
    assert request.compaction
    assert request.messages[-1].text == COMPACTION_REQUEST
    (item,) = json.loads(DIALECT.render(request, ChatReply(text="done so far: é"), HEAD))["output"]
    assert item["type"] == "compaction"
    (message,) = parse([item]).messages
    assert message.text.endswith("done so far: é")


@pytest.mark.parametrize(
    ("items", "fields", "field"),
    [
        ([], {}, "input"),
        ([{"type": "alien"}], {}, "input[0].type"),
        ([{"role": "alien", "content": "x"}], {}, "input[0].role"),
        ([{"role": "user", "content": [{"type": "alien"}]}], {}, "input[0].content[0].type"),
        ("x", {"max_output_tokens": 0}, "max_output_tokens"),
        ("x", {"tools": [{"type": "function"}]}, "tools[0].name"),
    ],
)
def test_what_cannot_be_passed_on_is_refused_by_name(items: Any, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(items, **fields)
    assert caught.value.field == field


@given(reply=REPLIES)
def test_stream_holds_exactly_the_reply_in_the_providers_order(reply: ChatReply) -> None:
    events = sse(list(DIALECT.stream(parse("x"), reply, HEAD)))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))

    def joined(kind: str) -> str:
        return "".join(event["delta"] for event in events if event["type"] == kind)

    assert joined("response.output_text.delta") == reply.text
    assert joined("response.reasoning_summary_text.delta") == reply.reasoning
    assert joined("response.function_call_arguments.delta") == "".join(c.arguments for c in reply.tool_calls)
    whole = events[-1]["response"]
    assert events[-1]["type"] == ("response.incomplete" if reply.finish_reason == "length" else "response.completed")
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert whole["output"] == done
    assert whole["usage"]["input_tokens"] == reply.usage.prompt_tokens


@given(reply=REPLIES)
def test_whole_reply_echoed_back_is_the_same_turn(reply: ChatReply) -> None:
    items = json.loads(DIALECT.render(parse("x"), reply, HEAD))["output"]
    (echoed,) = parse(items).messages
    assert (echoed.text, echoed.reasoning) == (reply.text, reply.reasoning)
    assert echoed.tool_calls == reply.tool_calls


def test_overflow_and_unknown_previous_response_have_the_providers_codes() -> None:
    overflow = json.loads(DIALECT.error(WireError(fault=Fault.CONTEXT_OVERFLOW, message="long")))
    assert overflow["error"]["code"] == "context_length_exceeded"
    unknown = json.loads(DIALECT.error(WireError(fault=Fault.NOT_FOUND, message="?", field="previous_response_id")))
    assert unknown["error"]["code"] == "previous_response_not_found"
    created, event = sse([DIALECT.stream_error(WireError(fault=Fault.UNAVAILABLE, message="down"), HEAD)])
    assert (created["type"], created["response"]["id"]) == ("response.created", event["response"]["id"])
    assert event["response"]["error"]["code"] == "server_error"


@pytest.mark.parametrize(
    ("choice", "wire"),
    [
        ("auto", "auto"),
        ("required", "required"),
        ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
        ({"type": "custom", "name": "exec"}, {"type": "function", "function": {"name": "exec"}}),
        (
            {"type": "function", "namespace": "fs", "name": "read"},
            {"type": "function", "function": {"name": "fs__read"}},
        ),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}, "required"),
    ],
)
def test_tool_choice_is_translated(choice: Any, wire: Any) -> None:
    request = parse([{"role": "user", "content": "x"}], tool_choice=choice)
    assert json.loads(bytes(request.tool_choice or b"null")) == wire
    assert request.dropped == {}


def test_what_the_model_will_not_see_is_counted_by_rule() -> None:
    items = [
        {"role": "user", "content": "x"},
        {"type": "reasoning", "summary": [], "encrypted_content": "theirs"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "whole"}]},
    ]
    tools = [{"type": "web_search"}, {"type": "code_interpreter", "container": {}}]
    request = parse(items, tools=tools, tool_choice={"type": "web_search"})
    assert request.dropped == {"foreign_reasoning": 1, "provider_tool": 2, "provider_tool_choice": 1}
    assert request.messages[-1].reasoning == "whole"


def test_calls_of_two_replies_are_two_turns_and_those_of_one_stay_one() -> None:
    items: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": "go"}]
    for name in ("a", "b", "c"):
        items += [
            {"type": "function_call", "call_id": name, "name": "run", "arguments": "{}"},
            {"type": "function_call_output", "call_id": name, "output": f"result {name}"},
        ]
    items.append({"type": "function_call_output", "call_id": "z", "output": "nobody's"})
    messages = parse(items).messages
    told = [(message.role, [call.id for call in message.tool_calls] or message.tool_call_id) for message in messages]
    assert told[1] == ("assistant", ["a", "b", "c"])
    split = regrouped(messages, {"a": 0, "b": 1, "c": 1})
    told = [(message.role, [call.id for call in message.tool_calls] or message.tool_call_id) for message in split]
    assert told == [
        ("user", ""),
        ("assistant", ["a"]),
        ("tool", "a"),
        ("assistant", ["b", "c"]),
        ("tool", "b"),
        ("tool", "c"),
        ("tool", "z"),
    ]
    assert regrouped(messages, {}) == messages

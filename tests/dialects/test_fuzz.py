"""Mutated requests: whatever comes in, a dialect understands it or refuses it in words, and its answer can be rendered.

``POLYNYA_FUZZ=10000`` runs that many mutations of each dialect instead of the few that every test run does, ``POLYNYA_FUZZ_SEED``
other ones.
"""

from __future__ import annotations

import copy
import json
import os
import random
from typing import Any

import msgspec
import pytest

from polynya.dialects.base import BadRequest, Fault, WireError
from polynya.dialects.neutral import ChatReply, ChatRequest, ToolCall
from polynya.dialects.registry import DIALECTS

from ..gateway import sdk_shapes
from .conftest import HEAD, recorded

DEFAULT_ROUNDS = 200
SEED = os.environ.get("POLYNYA_FUZZ_SEED", "7")
ROUNDS = int(os.environ.get("POLYNYA_FUZZ", str(DEFAULT_ROUNDS)))
SEEDS: dict[str, list[tuple[str, Any]]] = {
    "openai_chat": [(row["path"], row["body"]) for row in recorded("/chat/completions")],
    "anthropic_messages": [(row["path"], row["body"]) for row in recorded("/messages")],
    "openai_responses": [(row["path"], row["body"]) for row in recorded("/responses")],
    "google_generate": [(row["path"], row["body"]) for row in recorded("enerateContent")],
}
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1e308,
    2**70,
    "",
    "\ud800",
    "x" * 5000,
    [],
    {},
    [[]],
    {"type": "alien"},
    [None],
    "\x00",
    3.5,
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    entries: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in entries:
        found += places(item, (*path, key))
    return found


def mutate(body: Any, dice: random.Random) -> Any:
    body = json.loads(json.dumps(body))
    for _ in range(dice.randint(1, 4)):
        spots = places(body)
        if not spots:
            break
        *above, key = dice.choice(spots)
        parent = body
        for step in above:
            parent = parent[step]
        match dice.randint(0, 3):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, list):
                parent.insert(key, copy.deepcopy(dice.choice(parent)))
            case _:
                parent[key] = copy.deepcopy(dice.choice(ODD))
    return body


def restructure(body: Any, other: Any, dice: random.Random) -> Any:
    """Changes as a buggy or newer client makes them: parts of another request, other orders, other kinds, other shapes."""
    body = json.loads(json.dumps(body))
    for _ in range(dice.randint(1, 3)):
        groups = [value for value in nodes(body) if isinstance(value, list) and value]
        records = [value for value in nodes(body) if isinstance(value, dict) and value]
        if not groups or not records:
            break
        group, record = dice.choice(groups), dice.choice(records)
        match dice.randint(0, 8):
            case 0:
                dice.shuffle(group)
            case 1:
                group.pop(dice.randrange(len(group)))
            case 2:
                group.insert(dice.randrange(len(group) + 1), copy.deepcopy(dice.choice(dice.choice(groups))))
            case 3:
                foreign = [value for value in nodes(other) if isinstance(value, dict)]
                group.insert(dice.randrange(len(group) + 1), copy.deepcopy(dice.choice(foreign)))
            case 4:
                field = dice.choice(["type", "role"])
                record[field] = dice.choice(KINDS[field])
            case 5:
                group.insert(dice.randrange(len(group) + 1), copy.deepcopy(dice.choice(PARTS)))
            case 6:
                texts = [(k, v) for k, v in record.items() if isinstance(v, str)]
                for key, text in texts[:1]:
                    record[key] = [{"type": "text", "text": text}, {"type": "input_text", "text": text}]
            case 7:
                record[dice.choice(["x_new", "name", "id", "call_id", "namespace"])] = dice.choice(
                    ["", "é" * 99, "a b", None]
                )
            case _:
                key = dice.choice(list(record))
                record[key] = {"value": record[key]} if dice.random() < 0.5 else [record[key]]
    return body


def nodes(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value, *(found for item in inner for found in nodes(item))]


KINDS = {
    "type": [
        "text", "input_text", "output_text", "image", "image_url", "input_image", "file", "input_file", "document",
        "tool_use", "tool_result", "thinking", "redacted_thinking", "reasoning", "function", "custom", "namespace",
        "function_call", "function_call_output", "custom_tool_call", "local_shell_call", "compaction", "compaction_trigger",
        "additional_tools", "item_reference", "web_search", "message", "tool_reference", "json_schema", "refusal",
    ],
    "role": ["system", "developer", "user", "assistant", "model", "tool", "function", ""],
}  # fmt: skip
PNG = "data:image/png;base64,QUJD"
PARTS: list[Any] = [
    {"type": "image_url", "image_url": {"url": PNG}},
    {"type": "input_image", "image_url": PNG},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}},
    {"inlineData": {"mimeType": "image/png", "data": "QUJD"}},
    {"inline_data": {"mime_type": "text/plain", "data": "QUJD"}},
    {"type": "document", "source": {"type": "text", "data": "plain"}},
    {"type": "document", "source": {"type": "base64", "media_type": "text/plain", "data": "/w=="}},
    {"type": "file", "file": {"file_data": "data:text/plain,hello%20there"}},
    {"type": "input_file", "file_data": "data:application/json;charset=utf-8;base64,e30="},
    {"type": "thinking", "thinking": "hm", "signature": "x"},
    {"type": "reasoning", "summary": [], "encrypted_content": "x"},
    {"functionCall": {"name": "f", "args": {"a": [1]}}},
    {"functionResponse": {"name": "f", "response": {"output": 1}, "parts": []}},
    {"type": "function_call", "call_id": "c", "name": "f", "namespace": "n" * 70, "arguments": "{"},
    {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "t"}]},
    {"role": "assistant", "content": None, "tool_calls": []},
]
REPLY_TEXT, REPLY_REASONING = "t é\n" * 90, "r " * 200


def reply_to(request: ChatRequest, dice: random.Random) -> ChatReply:
    """Text, reasoning, calls of tools that the request offers or not, whole arguments or broken ones."""
    names = [tool.name for tool in request.tools] + ["exec"]
    calls = [
        ToolCall(id=str(n), name=dice.choice(names), arguments=dice.choice(["[1", "{}", '{"input": "ls"}', '"x"']))
        for n in range(dice.randint(0, 2))
    ]
    text, reasoning = dice.choice(["", REPLY_TEXT]), dice.choice(["", REPLY_REASONING])
    return ChatReply(text=text, reasoning=reasoning, tool_calls=calls, finish_reason=dice.choice(["stop", "length"]))


def assert_answered(request: ChatRequest, reply: ChatReply) -> None:
    """What goes up is JSON that says what it is; what comes down is read by the SDK, and the same whole and streamed."""
    for message in request.messages:
        sent = json.loads(bytes(message.raw))
        assert sent["role"] in ("system", "user", "assistant", "tool")
        assert sent["role"] == message.role
    for raw in (request.tools_raw, request.tool_choice, request.response_format, request.template_kwargs):
        assert raw is None or json.loads(bytes(raw)) is not None
    names = [tool["function"]["name"] for tool in json.loads(bytes(request.tools_raw or b"[]"))]
    assert names == [tool.name for tool in request.tools]
    dialect = DIALECTS[request.dialect]
    streaming = msgspec.structs.replace(request, stream=True, include_usage=True)
    whole = sdk_shapes.whole(request.dialect, dialect.render(request, reply, HEAD))
    streamed = sdk_shapes.streamed(request.dialect, b"".join(dialect.stream(streaming, reply, HEAD)))
    assert (streamed.text, streamed.reasoning, streamed.finish) == (whole.text, whole.reasoning, whole.finish)
    assert [call[:2] for call in streamed.calls] == [call[:2] for call in whole.calls]
    if not request.compaction:
        assert (whole.text, whole.reasoning) == (reply.text, reply.reasoning)
        assert [call[0] for call in whole.calls] == [call.id for call in reply.tool_calls]


@pytest.mark.parametrize("how", ["any place", "structure"])
@pytest.mark.parametrize("name", sorted(SEEDS))
def test_mutated_requests_are_understood_or_refused_in_words(name: str, how: str) -> None:
    dialect, dice = DIALECTS[name], random.Random(f"{name}-{how}-{SEED}")
    outcomes = {"understood": 0, "refused": 0}
    for _ in range(ROUNDS):
        path, body = dice.choice(SEEDS[name])
        spoiled = mutate(body, dice) if how == "any place" else restructure(body, dice.choice(SEEDS[name])[1], dice)
        raw = json.dumps(spoiled).encode()
        if dice.random() < 0.05:
            raw = raw[: dice.randrange(len(raw))]
        try:
            request = dialect.parse(raw, path)
        except BadRequest as exc:
            outcomes["refused"] += 1
            assert exc.message
            json.loads(dialect.error(WireError(fault=Fault.BAD_REQUEST, message=exc.message, field=exc.field)))
            continue
        outcomes["understood"] += 1
        assert_answered(request, reply_to(request, dice))
    assert all(outcomes.values()), outcomes
    if ROUNDS > DEFAULT_ROUNDS:
        print(name, how, outcomes)

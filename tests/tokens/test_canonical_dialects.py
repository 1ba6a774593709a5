"""What a harness respells is ignored, what a message says is not: through all four dialects."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from .harness import NAMES, PNG, Body, Entry, assistant, body, head, system, tool, user

ARGUMENTS = {"b": 3, "a": [1.5, "ä/"], "7": {"y": None, "x": True}}
TALK: list[Entry] = [
    system("be good"),
    user("first", "second"),
    assistant("I look", ("c1", "read", ARGUMENTS), ("c2", "read", {"n": 1}), reasoning="hm"),
    tool("c1", "one\n", "read"),
    tool("c2", "two", "read"),
    assistant("done"),
    user("see", image=PNG),
    user("and"),
    user("more"),
]


def changed(change: Callable[[list[Entry]], Any]) -> list[Entry]:
    talk = copy.deepcopy(TALK)
    change(talk)
    return talk


def put(at: int, **fields: Any) -> list[Entry]:
    return changed(lambda talk: talk[at].update(fields))


def calls(first: Any, second: Any = ("c2", "read", {"n": 1})) -> list[Entry]:
    return put(2, calls=[first, second])


SAME: dict[str, list[Entry]] = {
    "reasoning dropped": put(2, reasoning=""),
    "reasoning of other words": put(2, reasoning="oh"),
    "whitespace at the ends of the model's text": put(2, text="\n I look\n\n"),
    "key order of arguments": calls(("c1", "read", {"7": {"x": True, "y": None}, "a": [1.5, "ä/"], "b": 3})),
    "number spelling of arguments": calls(("c1", "read", ARGUMENTS | {"b": 3.0})),
    "an empty text part": put(1, texts=["", "first", "", "second"]),
    "calls renamed": changed(
        lambda talk: (
            talk[2].update(calls=[("x", "read", ARGUMENTS), ("y", "read", {"n": 1})]),
            talk[3].update(id="x"),
            talk[4].update(id="y"),
        )
    ),
}
OTHER: dict[str, list[Entry]] = {
    "a byte of the user's text": put(1, texts=["first", "Second"]),
    "whitespace after the user's text": put(8, texts=["more "]),
    "a byte of the system's text": put(0, text="be good!"),
    "whitespace after the system's text": put(0, text="be good\n"),
    "whitespace after a tool's text": put(3, text="one"),
    "a byte of the model's text": put(2, text="I Look"),
    "two parts and their concatenation": put(1, texts=["firstsecond"]),
    "which call a result answers": changed(lambda talk: (talk[3].update(id="c2"), talk[4].update(id="c1"))),
    "the order of results": changed(lambda talk: talk.insert(3, talk.pop(4))),
    "the order of calls": put(2, calls=[("c2", "read", {"n": 1}), ("c1", "read", ARGUMENTS)]),
    "the number of calls": put(2, calls=[*TALK[2]["calls"], ("c3", "read", {"n": 1})]),
    "a tool's name": calls(("c1", "write", ARGUMENTS)),
    "an argument's value": calls(("c1", "read", ARGUMENTS | {"b": 4})),
    "a number as a string": calls(("c1", "read", ARGUMENTS | {"b": "3"})),
    "true for 1": calls(TALK[2]["calls"][0], ("c2", "read", {"n": True})),
    "null for nothing": calls(TALK[2]["calls"][0], ("c2", "read", {"n": 1, "m": None})),
    "an image's bytes": put(6, image="iVBORw0KGgp="),
    "an image left out": put(6, image=""),
    "the order of messages": changed(lambda talk: talk.insert(7, talk.pop(8))),
    "a message left out": changed(lambda talk: talk.pop(7)),
    "the model's text moved to the user": changed(lambda talk: talk.insert(5, user(talk.pop(5)["text"]))),
}


@pytest.mark.parametrize("dialect", NAMES)
@pytest.mark.parametrize("case", SAME)
def test_what_a_harness_respells_is_ignored(dialect: str, case: str) -> None:
    assert json.dumps(SAME[case]) != json.dumps(TALK)
    assert head(dialect, body(dialect, SAME[case])) == head(dialect, body(dialect, TALK))


@pytest.mark.parametrize("dialect", NAMES)
@pytest.mark.parametrize("case", OTHER)
def test_what_a_message_says_is_never_ignored(dialect: str, case: str) -> None:
    assert head(dialect, body(dialect, OTHER[case])) != head(dialect, body(dialect, TALK))


def _each(sent: Any, change: Callable[[Body], Any]) -> None:
    """Change every object, from the inside out."""
    if isinstance(sent, list):
        for item in sent:
            _each(item, change)
    if isinstance(sent, dict):
        for item in list(sent.values()):
            _each(item, change)
        change(sent)


def _chat_fields(item: Body) -> None:
    if item.get("role") == "assistant":
        item |= {"refusal": None, "audio": None, "function_call": None, "annotations": [], "id": "m1", "logprobs": None}
    if item.get("role") == "tool":
        item["name"] = "read"
    if "function" in item:
        item["index"] = 4
        del item["type"]


def _chat_arguments(item: Body) -> None:
    if "arguments" in item:
        item["arguments"] = json.loads(item["arguments"])


def _chat_escapes(item: Body) -> None:
    if "arguments" in item:
        item["arguments"] = (
            json.dumps(json.loads(item["arguments"]), indent=2).replace("/", "\\/").replace("b", "\\u0062")
        )


def _chat_parts(item: Body) -> None:
    if isinstance(item.get("content"), str):
        item["content"] = [{"type": "text", "text": item["content"], "cache_control": {"type": "ephemeral"}}]
    if item.get("type") == "image_url":
        item["cache_control"] = {"type": "ephemeral"}


def _chat_names(item: Body) -> None:
    if item.get("role") == "system":
        item["role"] = "developer"
    if "reasoning_content" in item:
        item["reasoning"] = item.pop("reasoning_content")


def _anthropic_cache(item: Body) -> None:
    if "type" in item and item["type"] != "base64":
        item["cache_control"] = {"type": "ephemeral"}


def _anthropic_thinking(item: Body) -> None:
    if item.get("role") == "assistant":
        item["content"].insert(0, {"type": "redacted_thinking", "data": "xyz"})
    if item.get("type") == "thinking":
        item["signature"] = "someone else's"


def _anthropic_results(item: Body) -> None:
    if item.get("type") == "tool_result":
        item["content"] = [{"type": "text", "text": item["content"]}, {"type": "text", "text": ""}]
        item["is_error"] = False


def _anthropic_strings(item: Body) -> None:
    if isinstance(item.get("content"), list) and [block["type"] for block in item["content"]] == ["text"]:
        item["content"] = item["content"][0]["text"]
    if isinstance(item.get("system"), str):
        item["system"] = [{"type": "text", "text": item["system"]}]


def _anthropic_split(item: Body) -> None:
    """One turn of the model in two messages."""
    if "messages" in item:
        turn = item["messages"][1]
        item["messages"][1:2] = [{**turn, "content": turn["content"][:2]}, {**turn, "content": turn["content"][2:]}]


def _responses_items(item: Body) -> None:
    if item.get("type") in ("function_call", "function_call_output", "message", "reasoning"):
        item |= {"id": f"fc_{item['type']}_1", "status": "completed"}
    if item.get("type") == "reasoning":
        item["encrypted_content"] = "xyz"
    if item.get("type") == "output_text":
        item |= {"annotations": [], "logprobs": []}


def _responses_strings(item: Body) -> None:
    if item.get("type") == "message" and len(item["content"]) == 1:
        item["content"] = item["content"][0]["text"]
        del item["type"]
    if item.get("type") == "function_call_output":
        item["output"] = [{"type": "input_text", "text": item["output"]}]


def _responses_developer(item: Body) -> None:
    if "instructions" in item:
        item["input"].insert(0, {"role": "developer", "content": item.pop("instructions")})


def _responses_interleaved(item: Body) -> None:
    if "input" in item:
        for number, at in enumerate((3, 4)):
            item["input"][at]["id"] = f"fc_r1_{number}"
        item["input"].insert(4, item["input"].pop(5))


def _google_ids(item: Body) -> None:
    if "response" in item or "args" in item:
        del item["id"]


def _google_signatures(item: Body) -> None:
    if "functionCall" in item or item.get("thought"):
        item["thoughtSignature"] = "xyz"


def _google_pieces(item: Body) -> None:
    if item.get("role") == "model":
        item["parts"] = [
            piece
            for part in item["parts"]
            for piece in ([{**part, "text": char} for char in part["text"]] if "text" in part else [part])
        ]


def _google_spelling(item: Body) -> None:
    if "inlineData" in item:
        item["inline_data"] = item.pop("inlineData")
    if "functionResponse" in item:
        item["function_response"] = item.pop("functionResponse")
    if item.get("role") == "user" and "function_response" in item["parts"][0]:
        item["role"] = "function"


RESPELLED: list[tuple[str, Callable[[Body], None]]] = [
    ("openai_chat", _chat_fields),
    ("openai_chat", _chat_arguments),
    ("openai_chat", _chat_escapes),
    ("openai_chat", _chat_parts),
    ("openai_chat", _chat_names),
    ("anthropic_messages", _anthropic_cache),
    ("anthropic_messages", _anthropic_thinking),
    ("anthropic_messages", _anthropic_results),
    ("anthropic_messages", _anthropic_strings),
    ("anthropic_messages", _anthropic_split),
    ("openai_responses", _responses_items),
    ("openai_responses", _responses_strings),
    ("openai_responses", _responses_developer),
    ("openai_responses", _responses_interleaved),
    ("google_generate", _google_ids),
    ("google_generate", _google_signatures),
    ("google_generate", _google_pieces),
    ("google_generate", _google_spelling),
]


@pytest.mark.parametrize(("dialect", "change"), RESPELLED, ids=[change.__name__.strip("_") for _, change in RESPELLED])
def test_what_only_one_dialect_can_respell_is_ignored(dialect: str, change: Callable[[Body], None]) -> None:
    sent = body(dialect, TALK)
    _each(sent, change)
    assert sent != body(dialect, TALK)
    assert head(dialect, sent) == head(dialect, body(dialect, TALK))


ROOTED: dict[str, dict[str, list[Body]]] = {
    "openai_chat": {"tools": [{"type": "function", "function": {"name": name}} for name in "ab"]},
    "anthropic_messages": {"tools": [{"name": name} for name in "ab"]},
    "openai_responses": {"tools": [{"type": "function", "name": name} for name in "ab"]},
    "google_generate": {"tools": [{"functionDeclarations": [{"name": name}]} for name in "ab"]},
}


@pytest.mark.parametrize("dialect", NAMES)
def test_the_tools_and_their_order_are_in_the_root(dialect: str) -> None:
    both = ROOTED[dialect]["tools"]
    lists: list[list[Body]] = [both, both[::-1], both[:1], []]
    assert len({head(dialect, body(dialect, TALK) | {"tools": tools}) for tools in lists}) == len(lists)


@pytest.mark.parametrize("dialect", sorted(set(NAMES) - {"google_generate"}))
def test_the_model_is_in_the_root(dialect: str) -> None:
    assert head(dialect, body(dialect, TALK) | {"model": "n"}) != head(dialect, body(dialect, TALK))

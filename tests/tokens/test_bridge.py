"""The pure part of the bridge: the stand-in conversation, the cut, the split, and what ends the parent's turn."""

import json
from typing import Any

import numpy as np
import pytest

from polynya.tokens.bridge import (
    SENTINEL,
    Vocabulary,
    closes,
    dummy_conversation,
    fenced,
    spelled,
    split,
    suffix_of,
    unmasked,
)

SPECIAL = {"<|im_start|>": 1, "<|im_end|>": 2, "<think>": 3, "</think>": 4, "<|endoftext|>": 5, "<|user|>": 6}
CHATML = Vocabulary(special=SPECIAL, stop_ids=frozenset({2, 5}), think_open=3, think_close=4)
CALLS = [("call_1", "bash"), ("call_2", "look")]


def message(role: str, content: Any, **rest: Any) -> bytes:
    return json.dumps({"role": role, "content": content, **rest}).encode()


def dummy(*tail: bytes, calls: list[tuple[str, str]] | None = None) -> tuple[list[Any], str]:
    messages, mask = dummy_conversation(tail, calls or [], SPECIAL)
    return [json.loads(one) for one in messages], mask


def test_the_stand_in_is_a_user_an_assistant_and_the_tail() -> None:
    messages, mask = dummy(message("tool", "out", tool_call_id="call_1"), message("user", "go"), calls=CALLS)
    assert [one["role"] for one in messages] == ["user", "assistant", "tool", "user"]
    assert messages[1]["content"] == SENTINEL and len(mask) == 1
    said = [(c["id"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in messages[1]["tool_calls"]]
    assert said == [("call_1", "bash", {"x": SENTINEL}), ("call_2", "look", {"x": SENTINEL})]
    assert messages[2:] == [
        {"role": "tool", "content": "out", "tool_call_id": "call_1"},
        {"role": "user", "content": "go"},
    ]
    assert "tool_calls" not in dummy(message("user", "x"))[0][1]


def test_no_content_spells_a_control_token_or_the_sentinel() -> None:
    text = f"<|im_end|>\n<think>{SENTINEL}</think>"
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    messages, mask = dummy(message("user", text), message("user", parts), message("user", None))
    shown = messages[2]["content"]
    assert not any(spelling in shown for spelling in (*SPECIAL, SENTINEL))
    assert unmasked(shown, mask) == text
    joined = "".join(part["text"] for part in messages[3]["content"])
    assert "<|im_end|>" not in joined and unmasked(joined, mask) == "<|im_end|>"
    assert [part["type"] for part in messages[3]["content"]] == ["text", "text"] and messages[4]["content"] is None


def test_names_and_ids_keep_their_shape_unless_they_spell_a_control_token() -> None:
    calls = [("call<1", "Q"), ("<|im_end|>", "n")]
    tail = [message("tool", "x", tool_call_id=call_id, name=name, extra={"k": ["<b>", 1]}) for call_id, name in calls]
    messages, mask = dummy(*tail, calls=calls)
    made = messages[1]["tool_calls"]
    assert (made[0]["id"], made[0]["function"]["name"]) == ("call<1", "Q")
    assert made[1]["id"] == messages[3]["tool_call_id"] == f"<{mask}|im_end|>"
    assert messages[2]["extra"] == {"k": ["<b>", 1]}


@pytest.mark.parametrize(
    "raw", [b"{", b"[]", b'"x"', message("user", [{"type": "image_url", "image_url": {}}]), message("user", ["x"])]
)
def test_what_is_no_text_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"message|media"):
        dummy(raw)


def test_the_mask_is_in_no_message() -> None:
    _, first = dummy(message("user", "x"))
    for text in (first, f"\\u{ord(first):x}", f"\\U{ord(first):X}".replace("U", "u", 1)):
        messages, mask = dummy(message("user", text + "<"))
        assert mask != first and unmasked(messages[2]["content"], mask) == text + "<"
    with pytest.raises(ValueError, match="every private-use"):
        dummy(message("user", "".join(map(chr, range(0xE000, 0xF900)))))


def test_a_mask_that_a_template_escaped_is_taken_out_too() -> None:
    assert unmasked("a\ue000b\\ue000c\\uE000d", "\ue000") == "abcd"
    assert unmasked("a\ue000", "") == "a\ue000"


def test_the_suffix_begins_behind_the_first_stop_after_the_last_sentinel() -> None:
    text = f"<|im_start|>x {SENTINEL}<|im_end|>{SENTINEL} more<|endoftext|>\n<|im_start|>user\nu<|im_end|>"
    found = suffix_of(text, CHATML)
    assert found is not None
    assert (found.close, found.close_text, found.text) == (5, "<|endoftext|>", "\n<|im_start|>user\nu<|im_end|>")


@pytest.mark.parametrize(
    ("text", "vocabulary"),
    [
        ("no such word<|im_end|>", CHATML),
        (SENTINEL, CHATML),
        (SENTINEL, Vocabulary(special={}, stop_ids=frozenset({1}))),
    ],
)
def test_no_suffix_without_sentinel_or_stop(text: str, vocabulary: Vocabulary) -> None:
    assert suffix_of(text, vocabulary) is None


def test_split_keeps_control_tokens_apart_from_masked_text() -> None:
    pieces = split("\n<|im_start|>user\n<\ue000|im_end|> hi<|im_end|><|im_start|>", SPECIAL, "\ue000")
    assert pieces == ["\n", 1, "user\n<|im_end|> hi", 2, 1]
    assert spelled(pieces, SPECIAL) == 1
    assert split("plain", {}, "") == ["plain"] and spelled(["plain"], {}) == 0 and split("", SPECIAL, "") == []


def test_the_longest_spelling_wins() -> None:
    assert split("<a><a>b", {"<a>": 1, "<a>b": 2}, "") == [1, 2]


def test_fences_leave_no_spelling_whole() -> None:
    text = "a<|im_end|>b<<think>c<a<b>d"
    pieces = fenced(text, [*SPECIAL, "<a<b>", "<b>"])
    assert "".join(pieces) == text
    assert not any(spelling in piece for piece in pieces for spelling in (*SPECIAL, "<a<b>", "<b>"))
    assert fenced("x", []) == ["x"] and fenced("x", SPECIAL) == ["x"]


def ids(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


LENGTH = {"synthetic_close": 1}
THOUGHT = {"synthetic_close": 1, "synthetic_think_close": 1}


@pytest.mark.parametrize(
    ("parent", "expected"),
    [
        (ids(1, 90, 2, 1, 80, 2), ([], {})),
        (ids(1, 90, 2, 1, 80, 5), ([], {"other_close": 1})),
        (ids(1, 90, 2, 1, 80), ([2], LENGTH)),
        (ids(90, 80), ([2], LENGTH)),
        (ids(1, 90, 2, 1, 3, 80), ([4, 2], THOUGHT)),
        (ids(1, 90, 2, 1, 3, 80, 4, 81), ([2], LENGTH)),
        (ids(1, 3, 2, 1, 80), ([2], LENGTH)),
        (ids(1, 3), ([4, 2], THOUGHT)),
    ],
    ids=[
        "own close",
        "other stop",
        "length",
        "no marks",
        "thinking",
        "thought over",
        "earlier thought",
        "prompt opened",
    ],
)
def test_what_ends_the_turn(parent: Any, expected: Any) -> None:
    assert closes(parent, CHATML, 2) == expected


@pytest.mark.parametrize("far", [10, 4095, 4096, 4097, 20_000])
def test_an_open_thought_is_found_however_long_it_is(far: int) -> None:
    parent = np.concatenate([ids(2, 3), np.full(far, 99, np.int32)])
    assert closes(parent, CHATML, 2) == ([4, 2], THOUGHT)
    assert closes(parent[1:], CHATML, 2) == ([4, 2], THOUGHT)
    assert closes(parent[2:], CHATML, 2) == ([2], LENGTH)


def test_a_model_without_think_tokens_has_only_the_close() -> None:
    for rest in ({"think_open": 3}, {"think_close": 4}, {}):
        assert closes(ids(3, 9), Vocabulary(special=SPECIAL, stop_ids=frozenset({2}), **rest), 2) == ([2], LENGTH)


def test_the_next_roles_opener_follows_whatever_else_stopped() -> None:
    glm = Vocabulary(special=SPECIAL, stop_ids=frozenset({5, 6}))
    assert closes(ids(9, 6), glm, 6, opener=True) == ([], {})
    assert closes(ids(9, 5), glm, 6, opener=True) == ([6], {"other_close": 1, "synthetic_close": 1})
    assert closes(ids(9, 9), glm, 6, opener=True) == ([6], LENGTH)

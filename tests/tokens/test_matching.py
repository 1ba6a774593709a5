"""Which captured call a history goes on from."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from polynya.dialects.neutral import ChatReply, ReplyHead, ToolCall
from polynya.dialects.openai_chat import assistant_message
from polynya.dialects.openai_responses import regrouped
from polynya.dialects.registry import DIALECTS
from polynya.dialects.wire import encode
from polynya.tokens.matching import Matcher


def raw(role: str, content: Any, **fields: Any) -> bytes:
    return msgspec.json.encode({"role": role, "content": content, **fields})


ASK, MORE, DONE = raw("user", "go"), raw("user", "more"), raw("assistant", "done")


def found(matcher: Matcher[str], *messages: bytes, root: bytes = b"r") -> tuple[str, int, bool] | None:
    hit = matcher.find(matcher.chain(root, list(messages)))
    return None if hit is None else (hit.call, hit.tail_start, hit.foreign)


def test_call_is_found_by_the_history_that_ends_with_its_reply() -> None:
    matcher: Matcher[str] = Matcher()
    matcher.commit(matcher.chain(b"r", [ASK]), DONE, "one")
    assert found(matcher, ASK, DONE, MORE) == ("one", 2, False)
    assert found(matcher, ASK) is None
    assert found(matcher, raw("user", "Go"), DONE, MORE) is None
    assert found(matcher, ASK, DONE, MORE, root=b"other tools") is None


def test_deepest_unedited_turn_is_found_and_a_foreign_turn_behind_it_is_said() -> None:
    matcher: Matcher[str] = Matcher()
    matcher.commit(matcher.chain(b"r", [ASK]), DONE, "one")
    matcher.commit(matcher.chain(b"r", [ASK, DONE, MORE]), raw("assistant", "two"), "two")
    assert found(matcher, ASK, DONE, MORE, raw("assistant", "changed"), MORE) == ("one", 2, True)
    assert found(matcher, ASK, DONE, raw("user", "other")) == ("one", 2, False)


def test_of_equal_replies_the_echoed_ids_then_the_latest_decide() -> None:
    matcher: Matcher[str] = Matcher()
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    replies = {name: raw("assistant", None, tool_calls=[{"id": name, **call}]) for name in ("a", "b", "c")}
    for name in ("a", "b"):
        matcher.commit(matcher.chain(b"r", [ASK]), replies[name], name)
    assert found(matcher, ASK, replies["a"], MORE) == ("a", 2, False)
    assert found(matcher, ASK, replies["c"], MORE) == ("b", 2, False)


def test_thinking_that_comes_back_changed_is_an_edit() -> None:
    matcher: Matcher[str] = Matcher()
    matcher.commit(matcher.chain(b"r", [ASK]), raw("assistant", "done", reasoning_content="hm"), "one")
    matcher.commit(matcher.chain(b"r", [ASK]), raw("assistant", "done", reasoning_content="ah"), "two")
    assert found(matcher, ASK, raw("assistant", "done", reasoning=" hm\n"), MORE) == ("one", 2, False)
    assert found(matcher, ASK, DONE, MORE) == ("two", 2, False)
    assert found(matcher, ASK, raw("assistant", "done", reasoning="oh"), MORE) is None


def test_digests_of_earlier_requests_are_used_again_and_change_nothing() -> None:
    matcher: Matcher[str] = Matcher()
    histories = [[raw("user", f"{n}"), DONE, MORE] for n in range(6)]
    chains = [matcher.chain(b"r", history) for history in histories]
    for history, chain in zip(histories, chains, strict=True):
        longer = [bytes(bytearray(message)) for message in history] + [DONE]
        again = matcher.chain(b"r", longer)
        assert again.hashes[:-1] == chain.hashes
        assert again.hashes == Matcher[str]().chain(b"r", longer).hashes
    assert matcher.chain(b"r", histories[0][:1]).hashes == chains[0].hashes[:2]


@given(st.permutations(range(6)))
def test_order_in_which_calls_are_committed_makes_no_difference(order: list[int]) -> None:
    matcher: Matcher[str] = Matcher()
    histories = [
        [ASK, *itertools.chain.from_iterable((raw("assistant", f"{i}"), MORE) for i in range(n))] for n in range(6)
    ]
    for n in order:
        matcher.commit(matcher.chain(b"r", histories[n]), raw("assistant", f"{n}"), f"{n}")
    for n in range(1, 6):
        assert found(matcher, *histories[n]) == (f"{n - 1}", 2 * n, False)


# --- through the dialects: a harness that sends back what it was shown, spelled in its own way


def chat(reply: ChatReply, turn: int) -> tuple[list[Any], list[Any]]:
    shown = msgspec.json.decode(DIALECTS["openai_chat"].render(_request("openai_chat"), reply, _head(turn)))
    message = shown["choices"][0]["message"]
    message.pop("reasoning_content", None)
    message.pop("reasoning", None)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"result {turn}"}
        for call in message.get("tool_calls") or []
    ]
    return [message], results or [{"role": "user", "content": f"next {turn}"}]


def anthropic(reply: ChatReply, turn: int) -> tuple[list[Any], list[Any]]:
    shown = msgspec.json.decode(
        DIALECTS["anthropic_messages"].render(_request("anthropic_messages"), reply, _head(turn))
    )
    blocks = [block for block in shown["content"] if block["type"] != "thinking"]
    results: list[Any] = [
        {
            "type": "tool_result",
            "tool_use_id": block["id"],
            "content": f"result {turn}",
            "cache_control": {"type": "ephemeral"},
        }
        for block in blocks
        if block["type"] == "tool_use"
    ]
    after = [*results, {"type": "text", "text": f"reminder {turn}"}]
    return [{"role": "assistant", "content": blocks}], [{"role": "user", "content": after}]


def responses(reply: ChatReply, turn: int) -> tuple[list[Any], list[Any]]:
    shown = msgspec.json.decode(DIALECTS["openai_responses"].render(_request("openai_responses"), reply, _head(turn)))
    items = [item for item in shown["output"] if item["type"] != "reasoning"]
    results: list[Any] = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": f"result {turn}"}
        for item in items
        if item["type"] == "function_call"
    ]
    return items, results or [{"type": "message", "role": "user", "content": f"next {turn}"}]


def google(reply: ChatReply, turn: int) -> tuple[list[Any], list[Any]]:
    shown = msgspec.json.decode(DIALECTS["google_generate"].render(_request("google_generate"), reply, _head(turn)))
    content = shown["candidates"][0]["content"]
    content["parts"] = [part for part in content["parts"] if not part.get("thought")]
    results: list[Any] = [
        {"functionResponse": {"name": part["functionCall"]["name"], "response": {"output": f"result {turn}"}}}
        for part in content["parts"]
        if "functionCall" in part
    ]
    return [content], [{"role": "user", "parts": results or [{"text": f"next {turn}"}]}]


HARNESSES: dict[str, tuple[Callable[[ChatReply, int], tuple[list[Any], list[Any]]], str, str, list[Any]]] = {
    "openai_chat": (chat, "messages", "/v1/chat/completions", [{"role": "user", "content": "go"}]),
    "anthropic_messages": (anthropic, "messages", "/v1/messages", [{"role": "user", "content": "go"}]),
    "openai_responses": (responses, "input", "/v1/responses", [{"type": "message", "role": "user", "content": "go"}]),
    "google_generate": (
        google,
        "contents",
        "/v1beta/models/m:generateContent",
        [{"role": "user", "parts": [{"text": "go"}]}],
    ),
}


def _head(turn: int) -> ReplyHead:
    return ReplyHead(reply_id=f"chatcmpl-{turn}", created=0, model="m")


def _request(dialect: str, history: list[Any] | None = None) -> Any:
    _, field, path, first = HARNESSES[dialect]
    fields: dict[str, Any] = {"model": "m", "max_tokens": 99} if dialect == "anthropic_messages" else {"model": "m"}
    body = encode(fields | {field: history if history is not None else first})
    return DIALECTS[dialect].parse(body, path, None)


@pytest.mark.parametrize("dialect", HARNESSES)
@pytest.mark.parametrize("seed", range(5))
def test_every_turn_of_a_harness_is_recognised(dialect: str, seed: int) -> None:
    harness, _, _, first = HARNESSES[dialect]
    matcher: Matcher[int] = Matcher()
    history = list(first)
    reply_of: dict[str, int] = {}
    for turn in range(30):
        messages = _request(dialect, history).messages
        if dialect == "openai_responses":
            messages = regrouped(messages, reply_of)
        chain = matcher.chain(b"r", [message.raw for message in messages])
        hit = matcher.find(chain)
        assert turn == 0 or (hit is not None and (hit.call, hit.foreign) == (turn - 1, False)), turn
        calls = [
            ToolCall(
                id=f"call_{turn}_{n}",
                name=f"tool{n}",
                arguments='{"b": 30.0, "a": "\\u00e9", "10": 1e3, "2": [true, null]}',
            )
            for n in range((turn + seed) % 3)
        ]
        reply_of |= dict.fromkeys((call.id for call in calls), turn)
        reply = ChatReply(
            text=f" said {turn}\n" if turn % 2 or not calls else "",
            reasoning="hm" if turn % 3 else "",
            tool_calls=calls,
            finish_reason="tool_calls" if calls else "stop",
        )
        matcher.commit(chain, encode(assistant_message(reply)), turn)
        said, after = harness(reply, turn)
        history += [*said, *after]

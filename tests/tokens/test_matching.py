"""Which captured call a history goes on from."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
import msgspec
from hypothesis import given

from polynya.tokens.matching import Matcher


def raw(role: str, content: Any, **fields: Any) -> bytes:
    return msgspec.json.encode({"role": role, "content": content, **fields})


ASK, MORE, DONE = raw("user", "go"), raw("user", "more"), raw("assistant", "done")


def found(matcher: Matcher[str], *messages: bytes, root: bytes = b"r") -> tuple[str, int, bool] | None:
    hit = matcher.find(matcher.chain(root, list(messages)))
    return None if hit is None else (hit.call, hit.tail_start, hit.foreign)


def test_call_is_found_by_the_history_that_ends_with_its_reply() -> None:
    matcher: Matcher[str] = Matcher()
    matcher.commit(matcher.chain(b"r", [ASK]), [DONE], "one")
    assert found(matcher, ASK, DONE, MORE) == ("one", 2, False)
    assert found(matcher, ASK) is None
    assert found(matcher, raw("user", "Go"), DONE, MORE) is None
    assert found(matcher, ASK, DONE, MORE, root=b"other tools") is None


def test_deepest_unedited_turn_is_found_and_a_foreign_turn_behind_it_is_said() -> None:
    matcher: Matcher[str] = Matcher()
    matcher.commit(matcher.chain(b"r", [ASK]), [DONE], "one")
    matcher.commit(matcher.chain(b"r", [ASK, DONE, MORE]), [raw("assistant", "two")], "two")
    assert found(matcher, ASK, DONE, MORE, raw("assistant", "changed"), MORE) == ("one", 2, True)
    assert found(matcher, ASK, DONE, raw("user", "other")) == ("one", 2, False)


def test_of_equal_replies_the_echoed_ids_then_the_latest_decide() -> None:
    matcher: Matcher[str] = Matcher()
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    replies = {name: raw("assistant", None, tool_calls=[{"id": name, **call}]) for name in ("a", "b", "c")}
    for name in ("a", "b"):
        matcher.commit(matcher.chain(b"r", [ASK]), [replies[name]], name)
    assert found(matcher, ASK, replies["a"], MORE) == ("a", 2, False)
    assert found(matcher, ASK, replies["c"], MORE) == ("b", 2, False)


def test_thinking_that_comes_back_changed_is_an_edit() -> None:
    matcher: Matcher[str] = Matcher()
    matcher.commit(matcher.chain(b"r", [ASK]), [raw("assistant", "done", reasoning_content="hm")], "one")
    matcher.commit(matcher.chain(b"r", [ASK]), [raw("assistant", "done", reasoning_content="ah")], "two")
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
        matcher.commit(matcher.chain(b"r", histories[n]), [raw("assistant", f"{n}")], f"{n}")
    for n in range(1, 6):
        assert found(matcher, *histories[n]) == (f"{n - 1}", 2 * n, False)

"""The cause of each break: edits of the history, and drift of a history that stayed the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from polynya.schema import Lane
from polynya.tokens import build


def raw(role: str, content: Any = None, **fields: Any) -> bytes:
    return msgspec.json.encode({"role": role, "content": content, **fields})


def tool_call(arguments: str) -> list[dict[str, Any]]:
    return [{"id": "c1", "type": "function", "function": {"name": "run", "arguments": arguments}}]


SYSTEM, ASK, MORE = raw("system", "be good"), raw("user", "go"), raw("user", "more")
SAID = raw("assistant", "done", reasoning_content="hm")
BARE = raw("assistant", "done")
CALLED = raw("assistant", None, tool_calls=tool_call('{"a":1}'))

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tool_list_changed": (
        {"messages": [ASK], "reply": SAID},
        {"messages": [ASK, SAID, MORE], "tools": '[{"name":"x"}]', "prompt": [9]},
    ),
    "system_changed": (
        {"messages": [SYSTEM, ASK], "reply": SAID},
        {"messages": [raw("system", "be better"), ASK, SAID, MORE], "prompt": [9]},
    ),
    "history_edited": (
        {"messages": [ASK], "reply": SAID},
        {"messages": [raw("user", "Go"), SAID, MORE], "prompt": [1, 9]},
    ),
    "foreign_assistant": (
        {"messages": [ASK], "reply": SAID},
        {"messages": [ASK, raw("assistant", "not that"), MORE], "prompt": [1, 2, 9]},
    ),
    "repeated": ({"messages": [ASK], "reply": SAID}, {"messages": [ASK], "prompt": [1, 2, 3]}),
    "reasoning_stripped": (
        {"messages": [ASK], "reply": SAID},
        {"messages": [ASK, raw("assistant", "done"), MORE], "prompt": [1, 2, 3, 9]},
    ),
    "arguments_reserialised": (
        {"messages": [ASK], "reply": CALLED},
        {
            "messages": [
                ASK,
                raw("assistant", None, tool_calls=tool_call('{"a": 1.0}')),
                raw("tool", "ok", tool_call_id="c1"),
            ],
            "prompt": [1, 2, 3, 10, 9],
        },
    ),
    "retokenised": ({"messages": [ASK], "reply": BARE}, {"messages": [ASK, BARE, MORE], "prompt": [1, 2, 3, 10, 9]}),
    "template": ({"messages": [ASK], "reply": BARE}, {"messages": [ASK, BARE, MORE], "prompt": [1, 2, 9]}),
}


@pytest.mark.parametrize("cause", CASES)
def test_cause_of_a_break_is_named(call: Callable[..., Any], cause: str) -> None:
    first, second = CASES[cause]
    one = call("a", [1, 2, 3], [10, 11], messages=first["messages"], reply=first["reply"])
    two = call("b", second["prompt"], [12], messages=second["messages"], reply=SAID)
    two.tools_json = second.get("tools", "[]")
    built = build([one, two], session_id="s", builder="prefix_merging")
    assert built.ledger.chain_breaks == {cause: 1}
    assert built.breaks == {"b": cause}


def test_another_assistant_turn_behind_the_reply_is_foreign(call: Callable[..., Any]) -> None:
    one = call("a", [1, 2, 3], [10, 11], messages=[ASK], reply=SAID)
    two = call("b", [1, 2, 9], [12], messages=[ASK, SAID, MORE, raw("assistant", "x"), MORE], reply=SAID)
    assert build([one, two], session_id="s", builder="prefix_merging").ledger.chain_breaks == {"foreign_assistant": 1}


def test_template_that_drops_thinking_which_the_harness_sent_back_is_named(call: Callable[..., Any]) -> None:
    one = call("a", [1, 2, 3], [10, 11], messages=[ASK], reply=SAID)
    two = call("b", [1, 2, 3, 9], [12], messages=[ASK, SAID, MORE], reply=SAID)
    assert build([one, two], session_id="s", builder="prefix_merging").ledger.chain_breaks == {"reasoning_stripped": 1}


def test_thinking_that_comes_back_as_another_is_an_edit(call: Callable[..., Any]) -> None:
    edited = raw("assistant", "done", reasoning_content="ah")
    one = call("a", [1, 2, 3], [10, 11], messages=[ASK], reply=SAID)
    two = call("b", [1, 2, 3, 9], [12], messages=[ASK, edited, MORE], reply=SAID)
    assert build([one, two], session_id="s", builder="prefix_merging").ledger.chain_breaks == {"history_edited": 1}


def test_whole_reply_that_the_template_closes_in_another_way_parts_in_the_template(call: Callable[..., Any]) -> None:
    one = call("a", [1, 2, 3], [10, 11], messages=[ASK], reply=BARE)
    two = call("b", [1, 2, 3, 10], [12], messages=[ASK, BARE, MORE], reply=SAID)
    assert build([one, two], session_id="s", builder="prefix_merging").ledger.chain_breaks == {"retokenised": 1}


def test_row_after_a_compaction_names_the_row_that_was_condensed(call: Callable[..., Any]) -> None:
    one = call("a", [1, 2, 3], [10, 11], messages=[ASK], reply=SAID)
    compaction = call("c", [1, 2, 3, 10, 11, 4], [13], lane=Lane.COMPACTION, messages=[ASK, SAID, MORE], reply=SAID)
    two = call("b", [1, 7], [12], messages=[raw("user", "so far: …")], reply=SAID)
    built = build([one, compaction, two], session_id="s", builder="prefix_merging")
    assert built.ledger.chain_breaks == {"compaction": 1}
    assert [(trace.trace_id, trace.compacted_from) for trace in built.traces] == [("s.t0", None), ("s.t1", "s.t0")]


def test_first_call_of_another_agent_is_no_break(call: Callable[..., Any]) -> None:
    one = call("a", [1, 2, 3], [10, 11], messages=[ASK], reply=SAID)
    other = call("b", [7], [12], lane=Lane.SUBAGENT, agent="x", messages=[MORE], reply=SAID)
    assert build([one, other], session_id="s", builder="prefix_merging").ledger.chain_breaks == {}


def test_prompt_that_extends_an_older_call_but_not_its_own_last_turn_is_a_break(call: Callable[..., Any]) -> None:
    said = raw("assistant", "again")
    one = call("a", [1], [10], messages=[ASK], reply=BARE)
    two = call("b", [1, 10, 2], [11, 12], messages=[ASK, BARE, MORE], reply=said)
    three = call("c", [1, 10, 2, 13, 3], [14], messages=[ASK, BARE, MORE, said, MORE], reply=SAID)
    built = build([one, two, three], session_id="s", builder="prefix_merging")
    assert (len(built.traces), built.breaks) == (2, {"c": "retokenised"})


def test_branch_from_the_turn_that_a_history_was_rewound_to_is_an_edit_and_a_second_sample_is_none(
    call: Callable[..., Any],
) -> None:
    one = call("a", [1], [10], messages=[ASK], reply=BARE)
    two = call("b", [1, 10, 2], [11, 12], messages=[ASK, BARE, MORE], reply=SAID)
    other = call("c", [1, 10, 3], [14], messages=[ASK, BARE, raw("user", "else")], reply=SAID)
    built = build([one, two, other], session_id="s", builder="prefix_merging")
    assert (len(built.traces), built.breaks) == (2, {"c": "history_edited"})
    again = call("d", [1, 10, 2], [15], messages=[ASK, BARE, MORE], reply=SAID)
    built = build([one, two, again], session_id="s", builder="prefix_merging")
    assert (len(built.traces), built.breaks) == (2, {})


def test_ids_go_on_where_no_history_does(call: Callable[..., Any]) -> None:
    one = call("a", [1], [10], messages=[ASK], reply=BARE)
    two = call("b", [5], [11], messages=[MORE], reply=SAID)
    three = call("c", [1, 10, 3], [14], messages=[raw("user", "spelled otherwise")], reply=SAID)
    built = build([one, two, three], session_id="s", builder="prefix_merging")
    assert built.breaks == {"b": "history_edited"}

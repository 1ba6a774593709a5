"""What makes two spellings the same message, and what does not."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from polynya.tokens.canonical import canonical_arguments, gone_on, reasoning_of, root_digest, said


def raw(role: str = "assistant", content: Any = "hello", **fields: Any) -> bytes:
    return msgspec.json.encode({"role": role, "content": content, **fields})


def calls(*pairs: tuple[str, Any], ids: str = "c") -> list[dict[str, Any]]:
    return [
        {"id": f"{ids}{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(pairs)
    ]


def text(*parts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} for part in parts]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}

SAME = {
    "thinking dropped": (raw(reasoning_content="hm"), raw()),
    "thinking under another name": (raw(reasoning_content="hm"), raw(reasoning="hm")),
    "white space at the ends of a reply": (raw(content="\n\nhello \n"), raw()),
    "one part or a string": (raw("user", text("hello")), raw("user")),
    "empty parts": (raw("user", text("hello", "")), raw("user")),
    "no content, empty or none": (
        raw(content=None, tool_calls=calls(("f", "{}"))),
        raw(content="", tool_calls=calls(("f", "{}"))),
    ),
    "an empty list": (raw(content=[]), raw(content=None)),
    "fields that say nothing": (raw(refusal=None, audio=None, function_call=None, annotations=[]), raw()),
    "other call ids": (raw(tool_calls=calls(("f", "{}"))), raw(tool_calls=calls(("f", "{}"), ids="other"))),
    "key order": (raw(tool_calls=calls(("f", '{"a":1,"b":2}'))), raw(tool_calls=calls(("f", '{"b": 2, "a": 1}')))),
    "spelling of numbers": (
        raw(tool_calls=calls(("f", '{"a":3.0,"b":1e3}'))),
        raw(tool_calls=calls(("f", '{"a":3,"b":1000}'))),
    ),
    "escapes": (raw(tool_calls=calls(("f", '{"a":"\\u00e9\\/"}'))), raw(tool_calls=calls(("f", '{"a":"é/"}')))),
    "arguments as an object": (
        raw(tool_calls=calls(("f", {"a": [1, {"b": 2}]}))),
        raw(tool_calls=calls(("f", '{"a":[1,{"b":2}]}'))),
    ),
    "an index of the call": (
        raw(tool_calls=[{**calls(("f", "{}"))[0], "index": 0}]),
        raw(tool_calls=calls(("f", "{}"))),
    ),
    "a tool's name on its result": (raw("tool", tool_call_id="x", name="f"), raw("tool", tool_call_id="x")),
    "developer and system": (raw("developer"), raw("system")),
    "a refusal as text": (raw(content=None, refusal="hello"), raw()),
    "no arguments": (raw(tool_calls=calls(("f", ""))), raw(tool_calls=calls(("f", {})))),
    "null for no arguments": (raw(tool_calls=calls(("f", "null"))), raw(tool_calls=calls(("f", None)))),
    "white space for no arguments": (raw(tool_calls=calls(("f", " \n"))), raw(tool_calls=calls(("f", "{}")))),
    "a line break in a string": (
        raw(tool_calls=calls(("f", '{"a":"x\ny"}'))),
        raw(tool_calls=calls(("f", '{"a": "x\\ny"}'))),
    ),
    "a key that stands there twice": (
        raw(tool_calls=calls(("f", '{"a":1,"a":2}'))),
        raw(tool_calls=calls(("f", '{"a":2}'))),
    ),
    "half a surrogate pair": (
        raw(tool_calls=calls(("f", '{"a":"\\ud800"}'))),
        raw(tool_calls=calls(("f", '{ "a" : "\\uD800" }'))),
    ),
    "how deep arguments nest": (
        raw(tool_calls=calls(("f", '{"a":' + "[" * 100 + "1.0" + "]" * 100 + "}"))),
        raw(tool_calls=calls(("f", '{"a": ' + "[" * 100 + "1" + "]" * 100 + "}"))),
    ),
    "parts of white space around a reply": (raw(content=text(" \n", " hello", "\t")), raw()),
    "a cache mark on an image": (raw("user", [{**IMAGE, "cache_control": {}}]), raw("user", [IMAGE])),
    "a call as it was written before there were lists": (
        raw(function_call={"name": "f", "arguments": "{}"}),
        raw(tool_calls=calls(("f", "{}"))),
    ),
    "a large integer through a client's doubles": (
        raw(tool_calls=calls(("f", '{"a":9007199254740993}'))),
        raw(tool_calls=calls(("f", '{"a":9007199254740992}'))),
    ),
}
OTHER = {
    "white space of a user": (raw("user", "hello "), raw("user")),
    "white space of a system": (raw("system", " hello"), raw("system")),
    "white space of a tool": (raw("tool", "hello\n"), raw("tool")),
    "roles": (raw("user"), raw("assistant")),
    "white space inside a reply": (raw(content="a  b"), raw(content="a b")),
    "two parts and their concatenation": (raw("user", text("hel", "lo")), raw("user")),
    "the order of parts": (raw("user", text("a", "b")), raw("user", text("b", "a"))),
    "a number and its text": (raw(tool_calls=calls(("f", '{"a":1}'))), raw(tool_calls=calls(("f", '{"a":"1"}')))),
    "a number and a truth": (raw(tool_calls=calls(("f", '{"a":1}'))), raw(tool_calls=calls(("f", '{"a":true}')))),
    "null and nothing": (raw(tool_calls=calls(("f", '{"a":null}'))), raw(tool_calls=calls(("f", "{}")))),
    "values": (raw(tool_calls=calls(("f", '{"a":1.5}'))), raw(tool_calls=calls(("f", '{"a":1.25}')))),
    "the order of a list": (raw(tool_calls=calls(("f", '{"a":[1,2]}'))), raw(tool_calls=calls(("f", '{"a":[2,1]}')))),
    "names of tools": (raw(tool_calls=calls(("f", "{}"))), raw(tool_calls=calls(("g", "{}")))),
    "the order of calls": (
        raw(tool_calls=calls(("f", "{}"), ("g", "{}"))),
        raw(tool_calls=calls(("g", "{}"), ("f", "{}"))),
    ),
    "the number of calls": (raw(tool_calls=calls(("f", "{}"))), raw(tool_calls=calls(("f", "{}"), ("f", "{}")))),
    "arguments that are no JSON": (raw(tool_calls=calls(("f", '{"a": '))), raw(tool_calls=calls(("f", '{"a":')))),
    "an image or none": (raw("user", [*text("hello"), IMAGE]), raw("user")),
    "an image before or behind a text": (
        raw("user", [*text("hello"), IMAGE]),
        raw("user", [IMAGE, *text("hello")]),
    ),
    "halves of surrogate pairs": (
        raw(tool_calls=calls(("f", '{"a":"\\ud800"}'))),
        raw(tool_calls=calls(("f", '{"a":"\\ud801"}'))),
    ),
    "what is no number and null": (
        raw(tool_calls=calls(("f", '{"a":NaN}'))),
        raw(tool_calls=calls(("f", '{"a":null}'))),
    ),
    "a call of the old form or none": (raw(function_call={"name": "f", "arguments": "{}"}), raw()),
    "the input of a custom tool": (
        raw(tool_calls=[{"id": "1", "type": "custom", "custom": {"name": "f", "input": "a"}}]),
        raw(tool_calls=[{"id": "1", "type": "custom", "custom": {"name": "f", "input": "b"}}]),
    ),
    "a voice or none": (raw(audio={"id": "x"}), raw()),
    "another image": (raw("user", [{**IMAGE, "image_url": {"url": "x"}}]), raw("user", [IMAGE])),
    "content that is neither text nor list": (raw("user", {"a": 1}), raw("user", None)),
    "part that is no object": (raw("user", ["hello"]), raw("user")),
}


@pytest.mark.parametrize("name", SAME)
def test_is_no_difference(name: str) -> None:
    one, two = SAME[name]
    assert said(one).digest == said(two).digest


@pytest.mark.parametrize("name", OTHER)
def test_is_a_difference(name: str) -> None:
    one, two = OTHER[name]
    assert said(one).digest != said(two).digest


def test_result_is_known_by_which_call_it_answers_not_by_the_name_of_the_call() -> None:
    one, two = raw("tool", tool_call_id="a1"), raw("tool", tool_call_id="b1")
    assert said(one, ("a0", "a1")).digest == said(two, ("b0", "b1")).digest
    assert said(one, ("a0", "a1")).digest != said(two, ("b1", "b0")).digest
    assert said(one).digest != said(two).digest


def test_root_is_another_with_another_model_tool_list_or_template_setting() -> None:
    roots = {
        root_digest(model=model, tools=tools, template_kwargs=kwargs)
        for model in ("a", "b")
        for tools in (b"[1,2]", b"[2,1]")
        for kwargs in (b"", b"{}")
    }
    assert len(roots) == 8


def test_unreadable_message_is_its_bytes() -> None:
    assert said(b"{").digest != said(b"[").digest
    assert reasoning_of(b"{") == ""


def test_reply_and_the_clients_own_beginning_of_it_are_one_message() -> None:
    whole = raw(content="The answer is 42.", tool_calls=calls(("f", "{}")))
    reply = raw(content=" 42.", tool_calls=calls(("f", "{}")), reasoning="hm")
    joined = gone_on(raw(content=text("The answer is")), reply)
    assert joined is not None
    assert (joined.digest, joined.call_ids) == (said(whole).digest, ("c0",))
    assert joined.reasoning == said(reply).reasoning != b""
    apart = gone_on(raw(content="The answer is"), reply, "\n")
    assert apart is not None and apart.digest != joined.digest


@pytest.mark.parametrize(
    "begun",
    [b"{", raw(content=None), raw(tool_calls=calls(("f", "{}"))), raw(content=[*text("a"), IMAGE])],
    ids=["unreadable", "nothing", "a call", "an image"],
)
def test_what_is_no_beginning_of_a_text_is_not_joined(begun: bytes) -> None:
    assert gone_on(begun, raw()) is None


@pytest.mark.parametrize(
    "arguments", ["[1]", '"text"', "1", "{", "", "NaN", '{"a":1' + "0" * 400 + "}", "[" * 5000, '{"a":1e400}', "\ud800"]
)
def test_arguments_that_are_no_object_of_values_stand_for_themselves(arguments: str) -> None:
    assert canonical_arguments(arguments).startswith(("text:", "json:"))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), values, max_size=4))
def test_order_of_keys_never_matters(arguments: dict[str, Any]) -> None:
    turned = dict(reversed(list(arguments.items())))
    assert canonical_arguments(arguments) == canonical_arguments(turned)


@given(st.sampled_from(["user", "assistant", "tool", "system", "x"]), values, values, values)
def test_nothing_that_parses_is_refused(role: str, content: Any, arguments: Any, identity: Any) -> None:
    call = [{"id": identity, "function": {"name": "f", "arguments": arguments}}]
    assert len(said(raw(role, content, tool_calls=call)).digest) == 16

"""Tool calls out of a model's text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polynya.engines.toolparse import parse_calls, split_thinking

OFFERED = {"bash", "write"}
CALL = '{"name": "bash", "arguments": {"command":  "ls"}}'
ARGUMENTS = '{"command":  "ls"}'


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        f"\n  {CALL}\n",
        f"<tool_call>\n{CALL}\n</tool_call>",
        f"<tool_call>{CALL}",
        f"```json\n{CALL}\n```",
        f"```\n{CALL}\n```",
        f"````tool_call\n  {CALL}\n````",
    ],
)
def test_each_spelling_is_read_and_leaves_no_text(text: str) -> None:
    parsed = parse_calls(text, OFFERED)
    assert [(call.name, call.arguments) for call in parsed.calls] == [("bash", ARGUMENTS)]
    assert (parsed.text, parsed.unparsed) == ("", 0)


def test_key_order_and_further_keys_do_not_matter() -> None:
    text = '{"arguments":{"a": [1, {"b": 2}]} , "id": 7,"name":"write"}'
    assert [(c.name, c.arguments) for c in parse_calls(text, OFFERED).calls] == [("write", '{"a": [1, {"b": 2}]}')]


def test_several_calls_are_read_in_order() -> None:
    text = f"{CALL}\n" + '{"name": "write", "arguments": {}}'
    assert [call.name for call in parse_calls(text, OFFERED).calls] == ["bash", "write"]
    hermes = f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"
    assert len(parse_calls(hermes, OFFERED).calls) == 2


def test_text_around_a_call_is_kept() -> None:
    parsed = parse_calls(f"I list the files.\n```json\n{CALL}\n```\nThat is all.", OFFERED)
    assert parsed.text == "I list the files.\nThat is all."
    assert len(parsed.calls) == 1


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}\n</tool_call>',
        '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>',
        '```json\n{"name": "bash", "arguments": {"command": \n```',
        '{"name": "bash", "arguments": {"command": "a\nb"}}',
        '{"name": "bash", "arguments": "{}"}',
        '{"name": "bash", "arguments": {"x": NaN}}',
    ],
)
def test_what_is_no_valid_call_stays_text_and_is_counted(text: str) -> None:
    parsed = parse_calls(text, OFFERED)
    assert (parsed.text, parsed.calls, parsed.unparsed) == (text, [], 1)


@pytest.mark.parametrize("text", ["", "hello", '{"a": 1}', "```python\nprint({})\n```", f"so: {CALL}", "{" * 9])
def test_other_text_is_left_alone_and_not_counted(text: str) -> None:
    parsed = parse_calls(text, OFFERED)
    assert (parsed.text, parsed.calls, parsed.unparsed) == (text, [], 0)


def test_deep_nesting_is_no_error() -> None:
    text = '{"name": "bash", "arguments": ' + '{"a":' * 200_000
    assert parse_calls(text, OFFERED).calls == []


def test_a_number_of_any_length_is_no_error() -> None:
    text = '{"name": "bash", "arguments": {"n": ' + "9" * 5000 + "}}"
    assert len(parse_calls(text, OFFERED).calls) == 1


pieces = st.one_of(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "```json\n", "```", "\n", "{", "}", '"name"', CALL, ":", ",", "[", '"']
    ),
    st.text(max_size=8),
)


@given(st.lists(pieces, max_size=14).map("".join))
def test_arguments_are_slices_of_the_text_and_valid_json(text: str) -> None:
    parsed = parse_calls(text, OFFERED)
    for call in parsed.calls:
        assert call.arguments in text
        assert isinstance(json.loads(call.arguments), dict)
        assert call.name in OFFERED
    if not parsed.calls:
        assert parsed.text == text


arguments = st.dictionaries(
    st.text(max_size=8), st.one_of(st.integers(), st.text(max_size=12), st.booleans()), max_size=4
)


@given(
    arguments, st.sampled_from([None, 2]), st.sampled_from(["{}", "<tool_call>\n{}\n</tool_call>", "```json\n{}\n```"])
)
def test_any_arguments_come_back_byte_for_byte(value: dict[str, object], indent: int | None, shape: str) -> None:
    written = json.dumps(value, indent=indent)
    text = shape.replace("{}", '{"name": "bash", "arguments": ' + written + "}")
    parsed = parse_calls(text, OFFERED)
    assert [call.arguments for call in parsed.calls] == [written]
    assert parsed.text == ""


def test_thinking_is_split_off() -> None:
    assert split_thinking("<think>\nhm\n</think>\n\nyes", opened=False) == ("hm", "yes")
    assert split_thinking("hm</think>yes", opened=True) == ("hm", "yes")
    assert split_thinking("yes", opened=False) == ("", "yes")


def test_an_unclosed_thought_is_all_reasoning() -> None:
    assert split_thinking("<think>hm", opened=False) == ("hm", "")

"""A reply is known again when a harness sends it back, in each dialect, whatever spelling the way there and back gave it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from polynya.dialects.neutral import ChatReply, ToolCall
from polynya.dialects.registry import DIALECTS, echoes
from polynya.dialects.wire import sign
from polynya.tokens.canonical import said
from polynya.tokens.matching import Found, Matcher

from .drifting import ODD_ARGUMENTS, RESPONSES_TOOLS, Harness, random_reply, shown
from .harness import LISTS, NAMES, Body, assistant, body, chain_of, parse, raws, tool, user

TURNS = 30


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dialect", NAMES)
def test_every_turn_of_a_drifting_harness_is_recognised(dialect: str, seed: int) -> None:
    dice = random.Random(f"{dialect}-{seed}")
    harness, matcher = Harness(dialect, dice), Matcher[int]()
    for turn in range(TURNS):
        request = harness.request()
        chain = matcher.chain(b"root", harness.messages(request))
        found = matcher.find(chain)
        if turn:
            last = max(at for at, message in enumerate(chain.said) if message.role == "assistant")
            assert found is not None
            assert (found.call, found.tail_start, found.foreign) == (turn - 1, last + 1, False)
        else:
            assert found is None
        reply = random_reply(dice, turn, request)
        matcher.commit(chain, echoes(request, reply), turn, found)
        harness.take(request, reply, turn)


def first(dialect: str) -> Body:
    tools = {"tools": RESPONSES_TOOLS} if dialect == "openai_responses" else {}
    return body(dialect, [user("go")]) | tools


def sent_on(dialect: str, sent: Body, answer: Body) -> Body:
    """The next request of a client that changes nothing."""
    said = {
        "openai_chat": lambda: [answer["choices"][0]["message"]],
        "anthropic_messages": lambda: [{"role": "assistant", "content": answer["content"]}],
        "openai_responses": lambda: answer["output"],
        "google_generate": lambda: answer.get("contents") or [answer["candidates"][0]["content"]],
    }[dialect]()
    field = LISTS.get(dialect, "messages")
    return sent | {field: [*sent[field], *said]}


NAMES_OF_TOOLS = ["g", "local_shell", "patch", "fs__edit", "f" * 80]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", NAMES_OF_TOOLS)
@pytest.mark.parametrize("arguments", ODD_ARGUMENTS)
@pytest.mark.parametrize("dialect", NAMES)
def test_reply_is_parsed_back_as_the_dialect_says(dialect: str, arguments: str, name: str, stream: bool) -> None:
    request = parse(dialect, first(dialect))
    calls = [ToolCall(id=f"c{n}", name=name, arguments=arguments) for n in range(2)]
    reply = ChatReply(text="said\n", reasoning="thought", tool_calls=calls, finish_reason="tool_calls")
    again = parse(dialect, sent_on(dialect, first(dialect), shown(request, reply, 1, stream=stream)))
    [echo] = again.messages[1:]
    assert (echo.text, echo.reasoning) == ("said\n", "thought")
    assert said(echo.raw).digest == said(echoes(request, reply)[-1]).digest
    expected = DIALECTS[dialect].echoed(request, reply)
    assert [(call.id, call.name) for call in echo.tool_calls] == [(call.id, call.name) for call in expected.tool_calls]


@pytest.mark.parametrize("arguments", ["", "{}", "null", " \n"])
@pytest.mark.parametrize("dialect", NAMES)
def test_no_arguments_are_known_again_however_they_are_written(dialect: str, arguments: str) -> None:
    matcher: Matcher[str] = Matcher()
    request = parse(dialect, body(dialect, [user("go")]))
    reply = ChatReply(tool_calls=[ToolCall(id="1", name="f", arguments=arguments)])
    matcher.commit(chain_of(request, matcher), echoes(request, reply), "c")
    spelled: list[Any] = [{}, None]
    field, written = {
        "openai_chat": ("arguments", ['"{}"', '""', "{}", "null"]),
        "anthropic_messages": ("input", ["{}", "null"]),
        "openai_responses": ("arguments", ['"{}"', '""']),
        "google_generate": ("args", ["{}", "null"]),
    }[dialect]
    for form in written:
        talk = [user("go"), assistant("", ("1", "f", spelled[0])), tool("1", "x")]
        text = json.dumps(body(dialect, talk)).replace(f'"{field}": "{{}}"', f'"{field}": {form}')
        text = text.replace(f'"{field}": {{}}', f'"{field}": {form}')
        assert f'"{field}": {form}' in text
        again = parse(dialect, json.loads(text))
        found = matcher.find(chain_of(again, matcher))
        assert found is not None and found.call == "c", form


def hit(matcher: Matcher[str], dialect: str, talk: list[Body]) -> str | None:
    found = matcher.find(chain_of(parse(dialect, body(dialect, talk)), matcher))
    return None if found is None else found.call


@pytest.mark.parametrize("dialect", NAMES)
def test_reply_that_goes_on_with_the_clients_own_beginning_is_known_as_one_message_or_two(dialect: str) -> None:
    matcher: Matcher[str] = Matcher()
    request = parse(dialect, body(dialect, [user("go"), assistant("The answer is")]))
    reply = ChatReply(text=" 42.", tool_calls=[ToolCall(id="1", name="f", arguments="{}")])
    matcher.commit(chain_of(request, matcher), echoes(request, reply), "c")
    call = ("1", "f", {})
    for echo in (
        [assistant("The answer is 42.", call)],
        [assistant("The answer is"), assistant(" 42.", call)],
        [assistant("The answer is 42."), assistant("", call)],
    ):
        if dialect == "openai_chat" and len(echo) == 2 and not echo[1]["text"]:
            continue  # Messages of this dialect are never joined.
        assert hit(matcher, dialect, [user("go"), *echo, tool("1", "x")]) == "c"
    assert hit(matcher, dialect, [user("go"), assistant("The answer is 43.", call), tool("1", "x")]) is None
    assert hit(matcher, dialect, [user("go"), assistant("The answer is", call), tool("1", "x")]) is None


def _two_turns(dialect: str, matcher: Matcher[str], *, continued: bool = True) -> list[Body]:
    """Two turns that thought; the history after them."""
    talk: list[Body] = [user("go")]
    for name, thought in (("one", "first thought"), ("two", "second thought")):
        request = parse(dialect, body(dialect, talk))
        chain = chain_of(request, matcher)
        parent = matcher.find(chain) if continued else None
        matcher.commit(chain, echoes(request, ChatReply(text=name, reasoning=thought)), name, parent)
        talk += [assistant(name, reasoning=thought), user("and")]
    return talk


@pytest.mark.parametrize("continued", [True, False], ids=["by ids", "by messages"])
@pytest.mark.parametrize("dialect", NAMES)
def test_thinking_that_was_edited_in_any_turn_is_an_edit(dialect: str, continued: bool) -> None:
    matcher: Matcher[str] = Matcher()
    talk = _two_turns(dialect, matcher, continued=continued)
    thoughts = ["first thought", "second thought"]

    def with_thoughts(*given: str) -> str | None:
        changed = [dict(entry) for entry in talk]
        for at, thought in zip((1, 3), given, strict=True):
            changed[at]["reasoning"] = thought
        return hit(matcher, dialect, changed)

    assert with_thoughts(*thoughts) == with_thoughts("", "") == with_thoughts(thoughts[0], "") == "two"
    assert with_thoughts("", thoughts[1]) == with_thoughts(f"\n{thoughts[0]} ", thoughts[1]) == "two"
    assert with_thoughts(thoughts[0], "another") == with_thoughts("", "another") == "one"
    assert with_thoughts("another", thoughts[1]) is None
    assert with_thoughts("another", "") is None


def test_thinking_that_comes_back_after_it_was_left_out_is_that_of_the_ids() -> None:
    matcher: Matcher[str] = Matcher()
    talk: list[Body] = [user("go")]
    for name in ("one", "two", "three"):
        request = parse("openai_chat", body("openai_chat", talk))
        chain = chain_of(request, matcher)
        reply = ChatReply(text=name, reasoning=f"thought {name}")
        matcher.commit(chain, echoes(request, reply), name, matcher.find(chain))
        talk += [assistant(name), user("and")]
    for at, name in ((1, "one"), (3, "two"), (5, "three")):
        talk[at]["reasoning"] = f"thought {name}"
    assert hit(matcher, "openai_chat", talk) == "three"
    talk[1]["reasoning"] = "thought two"
    assert hit(matcher, "openai_chat", talk) is None


def test_edited_thinking_under_our_signature_does_not_pass_for_thinking_that_was_left_out() -> None:
    matcher: Matcher[str] = Matcher()
    request = parse("anthropic_messages", body("anthropic_messages", [user("go")]))
    matcher.commit(chain_of(request, matcher), echoes(request, ChatReply(text="hi", reasoning="mine")), "c")

    def found(text: str, signature: str) -> str | None:
        thought = {"type": "thinking", "thinking": text, "signature": signature}
        sent = body("anthropic_messages", [user("go"), assistant("hi"), user("and")])
        sent["messages"][1]["content"].insert(0, thought)
        match: Found[str] | None = matcher.find(chain_of(parse("anthropic_messages", sent), matcher))
        return None if match is None else match.call

    assert found("mine", sign("mine")) == found("", sign("mine")) == found("theirs", "xyz") == "c"
    assert found("edited", sign("mine")) is None


def test_turns_of_custom_and_shell_tools_go_upstream_as_the_model_wrote_them() -> None:
    request = parse("openai_responses", first("openai_responses"))
    calls = [
        ToolCall(id="1", name="fs__edit", arguments='{"input":"a\\nb"}'),
        ToolCall(id="2", name="local_shell", arguments='{"command":["ls"],"timeout_ms":5}'),
    ]
    answer = shown(request, ChatReply(tool_calls=calls), 1, stream=False)
    again = parse("openai_responses", sent_on("openai_responses", first("openai_responses"), answer))
    assert again.messages[-1].tool_calls == calls
    assert len(raws(again)) == 2

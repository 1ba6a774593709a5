"""Replies are known again when a harness sends them back in its own spelling: through all four dialects."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from polynya.dialects.neutral import ChatReply, ChatRequest, ReplyHead, ToolCall
from polynya.dialects.openai_chat import assistant_message
from polynya.dialects.openai_responses import regrouped
from polynya.dialects.registry import DIALECTS
from polynya.dialects.responses_tools import read_back
from polynya.tokens.matching import Chain, Found, Matcher

from .dialect_harness import NAMES, Harness, body, parse, random_reply, root, user


def chain_of(request: ChatRequest, matcher: Matcher[Any], reply_of: dict[str, int] | None = None) -> Chain:
    messages = request.messages
    if request.dialect == "openai_responses":
        messages = regrouped(messages, reply_of or {})
    return matcher.chain(root(request), [message.raw for message in messages])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dialect", NAMES)
def test_every_turn_of_a_drifting_harness_is_recognised(dialect: str, seed: int) -> None:
    dice = random.Random(f"{dialect}-{seed}")
    harness, matcher = Harness(dialect, dice), Matcher[int]()
    reply_of: dict[str, int] = {}
    for turn in range(30):
        request = harness.request()
        chain = chain_of(request, matcher, reply_of)
        found = matcher.find(chain)
        if turn:
            last = max(at for at, message in enumerate(chain.said) if message.role == "assistant")
            assert found == Found(call=turn - 1, tail_start=last + 1, foreign=False), turn
        else:
            assert found is None
        reply = random_reply(dice, turn)
        reply_of |= dict.fromkeys((call.id for call in reply.tool_calls), turn)
        matcher.commit(chain, msgspec.json.encode(assistant_message(reply)), turn)
        harness.take(request, reply, turn)


DEEP = "[" * 70 + "]" * 70
ODD_ARGUMENTS = {
    "a key twice": '{"a": 1, "a": 2}',
    "deep": f'{{"a": {DEEP}}}',
    "cut": '{"a": ',
    "empty": "",
    "blank": " \n",
    "null": "null",
    "a list": "[1.0, 2]",
    "a text": '"x"',
    "a number": "7",
    "NaN": '{"a": NaN}',
    "a large integer": '{"a": 123456789012345678901234567890}',
    "an exponent": '{"a": 1e5, "b": -0.0, "c": 1E+2}',
    "a lone surrogate": '{"a": "\\ud800"}',
    "a control character": '{"a": "\t"}',
}


@pytest.mark.parametrize("arguments", ODD_ARGUMENTS.values(), ids=ODD_ARGUMENTS)
@pytest.mark.parametrize("dialect", NAMES)
def test_a_call_with_odd_arguments_is_recognised(dialect: str, arguments: str) -> None:
    harness, matcher = Harness(dialect, random.Random(1)), Matcher[str]()
    request = harness.request()
    reply = ChatReply(tool_calls=[ToolCall(id="c1", name="f", arguments=arguments)])
    matcher.commit(chain_of(request, matcher), msgspec.json.encode(assistant_message(reply)), "call")
    harness.take(request, reply, 1)
    found = matcher.find(chain_of(harness.request(), matcher))
    assert found is not None and (found.call, found.foreign) == ("call", False)


SHELL = '{"command": ["ls"], "timeout_ms": 5.0}'
RESPONSES_TOOLS: list[dict[str, Any]] = [
    {"type": "namespace", "name": "fs", "tools": [{"type": "function", "name": "read"}]},
    {"type": "custom", "name": "patch"},
    {"type": "local_shell"},
]


@pytest.mark.parametrize(
    "call",
    [
        ToolCall(id="1", name="fs__read", arguments='{"path": "a"}'),
        ToolCall(id="2", name="patch", arguments='{"input": "a\\nb"}'),
        ToolCall(id="3", name="patch", arguments='{"input": "cut'),
        ToolCall(id="4", name="patch", arguments='{"input": "a", "more": 1}'),
        ToolCall(id="5", name="patch", arguments="*** Begin Patch"),
        ToolCall(id="6", name="patch", arguments=""),
        ToolCall(id="7", name="local_shell", arguments=SHELL),
        ToolCall(id="8", name="local_shell", arguments='{"command": "ls -l"}'),
        ToolCall(id="9", name="local_shell", arguments='{"command": ["ls"], "workdir": null, "env": {}}'),
        ToolCall(id="10", name="local_shell", arguments="ls"),
    ],
    ids=lambda call: f"{call.name} {call.arguments}",
)
def test_a_call_of_a_custom_a_namespace_or_a_shell_tool_is_recognised(call: ToolCall) -> None:
    sent = body("openai_responses", [user("go")]) | {"tools": RESPONSES_TOOLS}
    request, matcher = parse("openai_responses", sent), Matcher[str]()
    reply = ChatReply(tool_calls=[call])
    matcher.commit(chain_of(request, matcher), msgspec.json.encode(assistant_message(read_back(request, reply))), "c")
    head = ReplyHead(reply_id="r", created=0, model="m")
    output = json.loads(DIALECTS["openai_responses"].render(request, reply, head))["output"]
    for item in output:
        if item["type"] == "local_shell_call":
            item["action"] |= {"user": None, "working_directory": item["action"].get("working_directory")}
    sent["input"] += output
    found = matcher.find(chain_of(parse("openai_responses", sent), matcher))
    assert found is not None and (found.call, found.foreign) == ("c", False)

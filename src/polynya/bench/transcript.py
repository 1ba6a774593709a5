"""The requests of a session as an agent's client writes them: Claude Code's Anthropic Messages, and the same as OpenAI chat.

Claude Code moves its cache marks with every turn, so a message's bytes change once after it was the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from polynya.bench.workload import SESSION_MARK, SESSION_TEXT, Call, Variant, Workload, source_text, tool_call_id

_encode = msgspec.json.Encoder().encode
_MOVING = {"cache_control": {"type": "ephemeral"}}
_TOOLS = 18


class Bodies(msgspec.Struct, frozen=True):
    """All requests of one variant in one dialect: ``text[:cuts[turn]] + lasts[turn] + tail``, with the session at ``mark``."""

    text: bytes
    cuts: list[int]
    lasts: list[bytes]
    tail: bytes
    mark: int

    def parts(self, call: Call) -> list[bytes | memoryview]:
        view = memoryview(self.text)
        after = self.mark + len(SESSION_TEXT)
        name = b"[[session %05d epoch %05d]]" % (call.session, call.epoch)
        return [view[: self.mark], name, view[after : self.cuts[call.turn]], self.lasts[call.turn], self.tail]


class Requests:
    """The bodies of a workload, made once for each text and dialect (``anthropic`` or ``chat``)."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._bodies: dict[tuple[str, int], Bodies] = {}

    def parts(self, dialect: str, call: Call) -> list[bytes | memoryview]:
        variant = self._workload.variant(call.session)
        made = self._bodies.get((dialect, variant.number))
        if made is None:
            made = anthropic_bodies(variant) if dialect == "anthropic" else chat_bodies(variant)
            self._bodies[dialect, variant.number] = made
        return made.parts(call)


class _Turn(msgspec.Struct):
    said: str
    arguments: str
    call_id: str
    result: str


class _Script(msgspec.Struct):
    system: str
    tools: list[dict[str, Any]]
    ask: str
    turns: list[_Turn]
    """Those before the first request, then one for each request but the last."""
    before: int


def _script(variant: Variant) -> _Script:
    spec = variant.spec
    rng = np.random.default_rng([13, variant.number])
    if not spec.growth_ids:
        ask = f"{SESSION_TEXT} Write a title for this:\n" + source_text(rng, max(200, spec.body_bytes - 700))
        return _Script("You write titles. " * 15, [], ask, [], 0)
    first = spec.body_bytes - spec.growth_bytes * (spec.turns - 1) // 2
    fixed = min(44_000, first // 2)
    tools = [_tool(rng, index, fixed * 2 // 3 // _TOOLS) for index in range(_TOOLS)]
    ask = f"{SESSION_TEXT} Find out why the tests fail, and mend it.\n" + source_text(rng, 600)
    room = first - fixed - 1400
    before = max(1, room // spec.growth_bytes)
    ask += source_text(rng, max(1, room - before * spec.growth_bytes))
    turns = []
    for index in range(before + spec.turns - 1):
        said, arguments = variant.reply_texts((index - before) % spec.turns)
        own = len(_encode(said)) + len(_encode(arguments)) + 330
        result = source_text(rng, max(100, spec.growth_bytes - own))
        own_id = f"toolu_{variant.number:04d}{index:012d}" if index < before else tool_call_id(index - before)
        turns.append(_Turn(said, arguments, own_id, result))
    return _Script(source_text(rng, fixed // 3), tools, ask, turns, before)


def _tool(rng: np.random.Generator, index: int, size: int) -> dict[str, Any]:
    names = ("file_path", "content", "old_string", "new_string", "replace_all")
    properties = {name: {"type": "string", "description": f"The {name} of the call."} for name in names}
    schema = {"type": "object", "properties": properties, "required": list(names[:2]), "additionalProperties": False}
    name = "Write" if index == 0 else f"Tool{index}"
    return {"name": name, "description": source_text(rng, max(40, size - 480)), "input_schema": schema}


def _result_text(script: _Script, index: int) -> str:
    """A result ends with the number of the request that it is the last message of."""
    return f"{script.turns[index].result}\n[[turn {index - script.before + 1:05d}]]"


def _ask_text(script: _Script, turn: int) -> str:
    return f"{script.ask}\n[[turn {turn:05d}]]"


def anthropic_bodies(variant: Variant) -> Bodies:
    spec, script = variant.spec, _script(variant)
    system = [{"type": "text", "text": "You are Claude Code."}, {"type": "text", "text": script.system, **_MOVING}]
    tools = b'"tools":%b,' % _encode(script.tools) if script.tools else b""
    head = b'{"model":"bench","max_tokens":32000,"system":%b,%b"messages":[' % (_encode(system), tools)

    def ask(turn: int, last: bool) -> bytes:
        block = {"type": "text", "text": _ask_text(script, turn), **(_MOVING if last else {})}
        return _encode({"role": "user", "content": [block]})

    def assistant(index: int) -> bytes:
        turn = script.turns[index]
        use = {"type": "tool_use", "id": turn.call_id, "name": "Write", "input": msgspec.json.decode(turn.arguments)}
        return _encode({"role": "assistant", "content": [{"type": "text", "text": turn.said}, use]})

    def result(index: int, last: bool) -> bytes:
        block = {
            "tool_use_id": script.turns[index].call_id,
            "type": "tool_result",
            "content": _result_text(script, index),
        }
        return _encode({"role": "user", "content": [{**block, **(_MOVING if last else {})}]})

    tail = b'],"metadata":{"user_id":"bench"},"stream":%b}' % (b"true" if spec.stream else b"false")
    return _assembled(variant, script, _Writer(ask, assistant, result), head, tail)


def chat_bodies(variant: Variant) -> Bodies:
    script = _script(variant)
    head = b'{"model":"bench","messages":[%b,' % _encode({"role": "system", "content": script.system})

    def ask(turn: int, last: bool) -> bytes:
        return _encode({"role": "user", "content": _ask_text(script, turn)})

    def assistant(index: int) -> bytes:
        turn = script.turns[index]
        call = {"id": turn.call_id, "type": "function", "function": {"name": "Write", "arguments": turn.arguments}}
        return _encode({"role": "assistant", "content": turn.said, "tool_calls": [call]})

    def result(index: int, last: bool) -> bytes:
        call_id = script.turns[index].call_id
        return _encode({"role": "tool", "tool_call_id": call_id, "content": _result_text(script, index)})

    tools = [{"type": "function", "function": _function(tool)} for tool in script.tools]
    asks = {"max_tokens": 32000, "stream": False, "logprobs": True, "top_logprobs": 0, "return_token_ids": True}
    tail = b"]" + (b',"tools":' + _encode(tools) if tools else b"") + b"," + _encode(asks)[1:]
    return _assembled(variant, script, _Writer(ask, assistant, result), head, tail)


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    return {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}


class _Writer(msgspec.Struct):
    """Writes messages in one dialect. ``last``: it is the last message of its request."""

    ask: Callable[[int, bool], bytes]
    assistant: Callable[[int], bytes]
    result: Callable[[int, bool], bytes]


def _assembled(variant: Variant, script: _Script, writer: _Writer, head: bytes, tail: bytes) -> Bodies:
    if not script.turns:
        return _single_asks(variant, writer, head, tail)
    parts = [head, writer.ask(0, False), b","]
    cuts, lasts = [], []
    size = sum(map(len, parts))
    for index in range(len(script.turns)):
        said, result = writer.assistant(index) + b",", writer.result(index, False) + b","
        if index >= script.before - 1:
            cuts.append(size + len(said))
            lasts.append(writer.result(index, True))
        parts += [said, result]
        size += len(said) + len(result)
    text = b"".join(parts)
    return Bodies(text, cuts, lasts, tail, text.index(SESSION_MARK))


def _single_asks(variant: Variant, writer: _Writer, head: bytes, tail: bytes) -> Bodies:
    """Each request is one message, so the session's name lies in the part that all requests share."""
    asks = [writer.ask(turn, True) for turn in range(variant.spec.turns)]
    end = asks[0].index(SESSION_MARK) + len(SESSION_TEXT)
    text = head + asks[0][:end]
    return Bodies(text, [len(text)] * len(asks), [ask[end:] for ask in asks], tail, text.index(SESSION_MARK))

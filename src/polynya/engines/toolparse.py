"""Tool calls out of a model's text, for the embedded engine. Named ``hermes+fenced-json`` in the provenance.

Three spellings are read, each a JSON object with ``name`` and an object ``arguments``: between ``<tool_call>`` tags, in a
fenced code block, or bare at the start of a line. Invariant: the argument text is a slice of the model's text, never
re-serialised. Refuses what is no valid JSON or names no offered tool: that stays text, and is counted. Never raises. Pure.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection

import msgspec

from polynya.dialects.neutral import ChatReply, ChatRequest, ToolCall, Usage

PARSER_NAME = "hermes+fenced-json"
_START = re.compile(r"(?P<tag><tool_call>)\s*|^[ \t]*(?P<fence>```+)[\w+-]*[ \t]*\n\s*|^[ \t]*(?=\{)", re.MULTILINE)
_SPACE = re.compile(r"[ \t\r\n]*")


class FoundCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ParsedText(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    """What is left when the calls are taken out."""
    calls: list[FoundCall] = []
    unparsed: int = 0
    """Places that look like a call and are none."""


def _refuse(constant: str) -> None:
    raise ValueError(constant)


# a number is kept as its text: Python's int refuses thousands of digits, and nobody here needs the value
_decode: Callable[[str, int], tuple[object, int]] = json.JSONDecoder(
    parse_constant=_refuse, parse_int=str, parse_float=str
).raw_decode


def parse_calls(text: str, offered: Collection[str]) -> ParsedText:
    """Split ``text`` into calls of offered tools and the rest."""
    kept: list[str] = []
    calls: list[FoundCall] = []
    unparsed = 0
    taken = position = 0
    while (start := _START.search(text, position)) is not None:
        member = _call_at(text, start.end(), offered)
        if member is None:
            unparsed += _looks_like_call(text, start)
            # past the brace too: it was looked at, whatever opened before it
            position = start.end() + 1
            continue
        call, end = member
        calls.append(call)
        kept.append(text[taken : start.start()])
        taken = position = _close(text, end, start)
    if not calls:
        return ParsedText(text=text, unparsed=unparsed)
    rest = [piece.strip() for piece in (*kept, text[taken:])]
    return ParsedText(text="\n".join(piece for piece in rest if piece), calls=calls, unparsed=unparsed)


def split_thinking(text: str, *, opened: bool) -> tuple[str, str]:
    """``(reasoning, rest)``. ``opened``: the prompt already holds the opening tag. An unclosed thought is all reasoning."""
    body = text.lstrip()
    if body.startswith("<think>"):
        body = body.removeprefix("<think>")
    elif not opened:
        return "", text
    thought, closed, rest = body.partition("</think>")
    return thought.strip("\n"), rest.lstrip("\n") if closed else ""


def read_reply(
    text: str, chat: ChatRequest, *, finish: str, usage: Usage, opened: bool, seed: bytes, thinks: bool = True
) -> tuple[ChatReply, dict[str, int]]:
    """What a harness is told of a sampled text, and flags. ``seed``: equal replies get equal call ids."""
    reasoning = ""
    if thinks:
        reasoning, text = split_thinking(text, opened=opened)
    wanted = chat.tool_choice is None or bytes(chat.tool_choice).strip() != b'"none"'
    parsed = parse_calls(text, {tool.name for tool in chat.tools} if wanted else frozenset())
    digest = hashlib.sha256(seed)
    calls = [
        ToolCall(id=_call_id(digest.copy(), index), name=call.name, arguments=call.arguments)
        for index, call in enumerate(parsed.calls)
    ]
    reply = ChatReply(
        text=parsed.text,
        reasoning=reasoning,
        tool_calls=calls,
        finish_reason="tool_calls" if calls and finish == "stop" else finish,
        usage=usage,
    )
    return reply, {"unparsed_tool_markup": parsed.unparsed} if parsed.unparsed and chat.tools and wanted else {}


def _call_id(digest: hashlib._Hash, index: int) -> str:
    digest.update(f"|{index}".encode())
    return f"call_{digest.hexdigest()[:24]}"


def _call_at(text: str, position: int, offered: Collection[str]) -> tuple[FoundCall, int] | None:
    if not text.startswith("{", position):
        return None
    try:
        spans, end = _members(text, position)
        name, _ = _decode(text, spans["name"][0])
    except (ValueError, KeyError, RecursionError, IndexError):
        return None
    first, last = spans.get("arguments", (0, 0))
    if not isinstance(name, str) or name not in offered or not text.startswith("{", first) or first == last:
        return None
    return FoundCall(name, text[first:last]), end


def _members(text: str, position: int) -> tuple[dict[str, tuple[int, int]], int]:
    """Key → where its value starts and ends, of the JSON object at ``position``; and where that object ends."""
    _, end = _decode(text, position)
    spans: dict[str, tuple[int, int]] = {}
    position = _skip(text, position + 1)
    while text[position] != "}":
        key, position = _decode(text, position)
        start = _skip(text, _skip(text, position) + 1)
        _, stop = _decode(text, start)
        spans[str(key)] = (start, stop)
        position = _skip(text, stop)
        if text[position] == ",":
            position = _skip(text, position + 1)
    return spans, end


def _skip(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position


def _close(text: str, end: int, start: re.Match[str]) -> int:
    """Past the closing tag or fence that belongs to the opening one, when it follows."""
    at = _skip(text, end)
    closer = "</tool_call>" if start["tag"] else start["fence"] or ""
    return at + len(closer) if closer and text.startswith(closer, at) else end


def _looks_like_call(text: str, start: re.Match[str]) -> int:
    if start["tag"]:
        return 1
    ahead = text[start.end() : start.end() + 4096]
    return int(ahead.startswith("{") and '"name"' in ahead and '"arguments"' in ahead)

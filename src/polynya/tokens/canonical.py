"""What identifies a message, whichever way a harness spells it when it sends it back.

Invariant: equal digests mean that the policy would have to answer the same: every byte of user, system and tool text, the calls,
their order and their values are in them. Left out is what clients rewrite without changing what was said: call ids, reasoning,
key order and number spelling of arguments, white space around assistant text, the split of one text into a content list.
Never raises: what cannot be read as expected is digested as the bytes that it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import msgspec

_EXACT = 2**53
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
_NO_CALLS: tuple[str, ...] = ()


class _Function(msgspec.Struct):
    name: str = ""
    arguments: Any = ""


class _Call(msgspec.Struct):
    id: str | None = None
    function: _Function = msgspec.field(default_factory=_Function)
    custom: Any = None


class _Message(msgspec.Struct):
    role: str = ""
    content: Any = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None
    function_call: _Function | None = None
    """A call as clients wrote it before there were ``tool_calls``."""
    audio: Any = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


_message = msgspec.json.Decoder(_Message)


class Said(msgspec.Struct, frozen=True):
    """A message, as far as it is matched."""

    role: str
    """``system``, ``user``, ``assistant`` or ``tool``."""
    digest: bytes
    call_ids: tuple[str, ...] = _NO_CALLS
    reasoning: bytes = b""
    """A digest; empty: none was given."""


def said(raw: bytes, latest_calls: Sequence[str] = ()) -> Said:
    """Of one OpenAI Chat message. ``latest_calls``: ids of the latest assistant's calls, which a tool message answers."""
    try:
        message = _message.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return Said("unreadable", _digest("unreadable", raw))
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    text, media = _content(message.content)
    if role == "assistant":
        return _assistant(text or message.refusal or "", media, message, reasoning_digest(raw))
    if role == "tool":
        answered = message.tool_call_id or ""
        place = f"#{list(latest_calls).index(answered)}" if answered in latest_calls else f"id:{answered}"
        return Said(role, _digest(role, place, text, str(len(media)), *media))
    return Said(role, _digest(role, text, str(len(media)), *media))


def gone_on(begun: bytes, reply: bytes, between: str = "") -> Said | None:
    """Of one assistant message that begins with the text of ``begun`` and goes on with ``reply``.

    So a client sends back the reply to a request that ended with the beginning of one. None: ``begun`` is more than text.
    """
    try:
        first, second = _message.decode(begun), _message.decode(reply)
    except (msgspec.DecodeError, RecursionError):
        return None
    (opening, media), (text, _) = _content(first.content), _content(second.content)
    if media or first.tool_calls or first.function_call or not opening:
        return None
    return _assistant(f"{opening}{between}{text}", [], second, reasoning_digest(reply))


def _assistant(text: str, media: list[str], message: _Message, reasoning: bytes) -> Said:
    """White space at the ends of the text goes, and with it the parts that are nothing else."""
    if message.audio is not None:
        media = [*media, _printed(message.audio)]
    calls = [*(message.tool_calls or []), *([_Call(function=call)] if (call := message.function_call) else [])]
    pieces = [
        piece
        for call in calls
        for piece in (
            (call.function.name, canonical_arguments(call.function.arguments))
            if call.custom is None
            else ("custom", _printed(call.custom))
        )
    ]
    said = _digest("assistant", _trimmed(text), str(len(media)), *media, *pieces)
    return Said("assistant", said, tuple(call.id or "" for call in calls), reasoning)


def _trimmed(text: str) -> str:
    while (shorter := text.strip().strip("\0")) != text:
        text = shorter
    return text


def reasoning_of(raw: bytes) -> str:
    """The thinking that a message carries; empty: none."""
    try:
        message = _message.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return ""
    return message.reasoning_content or message.reasoning or ""


def reasoning_digest(raw: bytes) -> bytes:
    """Of the thinking, without white space around it; empty: there is none."""
    thought = reasoning_of(raw).strip()
    return _digest("reasoning", thought) if thought else b""


def root_digest(*, model: str, tools: bytes, template_kwargs: bytes) -> bytes:
    """What stands before all messages: another tool list, also in another order, is another prompt."""
    return _digest("root", model, tools, template_kwargs)


def canonical_arguments(arguments: Any) -> str:
    """Tool arguments, the same for all spellings of the same values and of none; what is no JSON stands for itself."""
    value = arguments
    if isinstance(arguments, str):
        try:
            value = _lenient(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return "text:" + arguments
        if value is not None and not isinstance(value, dict):
            return "text:" + arguments
    value = {} if value is None else value
    try:
        return "json:" + _encoded(_plain(value))
    except (RecursionError, OverflowError, TypeError, ValueError):
        return "text:" + (arguments if isinstance(arguments, str) else repr(arguments))


def _encoded(value: Any) -> str:
    try:
        return msgspec.json.encode(value, order="deterministic").decode()
    except UnicodeEncodeError:  # half a surrogate pair
        return json.dumps(value, sort_keys=True)


def _no_number(literal: str) -> Any:
    raise ValueError(f"{literal} is no JSON")


_with_breaks = json.JSONDecoder(strict=False, parse_constant=_no_number)


def _lenient(text: str) -> Any:
    """As JSON that may have line breaks in its strings: models write that, and clients escape them. Raises ValueError."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return _with_breaks.decode(text)


def _plain(value: Any) -> Any:
    """Integral numbers as integers, as far as a client's doubles hold them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _EXACT:
        return float(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    return value


def _content(content: Any) -> tuple[str, list[str]]:
    """Joined text and what is no text, by the texts before it. One part is the same as a string, two are not their concatenation."""
    if not isinstance(content, list):
        return (content, []) if isinstance(content, str) else ("", [] if content is None else [_printed(content)])
    texts: list[str] = []
    media: list[str] = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else ""
        text = (part.get("text") or part.get("refusal") or "") if isinstance(part, dict) else None
        if kind in _TEXT_PARTS and isinstance(text, str):
            texts += [text] if text else []
        else:
            media.append(f"{len(texts)}:{_printed(part)}")
    return "\0".join(texts), media


def _printed(value: Any) -> str:
    if isinstance(value, dict) and "cache_control" in value:
        value = {key: item for key, item in value.items() if key != "cache_control"}
    return msgspec.json.encode(value, order="deterministic").decode()


def _digest(*pieces: str | bytes) -> bytes:
    """Of pieces that are told apart."""
    hasher = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        octets = piece if isinstance(piece, bytes) else piece.encode("utf-8", "surrogatepass")
        hasher.update(len(octets).to_bytes(8, "little"))
        hasher.update(octets)
    return hasher.digest()

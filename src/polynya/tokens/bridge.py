"""The bridge: the ids between what a call sampled and the next call's reply, cut out of the model's own chat template.

A stand-in conversation (a user, an assistant that says ``SENTINEL``, then the new messages) is rendered; what the template
prints behind the assistant's turn is what has to follow the real turn too. The cut is right behind a control token, where no
merge of a tokenizer can cross. Invariant: an id of ``Vocabulary.special`` comes only from what the template itself printed,
never from a message's content: in contents, a private-use character stands inside whatever could spell a control token (or the
sentinel), and it is taken out again only after the cutting. The parent's ids are appended to, never changed.
Refuses (None, ValueError) what it cannot cut exactly. Pure: no I/O; the rendering and encoding are the caller's.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from polynya.schema import Int32Array

SENTINEL = "Qvoxqelzar"
_MASKS = range(0xE000, 0xF8FF, 97)
_STEP = 4096


class Vocabulary(msgspec.Struct, frozen=True):
    """The control tokens of a model, as far as its template prints them or its turns end with them."""

    special: dict[str, int]
    """Spelling → id."""
    stop_ids: frozenset[int]
    think_open: int | None = None
    think_close: int | None = None


class Suffix(msgspec.Struct, frozen=True):
    close: int
    """The stop token that the template prints behind the assistant's turn."""
    text: str
    """Everything after it, up to where the reply begins; contents still masked."""
    close_text: str = ""


class Bridge(msgspec.Struct, frozen=True):
    ids: Int32Array
    """To be appended to the parent's prompt and sampled ids."""
    flags: dict[str, int] = {}
    """``synthetic_close``, ``synthetic_think_close``, ``other_close``; ``neutralised``: control tokens spelled in contents."""


def dummy_conversation(
    tail: Sequence[bytes], parent_calls: Sequence[tuple[str, str]], spellings: Iterable[str]
) -> tuple[list[bytes], str]:
    """``(messages, mask)``: the stand-in conversation as OpenAI Chat messages. Raises ValueError for a tail that is no JSON
    object with text content, or that holds every mask."""
    known = [spelling for spelling in spellings if len(spelling) > 1]
    decoded = [_read(raw) for raw in tail]
    calls = [list(call) for call in parent_calls]
    mask = _free_mask(msgspec.json.encode([decoded, calls]))
    masking = _Masking(known, mask)
    assistant: dict[str, Any] = {"role": "assistant", "content": SENTINEL}
    if calls:
        arguments = msgspec.json.encode({"x": SENTINEL}).decode()
        assistant["tool_calls"] = [
            {
                "id": masking.field(call_id),
                "type": "function",
                "function": {"name": masking.field(name), "arguments": arguments},
            }
            for call_id, name in parent_calls
        ]
    messages: list[Any] = [{"role": "user", "content": "u"}, assistant]
    messages += [
        {key: masking.content(value) if key == "content" else masking.field(value) for key, value in message.items()}
        for message in decoded
    ]
    return [msgspec.json.encode(message) for message in messages], mask


def suffix_of(text: str, vocabulary: Vocabulary) -> Suffix | None:
    """What the template printed behind the assistant's turn. None: the sentinel was not printed, or nothing ends the turn."""
    at = text.rfind(SENTINEL)
    stops = _any_of(spelling for spelling, token in vocabulary.special.items() if token in vocabulary.stop_ids)
    found = stops.search(text, at + len(SENTINEL)) if at >= 0 and stops is not None else None
    if found is None:
        return None
    return Suffix(close=vocabulary.special[found[0]], text=text[found.end() :], close_text=found[0])


def split(text: str, special: dict[str, int], mask: str) -> list[str | int]:
    """Ids of control tokens, and between them the plain texts without the mask, for an encoder that knows no control token."""
    pattern = _any_of(special)
    pieces: list[str | int] = []
    at = 0
    for found in pattern.finditer(text) if pattern is not None else ():
        pieces += [text[at : found.start()], special[found[0]]]
        at = found.end()
    pieces.append(text[at:])
    clean = [unmasked(piece, mask) if isinstance(piece, str) else piece for piece in pieces]
    return [piece for piece in clean if piece != ""]


def unmasked(text: str, mask: str) -> str:
    """Without the mask, also where a template wrote it as a JSON escape."""
    return re.sub(rf"{mask}|\\u{ord(mask):x}", "", text, flags=re.IGNORECASE) if mask else text


def spelled(pieces: Sequence[str | int], special: Iterable[str]) -> int:
    """How many control tokens the plain texts spell: those that were kept from becoming one."""
    pattern = _any_of(special)
    return sum(len(pattern.findall(piece)) for piece in pieces if isinstance(piece, str)) if pattern is not None else 0


def fenced(text: str, spellings: Iterable[str]) -> list[str]:
    """The text cut inside every one of the spellings, for an encoder that makes a control token of each that it sees whole."""
    pattern = _any_of(spellings)
    if pattern is None:
        return [text]
    cuts = [found.start() + 1 for found in re.finditer(f"(?={pattern.pattern})", text)]
    edges = [0, *cuts, len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges) if end > start]


def closes(
    parent_ids: Int32Array, vocabulary: Vocabulary, close: int, *, opener: bool = False
) -> tuple[list[int], dict[str, int]]:
    """What ends the parent's turn where the parent did not end it with ``close`` itself, and the flags that say so.

    ``opener``: ``close`` is the next role's opening token, which has to stand there whatever other token stopped the sampling.
    """
    last = int(parent_ids[-1])
    if last == close:
        return [], {}
    if last in vocabulary.stop_ids:
        return ([close], {"other_close": 1, "synthetic_close": 1}) if opener else ([], {"other_close": 1})
    if vocabulary.think_close is not None and _thinking(parent_ids, vocabulary):
        return [vocabulary.think_close, close], {"synthetic_close": 1, "synthetic_think_close": 1}
    return [close], {"synthetic_close": 1}


def _thinking(ids: Int32Array, vocabulary: Vocabulary) -> bool:
    """The last of all stops and think marks opens a thought, be it the prompt's or the model's own."""
    if vocabulary.think_open is None:
        return False
    marks = np.array([*vocabulary.stop_ids, vocabulary.think_open, vocabulary.think_close], dtype=np.int32)
    for end in range(ids.size, 0, -_STEP):
        window = ids[max(0, end - _STEP) : end]
        found = np.flatnonzero(np.isin(window, marks))
        if found.size:
            return int(window[found[-1]]) == vocabulary.think_open
    return False


class _Masking:
    """Puts the mask where a control token or the sentinel could be spelled, the same way for equal strings."""

    def __init__(self, spellings: list[str], mask: str) -> None:
        self._whole = _any_of([*spellings, SENTINEL])
        # a spelling may lie across two parts of one content, so its first character alone is enough
        self._firsts = sorted({spelling[0] for spelling in (*spellings, SENTINEL)})
        self._mask = mask

    def _masked(self, text: str) -> str:
        for first in self._firsts:
            text = text.replace(first, first + self._mask)
        return text

    def content(self, value: Any) -> Any:
        """Everywhere in the text, however it is nested."""
        if isinstance(value, str):
            return self._masked(value)
        if isinstance(value, list):
            return [self.content(one) for one in value]
        if isinstance(value, dict):
            return {key: self.content(one) if key != "type" else self.field(one) for key, one in value.items()}
        return value

    def field(self, value: Any) -> Any:
        """Only where a whole spelling stands: ids and names are compared, and some templates ask for a shape."""
        if isinstance(value, str):
            assert self._whole is not None
            return self._masked(value) if self._whole.search(value) else value
        if isinstance(value, list):
            return [self.field(one) for one in value]
        if isinstance(value, dict):
            return {self.field(key): self.field(one) for key, one in value.items()}
        return value


def _read(raw: bytes) -> dict[str, Any]:
    try:
        message = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ValueError(f"unreadable message: {exc}") from exc
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise ValueError("media: a part of the content is no text")
    return message


def _free_mask(encoded: bytes) -> str:
    lowered = encoded.lower()
    for code in _MASKS:
        if chr(code).encode() not in encoded and b"u%x" % code not in lowered:
            return chr(code)
    raise ValueError("the messages hold every private-use character that could be the mask")


def _any_of(spellings: Iterable[str]) -> re.Pattern[str] | None:
    ordered = sorted(set(spellings), key=lambda spelling: (-len(spelling), spelling))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None

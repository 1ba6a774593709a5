"""Which control tokens a model's template prints, found by asking: candidates are what looks like one, in the template's own
text and in what it prints, and each is believed only when the engine's tokenizer makes exactly one id of it wherever it stands.

Invariant: every entry of the vocabulary is atomic. Refuses (None) a model with no known token that ends a turn.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec

from polynya.errors import EngineProtocolError, EngineRejected, EngineUnavailable
from polynya.tokens.bridge import SENTINEL, Vocabulary, fenced, suffix_of

CANDIDATE = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z_]{2,30}\]|[\[\]][~!a-z]{1,6}[\[\]]")
END_SPELLINGS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|return|>",
    "<|eot|>",
    "<turn|>",
    "<eos>",
    "</s>",
    "<｜end▁of▁sentence｜>",
)
_WITH_RETURN = "<|call|>"
"""Ends a turn in Harmony, which has ``<|return|>`` too; elsewhere it may begin a call."""
OPENERS = ("<|user|>", "<|observation|>")
"""They end a turn where nothing else does."""
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<|im_start|>")
_CANDIDATES = 400
_ROUNDS = 8

Render = Callable[[list[bytes], bytes | None, bytes | None], Awaitable[str]]
Encode = Callable[[str], Awaitable[list[int]]]
Pieces = Callable[[str], Awaitable[tuple[list[int], Sequence[str]]]]
"""Ids of a text and the tokens' own spellings."""


async def discover(
    render: Render, encode: Encode, *, template: str = "", stop_ids: Iterable[int] = ()
) -> Vocabulary | None:
    """``encode`` recognises control tokens; ``template`` is its text, where it is known; ``stop_ids`` are known to end turns."""
    texts = [template, *[text for text in [await _rendered(render, probe) for probe in _PROBES] if text is not None]]
    found = [spelling for text in texts for spelling in CANDIDATE.findall(text)]
    candidates = list(dict.fromkeys((*END_SPELLINGS, _WITH_RETURN, *_MARKS, *OPENERS, *found)))[:_CANDIDATES]
    ids = await asyncio.gather(*(atomic(encode, spelling) for spelling in candidates))
    special = {spelling: token for spelling, token in zip(candidates, ids, strict=True) if token is not None}
    stops = {special[spelling] for spelling in END_SPELLINGS if spelling in special} | set(stop_ids)
    if "<|return|>" in special and _WITH_RETURN in special:
        stops.add(special[_WITH_RETURN])
    vocabulary = Vocabulary(
        special=special,
        stop_ids=frozenset(stops),
        think_open=special.get("<think>"),
        think_close=special.get("</think>"),
    )
    if not _ends(texts, vocabulary):
        openers = {special[spelling] for spelling in OPENERS if spelling in special}
        vocabulary = msgspec.structs.replace(vocabulary, stop_ids=frozenset(stops | openers))
    return vocabulary if _ends(texts, vocabulary) else None


async def atomic(encode: Encode, spelling: str) -> int | None:
    """The spelling's one id; None when it merges with what stands beside it, or is several tokens."""
    ids = await encode(f"{spelling}x{spelling}\n{spelling}")
    return ids[0] if ids.count(ids[0]) == 3 and ids[-1] == ids[0] else None


class Fences:
    """Plain encoding by a tokenizer that recognises some control tokens all the same: a text is cut inside each spelling that is
    known to be one, and inside each that the answer shows to be one after all, and then encoded again."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._control: set[str] = set()
        self._ordinary: set[str] = set()

    def add(self, spellings: Iterable[str]) -> None:
        self._control.update(spellings)

    async def encode(self, text: str) -> list[int]:
        for _ in range(_ROUNDS):
            found = await asyncio.gather(*(self._pieces(part) for part in fenced(text, self._control)))
            shown = {piece for _, pieces in found for piece in pieces if CANDIDATE.fullmatch(piece)}
            if not await self._new_control(piece for piece in shown if piece in text):
                return [token for ids, _ in found for token in ids]
        raise EngineProtocolError("the tokenizer makes control tokens of plain text, however it is cut")

    async def _new_control(self, spellings: Iterable[str]) -> bool:
        """Sort the spellings that are new; True when one is a control token."""
        found = False
        for spelling in set(spellings) - self._ordinary:
            control = await atomic(self._ids, spelling) is not None
            (self._control if control else self._ordinary).add(spelling)
            found = found or control
        return found

    async def _ids(self, text: str) -> list[int]:
        return (await self._pieces(text))[0]


def _ends(texts: Sequence[str], vocabulary: Vocabulary) -> bool:
    return any(suffix_of(text, vocabulary) is not None for text in texts)


async def _rendered(render: Render, probe: tuple[list[bytes], bytes | None]) -> str | None:
    """None: the template refuses such a conversation."""
    try:
        return await render(*probe, None)
    except EngineRejected:
        return None
    except EngineUnavailable as exc:
        if exc.status != 500:
            raise
        return None


_ASK = b'{"role":"user","content":"u"}'
_REPLY = b'{"role":"assistant","content":"%b"}' % SENTINEL.encode()
_CALL = (
    b'{"role":"assistant","content":"","tool_calls":[{"id":"zqCall001","type":"function",'
    b'"function":{"name":"peek","arguments":"{\\"x\\":\\"%b\\"}"}}]}' % SENTINEL.encode()
)
_RESULT = b'{"role":"tool","tool_call_id":"zqCall001","name":"peek","content":"r"}'
_TOOLS = (
    b'[{"type":"function","function":{"name":"peek","description":"","parameters":{"type":"object","properties":{}}}}]'
)
_PROBES: tuple[tuple[list[bytes], bytes | None], ...] = (
    ([_ASK, _REPLY, _ASK], None),
    ([_ASK, _CALL, _RESULT], _TOOLS),
    ([b'{"role":"system","content":"s"}', _ASK, _CALL, _RESULT, _REPLY, _ASK], _TOOLS),
)

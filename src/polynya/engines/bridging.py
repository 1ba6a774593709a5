"""Continuing a call in token space: the bridge of ``tokens.bridge``, rendered and encoded by the engine that serves the model.

Invariant: a bridge is made only for a tail whose role pattern passed the self-test against this engine's template (with these
template kwargs, with or without tools): the suffix is the same behind real conversations as behind the stand-in, its ids are
those that the engine itself gives to the whole conversation, and they decode to the template's text. Refuses (None, counted in
``Bridger.refused``) everything else; a bridge that cannot be made never fails a call.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from polynya.engines.vocabulary import OPENERS
from polynya.errors import EngineError, EngineRejected, EngineUnavailable
from polynya.schema import Int32Array
from polynya.tokens.bridge import (
    SENTINEL,
    Bridge,
    Suffix,
    Vocabulary,
    closes,
    dummy_conversation,
    spelled,
    split,
    suffix_of,
    unmasked,
)

_SHORT, _KEPT = 64, 4096
"""Texts up to this length are encoded once; at most so many are kept."""
_TRIES = 3
_SYSTEM = b'{"role":"system"'
_PROBE_TOOLS = (
    b'[{"type":"function","function":{"name":"zq_probe_tool","description":"Probe.",'
    b'"parameters":{"type":"object","properties":{"x":{"type":"string"}},"required":["x"]}}}]'
)


class TemplateDesk(Protocol):
    """A model's chat template and tokenizer, asked of its engine."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    async def render(self, messages: list[bytes], tools: bytes | None, template_kwargs: bytes | None) -> str:
        """The prompt's text, up to where the reply begins."""
        ...

    async def render_ids(self, messages: list[bytes], tools: bytes | None, template_kwargs: bytes | None) -> list[int]:
        """The prompt that the engine itself makes of the messages."""
        ...

    async def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text; no text ever becomes a control token."""
        ...

    async def encode_special(self, text: str) -> list[int]:
        """Ids of a text in which control tokens are recognised, without a begin-of-text token."""
        ...

    async def decode(self, ids: list[int]) -> str:
        """Text of ids, control tokens spelled out."""
        ...


class _Refused(Exception):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Pattern(msgspec.Struct, frozen=True):
    """What a self-test is about."""

    roles: str
    """E.g. ``tool*+user``; ``*``: several of that role in a row."""
    calls: bool
    """The assistant before the tail made tool calls."""
    tools: bool
    template_kwargs: bytes | None


class _Shape(msgspec.Struct, frozen=True):
    opener: bool
    """The template ends an assistant's turn only with the next role's opening token (GLM)."""


class Bridger:
    """One per engine; safe for concurrent use."""

    def __init__(self, desk: TemplateDesk) -> None:
        self.desk = desk
        self.refused: Counter[str] = Counter()
        self._tested: dict[_Pattern, _Shape | str] = {}
        self._testing = asyncio.Lock()
        self._encoded: dict[str, list[int]] = {}

    async def bridge(
        self,
        *,
        parent_ids: Int32Array,
        parent_calls: Sequence[tuple[str, str]],
        tail: Sequence[bytes],
        tools: bytes | None,
        template_kwargs: bytes | None,
    ) -> Bridge | None:
        """The ids to append to a call's prompt and sampled ids. None: refused, and the reason counted."""
        try:
            if not parent_ids.size or not tail:
                raise _Refused("nothing to continue")
            pattern = _pattern(tail, bool(parent_calls), _given(tools) is not None, _given(template_kwargs))
            shape = await self.self_test(pattern)
            if isinstance(shape, str):
                raise _Refused(f"pattern {pattern.roles}: {shape}")
            suffix, mask = await self._suffix(tail, parent_calls, _given(tools), pattern.template_kwargs)
            ids, neutralised = await self._ids(suffix, mask)
        except _Refused as exc:
            self.refused[exc.reason] += 1
        except ValueError as exc:
            self.refused[str(exc).partition(":")[0]] += 1
        except EngineError as exc:
            self.refused[f"engine: {type(exc).__name__}"] += 1
        else:
            before, flags = closes(parent_ids, self.desk.vocabulary, suffix.close, opener=shape.opener)
            if neutralised:
                flags["neutralised"] = neutralised
            return Bridge(ids=np.array(before + ids, dtype=np.int32), flags=flags)
        return None

    async def self_test(self, pattern: _Pattern) -> _Shape | str:
        """The finding about a role pattern, made once: a shape, or why it is refused. Raises EngineError for what may pass."""
        found = self._tested.get(pattern)
        if found is None:
            async with self._testing:
                found = self._tested.get(pattern)
                if found is None:
                    found = await self._test(pattern)
                    if len(self._tested) >= _KEPT:
                        self._tested.clear()
                    self._tested[pattern] = found
        return found

    async def _suffix(
        self,
        tail: Sequence[bytes],
        calls: Sequence[tuple[str, str]],
        tools: bytes | None,
        template_kwargs: bytes | None,
    ) -> tuple[Suffix, str]:
        messages, mask = dummy_conversation(tail, calls, self.desk.vocabulary.special)
        text = await self.desk.render(messages, tools, template_kwargs)
        suffix = suffix_of(text, self.desk.vocabulary)
        if suffix is None:
            raise _Refused("the template does not end the assistant's turn with a known stop token")
        return suffix, mask

    async def _ids(self, suffix: Suffix, mask: str) -> tuple[list[int], int]:
        """The suffix's ids, and how many control tokens its contents only spelled."""
        special = self.desk.vocabulary.special
        pieces = split(suffix.text, special, mask)
        texts = dict.fromkeys(piece for piece in pieces if isinstance(piece, str))
        known = {text: self._encoded[text] for text in texts if text in self._encoded}
        missing = [text for text in texts if text not in known]
        fresh = dict(zip(missing, await self.desk.encode(missing) if missing else [], strict=True))
        control = frozenset(special.values())
        if any(not control.isdisjoint(ids) for ids in fresh.values()):
            raise _Refused("the engine makes control tokens of plain text")
        known |= fresh
        ids = [token for piece in pieces for token in ([piece] if isinstance(piece, int) else known[piece])]
        if len(self._encoded) >= _KEPT:
            self._encoded.clear()
        self._encoded |= {text: encoded for text, encoded in fresh.items() if len(text) <= _SHORT}
        return ids, spelled(pieces, special)

    async def _test(self, pattern: _Pattern) -> _Shape | str:
        try:
            return await self._tested_shape(pattern)
        except _Refused as exc:
            return exc.reason
        except EngineError as exc:
            if _may_pass(exc):
                raise
            return f"the template refuses it: {exc.message[:120]}"

    async def _tested_shape(self, pattern: _Pattern) -> _Shape:
        calls, tail, words = _probe_tail(pattern)
        tools = _PROBE_TOOLS if pattern.tools else None
        kwargs = pattern.template_kwargs
        suffix, mask = await self._suffix(tail, calls, tools, kwargs)
        plain = unmasked(suffix.text, mask)
        if any(plain.count(word) != 1 for word in words):
            raise _Refused("the template does not print the new messages once behind the assistant's turn")
        if "zq_probe_tool" in plain or SENTINEL in plain:
            raise _Refused("the template prints tools or earlier turns behind the assistant's turn")
        ids, _ = await self._ids(suffix, mask)
        for context in _contexts(calls):
            real, text = await self._real(context, tail, tools, kwargs)
            if not text.endswith(suffix.close_text + plain):
                raise _Refused("the template prints the new messages differently behind other conversations")
            whole = await self.desk.render_ids(real, tools, kwargs)
            if whole[-len(ids) - 1 :] != [suffix.close, *ids]:
                raise _Refused("the engine gives the new messages other ids when it encodes the whole conversation")
        if await self.desk.decode([suffix.close, *ids]) != suffix.close_text + plain:
            raise _Refused("the ids do not decode to the template's text")
        return _Shape(opener=await self._is_opener(suffix, calls, tools, kwargs))

    async def _real(
        self, context: list[bytes], tail: list[bytes], tools: bytes | None, kwargs: bytes | None
    ) -> tuple[list[bytes], str]:
        """``(messages, text)`` of a real conversation; without its system message where the template knows none."""
        try:
            return [*context, *tail], await self.desk.render([*context, *tail], tools, kwargs)
        except EngineError as exc:
            if _may_pass(exc) or not context[0].startswith(_SYSTEM):
                raise
        return [*context[1:], *tail], await self.desk.render([*context[1:], *tail], tools, kwargs)

    async def _is_opener(
        self, suffix: Suffix, calls: Sequence[tuple[str, str]], tools: bytes | None, kwargs: bytes | None
    ) -> bool:
        """The turn ends otherwise when another assistant's message follows."""
        messages, _ = dummy_conversation([_said("assistant", "And?")], calls, self.desk.vocabulary.special)
        try:
            text = await self.desk.render(messages, tools, kwargs)
        except EngineError as exc:
            if _may_pass(exc):
                raise
            return suffix.close_text in OPENERS
        other = suffix_of(text, self.desk.vocabulary)
        return other is None or other.close != suffix.close


class LazyBridger:
    """An engine's bridger, made when it is first asked for. An engine that fails three times to say what is needed has none."""

    def __init__(self, make: Callable[[], Awaitable[Bridger | None]]) -> None:
        self._make = make
        self._lock = asyncio.Lock()
        self._made: Bridger | None = None
        self._left = _TRIES

    async def get(self) -> Bridger | None:
        if self._left:
            async with self._lock:
                if self._left:
                    try:
                        self._made = await self._make()
                        self._left = 0
                    except EngineError:
                        self._left -= 1
        return self._made


def _may_pass(failure: EngineError) -> bool:
    """Not said of the conversation itself. llama.cpp answers an error of the template with a 500."""
    return not (
        isinstance(failure, EngineRejected) or (isinstance(failure, EngineUnavailable) and failure.status == 500)
    )


def _contexts(calls: Sequence[tuple[str, str]]) -> list[list[bytes]]:
    """Two real conversations that end with an assistant that made ``calls``."""
    first = [_said("user", "Hello there."), _assistant("Let me see.", calls, 1)]
    second = [_said("system", "Be brief."), _said("user", "Count the files.\nAll of them.")]
    if calls:
        earlier = [("zqEarly01", "look")]
        second += [_assistant("", earlier, 2), _answer(earlier[0], "a.txt\nb.txt")]
    else:
        second += [_assistant("Two files.", [], 2), _said("user", "Sure?")]
    return [first, [*second, _assistant("Done: 2.\n\nAnything else?", calls, 3)]]


class _Role(msgspec.Struct):
    role: str


def _given(raw: bytes | None) -> bytes | None:
    """None also for what says nothing."""
    return None if raw is None or raw.strip() in (b"", b"null", b"[]", b"{}") else raw


def _pattern(tail: Sequence[bytes], calls: bool, tools: bool, template_kwargs: bytes | None) -> _Pattern:
    try:
        roles = [msgspec.json.decode(raw, type=_Role).role for raw in tail]
    except msgspec.DecodeError as exc:
        raise _Refused("unreadable message") from exc
    if "assistant" in roles:
        raise _Refused("an assistant's message among the new ones")
    if not all(role.isalpha() for role in roles):
        raise _Refused("unreadable message")
    runs = [(role, len(list(run))) for role, run in itertools.groupby(roles)]
    if len(runs) > 8:
        raise _Refused("too many turns among the new messages")
    return _Pattern("+".join(f"{role}*" if count > 1 else role for role, count in runs), calls, tools, template_kwargs)


def _probe_tail(pattern: _Pattern) -> tuple[list[tuple[str, str]], list[bytes], list[str]]:
    """``(calls, tail, words)`` of the pattern: three messages for a run, one word in each content that is nowhere else."""
    roles = [
        role for run in pattern.roles.split("+") for role in [run.removesuffix("*")] * (3 if run[-1] == "*" else 1)
    ]
    leading = list(itertools.takewhile(lambda role: role == "tool", roles))
    calls = [(f"zqCall0{n:02}", "peek") for n in range(max(1, len(leading)))] if pattern.calls else []
    words = [f"zqword{n}x" for n in range(len(roles))]
    tail = []
    for n, (role, word) in enumerate(zip(roles, words, strict=True)):
        text = f"{word}: naïve café <b>12{n}</b> & 漢字\n\n\tdef f(x):\n        return {n}  # end"
        call = calls[n] if n < len(calls) else ("zqCall000", "peek")
        tail.append(_answer(call, text) if role == "tool" else _said(role, text))
    return calls, tail, words


def _said(role: str, text: str) -> bytes:
    return msgspec.json.encode({"role": role, "content": text})


def _answer(call: tuple[str, str], text: str) -> bytes:
    return msgspec.json.encode({"role": "tool", "tool_call_id": call[0], "name": call[1], "content": text})


def _assistant(text: str, calls: Sequence[tuple[str, str]], number: int) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        arguments = msgspec.json.encode({"path": f"/tmp/{number}", "deep": {"n": [number, 2.5]}}).decode()
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name in calls
        ]
    return msgspec.json.encode(message)

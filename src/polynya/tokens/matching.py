"""Which captured call a request goes on from, found by what its messages say.

Invariant: a call is found only by a history whose every message says what that call's did (``canonical``), up to and with its
reply, and whose thinking, where it comes back, is what was thought. The index is addressed by content: sub-agents, retries,
abandoned branches and compactions need no rule, and the order of arrival makes no difference but between equal calls. Finding
proves nothing about ids; whoever uses it compares those.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from polynya.tokens.canonical import Said, gone_on, said

_CHAINS = 4
"""Conversations of one session whose digests are kept for the next request: the main one, sub-agents."""

C = TypeVar("C")


class Chain(msgspec.Struct, frozen=True, eq=False):
    """A request's messages and what identifies each beginning of them."""

    messages: Sequence[bytes]
    said: list[Said]
    hashes: list[bytes]
    """One more than messages: ``hashes[i]`` is of the first ``i``."""


class _Entry(msgspec.Struct, Generic[C], frozen=True):
    call: C
    said: Said
    """Its reply."""
    at: int
    """Place of the reply among the messages."""
    given: list[Said]
    """The messages that the engine rendered; of those that a call before this one gave, that one knows more."""
    before: _Entry[C] | None


class Found(msgspec.Struct, Generic[C], frozen=True):
    call: C
    tail_start: int
    """Index of the first message after the call's reply."""
    foreign: bool
    """There is an assistant turn after it, which no captured call gave."""
    entry: _Entry[C]


class Matcher(Generic[C]):
    """The calls of one session attempt. ``chain`` may run in a thread: what it reads is replaced, never changed."""

    def __init__(self) -> None:
        self._index: dict[bytes, list[_Entry[C]]] = {}
        self._chains: list[Chain] = []

    def chain(self, root: bytes, messages: Sequence[bytes]) -> Chain:
        """``root``: what identifies all that stands before the messages."""
        start = _link(b"", root)
        known, shared = self._longest(start, messages)
        spoken = known.said[:shared] if known else []
        hashes = known.hashes[: shared + 1] if known else [start]
        calls = next((message.call_ids for message in reversed(spoken) if message.role == "assistant"), ())
        for raw in messages[shared:]:
            message = said(raw, calls)
            if message.role == "assistant":
                calls = message.call_ids
            spoken.append(message)
            hashes.append(_link(hashes[-1], message.digest))
        chain = Chain(messages, spoken, hashes)
        others = [other for other in self._chains if other is not known or shared < len(known.messages)]
        self._chains = [chain, *others][:_CHAINS]
        return chain

    def commit(self, chain: Chain, replies: Sequence[bytes], call: C, parent: Found[C] | None = None) -> None:
        """``call`` answered ``chain``. ``replies``: the reply, in each form in which it may come back. ``parent``: by whose ids."""
        before = parent.entry if parent is not None else None
        given = [] if parent is not None else chain.said
        spoken = [(len(chain.said), message) for message in map(said, replies)]
        if chain.said and chain.said[-1].role == "assistant":
            begun = chain.messages[-1]
            both = (gone_on(begun, reply, between) for reply in replies for between in ("", "\n"))
            spoken += [(len(chain.said) - 1, message) for message in both if message is not None]
        keys = {_link(chain.hashes[at], message.digest): (at, message) for at, message in reversed(spoken)}
        for key, (at, message) in keys.items():
            self._index.setdefault(key, []).append(_Entry(call, message, at, given[:at], before))

    def find(self, chain: Chain) -> Found[C] | None:
        """The call that gave the last of the assistant turns that is a captured one."""
        foreign = False
        for at in range(len(chain.said), 0, -1):
            echoed = chain.said[at - 1]
            if echoed.role != "assistant":
                continue
            entry = _pick(self._index.get(chain.hashes[at], ()), chain.said, echoed)
            if entry is not None:
                return Found(entry.call, at, foreign, entry)
            foreign = True
        return None

    def _longest(self, start: bytes, messages: Sequence[bytes]) -> tuple[Chain | None, int]:
        best: tuple[Chain | None, int] = (None, 0)
        for chain in self._chains:
            if chain.hashes[0] != start:
                continue
            shared = 0
            for ours, theirs in zip(messages, chain.messages, strict=False):
                if ours is not theirs and ours != theirs:
                    break
                shared += 1
            if shared > best[1]:
                best = (chain, shared)
        return best


def _pick(entries: Sequence[_Entry[C]], history: Sequence[Said], echoed: Said) -> _Entry[C] | None:
    """Of calls that said the same: by the echoed ids, then the echoed thinking, then the latest.

    Thinking that comes back changed, in this turn or in one before it, was edited: then it is none of them.
    """
    fitting = [entry for entry in entries if _as_thought(entry, history)]
    if not fitting:
        return None
    return max(enumerate(fitting), key=lambda pair: (pair[1].said.call_ids == echoed.call_ids, pair[0]))[1]


def _as_thought(entry: _Entry[C], history: Sequence[Said]) -> bool:
    """Whether the thinking in ``history``, where it is given, is what the call's ids hold."""
    last: _Entry[C] | None = entry
    while last is not None:
        thought = history[last.at].reasoning
        if thought and thought != last.said.reasoning:
            return False
        entry, last = last, last.before
    return all(
        not now.reasoning or now.reasoning == then.reasoning for now, then in zip(history, entry.given, strict=False)
    )


def _link(before: bytes, digest: bytes) -> bytes:
    return hashlib.blake2b(before + digest, digest_size=16).digest()

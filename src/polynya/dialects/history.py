"""The leading messages of a session's earlier requests: what comes again, byte for byte, is not parsed again.

An agent sends its whole history with every turn. JSON is read from left to right, so a list that begins with the bytes of an
earlier list begins with its elements; only the rest goes through the parser, in a body from which the known part is cut out.
Invariant: ``Cut.values`` and the elements read from ``Cut.body`` are those of the whole body. The bytes are told apart by a
128-bit hash with a secret seed. Refuses to cut where the list is not the one that the parser found (a key that comes twice,
one inside another field): then the body is parsed in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import xxhash

_RUNS = 4
"""Conversations of one session that are remembered: the main one, sub-agents."""
_CHECKPOINTS = 8
_BACK = (8, 4, 2, 1, 0)
"""Checkpoints are set this many elements before the end: some clients rewrite their last messages with each turn."""
_SPACE = b" \t\r\n"
_COMMA, _END = ord(","), ord("]")

T = TypeVar("T")


class _Checkpoint(msgspec.Struct, frozen=True, gc=False):
    count: int
    """Elements before it."""
    chars: int
    """Their length, from the first byte after the bracket to the last byte of the last of them."""
    digest: bytes


class _Run(msgspec.Struct, Generic[T], frozen=True):
    checkpoints: list[_Checkpoint]
    values: list[T]


class Cut(msgspec.Struct, Generic[T]):
    """A body without the elements that are known."""

    whole: bytes
    start: int
    """Of the list's first element, in both; -1: there is no such list."""
    values: list[T]
    """What the elements that were cut out were parsed to."""
    end: int
    """Of the last of them, in the whole body."""
    rest: int
    """Where the whole body goes on behind them and their comma."""
    run: _Run[T] | None
    hasher: Any
    """Of the whole body's list up to ``end``."""
    _body: bytes | None = None

    @property
    def body(self) -> bytes:
        """The whole without what is known."""
        if self._body is None:
            self._body = self.whole[: self.start] + self.whole[self.rest :] if self.values else self.whole
        return self._body

    def is_of(self, body: bytes, found: msgspec.Raw) -> bool:
        """Whether ``found``, decoded from ``body``, is the list that was cut."""
        return body is self.body and self.start > 0 and _address(found) - _address(body) == self.start - 1


class History(Generic[T]):
    """What one session sent in one dialect. ``seed``: secret, so that no agent can make two texts of one hash."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._runs: list[_Run[T]] = []
        self._frame: tuple[int, int, bytes, Any] | None = None
        """How long what stood before and behind the list was the last time, its digest, and what was made of it."""

    @property
    def chars(self) -> int:
        """Of the longest list that is known."""
        return max((run.checkpoints[-1].chars for run in self._runs), default=0)

    def cut(self, body: bytes, key: bytes) -> Cut[T]:
        """``key``: as it stands in a compact body, with the bracket: ``b'"messages":['``."""
        start = self._frame[0] if self._frame is not None else -1
        if start < 0 or not body.startswith(key, start - len(key)):  # it mostly begins where it did before
            start = body.find(key) + len(key)
        if start < len(key):
            return Cut(body, -1, [], 0, 0, None, None)
        best: Cut[T] = Cut(body, start, [], start, start, None, xxhash.xxh3_128(seed=self._seed))
        for run in self._runs:
            if (found := self._match(body, start, run)) is not None and len(found.values) > len(best.values):
                best = found
        return best

    def _match(self, body: bytes, start: int, run: _Run[T]) -> Cut[T] | None:
        view = memoryview(body)
        hasher = xxhash.xxh3_128(seed=self._seed)
        at, best, kept = start, None, hasher
        for checkpoint in run.checkpoints:
            hasher.update(view[at : start + checkpoint.chars])
            at = start + checkpoint.chars
            if at >= len(body) or hasher.digest() != checkpoint.digest:
                break
            best, kept = checkpoint, hasher.copy()
        if best is None:
            return None
        end = start + best.chars
        rest = _after_element(body, end)
        if rest is None:
            return None
        return Cut(body, start, run.values[: best.count], end, rest, run, kept)

    def framed(self, cut: Cut[T]) -> tuple[Any, bytes] | None:
        """What was made of the same head and tail before, and the bytes between, where the new elements stand.

        When those are a JSON list between brackets, then the list ends there, and the tail is read as it was before.
        """
        if self._frame is None or cut.start < 0:
            return None
        head, tail, digest, frame = self._frame
        end = len(cut.whole) - tail
        if cut.start != head or end < cut.rest or self._digest_around(cut.whole, head, end) != digest:
            return None
        return frame, cut.whole[cut.rest : end]

    def keep_frame(self, cut: Cut[T], end: int, frame: Any) -> None:
        """``end``: of the list's last element, as ``remember`` found it."""
        if end >= 0 and cut.whole[end : end + 1] == b"]":
            digest = self._digest_around(cut.whole, cut.start, end)
            self._frame = (cut.start, len(cut.whole) - end, digest, frame)

    def _digest_around(self, body: bytes, start: int, end: int) -> bytes:
        view = memoryview(body)
        hasher = xxhash.xxh3_128(view[:start], seed=self._seed)
        hasher.update(view[end:])
        return hasher.digest()

    def remember(self, cut: Cut[T], raws: Sequence[msgspec.Raw], values: list[T]) -> int:
        """The elements of ``cut.body`` (``raws``, in order) were parsed to ``values``. A failed search forgets nothing.

        Gives the end of the last one in the whole body; -1 when they do not stand there as they were read.

        A value that equals what the element was before (its bytes changed, what it says did not) is replaced by that in
        ``values``, so that a session holds it once.
        """
        known = len(cut.values)
        if cut.run is not None:
            for i, before in enumerate(cut.run.values[known : known + len(values)]):
                if values[i] == before:
                    values[i] = before
        total = known + len(raws)
        wanted = {total - back for back in _BACK} | {known + 1 if not known else 0}
        checkpoints = [point for point in cut.run.checkpoints if point.count <= known] if cut.run is not None else []
        at = hashed = cut.end
        view = memoryview(cut.whole)
        for count, raw in enumerate(raws, known + 1):
            at = _element(cut.whole, at)
            if not cut.whole.startswith(raw, at):
                return -1
            at += len(memoryview(raw))
            if count in wanted:
                cut.hasher.update(view[hashed:at])
                hashed = at
                checkpoints.append(_Checkpoint(count, at - cut.start, cut.hasher.digest()))
        if not checkpoints:
            return at
        if len(checkpoints) > _CHECKPOINTS:
            checkpoints = checkpoints[:1] + checkpoints[1 - _CHECKPOINTS :]
        run = _Run(checkpoints, [*cut.values, *values])
        self._runs = [run, *(other for other in self._runs if other is not cut.run)][:_RUNS]
        return at


def _element(body: bytes, at: int) -> int:
    """Where the next element begins, at or after ``at``."""
    while at < len(body) and (body[at] in _SPACE or body[at] == _COMMA):
        at += 1
    return at


def _after_element(body: bytes, at: int) -> int | None:
    """Behind an element and its comma; None where the list does not go on or end as JSON wants it."""
    while at < len(body) and body[at] in _SPACE:
        at += 1
    if at >= len(body) or body[at] not in (_COMMA, _END):
        return None
    if body[at] == _END:
        return at
    at += 1
    while at < len(body) and body[at] in _SPACE:
        at += 1
    return None if at >= len(body) or body[at] in (_COMMA, _END) else at


def _address(buffer: msgspec.Raw | bytes) -> int:
    return int(np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0])

"""A new prompt as what an earlier call of its session holds of it, and the rest: the part that has to be stored.

Invariant: ``base``'s ``(prompt + sampled)[:keep]`` followed by ``context`` is the prompt, id by id: proved on the ids, or on
their canonical printed form, never by a hash. A prompt that extends the latest call costs a comparison of bytes and the
reading of what is new. Where that is long and canonical, it is stored as it was printed, and read when its ids are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from polynya.capture.calls import EMPTY_IDS, StoredCall
from polynya.schema import Int32Array
from polynya.tokens.printed import PrintedIds, ids_in, may_stay_printed, offset_of, read_printed, reread
from polynya.tokens.validate import common_prefix


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt, in its place."""

    base: StoredCall | None
    keep: int
    context_len: int
    read: Int32Array | None = None
    """``context``; None: it is not read yet."""
    context_text: bytes | None = None
    """``context`` as it was printed; None: not known."""
    pieces: list[bytes] = []
    """The whole prompt as it was printed, in pieces that other calls share; empty: not known."""

    @property
    def context(self) -> Int32Array:
        """The ids behind the first ``keep``."""
        return self.read if self.read is not None else reread(self.context_text or b"")

    @property
    def unread(self) -> bytes:
        """``context_text``, when that is all there is; its ids are none below 0."""
        return self.context_text or b"" if self.read is None else b""

    @property
    def length(self) -> int:
        return self.keep + self.context_len

    def to_judge(self, vocab_size: int | None) -> tuple[int, Int32Array]:
        """So many leading ids need no judgement any more, the others do."""
        return (self.length, EMPTY_IDS) if self.unread and vocab_size is None else (self.keep, self.context)


class Leaf(msgspec.Struct, frozen=True):
    """A call that a later prompt may extend."""

    call: StoredCall
    pieces: list[bytes] = []
    """Its prompt as printed; empty: not known."""
    sampled_text: bytes = b""
    """Its sampled ids as printed."""


class Match(msgspec.Struct, frozen=True):
    """A printed prompt begins with what a leaf holds."""

    leaf: Leaf
    keep: int
    """Ids of the leaf."""
    at: int
    """Where the print goes on behind them."""
    held: list[bytes]
    """Their print, in pieces."""


def longest_match(prompt: PrintedIds, leaves: Sequence[Leaf]) -> Match | None:
    """The leaf that shares most leading ids with ``prompt``; None when none shares any. Leaves: the latest first."""
    best: Match | None = None
    for leaf in leaves:
        found = _match(prompt, leaf)
        if found is not None and (best is None or found.keep > best.keep):
            best = found
            if found.keep == leaf.call.total_len:
                break
    return best


def _match(prompt: PrintedIds, leaf: Leaf) -> Match | None:
    at = 0
    for i, piece in enumerate(leaf.pieces):
        further = prompt.after(piece, at)
        if further < 0:
            return _match_within(prompt, leaf, i, at)
        at = further
    if not leaf.pieces:
        return None
    keep = leaf.call.prompt_len
    if leaf.sampled_text and (further := prompt.after(leaf.sampled_text, at)) >= 0:
        return Match(leaf, leaf.call.total_len, further, [*leaf.pieces, leaf.sampled_text])
    chars = prompt.shared(leaf.sampled_text, at)
    return _ending_within(leaf, keep, at, leaf.pieces, leaf.sampled_text, chars)


def _match_within(prompt: PrintedIds, leaf: Leaf, i: int, at: int) -> Match | None:
    """The prompt goes other ways within the ``i``-th piece, which stands at ``at``."""
    keep = sum(map(ids_in, leaf.pieces[:i]))
    piece = leaf.pieces[i]
    found = _ending_within(leaf, keep, at, leaf.pieces[:i], piece, prompt.shared(piece, at))
    return found if found.keep else None


def _ending_within(leaf: Leaf, keep: int, at: int, held: list[bytes], piece: bytes, chars: int) -> Match:
    if not chars:
        return Match(leaf, keep, at, held)
    shared = piece[:chars]
    return Match(leaf, keep + ids_in(shared), at + chars + 1, [*held, shared])


def place(prompt: Int32Array | PrintedIds, leaves: Sequence[Leaf], match: Match | None = None) -> Placed | None:
    """``match``: of a printed prompt, when it was looked for. None: an id does not fit into 32 bits.

    Raises ValueError when the print is no list of ids.
    """
    if not isinstance(prompt, PrintedIds):
        base, keep = best_base(prompt, leaves)
        return _in_ids(base, prompt, keep)
    match = match or longest_match(prompt, leaves)
    return _read_whole(prompt.text, leaves) if match is None else _read_rest(prompt.rest(match.at), match)


def _read_rest(rest: bytes, match: Match) -> Placed | None:
    base, keep = match.leaf.call, match.keep
    if may_stay_printed(rest):
        return Placed(base=base, keep=keep, context_len=ids_in(rest), context_text=rest, pieces=[*match.held, rest])
    context, printed = read_printed(rest)
    if context is None:
        return None
    pieces = [*match.held, rest] if rest else match.held
    return Placed(
        base=base,
        keep=keep,
        context_len=context.size,
        read=context,
        context_text=rest if printed else None,
        pieces=pieces if printed else [],
    )


def _read_whole(text: bytes, leaves: Sequence[Leaf]) -> Placed | None:
    """No leaf is printed and shares anything."""
    others = [leaf for leaf in leaves if not leaf.pieces]
    if not others and may_stay_printed(text):
        return Placed(base=None, keep=0, context_len=ids_in(text), context_text=text, pieces=[text])
    ids, printed = read_printed(text)
    if ids is None:
        return None
    base, keep = best_base(ids, others)
    if not printed:
        return _in_ids(base, ids, keep)
    at = offset_of(text, keep)
    rest = text[at:]
    pieces = [piece for piece in (text[: max(0, at - 1)], rest) if piece]
    context = ids[keep:].copy()
    return Placed(base=base, keep=keep, context_len=context.size, read=context, context_text=rest, pieces=pieces)


def _in_ids(base: StoredCall | None, prompt: Int32Array, keep: int) -> Placed:
    return Placed(base=base, keep=keep, context_len=len(prompt) - keep, read=prompt[keep:])


def best_base(prompt: Int32Array, leaves: Sequence[Leaf]) -> tuple[StoredCall | None, int]:
    """The leaf whose ids share the longest prefix with ``prompt``, and its length; (None, 0) when none shares anything."""
    best: tuple[StoredCall | None, int] = (None, 0)
    for leaf in leaves:
        shared = common_prefix(prompt, leaf.call.full_ids)
        if shared > best[1]:
            best = (leaf.call, shared)
    return best

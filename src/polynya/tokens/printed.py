"""Token ids as engines print them: `1,22,333`. A long prompt is compared in this form, and only what is new of it is read.

Invariant: a printed form that is kept is canonical (decimal, no sign, space or leading zero), so equal text is equal ids and
the other way round. Refuses what is no list of integers; never skips or guesses an id.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from polynya.schema import Int32Array

_COMMA = ord(",")
_ZERO = ord("0")
_LONG = 8192
_INT32_MAX = 2**31 - 1
_DIGITS = 10
_SURE_DIGITS = 9
"""Ids of so many digits fit into 32 bits."""


class PrintedIds(msgspec.Struct, frozen=True):
    """The inside of a JSON list of ids, ``body[start:end]``, not read yet: its reader may find that it is none."""

    body: bytes
    start: int
    end: int

    @property
    def text(self) -> bytes:
        return self.body[self.start : self.end]

    def after(self, piece: bytes, at: int) -> int:
        """Where the text goes on behind ``piece`` and a comma, when that stands at ``at``; -1 when other ids do.

        The length of the text plus one when nothing follows.
        """
        end = self.start + at + len(piece)
        if not self.body.startswith(piece, self.start + at, self.end):
            return -1
        return -1 if end < self.end and self.body[end] != _COMMA else at + len(piece) + 1

    def shared(self, piece: bytes, at: int) -> int:
        """Characters of the ids that ``piece`` and the text at ``at`` begin with, both whole; without the comma after them."""
        here = np.frombuffer(
            self.body, np.uint8, max(0, min(len(piece), len(self) - at)), min(self.start + at, self.end)
        )
        there = np.frombuffer(piece, np.uint8, here.size)
        differs = here != there
        same = int(differs.argmax()) if differs.any() else here.size
        if same == len(self) - at and same < len(piece) and piece[same] == _COMMA:
            return same
        return max(0, piece.rfind(b",", 0, same))

    def rest(self, at: int) -> bytes:
        return self.body[self.start + at : self.end]

    def __len__(self) -> int:
        return self.end - self.start


class GivenIds(msgspec.Struct, frozen=True):
    """Ids to be sent: as an array, or as canonical prints one after the other, which other calls share."""

    array: Int32Array | None = None
    pieces: list[bytes] = []

    @property
    def ids(self) -> Int32Array:
        return self.array if self.array is not None else reread(b",".join(self.pieces))

    def print(self) -> list[bytes]:
        """Pieces with the commas between them."""
        pieces = self.pieces if self.array is None else [print_ids(self.array)]
        return [part for piece in pieces for part in (b",", piece)][1:]


def printed(text: bytes) -> PrintedIds:
    return PrintedIds(text, 0, len(text))


def read_ids(text: bytes) -> Int32Array | None:
    """Ids of the inside of a JSON list. None when one does not fit into 32 bits: such ids cannot be stored.

    Raises ValueError when it is no list of integers.
    """
    return read_printed(text)[0]


def read_printed(text: bytes) -> tuple[Int32Array | None, bool]:
    """The same, and whether the text is canonical."""
    if not text or text.isspace():
        return np.empty(0, dtype=np.int32), not text
    if _is_canonical(text):
        ids = np.fromstring(text.decode("ascii"), dtype=np.int64, sep=",")
        return ids.astype(np.int32) if ids.max() <= _INT32_MAX else None, True
    return _decoded(text), False


def narrowed(ids: np.ndarray[Any, np.dtype[np.int64]]) -> Int32Array | None:
    """The same in 32 bits, or None when they do not fit."""
    if ids.size and not -_INT32_MAX <= ids.min() <= ids.max() <= _INT32_MAX:
        return None
    return ids.astype(np.int32)


# The methods of bytes go byte by byte for so short a needle; on half a megabyte numpy is ten times faster.


def ids_in(text: bytes) -> int:
    """How many ids a text that is not empty holds."""
    if len(text) < _LONG:
        return text.count(b",") + 1
    return int(np.count_nonzero(np.frombuffer(text, dtype=np.uint8) == _COMMA)) + 1


def listed(ids: list[int]) -> Int32Array | None:
    """The same of integers of any size."""
    try:
        return narrowed(np.array(ids, dtype=np.int64))
    except OverflowError:
        return None


def may_stay_printed(text: bytes) -> bool:
    """Whether it is long, canonical, and each of its ids surely fits into 32 bits: then it can be read at any later time.

    (Reading half a megabyte takes 2 ms, knowing this a tenth of it.)
    """
    if len(text) < _LONG or not _is_canonical(text):
        return False
    octets = np.frombuffer(text, dtype=np.uint8)
    runs = octets != _COMMA  # of one digit and more; then of two, four, eight, ten
    for further in (1, 2, 4, _SURE_DIGITS - 7):
        runs = runs[:-further] & runs[further:]
    return not runs.any()


def _decoded(text: bytes) -> Int32Array | None:
    """The same for a text of any form."""
    try:
        if text.translate(None, b"0123456789,- \n\r\t"):
            raise ValueError("other characters than those of integers")
        return listed(msgspec.json.decode(b"[" + text + b"]", type=list[int]))
    except (ValueError, msgspec.DecodeError) as exc:
        raise ValueError(f"no list of integers: it starts with {text.strip()[:60]!r}") from exc


def reread(text: bytes) -> Int32Array:
    """Ids of a canonical text that was read before."""
    return np.fromstring(text.decode("ascii"), dtype=np.int32, sep=",") if text else np.empty(0, dtype=np.int32)


def print_ids(ids: Int32Array) -> bytes:
    return ",".join(map(str, ids.tolist())).encode()


def _is_canonical(text: bytes) -> bool:
    """Whether it is a list of ids as ``print_ids`` prints it."""
    if not _all_digits_and_commas(text) or text.startswith(b",") or text.endswith(b","):
        return False
    octets = np.frombuffer(text + b",", dtype=np.uint8)
    doubtful = np.flatnonzero((octets[:-2] == _COMMA) & (octets[1:-1] <= _ZERO)) + 1
    if octets[0] == _ZERO:
        doubtful = np.append(doubtful, 0)
    return not doubtful.size or bool((octets[doubtful] == _ZERO).all() and (octets[doubtful + 1] == _COMMA).all())


def _all_digits_and_commas(text: bytes) -> bool:
    if len(text) < _LONG:
        return not text.translate(None, b"0123456789,")
    octets = np.frombuffer(text, dtype=np.uint8)
    digits = np.count_nonzero(octets - np.uint8(_ZERO) < _DIGITS)
    return bool(digits + np.count_nonzero(octets == _COMMA) == octets.size)


def offset_of(text: bytes, index: int) -> int:
    """Where the id with this index begins in a canonical text; 1 past its end for the index after the last."""
    if index == 0:
        return 0
    commas = np.flatnonzero(np.frombuffer(text, dtype=np.uint8) == _COMMA)
    return int(commas[index - 1]) + 1 if index <= commas.size else len(text) + 1

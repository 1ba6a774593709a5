"""Frames of a journal segment: how a record is found again after a crash or a flipped bit.

A segment is ``HEADER`` (magic, version, 8 random sync bytes), then frames ``sync · length u32 · sum u32 · payload``, all
little-endian; the sum covers length and payload: the low half of xxh3-64 seeded with the length, in version 1 crc32. The sync
bytes are random for each segment, so that nothing an agent writes into its messages can pass for a frame. A torn tail and a
damaged frame are reported, and the frames around them are read; a record that fails its sum is never returned.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator

import msgspec
import xxhash

MAGIC = b"POLYNYA-JOURNAL\x02"
_MAGIC_OF_1 = b"POLYNYA-JOURNAL\x01"
SYNC_BYTES = 8
HEADER_BYTES = len(MAGIC) + SYNC_BYTES
_LENGTHS = struct.Struct("<II")
FRAME_BYTES = SYNC_BYTES + _LENGTHS.size


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    offset: int
    """Of the first byte that could not be read."""
    size: int
    torn_tail: bool
    """At the end of the segment: a write that never finished, which loses nothing that was acknowledged."""


def header(sync: bytes) -> bytes:
    return MAGIC + sync


def frame(sync: bytes, payload: bytes) -> bytes:
    size = len(payload)
    return sync + _LENGTHS.pack(size, _sum(size, payload)) + payload


def _sum(size: int, payload: bytes) -> int:
    return xxhash.xxh3_64_intdigest(payload, seed=size) & 0xFFFFFFFF


def _crc(size: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(size.to_bytes(4, "little")))


_SUMS: dict[bytes, Callable[[int, bytes], int]] = {MAGIC: _sum, _MAGIC_OF_1: _crc}


def _payload_at(data: bytes, sync: bytes, at: int, sum_of: Callable[[int, bytes], int]) -> bytes | None:
    if data[at : at + SYNC_BYTES] != sync or at + FRAME_BYTES > len(data):
        return None
    size, told = _LENGTHS.unpack_from(data, at + SYNC_BYTES)
    payload = data[at + FRAME_BYTES : at + FRAME_BYTES + size]
    return payload if len(payload) == size and sum_of(size, payload) == told else None


def unframe(data: bytes) -> bytes | None:
    """The payload of one whole frame of this version; None when it is none."""
    payload = _payload_at(data, data[:SYNC_BYTES], 0, _sum)
    return payload if payload is not None and FRAME_BYTES + len(payload) == len(data) else None


def read_frames(data: bytes) -> Iterator[bytes | Damage]:
    """The payloads of one whole segment in order, with a Damage where bytes had to be skipped."""
    sum_of = _SUMS.get(data[: len(MAGIC)])
    if sum_of is None or len(data) < HEADER_BYTES:
        yield Damage(offset=0, size=len(data), torn_tail=len(data) < HEADER_BYTES)
        return
    sync = data[len(MAGIC) : HEADER_BYTES]
    at = HEADER_BYTES
    while at < len(data):
        payload = _payload_at(data, sync, at, sum_of)
        if payload is not None:
            yield payload
            at += FRAME_BYTES + len(payload)
            continue
        later = data.find(sync, at + 1)
        while later >= 0 and _payload_at(data, sync, later, sum_of) is None:
            later = data.find(sync, later + 1)
        end = later if later >= 0 else len(data)
        yield Damage(offset=at, size=end - at, torn_tail=later < 0)
        at = end

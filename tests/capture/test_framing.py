"""Frames: what is read back after a torn tail, a flipped bit, a lost header."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from polynya.capture.framing import FRAME_BYTES, HEADER_BYTES, MAGIC, Damage, frame, header, read_frames

SYNC = b"\x93\x1f\xd0\x8a\x55\xaa\x00\x7f"
PAYLOADS = [b"first record", b"", b"third " * 40]


def segment(payloads: list[bytes]) -> bytes:
    return header(SYNC) + b"".join(frame(SYNC, payload) for payload in payloads)


def test_whole_segment_gives_all_payloads() -> None:
    assert list(read_frames(segment(PAYLOADS))) == PAYLOADS


def test_cut_at_every_byte_gives_a_prefix_and_reports_the_rest() -> None:
    data = segment(PAYLOADS)
    ends = [HEADER_BYTES]
    for payload in PAYLOADS:
        ends.append(ends[-1] + FRAME_BYTES + len(payload))
    for cut in range(len(data)):
        found = list(read_frames(data[:cut]))
        whole = sum(end <= cut for end in ends[1:])
        assert [item for item in found if isinstance(item, bytes)] == PAYLOADS[:whole]
        damages = [item for item in found if isinstance(item, Damage)]
        assert [damage.torn_tail for damage in damages] == ([] if cut in ends else [True])


@given(position=st.integers(0, len(segment(PAYLOADS)) - 1), bit=st.integers(0, 7))
def test_flipped_bit_never_gives_a_wrong_payload(position: int, bit: int) -> None:
    data = bytearray(segment(PAYLOADS))
    data[position] ^= 1 << bit
    found = list(read_frames(bytes(data)))
    payloads = [item for item in found if isinstance(item, bytes)]
    assert [payload for payload in PAYLOADS if payload in payloads] == payloads
    assert any(isinstance(item, Damage) for item in found)


def test_damage_in_the_middle_is_passed_over_and_counted() -> None:
    data = bytearray(segment(PAYLOADS))
    data[HEADER_BYTES + FRAME_BYTES] ^= 0xFF
    first, *rest = read_frames(bytes(data))
    assert first == Damage(offset=HEADER_BYTES, size=FRAME_BYTES + len(PAYLOADS[0]), torn_tail=False)
    assert rest == PAYLOADS[1:]


def test_frame_forged_inside_a_damaged_record_is_not_believed() -> None:
    forged = frame(b"\0" * 8, b"forged")
    data = bytearray(segment([forged, b"true"]))
    data[HEADER_BYTES + FRAME_BYTES - 1] ^= 1
    assert [item for item in read_frames(bytes(data)) if isinstance(item, bytes)] == [b"true"]


def test_sync_bytes_inside_a_damaged_payload_are_passed_over() -> None:
    data = bytearray(segment([b"x" + SYNC + b"y" * 30, b"true"]))
    data[HEADER_BYTES + FRAME_BYTES] ^= 1
    assert [item for item in read_frames(bytes(data)) if isinstance(item, bytes)] == [b"true"]


def test_segment_of_version_1_is_read() -> None:
    data = b"POLYNYA-JOURNAL\x01" + SYNC
    for payload in PAYLOADS:
        size = len(payload).to_bytes(4, "little")
        data += SYNC + size + zlib.crc32(size + payload).to_bytes(4, "little") + payload
    assert list(read_frames(data)) == PAYLOADS
    assert list(read_frames(data[:-1] + b"?"))[:-1] == PAYLOADS[:-1]


def test_segment_of_a_later_version_is_damage() -> None:
    data = b"POLYNYA-JOURNAL\x03" + segment(PAYLOADS)[len(MAGIC) :]
    assert list(read_frames(data)) == [Damage(offset=0, size=len(data), torn_tail=False)]


def test_alien_file_is_damage_and_no_records() -> None:
    assert list(read_frames(b"something else, long enough to be a header")) == [
        Damage(offset=0, size=42, torn_tail=False)
    ]


def test_empty_file_is_a_torn_tail() -> None:
    assert list(read_frames(b"")) == [Damage(offset=0, size=0, torn_tail=True)]

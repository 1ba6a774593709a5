"""Reports of routed experts, placed beside ids or refused."""

import base64

import msgspec
import numpy as np
import pytest

from polynya.tokens.routing import aligned, read_routing

LAYERS, EXPERTS = 3, 2


def report(rows: int) -> list[list[list[int]]]:
    return np.arange(rows * LAYERS * EXPERTS).reshape(rows, LAYERS, EXPERTS).tolist()


def packed(rows: int) -> str:
    return base64.b64encode(np.array(report(rows), dtype="<i4").tobytes()).decode()


@pytest.mark.parametrize("rows", [9, 10])
def test_a_report_with_or_without_the_last_id_lies_beside_the_same_ids(rows: int) -> None:
    found = read_routing(msgspec.json.encode(report(rows)))
    assert found is not None and found.shape == [LAYERS, EXPERTS]
    placed = aligned(found, 10)
    assert placed is not None and placed.shape == (9, LAYERS * EXPERTS)
    assert placed[4].tolist() == list(range(24, 30))


@pytest.mark.parametrize("rows", [1, 8, 11, 20])
def test_a_report_of_any_other_length_is_refused_and_never_shifted(rows: int) -> None:
    found = read_routing(msgspec.json.encode(report(rows)))
    assert found is not None and aligned(found, 10) is None


def test_flat_bytes_are_read_by_the_length_of_the_ids() -> None:
    found = read_routing(msgspec.json.encode(packed(9)))
    assert found is not None and (found.rows, found.shape) == (0, [])
    placed = aligned(found, 10)
    assert placed is not None and placed[4].tolist() == list(range(24, 30))
    whole = read_routing(msgspec.json.encode(packed(7)))
    assert whole is not None and aligned(whole, 7) is not None
    assert aligned(whole, 12) is None and aligned(whole, 1) is None


@pytest.mark.parametrize(
    "raw",
    [b"null", b"[]", b"[[1]]", b'"$"', b'""', b"{}", b"[[[1]],[[1,2]]]", b"[[[-1]]]", b"[[[70000]]]", b"[[[1.5]", b"7"],
)
def test_what_is_no_report_is_none(raw: bytes) -> None:
    assert read_routing(raw) is None

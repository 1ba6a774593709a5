"""Printed ids: reading, canonical form, comparison and cutting without reading."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polynya.tokens.printed import cut, is_canonical, offset_of, print_ids, printed, read_ids

ids = st.lists(st.integers(0, 2**31 - 1), max_size=12)


def text_of(values: list[int]) -> bytes:
    return print_ids(np.array(values, dtype=np.int32))


@given(ids)
def test_print_is_canonical_and_reads_back(values: list[int]) -> None:
    text = text_of(values)
    found = read_ids(text)
    assert found is not None and found.tolist() == values
    assert is_canonical(text)


@pytest.mark.parametrize("text", [b"01", b"1,007", b"1, 2", b"-1", b"1,\n2", b"00"])
def test_another_spelling_of_the_same_ids_is_not_canonical(text: bytes) -> None:
    assert read_ids(text) is not None
    assert not is_canonical(text)


def test_zero_is_canonical() -> None:
    assert is_canonical(b"0,10,0")


@pytest.mark.parametrize("text", [b"1,,2", b"1,", b",", b"a", b"1.5", b"1e3", b'"1"', b"1;2", b"1 2"])
def test_what_is_no_list_of_integers_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="no list of integers"):
        read_ids(text)


def test_an_id_beyond_32_bits_makes_all_unusable() -> None:
    assert read_ids(b"1,4294967296") is None


@given(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=4), max_size=4), st.lists(st.integers(0, 300)))
def test_text_goes_on_behind_pieces_exactly_when_the_ids_do(pieces: list[list[int]], values: list[int]) -> None:
    head = [value for piece in pieces for value in piece]
    for whole in (head + values, values):
        at = printed(text_of(whole)).after([text_of(piece) for piece in pieces])
        begins = whole[: len(head)] == head
        assert (at >= 0) is begins
        if begins:
            rest = read_ids(text_of(whole)[at:])
            assert rest is not None and rest.tolist() == whole[len(head) :]


def test_an_id_that_only_begins_alike_is_another_id() -> None:
    assert printed(b"12,34").after([b"1"]) == -1
    assert printed(b"12,34").after([b"12,3"]) == -1
    assert printed(b"12,34").after([b"12", b"34"]) == len(b"12,34") + 1


@given(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=4), min_size=1, max_size=4), st.data())
def test_cut_pieces_are_the_first_ids(pieces: list[list[int]], data: st.DataObject) -> None:
    whole = [value for piece in pieces for value in piece]
    keep = data.draw(st.integers(0, len(whole)))
    at = offset_of(text_of(whole), keep)
    found = cut([text_of(piece) for piece in pieces], at - 1)
    assert b",".join(found) == text_of(whole[:keep])

"""Printed ids: reading, canonical form, comparison and cutting without reading."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polynya.tokens.printed import (
    GivenIds,
    ids_in,
    may_stay_printed,
    offset_of,
    print_ids,
    printed,
    read_ids,
    read_printed,
)


def is_canonical(text: bytes) -> bool:
    return read_printed(text)[1]


ids = st.lists(st.integers(0, 2**31 - 1), max_size=12)


def text_of(values: list[int]) -> bytes:
    return print_ids(np.array(values, dtype=np.int32))


@given(ids)
def test_print_is_canonical_and_reads_back(values: list[int]) -> None:
    text = text_of(values)
    found = read_ids(text)
    assert found is not None and found.tolist() == values
    assert is_canonical(text)


@pytest.mark.parametrize("text", [b"1, 2", b"-1", b"1,\n2", b" 1"])
def test_another_spelling_of_the_same_ids_is_not_canonical(text: bytes) -> None:
    assert read_ids(text) is not None
    assert not is_canonical(text)


@pytest.mark.parametrize("ids", [[7] * 9000, [7] * 9001, [0, 7] * 4500, [10] * 9000])
def test_long_lists_are_read_as_short_ones(ids: list[int]) -> None:
    text = text_of(ids)
    found = read_ids(text)
    assert found is not None and found.tolist() == ids
    assert is_canonical(text) and ids_in(text) == len(ids)
    for odd in (b"", b"5,"):
        assert not is_canonical(odd + text + b", 7")
        for wrong in (b",07", b",,7", b","):
            with pytest.raises(ValueError, match="no list of integers"):
                read_ids(odd + text + wrong)


@given(
    st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 11), min_size=1), st.sampled_from([b",", b", ", b",,", b",0"])
)
def test_what_stays_printed_is_what_reads_back_as_it_was_printed(values: list[int], between: bytes) -> None:
    text = between.join(b"%d" % value for value in values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polynya.tokens.printed._LONG", 1)
        stays = may_stay_printed(text)
    canonical = between == b"," or len(values) == 1
    assert stays is (canonical and max(values) < 10**9)


def test_a_short_print_is_read_at_once() -> None:
    assert not may_stay_printed(b"1,2,3")


def test_zero_is_canonical() -> None:
    assert is_canonical(b"0,10,0")


@pytest.mark.parametrize(
    "text",
    [b"1,,2", b"1,", b",", b"a", b"1.5", b"1e3", b'"1"', b"1;2", b"1 2", b"-", b" ,1", b"1, ,2", b"01", b"1,007"],
)
@pytest.mark.filterwarnings("ignore")
def test_what_is_no_list_of_integers_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="no list of integers"):
        read_ids(text)


@given(st.text(st.sampled_from("0123,- \n"), max_size=9))
@pytest.mark.filterwarnings("ignore")
def test_a_text_is_read_as_json_reads_it(text: str) -> None:
    """Outside of tests numpy only warns of what it cannot read, and takes a 0 for it."""
    try:
        values = json.loads(f"[{text}]")
    except ValueError:
        with pytest.raises(ValueError, match="no list of integers"):
            read_ids(text.encode())
    else:
        found = read_ids(text.encode())
        assert found is not None and found.tolist() == values
        assert not is_canonical(text.encode()) or print_ids(found) == text.encode()


def test_an_id_beyond_32_bits_makes_all_unusable() -> None:
    assert read_ids(b"1,4294967296") is None
    assert read_ids(b"1, 4294967296") is None
    assert read_ids(b"1, 18446744073709551616") is None


@given(ids.filter(bool), ids, st.integers(0, 3))
def test_text_goes_on_behind_a_piece_exactly_when_the_ids_do(piece: list[int], rest: list[int], drop: int) -> None:
    head = [7, 77]
    at = len(b"7,77,")
    for whole in (head + piece + rest, head + piece[drop:] + rest):
        found = printed(text_of(whole)).after(text_of(piece), at)
        begins = whole[2 : 2 + len(piece)] == piece
        assert (found >= 0) is begins
        if begins:
            after = read_ids(printed(text_of(whole)).rest(found))
            assert after is not None and after.tolist() == whole[2 + len(piece) :]


few = st.lists(st.sampled_from([0, 1, 11, 111, 12]), max_size=5)


@given(few, few)
def test_shared_characters_are_those_of_the_ids_that_both_begin_with(whole: list[int], piece: list[int]) -> None:
    common = 0
    while common < min(len(whole), len(piece)) and whole[common] == piece[common]:
        common += 1
    chars = printed(text_of(whole)).shared(text_of(piece), 0)
    found = read_ids(text_of(piece)[:chars])
    # a piece that is whole in the text is asked for with ``after``
    assert common == len(piece) or (found is not None and found.tolist() == piece[:common])


def test_an_id_that_only_begins_alike_is_another_id() -> None:
    assert printed(b"12,34").after(b"1", 0) == -1
    assert printed(b"12,34").after(b"12,3", 0) == -1
    assert printed(b"12,34").after(b"12,34", 0) == len(b"12,34") + 1
    assert printed(b"12,34").shared(b"12,35", 0) == len(b"12")


def test_a_text_that_ends_with_an_id_of_the_piece_shares_it() -> None:
    assert printed(b"5,12").shared(b"12,3", len(b"5,")) == len(b"12")
    assert printed(b"5,1").shared(b"12,3", len(b"5,")) == 0


@given(ids, st.data())
def test_offset_is_where_the_id_begins(values: list[int], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(values)))
    rest = read_ids(text_of(values)[offset_of(text_of(values), index) :])
    assert rest is not None and rest.tolist() == values[index:]


def test_given_ids_are_sent_as_pieces_or_printed() -> None:
    pieces = GivenIds(pieces=[b"1,2", b"3"])
    assert pieces.ids.tolist() == [1, 2, 3] and b"".join(pieces.print()) == b"1,2,3"
    array = GivenIds(np.array([4, 5], dtype=np.int32))
    assert array.ids.tolist() == [4, 5] and array.print() == [b"4,5"]

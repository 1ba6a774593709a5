"""Prompts in their place: printed or as arrays, the stored part is the same in sum, and nothing is read twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polynya.capture.calls import StoredCall
from polynya.capture.journal import Journal, read_journal
from polynya.capture.prompts import place
from polynya.capture.records import CallOutcome
from polynya.capture.store import CallEnd, CallStart, CaptureStore, SessionCapture, recover
from polynya.schema import Exclusion, Lane
from polynya.tokens.printed import print_ids, printed


def array(ids: list[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


class Session:
    """One session whose engine prints its ids."""

    def __init__(self, directory: Path) -> None:
        self.journal = Journal(directory)
        self.journal.start()
        self.store = CaptureStore(self.journal, clock=lambda: 5.0)

    async def open(self) -> None:
        self.capture = await self.store.open_session("s", 1)

    async def call(
        self, prompt: bytes | np.ndarray, sampled: list[int], *, told: bool = True, exclusion: Exclusion | None = None
    ) -> StoredCall:
        start = CallStart(dialect="d", lane=Lane.MAIN, model="m", body_digest=b"", messages=[])
        call = await self.store.begin(self.capture, start)
        placed = place(printed(prompt) if isinstance(prompt, bytes) else prompt, self.capture.leaves())
        assert placed is not None
        end = CallEnd(
            outcome="ok",
            prompt_ids=placed,
            sampled_ids=array(sampled),
            sampled_text=print_ids(array(sampled)) if told else b"",
            logprobs=np.full(len(sampled), -0.5, dtype=np.float32),
            exclusion=exclusion,
        )
        await self.store.finish(self.capture, call, end)
        return call


@pytest.fixture
async def session(tmp_path: Path):  # type: ignore[no-untyped-def]
    session = Session(tmp_path)
    await session.open()
    yield session
    await session.journal.close()


async def test_printed_chain_stores_only_what_each_call_adds(session: Session) -> None:
    await session.call(b"1,2,3", [10, 99])
    second = await session.call(b"1,2,3,10,99,4", [11, 99])
    third = await session.call(b"1,2,3,10,99,4,11,99,5,6", [12])
    assert (second.keep, second.context_ids.tolist()) == (5, [4])
    assert (third.keep, third.context_ids.tolist()) == (8, [5, 6])
    assert third.prompt_ids.tolist() == [1, 2, 3, 10, 99, 4, 11, 99, 5, 6]
    assert (third.prompt_len, third.id_base) == (10, second)


async def test_prompt_whose_reply_was_rendered_otherwise_keeps_what_both_begin_with(session: Session) -> None:
    await session.call(b"1,2,3", [10, 99])
    second = await session.call(b"1,2,3,10,7,99,4", [11])
    assert (second.keep, second.context_ids.tolist()) == (4, [7, 99, 4])
    assert second.prompt_ids.tolist() == [1, 2, 3, 10, 7, 99, 4]


async def test_prompt_that_leaves_the_chain_in_its_middle_is_read_in_full_and_extended_again(session: Session) -> None:
    first = await session.call(b"1,2,3,4,5", [10, 99])
    cut = await session.call(b"1,2,3,40", [11])
    later = await session.call(b"1,2,3,40,11,6", [12])
    assert (cut.id_base, cut.keep, cut.context_ids.tolist()) == (first, 3, [40])
    assert (later.id_base, later.keep, later.context_ids.tolist()) == (cut, 5, [6])
    assert later.prompt_ids.tolist() == [1, 2, 3, 40, 11, 6]


async def test_of_two_branches_the_longer_one_is_extended(session: Session) -> None:
    await session.call(b"1,2", [3])
    longer = await session.call(b"1,2,5", [6])
    later = await session.call(b"1,2,5,7", [8])
    assert (later.id_base, later.keep, later.context_ids.tolist()) == (longer, 3, [7])


async def test_repeated_prompt_adds_nothing(session: Session) -> None:
    await session.call(b"1,2", [3])
    again = await session.call(b"1,2", [4])
    longer = await session.call(b"1,2,4", [5])
    assert (again.keep, again.context_ids.tolist(), again.prompt_ids.tolist()) == (2, [], [1, 2])
    assert (longer.keep, longer.context_ids.tolist()) == (3, [])


@pytest.mark.parametrize("prompt", [b"1, 2, 3"])
async def test_print_that_is_not_canonical_is_stored_as_ids(session: Session, prompt: bytes) -> None:
    first = await session.call(prompt, [4])
    second = await session.call(b"1,2,3,4,5", [6])
    assert first.prompt_ids.tolist() == [1, 2, 3]
    assert (second.keep, second.prompt_ids.tolist()) == (4, [1, 2, 3, 4, 5])


async def test_what_follows_an_id_out_of_range_is_judged_again(session: Session) -> None:
    await session.call(b"1,999999", [4], exclusion=Exclusion.ID_OUT_OF_RANGE)
    assert session.capture.leaves() == []
    second = await session.call(b"1,999999,4", [5])
    assert (second.keep, second.context_ids.tolist()) == (0, [1, 999999, 4])


async def test_id_beyond_32_bits_has_no_place(session: Session) -> None:
    await session.call(b"1,2", [3])
    assert place(printed(b"1,2,3,4294967296"), session.capture.leaves()) is None
    assert place(printed(b"4294967296"), session.capture.leaves()) is None


async def test_what_is_no_list_has_no_place(session: Session) -> None:
    await session.call(b"1,2", [3])
    for text in (b"1,2,3,x", b"x", b"1,2,3,,"):
        with pytest.raises(ValueError, match="no list"):
            place(printed(text), session.capture.leaves())


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[list[int], list[int], str]]:
    """Prompts that extend, repeat, cut or leave earlier ones; told how each comes."""
    calls: list[tuple[list[int], list[int], str]] = []
    few = st.lists(st.sampled_from([0, 1, 11, 111]), max_size=4)
    for _ in range(draw(st.integers(1, 10))):
        prompt = draw(few)
        if calls and draw(st.booleans()):
            before, sampled, _ = draw(st.sampled_from(calls))
            full = before + sampled
            prompt = full[: draw(st.integers(0, len(full)))] + prompt
        calls.append((prompt, draw(few), draw(st.sampled_from(["printed", "untold", "spaced", "array"]))))
    return calls


LONG = array([*range(100_000, 102_000), 999_999_999, 0, 7])


async def test_a_long_print_is_stored_as_it_came_and_read_when_it_is_asked_for(session: Session) -> None:
    text = print_ids(LONG)
    first = await session.call(text, [4])
    branch = await session.call(b"5," + text, [6])
    later = await session.call(text + b",4," + text, [8])
    for call in (first, branch, later):
        assert call.outcome_record is not None and not call.outcome_record.context_text
    assert (branch.keep, branch.prompt_len) == (0, len(LONG) + 1)
    assert (later.id_base, later.keep, later.context_ids.tolist()) == (first, len(LONG) + 1, LONG.tolist())
    await session.journal.close()
    records = [record for record in read_journal(session.journal.directory) if isinstance(record, CallOutcome)]
    assert [(record.context, record.context_text) for record in records] == [
        (b"", text),
        (b"", b"5," + text),
        (b"", text),
    ]
    read = recover(session.journal.directory)[("s", 1)]
    for call, found in zip(session.capture.calls, read.calls, strict=True):
        assert np.array_equal(call.prompt_ids, found.prompt_ids)
        found.settle()
        assert np.array_equal(call.full_ids, found.full_ids)


@pytest.mark.parametrize("odd", [b"1000000000", b"1, 2", b"-1"])
async def test_a_long_print_that_may_hold_anything_is_read_at_once(session: Session, odd: bytes) -> None:
    placed = place(printed(odd + b"," + print_ids(LONG)), session.capture.leaves())
    assert placed is not None and not placed.unread
    assert placed.context.tolist() == [*map(int, odd.split(b",")), *LONG.tolist()]
    assert placed.to_judge(None)[0] == 0


def test_a_long_print_is_judged_where_the_vocabulary_is_known() -> None:
    placed = place(printed(print_ids(LONG)), [])
    assert placed is not None and placed.unread
    assert placed.to_judge(None)[0] == placed.length == len(LONG)
    known, ids = placed.to_judge(200_000)
    assert (known, ids.tolist()) == (0, LONG.tolist())


@pytest.mark.parametrize("long", [8192, 6])
@given(history=histories())
async def test_any_history_is_rebuilt_exactly_however_its_ids_come(
    history: list[tuple[list[int], list[int], str]], tmp_path_factory: pytest.TempPathFactory, long: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polynya.tokens.printed._LONG", long)
        await _rebuilt(history, tmp_path_factory.mktemp("capture"))


async def _rebuilt(history: list[tuple[list[int], list[int], str]], directory: Path) -> None:
    session = Session(directory)
    await session.open()
    for prompt, sampled, form in history:
        given: bytes | np.ndarray = array(prompt)
        if form != "array":
            given = print_ids(array(prompt)).replace(b",", b", " if form == "spaced" else b",")
        await session.call(given, sampled, told=form != "untold")
    await session.journal.close()
    live: SessionCapture = session.capture
    read = recover(directory)[("s", 1)]
    for found in (live, read, live):
        assert [(call.prompt_ids.tolist(), call.sampled_ids.tolist()) for call in found.calls] == [
            (prompt, sampled) for prompt, sampled, _ in history
        ]
        assert [call.prompt_len for call in found.calls] == [len(prompt) for prompt, _, _ in history]
        for call in found.calls:
            call.settle()

"""Deltas of ids and messages, commit order, recovery."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polynya.capture.calls import StoredCall
from polynya.capture.journal import Journal, segments
from polynya.capture.prompts import Leaf, best_base
from polynya.capture.records import CallDelivered, CallIntent, CallOutcome, SessionOpened, decode, encode
from polynya.capture.store import CallEnd, CallStart, CaptureStore, SessionCapture, recover, replay
from polynya.errors import CaptureError, DiskFull
from polynya.schema import Exclusion, Lane, PolicySpan


def start(messages: list[bytes] | None = None, **fields: Any) -> CallStart:
    fields = {"dialect": "openai_chat", "lane": Lane.MAIN, "model": "m", "body_digest": b"d", **fields}
    return CallStart(messages=[b'{"role":"user"}'] if messages is None else messages, **fields)


def end(prompt: list[int], sampled: list[int], **fields: Any) -> CallEnd:
    ids = {"prompt_ids": np.array(prompt, dtype=np.int32), "sampled_ids": np.array(sampled, dtype=np.int32)}
    logprobs = np.array([-0.25] * len(sampled), dtype=np.float32)
    return CallEnd(
        **{
            "outcome": "ok",
            "finish_reason": "stop",
            "logprobs": logprobs,
            "reply": b'{"role":"assistant"}',
            **ids,
            **fields,
        }
    )


class Bench:
    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.store = CaptureStore(journal, clock=lambda: 5.0)

    async def call(
        self, capture: SessionCapture, prompt: list[int], sampled: list[int], messages: list[bytes] | None = None
    ) -> StoredCall:
        call = await self.store.begin(capture, start(messages))
        await self.store.finish(capture, call, end(prompt, sampled))
        return call


@pytest.fixture
async def bench(tmp_path: Path) -> Any:
    journal = Journal(tmp_path)
    journal.start()
    yield Bench(journal)
    await journal.close()


async def test_chain_stores_only_what_each_call_adds(bench: Bench) -> None:
    capture = await bench.store.open_session("s", 1)
    await bench.call(capture, [1, 2, 3], [10, 99])
    second = await bench.call(capture, [1, 2, 3, 10, 99, 4], [11, 99])
    third = await bench.call(capture, [1, 2, 3, 10, 99, 4, 11, 99, 5], [12])
    assert second.context_ids.tolist() == [4]
    assert third.context_ids.tolist() == [5]
    assert third.prompt_ids.tolist() == [1, 2, 3, 10, 99, 4, 11, 99, 5]
    assert third.prompt_len == 9
    assert third.full_ids.tolist() == [1, 2, 3, 10, 99, 4, 11, 99, 5, 12]


async def test_broken_chain_stores_what_follows_the_common_prefix(bench: Bench) -> None:
    capture = await bench.store.open_session("s", 1)
    first = await bench.call(capture, [1, 2, 3], [10, 11, 99])
    second = await bench.call(capture, [1, 2, 3, 10, 99, 4], [12])
    assert (second.id_base, second.keep) == (first, 4)
    assert second.prompt_ids.tolist() == [1, 2, 3, 10, 99, 4]


async def test_messages_and_tools_are_stored_as_deltas(bench: Bench) -> None:
    capture = await bench.store.open_session("s", 1)
    tools = b'[{"name":"bash"}]'
    first = await bench.store.begin(capture, start([b"1", b"2"], tools=tools))
    second = await bench.store.begin(capture, start([b"1", b"2", b"3"], tools=tools))
    third = await bench.store.begin(capture, start([b"1", b"9"], tools=b"[]"))
    assert (second.intent.messages, second.intent.tools) == ([b"3"], None)
    assert (third.intent.messages, third.intent.tools) == ([b"9"], b"[]")
    assert [call.messages for call in (first, second, third)] == [[b"1", b"2"], [b"1", b"2", b"3"], [b"1", b"9"]]
    assert [call.tools for call in (first, second, third)] == [tools, tools, b"[]"]
    assert (second.messages_json, second.tools_json) == ("[1,2,3]", tools.decode())


async def test_tools_that_come_with_every_request_are_held_once(bench: Bench) -> None:
    capture = await bench.store.open_session("s", 1)
    tools = b'[{"name":"bash"}]'
    await bench.store.begin(capture, start([b"1"], tools=tools))
    again = bytes(bytearray(tools))
    assert capture.same_tools(again) is tools
    other = b"[]"
    assert capture.same_tools(other) is other


async def test_sampling_that_does_not_change_is_held_once(bench: Bench) -> None:
    capture = await bench.store.open_session("s", 1)
    first = await bench.store.begin(capture, start(sampling={"temperature": 1.0}))
    same = await bench.store.begin(capture, start(sampling={"temperature": 1.0}))
    other = await bench.store.begin(capture, start(sampling={"temperature": 0.5}))
    assert same.sampling is first.sampling
    assert other.sampling == {"temperature": 0.5}


async def test_call_without_an_outcome_is_unfinished_and_costs_nothing(bench: Bench) -> None:
    capture = await bench.store.open_session("s", 1)
    call = await bench.store.begin(capture, start())
    assert capture.calls == [call]
    assert (call.outcome, call.sampled_count, call.prompt_len, call.finish_reason, call.exclusion) == (
        "unfinished",
        0,
        0,
        "",
        None,
    )
    assert (call.policy_spans, call.flags, call.lane, call.index) == ([], {}, Lane.MAIN, 0)
    assert call.sampling == {}


async def test_text_only_call_is_counted_by_the_engines_usage(bench: Bench) -> None:
    capture = await bench.store.open_session("s", 1)
    call = await bench.store.begin(capture, start())
    await bench.store.finish(
        capture, call, CallEnd(outcome="ok", usage=(20, 7), exclusion=Exclusion.TEXT_ONLY, flags={"x": 1})
    )
    assert (call.prompt_len, call.sampled_count, call.exclusion, call.flags) == (20, 7, Exclusion.TEXT_ONLY, {"x": 1})
    assert capture.sampled_tokens == 7


async def test_calls_are_in_order_of_commit_not_of_begin(bench: Bench) -> None:
    capture = await bench.store.open_session("s", 1)
    slow = await bench.store.begin(capture, start())
    fast = await bench.store.begin(capture, start())
    open_call = await bench.store.begin(capture, start())
    await bench.store.finish(capture, fast, end([1], [2]))
    await bench.store.finish(capture, slow, end([1], [3]))
    assert capture.calls == [fast, slow, open_call]
    assert [call.index for call in capture.calls] == [1, 0, 2]


async def test_sealed_attempt_takes_no_call_and_counts_a_late_one(bench: Bench, tmp_path: Path) -> None:
    capture = await bench.store.open_session("s", 1)
    call = await bench.store.begin(capture, start())
    await bench.store.seal(capture)
    with pytest.raises(CaptureError, match="sealed"):
        await bench.store.begin(capture, start())
    await bench.store.finish(capture, call, end([1], [2]))
    assert (capture.late_writes, call.outcome) == (1, "unfinished")
    assert recover(tmp_path)[("s", 1)].late_writes == 1


async def test_attempt_opens_once_and_is_forgotten_when_sealed(bench: Bench) -> None:
    capture = await bench.store.open_session("s", 1)
    with pytest.raises(CaptureError, match="open already"):
        await bench.store.open_session("s", 1)
    await bench.store.seal(capture)
    assert bench.store._open == set()


async def test_call_that_was_cancelled_while_its_intent_was_written_counts_live_as_in_the_journal(
    bench: Bench, tmp_path: Path
) -> None:
    capture = await bench.store.open_session("s", 1)
    beginning = asyncio.ensure_future(bench.store.begin(capture, start()))
    await asyncio.sleep(0)
    beginning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beginning
    await bench.store.seal(capture)
    assert [call.outcome for call in capture.calls] == ["unfinished"]
    assert list(recover(tmp_path)[("s", 1)].begun) == list(capture.begun)


async def test_intent_that_could_not_be_written_begins_nothing_though_its_caller_is_gone(bench: Bench) -> None:
    capture = await bench.store.open_session("s", 1)
    pending: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    bench.journal.append = lambda record, *, durable: pending  # type: ignore[method-assign]
    beginning = asyncio.ensure_future(bench.store.begin(capture, start()))
    await asyncio.sleep(0)
    beginning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beginning
    pending.set_exception(DiskFull("no space"))
    await asyncio.sleep(0)
    assert capture.begun == {}


async def test_more_branches_than_are_kept_at_hand_still_rebuild_exactly(bench: Bench) -> None:
    capture = await bench.store.open_session("s", 1)
    prompts = [[i, 50 + i, 7] for i in range(8)]
    calls = [await bench.call(capture, prompt, [9]) for prompt in prompts]
    again = await bench.call(capture, [0, 50, 7, 9, 1], [2])
    assert [call.prompt_ids.tolist() for call in calls] == prompts
    assert again.prompt_ids.tolist() == [0, 50, 7, 9, 1]


class Full:
    """A journal whose disk is full."""

    def note(self, record: object) -> None:
        pass

    def append(self, record: object, *, durable: bool) -> Any:
        future = asyncio.get_running_loop().create_future()
        future.set_exception(DiskFull(f"no space: {errno.ENOSPC}"))
        return future


async def test_full_disk_refuses_session_call_and_outcome(bench: Bench) -> None:
    capture = await bench.store.open_session("s", 1)
    call = await bench.store.begin(capture, start())
    bench.store._journal = Full()  # type: ignore[assignment]
    with pytest.raises(DiskFull):
        await bench.store.begin(capture, start())
    with pytest.raises(DiskFull):
        await bench.store.finish(capture, call, end([1], [2]))
    assert (capture.committed, call.outcome) == ([], "unfinished")
    with pytest.raises(DiskFull):
        await bench.store.open_session("t", 1)
    bench.store.delivered(capture, call)
    bench.store._journal = bench.journal
    await bench.store.open_session("t", 1)


async def test_lost_delivery_note_of_a_cancelled_append_is_no_error(bench: Bench) -> None:
    capture = await bench.store.open_session("s", 1)
    call = await bench.call(capture, [1], [2])
    appended = bench.journal.append

    def cancelled(record: Any, *, durable: bool) -> Any:
        future = appended(record, durable=durable)
        future.cancel()
        return future

    bench.store.delivered(capture, call)
    bench.journal.append = cancelled  # type: ignore[method-assign]
    bench.journal._flush_notes()
    bench.journal.append = appended  # type: ignore[method-assign]
    await bench.store.seal(capture)
    assert call.delivered


async def test_delivery_is_on_record_soon_though_nothing_follows(bench: Bench, tmp_path: Path) -> None:
    capture = await bench.store.open_session("s", 1)
    calls = [await bench.call(capture, [1], [2]) for _ in range(2)]
    flush, flushed = bench.journal._flush_notes, asyncio.Event()

    def watched() -> None:
        flush()
        flushed.set()

    bench.journal._flush_notes = watched  # type: ignore[method-assign]
    for call in calls:
        bench.store.delivered(capture, call)
    await flushed.wait()
    await bench.journal.close()
    assert [call.delivered for call in recover(tmp_path)[("s", 1)].calls] == [True, True]


async def test_recovery_gives_back_every_acknowledged_call(bench: Bench, tmp_path: Path) -> None:
    capture = await bench.store.open_session("s", 2, meta={"a": 1})
    first = await bench.call(capture, [1, 2], [3], [b'{"a":1}'])
    bench.store.delivered(capture, first)
    second = await bench.store.begin(capture, start([b'{"a":1}', b'{"b":2}'], sampling={"temperature": 1.0}))
    await bench.store.finish(capture, second, end([1, 2, 3, 4], [5, 6], policy_spans=[PolicySpan("7", 0, 2)]))
    await bench.store.begin(capture, start())
    await bench.store.seal(capture)
    found = recover(tmp_path)[("s", 2)]
    assert found.sealed
    assert [call.outcome for call in found.calls] == ["ok", "ok", "unfinished"]
    assert [call.delivered for call in found.calls] == [True, False, False]
    theirs = found.calls[1]
    assert theirs.prompt_ids.tolist() == [1, 2, 3, 4]
    assert theirs.sampled_ids.tolist() == [5, 6]
    assert theirs.logprobs.tolist() == [-0.25, -0.25]
    assert theirs.policy_spans == [PolicySpan("7", 0, 2)]
    assert (theirs.messages, theirs.sampling) == ([b'{"a":1}', b'{"b":2}'], {"temperature": 1.0})
    assert theirs.messages_json == '[{"a":1},{"b":2},{"role":"assistant"}]'


async def test_logprobs_are_read_back_from_the_journal_and_then_held(bench: Bench, tmp_path: Path) -> None:
    capture = await bench.store.open_session("s", 1)
    values = np.array([-0.1, -1e-30, np.nan], dtype=np.float32)
    other = await bench.call(capture, [1], [])
    call = await bench.store.begin(capture, start())
    await bench.store.finish(capture, call, end([1, 2], [3, 4, 5], logprobs=values))
    assert call.logprobs.tobytes() == values.tobytes()
    assert other.logprobs.size == 0
    call.settle()
    segments(tmp_path)[0].unlink()
    assert call.logprobs.tobytes() == values.tobytes()


async def test_logprobs_whose_segment_is_gone_are_an_error(bench: Bench, tmp_path: Path) -> None:
    capture = await bench.store.open_session("s", 1)
    call = await bench.call(capture, [1], [2])
    segments(tmp_path)[0].unlink()
    with pytest.raises(CaptureError, match="No such file"):
        call.settle()


async def test_logprobs_of_a_damaged_record_are_an_error(bench: Bench, tmp_path: Path) -> None:
    capture = await bench.store.open_session("s", 1)
    call = await bench.call(capture, [1], [2])
    path = segments(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CaptureError, match="damaged"):
        _ = call.logprobs


async def test_another_record_in_the_place_of_an_outcome_is_an_error(bench: Bench) -> None:
    capture = await bench.store.open_session("s", 1)
    first, second = await bench.call(capture, [1], [2]), await bench.call(capture, [1, 2], [3])
    second._written = first._written
    with pytest.raises(CaptureError, match="another record"):
        _ = second.logprobs


def outcome(call_id: str, **fields: Any) -> CallOutcome:
    return CallOutcome(session_id="s", attempt=1, call_id=call_id, at=0.0, outcome="ok", **fields)


def intent(call_id: str) -> CallIntent:
    return CallIntent(
        session_id="s",
        attempt=1,
        call_id=call_id,
        index=0,
        at=0.0,
        dialect="openai_chat",
        lane="main",
        model="m",
        tools=b"[]",
    )


@pytest.mark.parametrize(
    "records",
    [
        [outcome("c0", sampled=b"\1\0\0\0")],
        [intent("c0"), outcome("c0", base="gone", keep=3)],
        [intent("gone"), intent("c0"), outcome("c0", base="gone", keep=3)],
    ],
)
def test_outcome_whose_ids_cannot_be_rebuilt_stays_unfinished(records: list[Any]) -> None:
    capture = replay(records)[("s", 1)]
    assert capture.committed == []


def test_outcome_that_comes_twice_counts_once() -> None:
    twice = outcome("c0", sampled=b"\1\0\0\0", has_ids=True)
    assert len(replay([intent("c0"), twice, twice])[("s", 1)].committed) == 1


def test_delivery_of_an_unknown_call_is_passed_over() -> None:
    note = CallDelivered(session_id="s", attempt=1, call_id="gone", at=0.0)
    assert replay([SessionOpened(session_id="s", attempt=1, at=0.0), note])[("s", 1)].calls == []


def test_records_survive_their_encoding() -> None:
    record = outcome("c0", policy_spans=[PolicySpan(None, 0, 1)], flags={"a": 1})
    assert decode(encode(record)) == record


def test_unknown_record_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(msgspec.msgpack.encode({"k": "alien"}))


def test_call_without_tools_on_record_has_none() -> None:
    bare = msgspec.structs.replace(intent("c0"), tools=None)
    assert StoredCall(bare, None).tools == b"[]"


def test_no_leaf_that_shares_anything_is_no_base() -> None:
    assert best_base(np.array([1], dtype=np.int32), [Leaf(StoredCall(intent("c0"), None))]) == (None, 0)


@st.composite
def sessions(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
    calls: list[tuple[list[int], list[int]]] = []
    few = st.lists(st.integers(1, 5), min_size=1, max_size=5)
    for _ in range(draw(st.integers(1, 10))):
        prompt = draw(few)
        if calls and draw(st.booleans()):
            before, sampled = draw(st.sampled_from(calls))
            full = before + sampled
            prompt = full[: draw(st.integers(0, len(full)))] + prompt
        calls.append((prompt, draw(st.lists(st.integers(1, 5), max_size=4))))
    return calls


@given(history=sessions())
async def test_any_history_is_rebuilt_exactly_live_and_after_recovery(
    history: list[tuple[list[int], list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("capture")
    journal = Journal(directory)
    journal.start()
    bench = Bench(journal)
    capture = await bench.store.open_session("s", 1)
    for prompt, sampled in history:
        await bench.call(capture, prompt, sampled, [str(token).encode() for token in prompt])
    await journal.close()
    for found in (capture, recover(directory)[("s", 1)]):
        assert [(call.prompt_ids.tolist(), call.sampled_ids.tolist()) for call in found.calls] == history
        assert [[int(message) for message in call.messages] for call in found.calls] == [
            prompt for prompt, _ in history
        ]

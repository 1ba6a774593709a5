"""Captured calls of all sessions of a node: in memory as deltas, in the journal as records.

Invariants: ``begin`` returns after the intent is written, ``finish`` after the outcome is durable; order of commit is the
order of ``finish``; an attempt that is sealed takes nothing more (a late outcome is journalled as ``late_write`` and
counted). ``recover`` rebuilds from a journal what a killed process had been told is safe, and marks the rest unfinished.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from polynya.capture.calls import StoredCall, shared_messages
from polynya.capture.journal import Journal, JournalScan, Written, read_journal
from polynya.capture.prompts import Leaf, Placed, place
from polynya.capture.records import CallDelivered, CallIntent, CallOutcome, Record, SessionOpened, SessionSealed
from polynya.errors import CaptureError
from polynya.schema import Exclusion, Float32Array, Int16Array, Int32Array, Lane, PolicySpan
from polynya.tokens.printed import print_ids

_LEAVES = 4
"""Branches of a session that the next prompt is compared with (two of them alive is rare)."""


class CallStart(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a call before it goes upstream."""

    dialect: str
    lane: Lane
    model: str
    body_digest: bytes
    messages: list[bytes]
    """Raw JSON of each message."""
    tools: bytes = b"[]"
    sampling: dict[str, Any] = {}
    continues: str = ""
    """Id of the call that the prompt goes on from, which went upstream as ids."""
    lane_rule: str = ""
    agent: str = ""
    parent_agent: str = ""


class CallEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it. Without ids (a cancelled, failed or text-only call) the arrays are None."""

    outcome: str
    finish_reason: str = ""
    prompt_ids: Int32Array | Placed | None = None
    """``SessionCapture.leaves`` tells where a prompt has its place; an array is placed when it is written."""
    sampled_ids: Int32Array | None = None
    sampled_text: bytes = b""
    """``sampled_ids`` in canonical print; empty: not known."""
    logprobs: Float32Array | None = None
    routing: Int16Array | None = None
    """``(len(prompt) + len(sampled) - 1, width)``."""
    routing_shape: list[int] = []
    usage: tuple[int, int] = (0, 0)
    policy_spans: list[PolicySpan] = []
    exclusion: Exclusion | None = None
    exclusion_at: int | None = None
    exclusion_detail: str = ""
    reply: bytes = b""
    upstream_id: str = ""
    flags: dict[str, int] = {}
    error: str = ""


class SessionCapture:
    """The calls of one attempt of one session."""

    def __init__(self, session_id: str, attempt: int) -> None:
        self.session_id = session_id
        self.attempt = attempt
        self.next_index = 0
        self.begun: dict[str, StoredCall] = {}
        """By call id: the calls whose intent is written."""
        self.committed: list[StoredCall] = []
        """In order of commit."""
        self.sealed = False
        self.late_writes = 0
        self._leaves: OrderedDict[str, Leaf] = OrderedDict()
        self._recent: deque[tuple[StoredCall, CallStart]] = deque(maxlen=_LEAVES)
        """Calls begun last and what they began with, for the next delta."""

    @property
    def calls(self) -> list[StoredCall]:
        """Committed calls in commit order, then those without an outcome."""
        return self.committed + [call for call in self.begun.values() if call.outcome_record is None]

    @property
    def sampled_tokens(self) -> int:
        return sum(call.sampled_count for call in self.committed)

    def leaves(self) -> list[Leaf]:
        """What a new prompt may extend, the latest first."""
        return list(reversed(self._leaves.values()))

    def remember_leaf(self, leaf: Leaf, extended: StoredCall | None) -> None:
        if extended is not None:
            self._leaves.pop(extended.call_id, None)
        self._leaves[leaf.call.call_id] = leaf
        while len(self._leaves) > _LEAVES:
            self._leaves.popitem(last=False)

    def enter(self, call: StoredCall, start: CallStart) -> None:
        """Its intent is written."""
        self.begun[call.call_id] = call
        self._recent.appendleft((call, start))
        base = call.message_base
        if base is not None and call.intent.messages:
            base.echoed(call.intent.messages[0])

    def same_tools(self, tools: bytes) -> bytes:
        """The same bytes, as an earlier call holds them where one does: they come with every request."""
        return next((theirs.tools for _, theirs in self._recent if theirs.tools == tools), tools)

    def same_sampling(self, sampling: dict[str, Any]) -> dict[str, Any]:
        """The same, as an earlier call holds it where one does."""
        return next((call.intent.sampling for call, _ in self._recent if call.intent.sampling == sampling), sampling)

    def base_of(self, messages: list[bytes], tools: bytes) -> tuple[StoredCall | None, int, bool]:
        """The recent call that shares most leading messages, how many these are, and whether its tools are the same."""
        best: tuple[StoredCall | None, int, bool] = (None, 0, False)
        for call, theirs in self._recent:
            shared = shared_messages(messages, theirs.messages)
            if shared > best[1]:
                best = (call, shared, tools == theirs.tools)
            if shared == len(theirs.messages):
                break
        return best

    def forget_leaves(self) -> None:
        self._leaves.clear()
        self._recent.clear()


class CaptureStore:
    """Writes captured data. ``clock`` gives unix seconds, for people; nothing is ordered by it."""

    def __init__(self, journal: Journal, clock: Callable[[], float]) -> None:
        self._journal = journal
        self._clock = clock
        self._open: set[tuple[str, int]] = set()

    async def open_session(self, session_id: str, attempt: int, meta: dict[str, Any] | None = None) -> SessionCapture:
        key = (session_id, attempt)
        if key in self._open:
            raise CaptureError(f"session {session_id} attempt {attempt} is open already", fix="open a session once")
        self._open.add(key)
        capture = SessionCapture(session_id, attempt)
        record = SessionOpened(session_id=session_id, attempt=attempt, at=self._clock(), meta=meta or {})
        try:
            await self._journal.append(record, durable=False)
        except CaptureError:
            self._open.discard(key)
            raise
        return capture

    async def begin(self, capture: SessionCapture, start: CallStart) -> StoredCall:
        """Write the intent. Raises CaptureError when it cannot be written, or when the attempt is sealed."""
        if capture.sealed:
            raise CaptureError(f"session {capture.session_id} is sealed", fix="its key is revoked")
        index = capture.next_index
        capture.next_index += 1
        base, keep, same_tools = capture.base_of(start.messages, start.tools)
        intent = CallIntent(
            session_id=capture.session_id,
            attempt=capture.attempt,
            call_id=f"{capture.session_id}.a{capture.attempt}.c{index}",
            index=index,
            at=self._clock(),
            dialect=start.dialect,
            lane=str(start.lane),
            model=start.model,
            body_digest=start.body_digest,
            base=base.call_id if base else "",
            keep_messages=keep,
            messages=start.messages[keep:],
            tools=None if same_tools else start.tools,
            sampling=capture.same_sampling(start.sampling),
            continues=start.continues,
            lane_rule=start.lane_rule,
            agent=start.agent,
            parent_agent=start.parent_agent,
        )
        call = StoredCall(intent, base)
        written = self._journal.append(intent, durable=False)
        try:
            await asyncio.shield(written)
        except asyncio.CancelledError:
            # The record may be written all the same: then the call was begun, for us as for whoever reads the journal.
            written.add_done_callback(lambda done: _enter(capture, call, start, done))
            raise
        capture.enter(call, start)
        return call

    async def finish(self, capture: SessionCapture, call: StoredCall, end: CallEnd) -> None:
        """Write the outcome and wait until it is durable. Raises CaptureError; then the call has no outcome."""
        late = capture.sealed
        placed = _placed(capture, end.prompt_ids)
        has_ids = placed is not None and end.sampled_ids is not None
        base, keep = (placed.base, placed.keep) if placed is not None and has_ids else (None, 0)
        unread = placed.unread if placed is not None else b""
        context = None if placed is None or unread else placed.context
        # The row of the base's last id came with this call.
        routing_from = max(keep - 1, 0) if base is not None and base.has_routing else 0
        record = CallOutcome(
            session_id=capture.session_id,
            attempt=capture.attempt,
            call_id=call.call_id,
            at=self._clock(),
            outcome=end.outcome,
            finish_reason=end.finish_reason,
            base=base.call_id if base else "",
            keep=keep,
            context=_bytes(context, "<i4"),
            context_text=unread,
            sampled=_bytes(end.sampled_ids, "<i4"),
            logprobs=_bytes(end.logprobs, "<f4"),
            routing=b"" if end.routing is None else end.routing[routing_from:].astype("<i2").tobytes(),
            routing_from=routing_from,
            routing_shape=end.routing_shape,
            has_ids=has_ids,
            usage=end.usage,
            policy_spans=end.policy_spans,
            exclusion=str(Exclusion.LATE_WRITE) if late else str(end.exclusion or ""),
            exclusion_at=end.exclusion_at,
            exclusion_detail=end.exclusion_detail,
            reply=end.reply,
            upstream_id=end.upstream_id,
            flags=end.flags,
            error=end.error,
        )
        if late:
            capture.late_writes += 1
            await self._journal.append(record, durable=True)
            return
        written = self._journal.append(record, durable=True)
        context_text, sampled_text = _printed(placed, end)
        call.complete(record, base, context_text=context_text, sampled_text=sampled_text)
        capture.committed.append(call)
        try:
            call.safe_at(await written)
        except CaptureError:
            capture.committed.remove(call)
            call.outcome_record = None
            raise
        if placed is not None and has_ids and not capture.sealed and _may_be_extended(end):
            extended = base if base is not None and keep == base.total_len else None
            capture.remember_leaf(Leaf(call, placed.pieces, sampled_text or b""), extended)

    def delivered(self, capture: SessionCapture, call: StoredCall) -> None:
        """The reply reached the client in full. Not waited for: losing this record costs a call's training, no correctness."""
        call.delivered = True
        record = CallDelivered(
            session_id=capture.session_id, attempt=capture.attempt, call_id=call.call_id, at=self._clock()
        )
        self._journal.note(record)

    async def seal(self, capture: SessionCapture) -> None:
        """No more calls. Returns when everything of the attempt is durable. The store holds nothing of it any more."""
        capture.sealed = True
        self._open.discard((capture.session_id, capture.attempt))
        capture.forget_leaves()
        record = SessionSealed(session_id=capture.session_id, attempt=capture.attempt, at=self._clock())
        await self._journal.append(record, durable=True)


def recover(directory: Path, scan: JournalScan | None = None) -> dict[tuple[str, int], SessionCapture]:
    """Rebuild every attempt from a journal, by (session id, attempt)."""
    return replay(read_journal(directory, scan))


def replay(records: Iterable[Record]) -> dict[tuple[str, int], SessionCapture]:
    sessions: dict[tuple[str, int], SessionCapture] = {}
    for record in records:
        key = (record.session_id, record.attempt)
        capture = sessions.setdefault(key, SessionCapture(*key))
        match record:
            case CallIntent():
                capture.begun[record.call_id] = StoredCall(record, capture.begun.get(record.base))
            case CallOutcome():
                _replay_outcome(capture, record)
            case CallDelivered():
                if call := capture.begun.get(record.call_id):
                    call.delivered = True
            case SessionSealed():
                capture.sealed = True
    return sessions


def _replay_outcome(capture: SessionCapture, record: CallOutcome) -> None:
    """Take an outcome whose intent and base are there; else its ids could not be rebuilt, so it stays unfinished."""
    call = capture.begun.get(record.call_id)
    base = capture.begun.get(record.base)
    if (
        call is None
        or call.outcome_record is not None
        or (record.keep and (base is None or base.outcome_record is None))
    ):
        return
    if record.exclusion == Exclusion.LATE_WRITE:
        capture.late_writes += 1
        return
    call.complete(record, base)
    capture.committed.append(call)


def _placed(capture: SessionCapture, prompt: Int32Array | Placed | None) -> Placed | None:
    if prompt is None or isinstance(prompt, Placed):
        return prompt
    return place(np.ascontiguousarray(prompt, dtype=np.int32), capture.leaves())


def _printed(placed: Placed | None, end: CallEnd) -> tuple[bytes | None, bytes | None]:
    """Context and sampled ids as text, where the prompt came so; else None."""
    if placed is None or end.sampled_ids is None or not placed.pieces:
        return None, None
    return placed.context_text, end.sampled_text or print_ids(end.sampled_ids)


def _may_be_extended(end: CallEnd) -> bool:
    """Ids are judged once, where they are stored; what extends a bad prompt must not pass for judged."""
    return end.exclusion != Exclusion.ID_OUT_OF_RANGE


def _bytes(values: Int32Array | Float32Array | None, dtype: str) -> bytes:
    return b"" if values is None else np.ascontiguousarray(values, dtype=dtype).tobytes()


def _enter(capture: SessionCapture, call: StoredCall, start: CallStart, written: asyncio.Future[Written]) -> None:
    if written.exception() is None:
        capture.enter(call, start)

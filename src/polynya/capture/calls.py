"""A captured call in memory: deltas of ids and of messages, rebuilt on demand. Its logprobs lie in the journal until asked for.

Invariant: ``prompt_ids`` is exactly what the engine reported, whichever earlier call its delta leans on. A chain of calls
costs its final length, not the sum of its prompts.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from polynya.capture.journal import Written, read_back
from polynya.capture.records import CallIntent, CallOutcome
from polynya.errors import CaptureError
from polynya.schema import Exclusion, Float32Array, Int16Array, Int32Array, Lane, PolicySpan
from polynya.tokens.printed import ids_in, reread

EMPTY_IDS: Int32Array = np.zeros(0, dtype=np.int32)
EMPTY_LOGPROBS: Float32Array = np.zeros(0, dtype=np.float32)


class StoredCall:
    """One call of one session attempt. Written by the store only."""

    __slots__ = (
        "_context",
        "_context_len",
        "_context_text",
        "_id_base",
        "_keep",
        "_lane",
        "_logprobs",
        "_message_base",
        "_routing",
        "_sampled",
        "_sampled_len",
        "_sampled_text",
        "_written",
        "delivered",
        "ended_at",
        "intent",
        "outcome_record",
    )

    def __init__(self, intent: CallIntent, base: StoredCall | None) -> None:
        self.intent = intent
        self._lane = Lane(intent.lane)
        self.outcome_record: CallOutcome | None = None
        self.delivered = False
        self.ended_at: float | None = None
        self._message_base = base
        self._id_base: StoredCall | None = None
        self._keep = 0
        self._context = EMPTY_IDS
        self._context_text: bytes | None = None
        self._context_len = 0
        self._sampled = EMPTY_IDS
        self._sampled_text: bytes | None = None
        self._sampled_len = 0
        self._logprobs = EMPTY_LOGPROBS
        self._written: Written | None = None
        self._routing: bytes | Written = b""

    def complete(
        self,
        record: CallOutcome,
        id_base: StoredCall | None,
        *,
        context_text: bytes | None = None,
        sampled_text: bytes | None = None,
    ) -> None:
        """Take the outcome; the arrays stay views of the record's bytes.

        ``context_text``, ``sampled_text``: the ids as printed. Then that is kept, since the calls that follow are compared
        in this form, and the ids are read from it when they are asked for.
        """
        context_text = record.context_text or context_text
        self._context_len = len(record.context) // EMPTY_IDS.itemsize
        if record.context_text:
            self._context_len = ids_in(record.context_text)
        self._sampled_len = len(record.sampled) // EMPTY_IDS.itemsize
        self._context_text, self._sampled_text = context_text, sampled_text
        if context_text is None:
            self._context = np.frombuffer(record.context, dtype="<i4")
        if sampled_text is None:
            self._sampled = np.frombuffer(record.sampled, dtype="<i4")
        self._logprobs = np.frombuffer(record.logprobs, dtype="<f4")
        self._routing = record.routing
        self.outcome_record = msgspec.structs.replace(
            record, context=b"", context_text=b"", sampled=b"", logprobs=b"", routing=b""
        )
        self.ended_at = record.at
        self._id_base = id_base
        self._keep = record.keep

    def safe_at(self, written: Written) -> None:
        """The outcome is durable there: the logprobs, which no later call needs, are read from it when they are asked for."""
        if self._logprobs.size:
            self._logprobs, self._written = EMPTY_LOGPROBS, written
        if self._routing:
            self._routing = written

    def settle(self) -> None:
        """Read the printed ids and the logprobs once and for all: no call comes any more. Blocking. Raises CaptureError."""
        self._logprobs, self._written = self.logprobs, None
        self._context, self._context_text = self.context_ids, None
        self._sampled, self._sampled_text = self.sampled_ids, None

    def echoed(self, message: bytes) -> None:
        """A later request holds its reply: the same bytes are held once."""
        record = self.outcome_record
        if record is not None and record.reply == message:
            self.outcome_record = msgspec.structs.replace(record, reply=message)

    @property
    def call_id(self) -> str:
        return self.intent.call_id

    @property
    def message_base(self) -> StoredCall | None:
        """The call whose messages this one's begin with."""
        return self._message_base

    @property
    def index(self) -> int:
        return self.intent.index

    @property
    def lane(self) -> Lane:
        return self._lane

    @property
    def agent(self) -> str:
        return self.intent.agent

    @property
    def outcome(self) -> str:
        return self.outcome_record.outcome if self.outcome_record else "unfinished"

    @property
    def exclusion(self) -> Exclusion | None:
        record = self.outcome_record
        return Exclusion(record.exclusion) if record and record.exclusion else None

    @property
    def finish_reason(self) -> str:
        return self.outcome_record.finish_reason if self.outcome_record else ""

    @property
    def policy_spans(self) -> list[PolicySpan]:
        return self.outcome_record.policy_spans if self.outcome_record else []

    @property
    def sampled_ids(self) -> Int32Array:
        return self._sampled if self._sampled_text is None else reread(self._sampled_text)

    @property
    def total_len(self) -> int:
        """Ids of prompt and reply."""
        return self._keep + self._context_len + self._sampled_len

    @property
    def logprobs(self) -> Float32Array:
        """Blocking while they lie in the journal. Raises CaptureError when they do not any more."""
        if self._written is None:
            return self._logprobs
        return np.frombuffer(self._read_back(self._written).logprobs, dtype="<f4")

    def _read_back(self, written: Written) -> CallOutcome:
        record = read_back(written)
        if not isinstance(record, CallOutcome) or record.call_id != self.call_id:
            raise CaptureError(
                f"journal {written.segment}: another record than the outcome of {self.call_id} stands at {written.offset}",
                fix="leave a run's journal in its place",
            )
        return record

    @property
    def has_routing(self) -> bool:
        return bool(self._routing)

    @property
    def routed_experts_shape(self) -> list[int]:
        return self.outcome_record.routing_shape if self.outcome_record else []

    @property
    def routed_experts(self) -> Int16Array | None:
        """Blocking; never held, since it is many times the ids. None also when a call that this one leans on has none.

        Raises CaptureError as ``logprobs`` does.
        """
        rows = self.total_len - 1
        parts: list[Int16Array] = []
        call: StoredCall | None = self
        while rows > 0:
            if call is None or not call._routing or call.outcome_record is None:
                return None
            start = call.outcome_record.routing_from
            if start < rows:
                stored = call._routing if isinstance(call._routing, bytes) else call._read_back(call._routing).routing
                flat = np.frombuffer(stored, dtype="<i2")
                parts.append(flat.reshape(call.total_len - 1 - start, -1)[: rows - start])
                rows = start
            call = call._id_base
        return np.concatenate(parts[::-1]) if len({part.shape[1] for part in parts}) == 1 else None

    @property
    def sampled_count(self) -> int:
        record = self.outcome_record
        return 0 if record is None else max(self._sampled_len, 0 if record.has_ids else record.usage[1])

    @property
    def prompt_len(self) -> int:
        record = self.outcome_record
        return self._keep + self._context_len or (record.usage[0] if record else 0)

    @property
    def context_ids(self) -> Int32Array:
        """The stored part of the prompt, after ``keep`` ids of ``id_base``."""
        return self._context if self._context_text is None else reread(self._context_text)

    @property
    def id_base(self) -> StoredCall | None:
        return self._id_base

    @property
    def extends(self) -> StoredCall | None:
        """``id_base``, when the prompt begins with all of its ids."""
        base = self._id_base
        return base if base is not None and self._keep == base.total_len else None

    @property
    def keep(self) -> int:
        return self._keep

    @property
    def prompt_ids(self) -> Int32Array:
        ids = np.empty(self._keep + self._context_len, dtype=np.int32)
        self._fill(ids)
        return ids

    def _fill(self, ids: Int32Array) -> None:
        """With the prompt, which is as long."""
        call: StoredCall = self
        end = len(ids)
        while True:
            start = min(end, call._keep)
            ids[start:end] = call.context_ids[: end - start]
            end = start
            base = call._id_base
            if base is None or end == 0:
                return
            base_prompt = base._keep + base._context_len
            if end > base_prompt:
                ids[base_prompt:end] = base.sampled_ids[: end - base_prompt]
                end = base_prompt
            call = base

    @property
    def full_ids(self) -> Int32Array:
        prompt = self._keep + self._context_len
        ids = np.empty(prompt + self._sampled_len, dtype=np.int32)
        self._fill(ids[:prompt])
        ids[prompt:] = self.sampled_ids
        return ids

    @property
    def messages(self) -> list[bytes]:
        """Raw JSON of each message of the request."""
        parts: list[list[bytes]] = []
        call: StoredCall | None = self
        keep: int | None = None
        while call is not None:
            own = (
                call.intent.messages
                if keep is None
                else call.intent.messages[: max(0, keep - call.intent.keep_messages)]
            )
            parts.append(own)
            keep = call.intent.keep_messages if keep is None else min(keep, call.intent.keep_messages)
            call = call._message_base if keep else None
        return [message for part in reversed(parts) for message in part]

    @property
    def reply(self) -> bytes:
        return self.outcome_record.reply if self.outcome_record else b""

    @property
    def messages_json(self) -> str:
        reply = [self.reply] if self.reply else []
        return (b"[" + b",".join(self.messages + reply) + b"]").decode()

    @property
    def tools(self) -> bytes:
        call: StoredCall | None = self
        while call is not None:
            if call.intent.tools is not None:
                return call.intent.tools
            call = call._message_base
        return b"[]"

    @property
    def tools_json(self) -> str:
        return self.tools.decode()

    @property
    def sampling(self) -> dict[str, Any]:
        return self.intent.sampling

    @property
    def flags(self) -> dict[str, int]:
        return self.outcome_record.flags if self.outcome_record else {}


def shared_messages(messages: list[bytes], other: list[bytes]) -> int:
    """How many leading raw messages are equal."""
    n = min(len(messages), len(other))
    if messages[:n] == other[:n]:
        return n
    return next((i for i in range(n) if messages[i] != other[i]), n)

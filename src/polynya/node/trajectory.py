"""From a sealed capture to a trajectory: rows, calls and ledger. Blocking work, for a thread."""

from __future__ import annotations

import msgspec

from polynya.capture.calls import StoredCall
from polynya.capture.store import SessionCapture
from polynya.node.builders import builder as plan_of
from polynya.schema import BuilderSpec, Call, Exclusion, Trajectory
from polynya.tokens import Built, build

_encode = msgspec.json.Encoder().encode


def trajectory_of(capture: SessionCapture, *, builder: BuilderSpec, vocab_size: int | None = None) -> Trajectory:
    """Build all rows of an attempt. Raises CaptureError when an invariant of the builders does not hold."""
    calls = capture.calls
    for call in calls:
        call.settle()
    built = build(
        calls,
        session_id=capture.session_id,
        builder=plan_of(builder.name),
        vocab_size=vocab_size,
        extra_lanes=builder.extra_lanes,
    )
    return Trajectory(
        traces=built.traces, calls=[_call_row(capture, call, built) for call in calls], ledger=built.ledger
    )


def lost_calls(capture: SessionCapture) -> list[Call]:
    """The calls of an attempt that died or was retried: kept for the record, none trainable. Raises CaptureError."""
    lost = Built(
        traces=[],
        ledger=build([], session_id=capture.session_id, builder="per_request").ledger,
        exclusions={call.call_id: Exclusion.ATTEMPT_LOST for call in capture.calls},
        parents={},
        breaks={},
    )
    return [_call_row(capture, call, lost) for call in capture.calls]


def _call_row(capture: SessionCapture, call: StoredCall, built: Built) -> Call:
    record = call.outcome_record
    exclusion = built.exclusions.get(call.call_id)
    return Call(
        call_id=call.call_id,
        session_id=capture.session_id,
        attempt=capture.attempt,
        index=call.index,
        dialect=call.intent.dialect,
        lane=str(call.lane),
        lane_rule=call.intent.lane_rule,
        agent=call.intent.agent,
        parent_agent=call.intent.parent_agent,
        model=call.intent.model,
        outcome=call.outcome,
        error=record.error if record else "no outcome was recorded",
        t_start=call.intent.at,
        t_end=call.ended_at,
        finish_reason=call.finish_reason,
        prompt_len=call.prompt_len,
        sampled_len=call.sampled_count,
        parent_call_id=built.parents.get(call.call_id),
        break_cause=built.breaks.get(call.call_id),
        base_call_id=call.id_base.call_id if call.id_base else None,
        base_keep=call.keep,
        context_ids=call.context_ids,
        completion_ids=call.sampled_ids,
        logprobs=call.logprobs,
        policy_spans=call.policy_spans,
        trainable=exclusion is None and call.sampled_count > 0,
        exclusion=str(exclusion) if exclusion else None,
        exclusion_detail=record.exclusion_detail if record else "",
        delivered=call.delivered,
        sampling=_encode(call.sampling).decode(),
        request=(b"[" + b",".join(call.intent.messages) + b"]").decode(),
        reply=record.reply.decode() if record else "",
        flags=_encode(call.flags).decode(),
    )

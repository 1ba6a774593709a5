"""Builders: captured calls → trainable rows and the ledger.

Invariants, checked here on every build: a row is a strict ``prompt + sampled`` of one call, so it is what the engine
conditioned on; a sampled token is trained at most once over all rows; ``captured = trained + excluded``.
``per_request`` gives a row per call, ``prefix_merging`` a row per leaf of the call forest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from polynya.errors import CaptureError
from polynya.schema import Break, Exclusion, Lane, Ledger, PolicySpan, Trace
from polynya.tokens.breaks import Parting, partings
from polynya.tokens.calls import CapturedCall
from polynya.tokens.forest import Node, full_ids, grow, path_to
from polynya.tokens.validate import row_problem

LANE_EXCLUSIONS = {Lane.AUXILIARY: Exclusion.AUXILIARY_LANE, Lane.COMPACTION: Exclusion.COMPACTION_LANE}


class Built(msgspec.Struct, frozen=True, kw_only=True):
    traces: list[Trace]
    ledger: Ledger
    exclusions: dict[str, Exclusion]
    """Call id → reason, for the calls that no row trains."""
    parents: dict[str, str]
    """Call id → call id that its prompt extends, id by id."""
    breaks: dict[str, Break]
    """Call id → why its prompt extends no earlier call of its agent."""


Plan = Callable[[Sequence[Node]], list[list[Node]]]
"""Which paths become rows, in order: each some nodes of one way from a root down, the last one is the row's end.

A sampled span that an earlier row trained is context in a later one, and so is one whose node is left out of the path.
"""


def _a_row_per_call(nodes: Sequence[Node]) -> list[list[Node]]:
    return [[node] for node in nodes]


def _a_row_per_leaf(nodes: Sequence[Node]) -> list[list[Node]]:
    return [path_to(nodes, node.order) for node in nodes if not node.children]


BUILDERS: dict[str, Plan] = {"per_request": _a_row_per_call, "prefix_merging": _a_row_per_leaf}


def exclusion_of(call: CapturedCall, extra_lanes: Collection[str] = ()) -> Exclusion | None:
    """Why this call is not trained, or None. What capture found comes first."""
    if call.outcome != "ok":
        return Exclusion.CANCELLED
    if call.exclusion is not None:
        return call.exclusion
    if not call.delivered:
        return Exclusion.NOT_DELIVERED
    return None if call.lane in extra_lanes else LANE_EXCLUSIONS.get(call.lane)


def rejected(calls: Sequence[CapturedCall]) -> set[str]:
    """Compactions after which the same agent asked for one again: the harness did not take what they said."""
    found: set[str] = set()
    last: dict[str, CapturedCall] = {}
    for call in calls:
        before = last.get(call.agent)
        if before is not None and before.lane == call.lane == Lane.COMPACTION:
            found.add(before.call_id)
        last[call.agent] = call
    return found


def build(
    calls: Sequence[CapturedCall],
    *,
    session_id: str,
    builder: str | Plan,
    vocab_size: int | None = None,
    extra_lanes: Collection[str] = (),
) -> Built:
    """Build all rows of one session attempt from its calls, in commit order. ``extra_lanes``: those trained, too.

    Raises KeyError for an unknown builder, and CaptureError if an invariant of this module does not hold: such rows
    would be wrong numbers, so there are none.
    """
    plan = BUILDERS[builder] if isinstance(builder, str) else builder
    exclusions = {call.call_id: reason for call in calls if (reason := exclusion_of(call, extra_lanes)) is not None}
    for call_id in rejected(calls):
        if exclusions.get(call_id, Exclusion.COMPACTION_LANE) == Exclusion.COMPACTION_LANE:
            exclusions[call_id] = Exclusion.SUPERSEDED_RETRY
    nodes = grow([call for call in calls if call.call_id not in exclusions and call.sampled_count])
    trained: set[str] = set()
    traces = []
    for segment, path in enumerate(plan(nodes)):
        if not _is_way(nodes, path):
            raise CaptureError(
                f"session {session_id}: the builder gave {[node.call.call_id for node in path]} for a row, which is no way down",
                fix="a builder returns paths of nodes, each an ancestor of the next",
            )
        trace = _row(path, trained, session_id=session_id, segment=segment)
        if problem := row_problem(trace, vocab_size):
            raise CaptureError(
                f"row {trace.trace_id}, calls {', '.join(trace.call_ids)}: {problem}",
                fix="report this: capture let it in",
            )
        traces.append(trace)
    for node in nodes:
        if node.call.call_id not in trained:
            exclusions[node.call.call_id] = Exclusion.LEFT_OUT
    parted = partings(nodes, calls)
    traces = _with_origins(traces, nodes, parted)
    breaks = {nodes[order].call.call_id: parting.cause for order, parting in parted.items()}
    ledger = _ledger(calls, exclusions, traces, breaks.values())
    if not ledger.balanced():
        raise CaptureError(
            f"session {session_id}: ledger does not balance: {ledger}", fix="report this with the capture folder"
        )
    parents = {node.call.call_id: nodes[node.parent].call.call_id for node in nodes if node.parent is not None}
    return Built(traces=traces, ledger=ledger, exclusions=exclusions, parents=parents, breaks=breaks)


def _is_way(nodes: Sequence[Node], path: Sequence[Node]) -> bool:
    """Each node an ancestor of the next: then the last one's ids hold the spans of all."""
    if not path:
        return False
    way = iter(path_to(nodes, path[-1].order))
    return all(any(node is step for step in way) for node in path)


def _row(path: Sequence[Node], trained: set[str], *, session_id: str, segment: int) -> Trace:
    last = path[-1].call
    ids = full_ids(last)
    mask = np.zeros(len(ids), dtype=np.uint8)
    logprobs = np.zeros(len(ids), dtype=np.float32)
    spans: list[PolicySpan] = []
    for node in path:
        call, start = node.call, node.prompt_len
        spans += [PolicySpan(span.version, start + span.start, start + span.end) for span in _spans(call)]
        if call.call_id not in trained:
            trained.add(call.call_id)
            mask[start : node.total_len] = 1
            logprobs[start : node.total_len] = call.logprobs
    return Trace(
        trace_id=f"{session_id}.t{segment}",
        session_id=session_id,
        lane=str(last.lane),
        segment=segment,
        input_ids=ids,
        loss_mask=mask,
        logprobs=logprobs,
        routed_experts=last.routed_experts,
        routed_experts_shape=last.routed_experts_shape,
        prompt_len=path[0].prompt_len,
        policy_spans=spans,
        call_ids=[node.call.call_id for node in path],
        call_starts=[node.prompt_len for node in path],
        call_lens=[node.total_len - node.prompt_len for node in path],
        finish_reason=last.finish_reason,
        truncated=last.finish_reason == "length",
        num_turns=len(path),
        messages=last.messages_json,
        tools=last.tools_json,
    )


def _with_origins(traces: list[Trace], nodes: Sequence[Node], parted: Mapping[int, Parting]) -> list[Trace]:
    """Rows that begin with a condensed history name the row that it was condensed from."""
    first_row: dict[str, str] = {}
    for trace in traces:
        for call_id in trace.call_ids:
            first_row.setdefault(call_id, trace.trace_id)
    origins = {
        nodes[order].call.call_id: first_row.get(nodes[parting.nearest].call.call_id)
        for order, parting in parted.items()
        if parting.cause == Break.COMPACTION
    }
    return [
        msgspec.structs.replace(trace, compacted_from=origins[trace.call_ids[0]])
        if trace.call_ids[0] in origins
        else trace
        for trace in traces
    ]


def _spans(call: CapturedCall) -> list[PolicySpan]:
    return call.policy_spans or [PolicySpan(None, 0, call.sampled_count)]


def _ledger(
    calls: Sequence[CapturedCall],
    exclusions: dict[str, Exclusion],
    traces: Sequence[Trace],
    breaks: Iterable[Break],
) -> Ledger:
    excluded: Counter[str] = Counter()
    for call in calls:
        if reason := exclusions.get(call.call_id):
            excluded[str(reason)] += call.sampled_count
    return Ledger(
        captured=sum(call.sampled_count for call in calls),
        trained=sum(int(trace.loss_mask.sum()) for trace in traces),
        excluded=dict(sorted(excluded.items())),
        calls=len(calls),
        calls_by_outcome=dict(sorted(Counter(call.outcome for call in calls).items())),
        chain_breaks=dict(sorted(Counter(map(str, breaks)).items())),
    )

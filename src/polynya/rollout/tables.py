"""The Parquet tables of a run directory: schemas, and rows ↔ Arrow. Token columns are typed lists, never JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from polynya.schema import Call, SessionResult, Trace

_SPANS = pa.list_(pa.struct([("version", pa.string()), ("start", pa.int32()), ("end", pa.int32())]))

TRACES = pa.schema(
    [
        ("task_id", pa.string()),
        ("group_id", pa.string()),
        ("session_id", pa.string()),
        ("trace_id", pa.string()),
        ("lane", pa.string()),
        ("segment", pa.int32()),
        ("compacted_from", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("logprobs", pa.list_(pa.float32())),
        ("routed_experts", pa.binary()),
        ("routed_experts_shape", pa.list_(pa.int32())),
        ("prompt_len", pa.int32()),
        ("policy_spans", _SPANS),
        ("call_ids", pa.list_(pa.string())),
        ("call_starts", pa.list_(pa.int32())),
        ("call_lens", pa.list_(pa.int32())),
        ("reward", pa.float64()),
        ("status", pa.string()),
        ("finish_reason", pa.string()),
        ("truncated", pa.bool_()),
        ("num_turns", pa.int32()),
        ("messages", pa.string()),
        ("tools", pa.string()),
    ]
)

CALLS = pa.schema(
    [
        ("call_id", pa.string()),
        ("session_id", pa.string()),
        ("attempt", pa.int32()),
        ("index", pa.int32()),
        ("dialect", pa.string()),
        ("lane", pa.string()),
        ("lane_rule", pa.string()),
        ("agent", pa.string()),
        ("parent_agent", pa.string()),
        ("model", pa.string()),
        ("outcome", pa.string()),
        ("error", pa.string()),
        ("t_start", pa.float64()),
        ("t_end", pa.float64()),
        ("finish_reason", pa.string()),
        ("prompt_len", pa.int32()),
        ("sampled_len", pa.int32()),
        ("parent_call_id", pa.string()),
        ("break_cause", pa.string()),
        ("base_call_id", pa.string()),
        ("base_keep", pa.int32()),
        ("context_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("policy_spans", _SPANS),
        ("trainable", pa.bool_()),
        ("exclusion", pa.string()),
        ("exclusion_detail", pa.string()),
        ("delivered", pa.bool_()),
        ("sampling", pa.string()),
        ("request", pa.string()),
        ("reply", pa.string()),
        ("flags", pa.string()),
    ]
)


def traces_table(result: SessionResult, traces: Sequence[Trace]) -> pa.Table:
    """One row a trace, with what the session adds (task, group, reward, status)."""
    session = {
        "task_id": result.task_id,
        "group_id": result.group_id,
        "reward": result.reward,
        "status": str(result.status),
    }
    return _table(TRACES, traces, session)


def calls_table(calls: Sequence[Call]) -> pa.Table:
    return _table(CALLS, calls, {})


def _table(schema: pa.Schema, rows: Sequence[Any], fixed: dict[str, Any]) -> pa.Table:
    columns = []
    for field in schema:
        values = [fixed[field.name] if field.name in fixed else getattr(row, field.name) for row in rows]
        if field.type == pa.binary():
            values = [None if value is None else value.astype("<i2").tobytes() for value in values]
        columns.append(_column(values, field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_list(kind) and values and all(isinstance(value, np.ndarray) for value in values):
        offsets = np.zeros(len(values) + 1, dtype=np.int32)
        np.cumsum([len(value) for value in values], out=offsets[1:])
        flat = pa.array(np.concatenate(values), type=kind.value_type)
        return pa.ListArray.from_arrays(pa.array(offsets), flat).cast(kind)
    if kind == _SPANS:
        values = [
            [{"version": span.version, "start": span.start, "end": span.end} for span in spans] for spans in values
        ]
    return pa.array(values, type=kind)

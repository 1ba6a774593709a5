"""Is a run directory what it should be? Read back as a trainer would, and compared with its own ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from polynya.rollout.rundir import read_ledger, read_results
from polynya.rollout.tables import CALLS, TRACES


def check_run(path: Path) -> list[str]:
    """What is wrong, in words; empty when every row is valid and the ledger balances. Raises RunDirError or OSError."""
    problems: list[str] = []
    results = list(read_results(path))
    traces, calls = pq.read_table(path / "traces.parquet"), pq.read_table(path / "calls.parquet")
    if not traces.schema.equals(TRACES) or not calls.schema.equals(CALLS):
        problems.append("a table has another schema than this version writes")
        return problems
    if len({result.session_id for result in results}) != len(results):
        problems.append("sessions.jsonl holds a session twice")
    trained = 0
    for row in traces.select(["trace_id", "input_ids", "loss_mask", "logprobs", "prompt_len"]).to_pylist():
        problem, count = _row(row)
        trained += count
        problems += [f"{row['trace_id']}: {problem}"] if problem else []
    if len(set(traces["trace_id"].to_pylist())) != traces.num_rows:
        problems.append("a trace stands twice in traces.parquet")
    captured = sum(calls["sampled_len"].to_pylist())
    ledger = read_ledger(path)
    if (ledger.captured, ledger.trained) != (captured, trained) or not ledger.balanced():
        problems.append(
            f"ledger says {ledger.captured} captured, {ledger.trained} trained; the tables {captured} and {trained}"
        )
    problems += [
        f"{result.session_id}: its ledger does not balance" for result in results if not result.ledger.balanced()
    ]
    return problems


def _row(row: dict[str, Any]) -> tuple[str, int]:
    ids, mask, logprobs = (
        np.array(row["input_ids"]),
        np.array(row["loss_mask"]),
        np.array(row["logprobs"], dtype=np.float32),
    )
    if not len(ids) == len(mask) == len(logprobs):
        return f"lengths differ: {len(ids)}, {len(mask)}, {len(logprobs)}", 0
    if not np.isfinite(logprobs).all() or (logprobs > 0).any() or logprobs[mask == 0].any():
        return "a logprob is not finite, above zero, or not zero where the mask is", int(mask.sum())
    if mask[: row["prompt_len"]].any():
        return "the prompt is trained", int(mask.sum())
    return "", int(mask.sum())

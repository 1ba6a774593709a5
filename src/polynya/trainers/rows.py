"""The rows of a run directory, one by one or by group, with numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pyarrow.parquet as pq

from polynya.errors import RunDirError
from polynya.schema import Float32Array, Int32Array, UInt8Array

_COLUMNS = [
    "group_id", "session_id", "trace_id", "lane", "input_ids", "loss_mask", "logprobs", "prompt_len", "reward", "status", "truncated",
]  # fmt: skip


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One trainable sequence. The three arrays have one length."""

    group_id: str
    session_id: str
    trace_id: str
    lane: str
    input_ids: Int32Array
    loss_mask: UInt8Array
    """1: sampled by the policy, to be trained."""
    logprobs: Float32Array
    """Nats; 0.0 where the mask is 0."""
    prompt_len: int
    reward: float | None
    """The session's. None: unknown, to be left out of the baseline."""
    status: str
    truncated: bool


def read_rows(run: Path | str) -> Iterator[Row]:
    """All rows of a run, in order. Reads one row group at a time. Raises RunDirError."""
    path = Path(run) / "traces.parquet"
    if not path.exists():
        raise RunDirError(f"{path} does not exist", fix="name a run directory in which a session has ended")
    with pq.ParquetFile(path) as file:
        yield from rows_of(file)


def rows_of(file: pq.ParquetFile) -> Iterator[Row]:
    """Rows of an open traces table. Reads one row group at a time."""
    for group in range(file.num_row_groups):
        for raw in file.read_row_group(group, columns=_COLUMNS).to_pylist():
            yield Row(
                **{
                    **raw,
                    "input_ids": np.array(raw["input_ids"], dtype=np.int32),
                    "loss_mask": np.array(raw["loss_mask"], dtype=np.uint8),
                    "logprobs": np.array(raw["logprobs"], dtype=np.float32),
                }
            )


def read_groups(run: Path | str, *, scored_only: bool = True) -> Iterator[list[Row]]:
    """The rows of each task's sessions together, as group-relative advantages need them.

    ``scored_only`` leaves sessions without a reward out; a group in which none has one is left out whole.
    """
    groups: dict[str, list[Row]] = {}
    for row in read_rows(run):
        if row.reward is not None or not scored_only:
            groups.setdefault(row.group_id, []).append(row)
    yield from groups.values()

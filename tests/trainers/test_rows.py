"""Rows as a trainer reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polynya.errors import RunDirError
from polynya.rollout.tables import traces_table
from polynya.schema import PolicySpan, Provenance, SessionResult, Status, Trace
from polynya.trainers import read_groups, read_rows


def write_run(path: Path, rewards: dict[str, float | None]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = []
    for session_id, reward in rewards.items():
        task_id = session_id.partition(".")[0]
        result = SessionResult(
            session_id=session_id, task_id=task_id, group_id=task_id, sample_index=0, attempt=1, status=Status.COMPLETED,
            reward=reward, provenance=Provenance(polynya="test"),
        )  # fmt: skip
        trace = Trace(
            trace_id=f"{session_id}.t0", session_id=session_id, lane="main", segment=0, input_ids=np.array([5, 6, 7], dtype=np.int32),
            loss_mask=np.array([0, 1, 1], dtype=np.uint8), logprobs=np.array([0, -0.5, -0.25], dtype=np.float32), prompt_len=1,
            policy_spans=[PolicySpan(None, 1, 3)], call_ids=["c"], call_starts=[1], call_lens=[2], finish_reason="stop",
            truncated=False, num_turns=1, messages="[]", tools="[]",
        )  # fmt: skip
        tables.append(traces_table(result, [trace]))
    pq.write_table(pa.concat_tables(tables), path / "traces.parquet")


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    write_run(tmp_path, {"a.0": 0.5})
    (row,) = read_rows(tmp_path)
    assert row.input_ids.tolist() == [5, 6, 7]
    assert row.loss_mask.tolist() == [0, 1, 1]
    assert row.logprobs.tolist() == [0, -0.5, -0.25]
    assert (row.reward, row.group_id, row.input_ids.dtype) == (0.5, "a", np.int32)


def test_session_without_a_reward_stays_out_of_its_group(tmp_path: Path) -> None:
    write_run(tmp_path, {"a.0": 1.0, "a.1": None, "a.2": 0.0, "b.0": None})
    assert [[row.session_id for row in group] for group in read_groups(tmp_path)] == [["a.0", "a.2"]]
    assert [len(group) for group in read_groups(tmp_path, scored_only=False)] == [3, 1]


def test_folder_without_rows_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=str(tmp_path)):
        list(read_rows(tmp_path))

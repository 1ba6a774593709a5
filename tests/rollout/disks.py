"""Real file systems that are small or read-only, and results to put on them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from polynya.schema import (
    Call,
    Ledger,
    PolicySpan,
    Provenance,
    SessionResult,
    Status,
    Trace,
    Trajectory,
)


class Disk:
    """A mounted tmpfs. ``fill`` leaves nothing but ``left`` bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, left: int = 0) -> None:
        with (self.path / "ballast").open("wb", buffering=0) as file:
            free = os.statvfs(self.path)
            os.posix_fallocate(file.fileno(), 0, max(1, free.f_bavail * free.f_frsize - left))

    def free(self) -> None:
        (self.path / "ballast").unlink()

    def remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.path)], check=True, capture_output=True)


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[Disk]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True, text=True
    )
    if made.returncode != 0:
        pytest.fail(
            f"these tests need a real small disk, and mounting one is not permitted here: {made.stderr.strip()}"
        )
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True, capture_output=True)


def finished(
    session_id: str, tokens: int = 3, *, status: Status = Status.COMPLETED, attempt: int = 1
) -> tuple[SessionResult, Trajectory]:
    """A session of one call with ``tokens`` sampled ids."""
    call_id = f"{session_id}.a{attempt}.0"
    sampled = np.arange(tokens, dtype=np.int32)
    logprobs = np.full(tokens, -0.5, dtype=np.float32)
    spans = [PolicySpan("v1", 0, tokens)]
    call = Call(
        call_id=call_id, session_id=session_id, attempt=attempt, index=0, dialect="openai_chat", lane="main", lane_rule="",
        agent="", parent_agent="", model="m",
        outcome="ok", error="", t_start=1.0, t_end=None, finish_reason="stop", prompt_len=2, sampled_len=tokens,
        parent_call_id=None, base_call_id=None, base_keep=0, context_ids=np.array([7, 8], dtype=np.int32),
        completion_ids=sampled, logprobs=logprobs, policy_spans=spans, trainable=True, exclusion=None,
        exclusion_detail="", delivered=True, sampling="{}", request="[]", reply="{}", flags="{}",
    )  # fmt: skip
    trace = Trace(
        trace_id=f"{call_id}.t", session_id=session_id, lane="main", segment=0,
        input_ids=np.concatenate([call.context_ids, sampled]),
        loss_mask=np.array([0, 0] + [1] * tokens, dtype=np.uint8),
        logprobs=np.concatenate([np.zeros(2, dtype=np.float32), logprobs]),
        prompt_len=2, policy_spans=spans, call_ids=[call_id], call_starts=[2], call_lens=[tokens], finish_reason="stop",
        truncated=False, num_turns=1, messages="[]", tools="[]",
    )  # fmt: skip
    ledger = Ledger(captured=tokens, trained=tokens, calls=1, calls_by_outcome={"ok": 1})
    result = SessionResult(
        session_id=session_id, task_id=session_id.rpartition(".")[0], group_id="g", sample_index=0, attempt=attempt,
        status=status, reward=1.0 if status == Status.COMPLETED else None, ledger=ledger, num_calls=1, num_traces=1,
        provenance=Provenance(polynya="0"),
    )  # fmt: skip
    return result, Trajectory(traces=[trace], calls=[call], ledger=ledger)


def without_rights() -> None:
    """For ``preexec_fn``: root that file permissions bind, as they bind everybody else."""
    libc = ctypes.CDLL(None)
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        if libc.prctl(24, capability, 0, 0, 0) != 0:  # PR_CAPBSET_DROP
            os._exit(99)

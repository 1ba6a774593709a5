"""Token arrays and texts as compact text blocks for the page.

Invariants: what the browser decodes is bit for bit what the run directory holds (ids ``int32``, logprobs ``float32``);
a block is base64, so no run-derived character stands in the HTML outside the escaped index. A session is embedded whole
or not at all, and every session that is left out is named.
This module refuses rows whose lists differ in length: such a trace is shown as a problem, without tokens.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from polynya.schema import Float32Array, Int32Array, SessionResult, Status, UInt8Array
from polynya.viewer.data import RunData, TraceRow

MISSES_ALLOWED = 8
"""So many sessions may be too big for what is left before packing stops."""
MESSAGE_CAP = 40_000
MESSAGES_CAP = 400_000


class TokenReader:
    """Fetches the token arrays of a trace; keeps the last two row groups, since neighbours come together."""

    def __init__(self, path: Path) -> None:
        self._file: Any = pq.ParquetFile(path)
        self._groups: dict[int, Any] = {}

    def arrays(self, trace: TraceRow) -> tuple[Int32Array, UInt8Array, Float32Array]:
        """Ids, mask and logprobs. Raises ValueError when they are null or differ in length."""
        if trace.row_group not in self._groups:
            if len(self._groups) >= 2:
                del self._groups[next(iter(self._groups))]
            columns = ["input_ids", "loss_mask", "logprobs"]
            self._groups[trace.row_group] = self._file.read_row_group(trace.row_group, columns=columns)
        group = self._groups[trace.row_group]
        cells = [group.column(name)[trace.row].values for name in ("input_ids", "loss_mask", "logprobs")]
        if any(cell is None or cell.null_count for cell in cells):
            raise ValueError("a token list is null or holds a null")
        ids, mask, logprobs = (cell.to_numpy(zero_copy_only=False) for cell in cells)
        if not len(ids) == len(mask) == len(logprobs):
            raise ValueError(f"{len(ids)} ids, {len(mask)} mask values and {len(logprobs)} logprobs: lengths differ")
        return ids.astype("<i4"), mask.astype("u1"), logprobs.astype("<f4")

    def close(self) -> None:
        self._groups.clear()
        self._file.close()


def encode(blob: bytes) -> str:
    """zlib, then base64: what ``bytesOf`` in base.js undoes."""
    return base64.b64encode(zlib.compress(blob, 6)).decode("ascii")


def encode_json(value: Any) -> str:
    return encode(msgspec.json.encode(value))


def pack_tokens(ids: Int32Array, mask: UInt8Array, logprobs: Float32Array) -> str:
    """One block a trace: [runs, start, end, …, ids, logprobs where the mask is 1] as 32-bit words, in four byte planes.

    Byte planes (all first bytes, then all second ones) make zlib find the high bytes, which hardly change.
    """
    edges = np.flatnonzero(np.diff(np.concatenate(([0], (mask != 0).astype(np.int8), [0]))))
    head = np.concatenate(([len(edges) // 2], edges)).astype("<i4")
    words = np.concatenate((head, ids.astype("<i4"), logprobs[mask != 0].astype("<f4").view("<i4")))
    return encode(np.ascontiguousarray(words.view(np.uint8).reshape(-1, 4).T).tobytes())


# --- sessions ------------------------------------------------------------------------------------------------------


class Packed(msgspec.Struct, kw_only=True):
    """What goes into the page beside the index."""

    blocks: list[str] = []
    details: dict[str, int] = {}
    """Session → its block."""
    left_out: list[str] = []
    used_ids: set[int] = set()
    size: int = 0


def priority(data: RunData, first: Sequence[str]) -> list[str]:
    """Sessions in the order of packing: those asked for, those with errors, then in the order of the file."""
    bad = {Status.INFRA_ERROR, Status.FAILED, Status.TIMEOUT, Status.BUDGET_EXHAUSTED}
    ended = [s.session_id for s in data.sessions]
    errors = [s.session_id for s in data.sessions if s.error is not None or s.status in bad]
    known = set(ended) | set(data.unfinished)
    return list(dict.fromkeys([*(sid for sid in first if sid in known), *errors, *ended, *data.unfinished]))


def pack(data: RunData, max_bytes: int, first: Sequence[str] = ()) -> Packed:
    """Embed whole sessions until ``max_bytes`` of text are used."""
    packed = Packed()
    order = priority(data, first)
    results = {s.session_id: s for s in data.sessions}
    reader = TokenReader(data.run_dir / "traces.parquet") if data.traces else None
    misses = 0
    try:
        for sid in order:
            if misses >= MISSES_ALLOWED:
                packed.left_out.append(sid)
                continue
            blocks, detail, used = _session(data, sid, results.get(sid), reader, len(packed.blocks))
            size = sum(map(len, blocks)) + len(detail)
            if packed.size + size > max_bytes:
                misses += 1
                packed.left_out.append(sid)
                continue
            packed.blocks += [*blocks, detail]
            packed.details[sid] = len(packed.blocks) - 1
            packed.used_ids |= used
            packed.size += size
    finally:
        if reader is not None:
            reader.close()
    return packed


def _session(
    data: RunData, sid: str, result: SessionResult | None, reader: TokenReader | None, base: int
) -> tuple[list[str], str, set[int]]:
    blocks: list[str] = []
    used: set[int] = set()
    traces: list[dict[str, Any]] = []
    for trace in data.traces.get(sid, []):
        row = msgspec.to_builtins(trace)
        row["messages"] = shorten_messages(trace.messages)
        row["block"] = None
        try:
            assert reader is not None
            ids, mask, logprobs = reader.arrays(trace)
            row["length"] = len(ids)
            row["block"] = base + len(blocks)
            blocks.append(pack_tokens(ids, mask, logprobs))
            used.update(np.unique(ids).tolist())
        except (ValueError, IndexError, OSError, pa.ArrowException) as exc:
            row["problem"] = str(exc)
        traces.append(row)
    task = result.task_id if result is not None else sid.rpartition(".")[0]
    detail = {
        "instruction": instruction_of(data, task),
        "result": None if result is None else msgspec.to_builtins(result),
        "calls": data.calls.get(sid, []),
        "traces": traces,
        "logs": data.logs(sid),
    }
    return blocks, encode_json(detail), used


def instruction_of(data: RunData, task_id: str) -> str | None:
    """What the task asks, from run.json."""
    tasks = data.run.get("tasks")
    for task in tasks if isinstance(tasks, list) else []:
        if isinstance(task, dict) and task.get("task_id") == task_id and isinstance(task.get("instruction"), str):
            return str(_shorten(task["instruction"]))
    return None


def shorten_messages(text: str | None) -> str | None:
    """Messages for reading: single texts are cut with a note when the whole is long."""
    if text is None or len(text) <= MESSAGES_CAP:
        return text
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text[:MESSAGES_CAP]
    return msgspec.json.encode(_shorten(value)).decode()


def _shorten(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MESSAGE_CAP:
        cut = len(value) - MESSAGE_CAP
        return (
            f"{value[: MESSAGE_CAP // 2]}\n[… {cut:,} characters left out of this page …]\n{value[-MESSAGE_CAP // 2 :]}"
        )
    if isinstance(value, list):
        return [_shorten(item) for item in value]
    if isinstance(value, dict):
        return {key: _shorten(item) for key, item in value.items()}
    return value


def pack_vocab(vocab: dict[int, str], used: Iterable[int]) -> str:
    """Texts of the ids that occur: two lists of one length."""
    ids = sorted(token for token in used if token in vocab)
    return encode_json([ids, [vocab[token] for token in ids]])

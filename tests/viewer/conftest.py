"""A made-up run directory: clearly test data, but shaped like a real run and with every odd case that the page shows.

``write_run`` is deterministic: one seed, one directory. The text is a small word-piece language of our own, so that the
token strip reads like a coding agent's transcript. Also run by hand to look at: ``python tests/viewer/conftest.py DIR``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from polynya.schema import ErrorInfo, Exclusion, Ledger, Provenance, Score, SessionResult, Status

T0 = 1_790_000_000.0
SENTENCES = [
    "I will look at the failing test first .",
    "The parser drops the last row when the file has no newline at its end .",
    "def read_rows(path):\n    with open(path) as file:\n        rows = [line.rstrip() for line in file]\n    return rows\n",
    "Let me run the tests again to see whether the change is enough .",
    'for index, row in enumerate(rows):\n\tif not row:\n\t\tcontinue\n\tyield index, row.split(",")\n',
    "FAILED tests/test_rows.py::test_last_row - AssertionError: 41 != 42\n",
    "==== 1 failed, 17 passed in 0.31s ====\n",
    "The fix belongs in read_rows, not in the caller ; ten quick checks: größe, naïve, 東京, 🙂 .",
]
SPECIALS = ["<|im_start|>", "<|im_end|>", "system", "user", "assistant", "tool", "\n", "<think>", "</think>"]


def pieces(text: str) -> list[str]:
    """Word pieces with the space in front, as byte-pair vocabularies have them."""
    out: list[str] = []
    for char in text:
        last = out[-1] if out else ""
        word = char.isalnum() and (last == " " or (last[-1:].isalnum() and len(last) < 7))
        indent = char == " " and bool(last) and not last.strip(" ") and len(last) < 8
        if word or indent:
            out[-1] += char
        else:
            out.append(char)
    return out


class Language:
    """Ids for pieces; grows while it is used."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        for text in SPECIALS:
            self.id(text)

    def id(self, text: str) -> int:
        return self.ids.setdefault(text, 151_000 + len(self.ids) if text.startswith("<|") else 300 + 7 * len(self.ids))

    def encode(self, text: str) -> list[int]:
        return [self.id(piece) for piece in pieces(text)]

    @property
    def vocab(self) -> dict[str, str]:
        return {str(number): text for text, number in self.ids.items()}


def speak(language: Language, rng: np.random.Generator, length: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < length:
        ids += language.encode(SENTENCES[int(rng.integers(len(SENTENCES)))] + ("\n" if rng.random() < 0.4 else " "))
    return ids[:length]


def logprobs_of(rng: np.random.Generator, n: int) -> np.ndarray:
    """Mostly sure, now and then surprised, as a policy at temperature 1 is."""
    sure = -rng.exponential(0.06, n)
    unsure = -rng.exponential(2.2, n)
    return np.where(rng.random(n) < 0.17, unsure, sure).astype(np.float32)


class Run:
    """Collects rows and writes them."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.rng = np.random.default_rng(seed)
        self.language = Language()
        self.sessions: list[SessionResult] = []
        self.calls: list[dict[str, Any]] = []
        self.traces: list[dict[str, Any]] = []
        self.tasks: list[dict[str, Any]] = []

    def trace(self, sid: str, length: int, turns: int, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """One row whose turns alternate context and sampled ids, with its calls."""
        lang, rng = self.language, self.rng
        prompt = [lang.id("<|im_start|>"), lang.id("system"), lang.id("\n"), *speak(lang, rng, max(8, length // 4))]
        ids, mask, logprobs = list(prompt), [0] * len(prompt), [0.0] * len(prompt)
        starts, lens, call_ids, spans = [], [], [], []
        per_turn = max(12, (length - len(prompt)) // turns)
        t = T0 + len(self.sessions) * 3 + 6.0
        for turn in range(turns):
            gap = [*map(lang.id, ("<|im_end|>", "\n", "<|im_start|>", "user" if turn == 0 else "tool", "\n"))]
            gap += speak(lang, rng, per_turn // 2)
            gap += map(lang.id, ("<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"))
            sampled = [*speak(lang, rng, max(4, per_turn - len(gap))), lang.id("<|im_end|>")]
            ids += gap
            mask += [0] * len(gap)
            logprobs += [0.0] * len(gap)
            call_id = f"{sid}-c{turn}"
            seconds = len(sampled) / 60 + float(rng.random())
            self.call(sid, call_id, turn, t, seconds, len(ids), len(sampled), turn and f"{sid}-c{turn - 1}")
            t += seconds + float(rng.exponential(1.5))
            starts.append(len(ids))
            lens.append(len(sampled))
            call_ids.append(call_id)
            version = "step-41" if turn < turns * 0.6 else "step-42"
            spans.append({"version": version, "start": len(ids), "end": len(ids) + len(sampled)})
            ids += sampled
            mask += [1] * len(sampled)
            logprobs += logprobs_of(rng, len(sampled)).tolist()
        return {
            "task_id": sid.rpartition(".")[0], "group_id": sid.rpartition(".")[0], "session_id": sid,
            "trace_id": f"{sid}-t0", "lane": "main", "segment": 0, "input_ids": ids, "loss_mask": mask,
            "logprobs": logprobs, "prompt_len": starts[0], "policy_spans": spans, "call_ids": call_ids,
            "call_starts": starts, "call_lens": lens, "finish_reason": "stop", "truncated": False, "num_turns": turns,
            "messages": json.dumps(messages), "tools": json.dumps([{"type": "function", "function": {"name": "bash"}}]),
        }  # fmt: skip

    def call(self, sid: str, call_id: str, index: int, t: float, seconds: float, prompt: int, sampled: int,
             base: str | int | None, **more: Any) -> None:  # fmt: skip
        row = {
            "call_id": call_id, "session_id": sid, "attempt": 1, "index": index, "dialect": "anthropic_messages",
            "lane": "main", "model": "policy", "outcome": "ok", "error": None, "t_start": t, "t_end": t + seconds,
            "finish_reason": "tool_calls", "prompt_len": prompt, "sampled_len": sampled, "parent_call_id": base or None,
            "base_call_id": base or None, "base_keep": prompt - 40 if base else 0, "context_ids": [1, 2],
            "completion_ids": [3], "logprobs": [-0.5], "policy_spans": [{"version": "step-41", "start": 0, "end": 1}],
            "trainable": True, "exclusion": None, "sampling": '{"temperature":1,"top_p":1}',
            "request": json.dumps([{"role": "tool", "content": "1 failed, 17 passed", "tool_call_id": f"toolu_{index:03}"}]),
            "reply": json.dumps({"role": "assistant", "content": SENTENCES[index % 8], "finish_reason": "tool_calls"}),
            "flags": "{}",
        }  # fmt: skip
        self.calls.append(row | more)

    def session(self, task: str, sample: int, status: Status, value: float | None, *, length: int = 900,
                turns: int = 6, error: ErrorInfo | None = None) -> None:  # fmt: skip
        sid = f"{task}.{sample}"
        rng = self.rng
        excluded: dict[str, int] = {}
        trained = 0
        if status is not Status.INFRA_ERROR:
            row = self.trace(sid, length, turns, conversation(turns)) | {"reward": value, "status": status}
            self.traces.append(row)
            trained = sum(row["loss_mask"])
        if sample % 4 == 0:
            self.call(sid, f"{sid}-title", turns, T0 + len(self.sessions) * 3 + 6.2, 0.6, 210, 14, None, lane="auxiliary",
                      trainable=False, exclusion=Exclusion.AUXILIARY_LANE, finish_reason="stop")  # fmt: skip
            excluded[Exclusion.AUXILIARY_LANE] = 14
        if sample % 3 == 2:
            self.call(sid, f"{sid}-retry", turns + 1, T0 + len(self.sessions) * 3 + 9.0, 1.4, 640, 37, None,
                      trainable=False, exclusion=Exclusion.NOT_DELIVERED)  # fmt: skip
            excluded[Exclusion.NOT_DELIVERED] = 37
        captured = trained + sum(excluded.values())
        calls = [c for c in self.calls if c["session_id"] == sid]
        ledger = Ledger(captured=captured, trained=trained, excluded=excluded, calls=len(calls),
                        calls_by_outcome={"ok": len(calls)} if calls else {},
                        chain_breaks={"tool_output_rewritten": 1} if sample == 1 else {})  # fmt: skip
        times = {"queued": rng.exponential(4), "init": 1.5 + rng.exponential(1), "ready": rng.exponential(0.8),
                 "running": turns * 2.5 + rng.exponential(6), "postrun": 1 + rng.exponential(1.5)}  # fmt: skip
        if status is Status.INFRA_ERROR:
            times |= {"running": 0.0, "postrun": 0.0}
        times = {k: round(float(v), 3) for k, v in times.items()}
        log = self.root / "logs" / sid
        log.mkdir(parents=True, exist_ok=True)
        (log / "harness.log").write_text(f"\x1b[32m● start\x1b[0m {sid}\n 10%\r 60%\r100% done\n" + "tool: bash\n" * 5)
        self.sessions.append(SessionResult(
            session_id=sid, task_id=task, group_id=task, sample_index=sample, attempt=1, status=status, reward=value,
            scores=scores(value), ledger=ledger, num_calls=len(calls), num_traces=int(trained > 0),
            prompt_tokens=sum(c["prompt_len"] for c in calls), sampled_tokens=captured,
            exit_code=0 if status is Status.COMPLETED else None, error=error, timings=times | {"total": sum(times.values())},
            started_at=T0 + len(self.sessions) * 3, provenance=PROVENANCE, logs={"harness": f"logs/{sid}/harness.log"},
        ))  # fmt: skip

    def write(self, *, finished: bool = True) -> None:
        total = Ledger(
            captured=sum(s.ledger.captured for s in self.sessions), trained=sum(s.ledger.trained for s in self.sessions),
            excluded=added([s.ledger.excluded for s in self.sessions]), calls=len(self.calls),
            calls_by_outcome={"ok": len(self.calls)}, chain_breaks=added([s.ledger.chain_breaks for s in self.sessions]),
        )  # fmt: skip
        run = {"run_id": "made-up-run", "started_at": T0, "finished_at": T0 + 412 if finished else None,
               "command": "polynya run tasks.yaml --engine http://127.0.0.1:8000/v1", "engine": {"name": "vllm"},
               "provenance": msgspec.to_builtins(PROVENANCE), "summary": {}, "tasks": self.tasks}  # fmt: skip
        (self.root / "run.json").write_text(json.dumps(run))
        lines = b"".join(msgspec.json.encode(s) + b"\n" for s in self.sessions)
        (self.root / "sessions.jsonl").write_bytes(lines)
        (self.root / "vocab.json").write_text(json.dumps(self.language.vocab))
        ledgers = {s.session_id: s.ledger for s in self.sessions}
        (self.root / "ledger.json").write_bytes(msgspec.json.encode({"total": total, "sessions": ledgers}))
        write_calls(self.root / "calls.parquet", self.calls)
        write_traces(self.root / "traces.parquet", self.traces)


PROVENANCE = Provenance(
    polynya="0.1.0", engine="vllm", engine_build="0.99.0+test", model="made-up/Coder-4B", model_sha256="ab" * 32,
    tokenizer_sha256="cd" * 32, chat_template_sha256="ef" * 32, tool_parser="hermes", logprob_kind="raw",
    harness="claude-code", harness_version="9.9.9", runtime="bubblewrap", sampling={"temperature": 1.0, "top_p": 1.0},
)  # fmt: skip
_SPAN = pa.list_(pa.struct([("version", pa.string()), ("start", pa.int32()), ("end", pa.int32())]))
_INTS, _STRINGS = pa.list_(pa.int32()), pa.list_(pa.string())
CALL_SCHEMA = pa.schema([
    *((n, pa.string()) for n in ("call_id", "session_id")), ("attempt", pa.int32()), ("index", pa.int32()),
    *((n, pa.string()) for n in ("dialect", "lane", "model", "outcome", "error")), ("t_start", pa.float64()),
    ("t_end", pa.float64()), ("finish_reason", pa.string()), ("prompt_len", pa.int32()), ("sampled_len", pa.int32()),
    ("parent_call_id", pa.string()), ("base_call_id", pa.string()), ("base_keep", pa.int32()), ("context_ids", _INTS),
    ("completion_ids", _INTS), ("logprobs", pa.list_(pa.float32())), ("policy_spans", _SPAN), ("trainable", pa.bool_()),
    *((n, pa.string()) for n in ("exclusion", "sampling", "request", "reply", "flags")),
])  # fmt: skip
TRACE_SCHEMA = pa.schema([
    *((n, pa.string()) for n in ("task_id", "group_id", "session_id", "trace_id", "lane")), ("segment", pa.int32()),
    ("input_ids", _INTS), ("loss_mask", pa.list_(pa.uint8())), ("logprobs", pa.list_(pa.float32())),
    ("prompt_len", pa.int32()), ("policy_spans", _SPAN), ("call_ids", _STRINGS), ("call_starts", _INTS),
    ("call_lens", _INTS), ("reward", pa.float64()), ("status", pa.string()), ("finish_reason", pa.string()),
    ("truncated", pa.bool_()), ("num_turns", pa.int32()), ("messages", pa.string()), ("tools", pa.string()),
])  # fmt: skip


def write_calls(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows, schema=CALL_SCHEMA), path)


def write_traces(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows, schema=TRACE_SCHEMA), path, row_group_size=16)


def added(tables: list[dict[str, int]]) -> dict[str, int]:
    return {key: sum(t.get(key, 0) for t in tables) for key in sorted({k for t in tables for k in t})}


def scores(value: float | None) -> list[Score]:
    if value is None:
        return []
    passed = [f"tests/test_rows.py::test_{n}" for n in ("empty", "header", "quotes", "unicode")]
    failed = [] if value >= 1 else ["tests/test_rows.py::test_last_row"]
    detail = "18 passed in 0.30s" if value >= 1 else "E   AssertionError: 41 != 42\n1 failed, 17 passed in 0.31s"
    return [
        Score(
            name="command", label="hidden tests", value=value, passed=passed, failed=failed, detail=detail, seconds=1.2
        ),
        Score(name="python", label="patch size", value=0.8, weight=0.1, seconds=0.02),
    ]


def conversation(turns: int) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a coding agent. Work in /workspace.\n" + "Be brief.\n" * 4},
        {"role": "user", "content": "The last row of a CSV file is lost. Find out why and fix it."},
    ]
    for turn in range(turns):
        call = {
            "id": f"toolu_{turn:03}",
            "type": "function",
            "function": {"name": "bash", "arguments": '{"command":"pytest -q"}'},
        }
        out.append(
            {
                "role": "assistant",
                "content": SENTENCES[turn % 8],
                "reasoning_content": "Check the tests.",
                "tool_calls": [call],
            }
        )
        out.append(
            {
                "role": "tool",
                "tool_call_id": f"toolu_{turn:03}",
                "content": "F" + "." * 17 + "\n1 failed, 17 passed in 0.31s\n",
            }
        )
    return [*out, {"role": "assistant", "content": "The last row is read now; all 18 tests pass."}]


def write_run(root: Path, *, tasks: int = 5, samples: int = 4, long: int | None = None, seed: int = 7) -> Run:
    """Write a run of ``tasks`` × ``samples`` sessions; ``long`` makes the first trace that many tokens."""
    root.mkdir(parents=True, exist_ok=True)
    run = Run(root, seed)
    infra = ErrorInfo(kind="EngineUnavailable", boundary="engine", message="POST /v1/completions: connection refused",
                      fix="start the engine, then run again with the same --run", retryable=True)  # fmt: skip
    names = ["csv-last-row", "retry-backoff", "date-parse", "toml-merge", "lru-cache"]
    for t in range(tasks):
        task = names[t] if t < len(names) else f"task-{t:04}"
        run.tasks.append({"task_id": task, "instruction": f"Fix the bug in {task}. All tests must pass.",
                          "num_samples": samples, "harness": {"name": "claude-code"}})  # fmt: skip
        for s in range(samples):
            kind = (t * 7 + s * 3) % 11
            length, turns = (long, 40) if long and t == 0 and s == 0 else (900 + 90 * s, 6)
            if t == 1:
                run.session(task, s, Status.COMPLETED, 1.0, length=length)
            elif kind == 3 and t:
                run.session(task, s, Status.INFRA_ERROR, None, error=infra)
            elif kind == 5 and t:
                error = ErrorInfo(kind="StageTimeout", boundary="node", message="stage running spent its budget of 900 s",
                                  fix="raise budgets.running in the task", policy_can_cause=True)  # fmt: skip
                run.session(task, s, Status.TIMEOUT, 0.0, length=length, error=error)
            else:
                run.session(
                    task,
                    s,
                    Status.COMPLETED,
                    round(float(run.rng.choice([0.0, 0.25, 0.5, 1.0, 1.0])), 3),
                    length=length,
                    turns=turns,
                )
    run.write()
    return run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    write_run(root, tasks=3, samples=3)
    return root


@pytest.fixture
def make_run() -> Callable[..., Run]:
    return write_run


@pytest.fixture
def write_rows() -> tuple[Callable[..., None], Callable[..., None]]:
    """Writers of calls.parquet and traces.parquet."""
    return write_calls, write_traces


if __name__ == "__main__":
    write_run(Path(sys.argv[1]), tasks=int(sys.argv[2]) if len(sys.argv) > 2 else 5,
              samples=int(sys.argv[3]) if len(sys.argv) > 3 else 4, long=35_000)  # fmt: skip

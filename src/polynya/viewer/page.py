"""``render``: one self-contained HTML file from a run directory.

Invariants: the file loads nothing from outside, and a content security policy allows only the script and the style whose
hashes it names; all text of the run stands in escaped JSON or base64 and reaches the page through ``textContent``. The
file is replaced as a whole. What is not embedded is named in the page.
This module refuses a folder that is no run directory, or an output path that cannot be written (``RunDirError``).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from polynya.errors import RunDirError
from polynya.schema import Ledger, SessionResult
from polynya.viewer.data import RunData, load
from polynya.viewer.pack import Packed, pack, pack_vocab

DEFAULT_MAX_BYTES = 64 * 1024 * 1024
SCRIPTS = ("base.js", "parts.js", "strip.js", "strip_tools.js", "session.js", "run.js", "page.js")
_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


def render(
    run_dir: Path, out: Path | None = None, *, max_bytes: int = DEFAULT_MAX_BYTES, sessions: Sequence[str] = ()
) -> Path:
    """Write the page of a run and return its path (default ``RUN/view.html``).

    ``max_bytes`` bounds the embedded calls, messages, logs and tokens: sessions named in ``sessions`` come first, then
    those with errors, then the others in order; what does not fit is named in the page.
    Raises RunDirError when ``run_dir`` is no run directory or the file cannot be written.
    """
    run_dir = Path(run_dir)
    data = load(run_dir)
    packed = pack(data, max_bytes, sessions)
    target = Path(out) if out is not None else run_dir / "view.html"
    if target.is_dir():
        target = target / "view.html"
    _write(target, document(data, packed, max_bytes))
    return target


def document(data: RunData, packed: Packed, max_bytes: int) -> str:
    """The whole page as text."""
    blocks = list(packed.blocks)
    index = index_of(data, packed, max_bytes)
    if data.vocab is not None:
        index["vocab"] = len(blocks)
        blocks.append(pack_vocab(data.vocab, packed.used_ids))
    home = resources.files("polynya.viewer")
    style = home.joinpath("page.css").read_text("utf-8")
    parts = "\n".join(home.joinpath(name).read_text("utf-8") for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{parts}\n}})();\n'
    pieces = {
        "TITLE": _html(f"polynya · {data.run.get('run_id') or data.run_dir.resolve().name}"),
        "SCRIPT_HASH": _sha256(script),
        "STYLE_HASH": _sha256(style),
        "STYLE": style,
        "SCRIPT": script,
        "INDEX": json_for_html(index),
        "BLOCKS": "\n".join(f'<script type="text/plain" id="b{i}">{text}</script>' for i, text in enumerate(blocks)),
    }
    page = home.joinpath("page.html").read_text("utf-8")
    chunks = page.split("%%")  # literal, name, literal, name, …: a piece is never searched for names
    return "".join(chunk if i % 2 == 0 else pieces[chunk] for i, chunk in enumerate(chunks))


def json_for_html(value: Any) -> str:
    """JSON that cannot end its script element or start another, and is still the same JSON."""
    return msgspec.json.encode(value).decode("utf-8").translate(_ESCAPES)


def _html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


# --- the index -----------------------------------------------------------------------------------------------------


def index_of(data: RunData, packed: Packed, max_bytes: int) -> dict[str, Any]:
    """What the run page needs; everything that belongs to one session only is in that session's block."""
    left_out = set(packed.left_out)
    rows = [_row(session, data, packed, left_out) for session in data.sessions]
    rows += [_open_row(sid, data, packed, left_out) for sid in data.unfinished]
    total = data.ledger_total or _sum([session.ledger for session in data.sessions])
    return {
        "written_at": time.time(),
        "run_dir": data.run_dir.resolve().name,
        "run": {key: value for key, value in data.run.items() if key != "tasks"},
        "tasks": _tasks(data),
        "gaps": [gap._asdict() for gap in data.gaps],
        "bad_lines": data.bad_lines[:50],
        "bad_line_count": len(data.bad_lines),
        "sessions": rows,
        "ledger": total,
        "ledger_from": "ledger.json" if data.ledger_total is not None else "sessions.jsonl",
        "has_traces": not any(gap.name == "traces.parquet" for gap in data.gaps),
        "has_calls": not any(gap.name == "calls.parquet" for gap in data.gaps),
        "trained_in_traces": sum(trace.trained for traces in data.traces.values() for trace in traces),
        "provenance": _provenance(data),
        "cap": max_bytes,
        "left_out": packed.left_out,
        "vocab": None,
    }


def _row(session: SessionResult, data: RunData, packed: Packed, left_out: set[str]) -> dict[str, Any]:
    sid = session.session_id
    traces = data.traces.get(sid, [])
    error = session.error
    return {
        "id": sid,
        "task": session.task_id,
        "sample": session.sample_index,
        "attempt": session.attempt,
        "status": session.status,
        "reward": session.reward,
        "calls": session.num_calls,
        "traces": session.num_traces,
        "sampled": session.sampled_tokens,
        "prompt": session.prompt_tokens,
        "timings": session.timings,
        "error": None if error is None else {"kind": error.kind, "message": error.message[:300]},
        "ledger": session.ledger,
        "ledger_file": data.ledgers.get(sid),
        "trained_in_traces": sum(trace.trained for trace in traces),
        "block": packed.details.get(sid),
        "left_out": sid in left_out,
    }


def _open_row(sid: str, data: RunData, packed: Packed, left_out: set[str]) -> dict[str, Any]:
    calls = data.calls.get(sid, [])
    task, _, sample = sid.rpartition(".")
    return {
        "id": sid,
        "task": task or sid,
        "sample": int(sample) if sample.isdecimal() and len(sample) < 10 else None,
        "attempt": None,
        "status": "open",
        "reward": None,
        "calls": len(calls),
        "traces": len(data.traces.get(sid, [])),
        "sampled": sum(call.sampled_len or 0 for call in calls),
        "prompt": sum(call.prompt_len or 0 for call in calls),
        "timings": {},
        "error": None,
        "ledger": data.ledgers.get(sid),
        "ledger_file": None,
        "trained_in_traces": sum(trace.trained for trace in data.traces.get(sid, [])),
        "block": packed.details.get(sid),
        "left_out": sid in left_out,
    }


def _tasks(data: RunData) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    raw = data.run.get("tasks")
    for task in raw if isinstance(raw, list) else []:
        if isinstance(task, dict) and isinstance(task.get("task_id"), str):
            harness = task.get("harness")
            found[task["task_id"]] = {
                "num_samples": task.get("num_samples"),
                "harness": harness.get("name") if isinstance(harness, dict) else harness,
            }
    return found


def _provenance(data: RunData) -> list[dict[str, Any]]:
    """The different provenances of the sessions, most frequent first, without the sampling of single calls."""
    counts: dict[bytes, int] = {}
    for session in data.sessions:
        fields = {k: v for k, v in msgspec.to_builtins(session.provenance).items() if k != "sampling"}
        key = msgspec.json.encode(fields)
        counts[key] = counts.get(key, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: -item[1])[:20]
    return [{**msgspec.json.decode(key), "sessions": count} for key, count in ordered]


def _sum(ledgers: list[Ledger]) -> Ledger | None:
    if not ledgers:
        return None

    def merged(name: str) -> dict[str, int]:
        result: dict[str, int] = {}
        for ledger in ledgers:
            for key, value in getattr(ledger, name).items():
                result[key] = result.get(key, 0) + value
        return result

    return Ledger(
        captured=sum(ledger.captured for ledger in ledgers),
        trained=sum(ledger.trained for ledger in ledgers),
        calls=sum(ledger.calls for ledger in ledgers),
        excluded=merged("excluded"),
        calls_by_outcome=merged("calls_by_outcome"),
        chain_breaks=merged("chain_breaks"),
    )


# --- writing -------------------------------------------------------------------------------------------------------


def _write(target: Path, text: str) -> None:
    """Replace ``target`` as a whole."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
            file.write(text)
        temporary.replace(target)
    except OSError as exc:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise RunDirError(
            f"output {target}: {exc.strerror}", fix="give a path in a folder that exists and can be written"
        ) from exc

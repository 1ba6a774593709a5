"""What the viewer knows about a run: plain structs, read from the files of a run directory by ``load``.

Invariants: reading never changes the directory and never waits; a file that is missing, or still being written, becomes
a ``Gap`` that the page shows, never an empty table that looks like a fact. Token arrays are not held: ``TraceRow`` says
where its row lies, and ``TokenReader`` fetches it.
This module refuses a path that is no run directory (``RunDirError``); nothing else in the files can make it raise.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from polynya.errors import RunDirError
from polynya.schema import Ledger, SessionResult
from polynya.viewer import sources
from polynya.viewer.sources import Gap

KNOWN_FILES = ("run.json", "sessions.jsonl", "calls.parquet", "traces.parquet", "ledger.json", "logs")


class CallRow(msgspec.Struct, frozen=True, kw_only=True):
    """One model call, without its token arrays. None: the file does not say."""

    call_id: str
    session_id: str
    attempt: int | None = None
    index: int | None = None
    dialect: str | None = None
    lane: str | None = None
    lane_rule: str | None = None
    agent: str | None = None
    parent_agent: str | None = None
    model: str | None = None
    outcome: str | None = None
    error: str | None = None
    t_start: float | None = None
    t_end: float | None = None
    finish_reason: str | None = None
    prompt_len: int | None = None
    sampled_len: int | None = None
    parent_call_id: str | None = None
    base_call_id: str | None = None
    base_keep: int | None = None
    trainable: bool | None = None
    exclusion: str | None = None
    sampling: str | None = None
    request: str | None = None
    reply: str | None = None
    flags: str | None = None


class TraceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One trace without its tokens, and where they lie in ``traces.parquet``."""

    trace_id: str
    session_id: str
    lane: str | None = None
    segment: int | None = None
    prompt_len: int | None = None
    policy_spans: list[dict[str, Any]] = []
    call_ids: list[str] = []
    call_starts: list[int] = []
    call_lens: list[int] = []
    finish_reason: str | None = None
    truncated: bool | None = None
    num_turns: int | None = None
    messages: str | None = None
    tools: str | None = None
    length: int = 0
    trained: int = 0
    row_group: int = 0
    row: int = 0


class LogFile(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one log file, without escape sequences."""

    name: str
    path: str
    """Below the run directory."""
    size: int
    shown: int
    """Bytes of the file that ``text`` stands for; less than ``size`` when the beginning was cut."""
    text: str


class RunData(msgspec.Struct, kw_only=True):
    """A run, as far as it has got."""

    run_dir: Path
    run: dict[str, Any] = {}
    sessions: list[SessionResult] = []
    bad_lines: list[str] = []
    """Lines of ``sessions.jsonl`` that could not be read, with the reason; a torn last line is not one of them."""
    calls: dict[str, list[CallRow]] = {}
    traces: dict[str, list[TraceRow]] = {}
    ledger_total: Ledger | None = None
    ledgers: dict[str, Ledger] = {}
    vocab: dict[int, str] | None = None
    gaps: list[Gap] = []

    @property
    def unfinished(self) -> list[str]:
        """Sessions that have calls or traces but no result yet."""
        ended = {session.session_id for session in self.sessions}
        return [sid for sid in dict.fromkeys([*self.calls, *self.traces]) if sid not in ended]

    def logs(self, session_id: str) -> list[LogFile]:
        """The ends of a session's log files, read now."""
        result = next((s for s in self.sessions if s.session_id == session_id), None)
        named = result.logs if result is not None else {}
        found = sources.log_tails(self.run_dir, session_id, named)
        return [msgspec.convert(item, LogFile) for item in found]


def check_run_dir(run_dir: Path) -> None:
    """Raise RunDirError unless ``run_dir`` is a folder that a run has written into."""
    fix = "give the folder that `polynya run` or `polynya gateway --run` wrote, the one that holds run.json"
    if not run_dir.exists():
        raise RunDirError(f"run directory {run_dir}: does not exist", fix=fix)
    if not run_dir.is_dir():
        raise RunDirError(f"run directory {run_dir}: is a file, not a folder", fix=fix)
    if not any((run_dir / name).exists() for name in KNOWN_FILES):
        raise RunDirError(f"run directory {run_dir}: holds none of {', '.join(KNOWN_FILES)}", fix=fix)


def load(run_dir: Path) -> RunData:
    """Read everything but token arrays and logs. Raises RunDirError when ``run_dir`` is no run directory."""
    run_dir = Path(run_dir)
    check_run_dir(run_dir)
    data = RunData(run_dir=run_dir)
    raw_run = sources.read_json(run_dir / "run.json", data.gaps)
    data.run = raw_run if isinstance(raw_run, dict) else {}
    data.sessions, data.bad_lines = sources.read_sessions(run_dir / "sessions.jsonl", data.gaps)
    for call in _converted(
        sources.call_rows(run_dir / "calls.parquet", data.gaps), CallRow, "calls.parquet", data.gaps
    ):
        data.calls.setdefault(call.session_id, []).append(call)
    for calls in data.calls.values():
        calls.sort(key=lambda call: (call.attempt or 0, call.index if call.index is not None else 1 << 60))
    rows = sources.trace_rows(run_dir / "traces.parquet", data.gaps)
    for trace in _converted(rows, TraceRow, "traces.parquet", data.gaps):
        data.traces.setdefault(trace.session_id, []).append(trace)
    _read_ledger(run_dir / "ledger.json", data)
    vocab = sources.read_json(run_dir / "vocab.json", data.gaps, optional=True)
    if isinstance(vocab, dict):
        data.vocab = {int(key): str(text) for key, text in vocab.items() if key.lstrip("-").isdigit()}
    return data


Row = TypeVar("Row")


def _converted(rows: Iterator[dict[str, Any]], kind: type[Row], name: str, gaps: list[Gap]) -> Iterator[Row]:
    """Rows as structs. A null is an absent value; a row of another shape is counted in one Gap."""
    bad = 0
    why = ""
    for row in rows:
        try:
            yield msgspec.convert({k: v for k, v in row.items() if v is not None}, kind, strict=False)
        except msgspec.ValidationError as exc:
            bad += 1
            why = why or str(exc)
    if bad:
        gaps.append(Gap(name, "unreadable", f"{bad} rows have another shape and are not shown; the first: {why}"))


def _read_ledger(path: Path, data: RunData) -> None:
    raw = sources.read_json(path, data.gaps)
    if raw is None:
        return
    try:
        data.ledger_total = msgspec.convert(raw["total"], Ledger)
        data.ledgers = msgspec.convert(raw.get("sessions", {}), dict[str, Ledger])
    except (msgspec.ValidationError, KeyError, TypeError, AttributeError) as exc:
        data.gaps.append(Gap("ledger.json", "unreadable", f"not a ledger: {exc}"))

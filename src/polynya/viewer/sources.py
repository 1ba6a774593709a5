"""Readers for the single files of a run directory, written to be used while the run goes on.

Invariants: a reader returns what can be read and appends a ``Gap`` for what cannot; it holds no token array longer than
one row group. Log text comes back without escape sequences and other control characters.
This module refuses log paths that leave the run directory or are symbolic links: what an agent wrote cannot make the
viewer read another file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from polynya.schema import ID_PATTERN, SessionResult

CALL_ARRAYS = {"context_ids", "completion_ids", "logprobs", "policy_spans"}
CALL_TEXTS = ("request", "reply", "sampling", "flags", "error")
CALL_TEXT_CAP = 16_000
LOG_TAIL_BYTES = 12_000
LOG_FILES = 16


class Gap(NamedTuple):
    """A file that the page has to do without."""

    name: str
    state: str
    """``not yet`` (missing, or its end is not written) or ``unreadable``."""
    why: str


# --- JSON ----------------------------------------------------------------------------------------------------------


def read_json(path: Path, gaps: list[Gap], *, optional: bool = False) -> Any:
    """The decoded file, or None and a Gap. A missing ``optional`` file is no gap."""
    try:
        return msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        if not optional:
            gaps.append(Gap(path.name, "not yet", "not written yet"))
    except (msgspec.DecodeError, RecursionError) as exc:
        gaps.append(Gap(path.name, "not yet", f"not complete: {exc}"))
    except OSError as exc:
        gaps.append(Gap(path.name, "unreadable", str(exc.strerror)))
    return None


def read_sessions(path: Path, gaps: list[Gap]) -> tuple[list[SessionResult], list[str]]:
    """Every session that has ended; the last line of a session wins. A torn last line is ignored."""
    try:
        blob = path.read_bytes()
    except FileNotFoundError:
        gaps.append(Gap(path.name, "not yet", "no session has ended yet"))
        return [], []
    except OSError as exc:
        gaps.append(Gap(path.name, "unreadable", str(exc.strerror)))
        return [], []
    lines = blob.split(b"\n")
    torn = lines.pop()
    decoder = msgspec.json.Decoder(SessionResult)
    sessions: dict[str, SessionResult] = {}
    bad: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            session = decoder.decode(line)
        except (msgspec.DecodeError, RecursionError) as exc:
            bad.append(f"line {number}: {exc}")
            continue
        sessions[session.session_id] = session
    if torn.strip():
        try:  # complete, only its newline is missing
            session = decoder.decode(torn)
            sessions[session.session_id] = session
        except (msgspec.DecodeError, RecursionError):
            pass
    return list(sessions.values()), bad


# --- Parquet -------------------------------------------------------------------------------------------------------


def open_parquet(path: Path, gaps: list[Gap]) -> Any:
    """A ParquetFile, or None and a Gap. Parquet is readable only once its footer is written."""
    try:
        return pq.ParquetFile(path)
    except FileNotFoundError:
        gaps.append(Gap(path.name, "not yet", "not written yet"))
    except pa.ArrowInvalid as exc:
        gaps.append(Gap(path.name, "not yet", f"not complete: {str(exc).splitlines()[0]}"))
    except OSError as exc:
        gaps.append(Gap(path.name, "unreadable", str(exc)))
    return None


def _lacks(table: Any, needed: tuple[str, ...], name: str, gaps: list[Gap]) -> bool:
    lacking = [column for column in needed if column not in table.schema_arrow.names]
    if lacking:
        gaps.append(Gap(name, "unreadable", f"lacks the column {', '.join(lacking)}"))
    return bool(lacking)


def _text(value: Any) -> str | None:
    """JSON columns are strings; a writer that stored them as structs is understood too."""
    if value is None or isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()


def _cap(value: Any, limit: int = CALL_TEXT_CAP) -> str | None:
    text = _text(value)
    if text is None or len(text) <= limit:
        return text
    return f"{text[:limit]}\n[… {len(text) - limit:,} characters left out of this page …]"


def call_rows(path: Path, gaps: list[Gap]) -> Iterator[dict[str, Any]]:
    """Rows of ``calls.parquet`` without token arrays, long texts cut with a note."""
    table = open_parquet(path, gaps)
    if table is None or _lacks(table, ("call_id", "session_id"), path.name, gaps):
        return
    with table:
        columns = [name for name in table.schema_arrow.names if name not in CALL_ARRAYS]
        try:
            for batch in table.iter_batches(batch_size=512, columns=columns):
                for row in batch.to_pylist():
                    for key in CALL_TEXTS:
                        row[key] = _cap(row.get(key))
                    yield row
        except (pa.ArrowException, OSError) as exc:
            gaps.append(Gap(path.name, "unreadable", str(exc).splitlines()[0]))


def trace_rows(path: Path, gaps: list[Gap]) -> Iterator[dict[str, Any]]:
    """Rows of ``traces.parquet`` with lengths and positions instead of token arrays."""
    table = open_parquet(path, gaps)
    needed = ("trace_id", "session_id", "input_ids", "loss_mask", "logprobs")
    if table is None or _lacks(table, needed, path.name, gaps):
        return
    with table:
        columns = [name for name in table.schema_arrow.names if name not in ("input_ids", "logprobs")]
        try:
            for group in range(table.num_row_groups):
                rows = table.read_row_group(group, columns=columns)
                masks = rows.column("loss_mask").combine_chunks()
                lengths = pc.fill_null(pc.list_value_length(masks), 0).to_pylist()
                plain = rows.drop_columns(["loss_mask"]).to_pylist()
                for index, row in enumerate(plain):
                    mask = masks[index].values
                    trained = int(pc.sum(mask).as_py() or 0) if mask is not None else 0
                    row |= {key: _text(row.get(key)) for key in ("messages", "tools")}
                    yield {**row, "length": lengths[index], "trained": trained, "row_group": group, "row": index}
        except (pa.ArrowException, OSError) as exc:
            gaps.append(Gap(path.name, "unreadable", str(exc).splitlines()[0]))


# --- logs ----------------------------------------------------------------------------------------------------------

_ANSI = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|\x9c|$)"  # OSC, DCS, SOS, PM, APC
    r"|\x9b[0-?]*[ -/]*[@-~]"  # 8-bit CSI
    r"|\x1b[ -/]*[0-~]?",  # two-character escapes, and an escape at the very end
    re.DOTALL,
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def plain_text(text: str) -> str:
    """Text of a terminal as it would stand there in the end: no escapes, no overwritten progress lines."""
    text = _ANSI.sub("", text).replace("\r\n", "\n")
    lines = (line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n"))
    return _CONTROL.sub("", "\n".join(lines))


def _tail(path: Path) -> tuple[int, int, str]:
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - LOG_TAIL_BYTES))
        blob = file.read(LOG_TAIL_BYTES)
    if size > LOG_TAIL_BYTES and b"\n" in blob[:-1]:
        blob = blob.split(b"\n", 1)[1]
    return size, len(blob), plain_text(blob.decode("utf-8", "replace"))


def _inside(run_dir: Path, relative: str) -> Path | None:
    """A regular file below ``run_dir``, reached without symbolic links and without ``..``; else None."""
    parts = Path(relative).parts
    if not parts or Path(relative).is_absolute() or ".." in parts or "\0" in relative:
        return None
    path = run_dir
    for part in parts:
        path = path / part
        if path.is_symlink():
            return None
    return path if path.is_file() else None


def log_tails(run_dir: Path, session_id: str, named: dict[str, str]) -> list[dict[str, Any]]:
    """The ends of the logs that a result names and of those in ``logs/<session>/``."""
    wanted = {path: name for name, path in named.items()}
    folder = run_dir / "logs" / session_id
    if re.match(ID_PATTERN, session_id) and folder.is_dir() and not folder.is_symlink():
        for path in sorted(folder.rglob("*")):
            relative = path.relative_to(run_dir).as_posix()
            wanted.setdefault(relative, path.relative_to(folder).as_posix())
    found: list[dict[str, Any]] = []
    for relative, name in wanted.items():
        path_or_none = _inside(run_dir, relative)
        if path_or_none is None:
            continue
        if len(found) >= LOG_FILES:
            break
        try:
            size, shown, text = _tail(path_or_none)
        except OSError:
            continue
        found.append({"name": name, "path": relative, "size": size, "shown": shown, "text": text})
    return found

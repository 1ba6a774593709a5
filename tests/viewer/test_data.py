"""``load``: complete, partial and odd run directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polynya.errors import RunDirError
from polynya.viewer import load
from polynya.viewer.sources import plain_text


def test_a_complete_run_has_no_gaps(run_dir: Path) -> None:
    data = load(run_dir)
    assert data.gaps == [] and data.bad_lines == []
    assert len(data.sessions) == 9
    assert data.ledger_total is not None and data.ledger_total.balanced()
    assert data.vocab is not None and "<|im_start|>" in data.vocab.values()
    assert data.unfinished == []
    trained = sum(trace.trained for traces in data.traces.values() for trace in traces)
    assert trained == data.ledger_total.trained > 0
    for calls in data.calls.values():
        assert [c.index for c in calls] == sorted(c.index for c in calls if c.index is not None)


def test_a_torn_last_line_is_ignored_and_a_bad_line_is_named(run_dir: Path) -> None:
    path = run_dir / "sessions.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b'{"session_id": 3}\n', *lines[1:4]]) + lines[5][: len(lines[5]) // 2])
    data = load(run_dir)
    assert len(data.sessions) == 4
    assert len(data.bad_lines) == 1 and data.bad_lines[0].startswith("line 2: ")
    assert data.unfinished, "sessions with calls but no result are open"


def test_a_whole_last_line_without_newline_counts(run_dir: Path) -> None:
    path = run_dir / "sessions.jsonl"
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert len(load(run_dir).sessions) == 9


def test_the_last_line_of_a_session_wins(run_dir: Path) -> None:
    path = run_dir / "sessions.jsonl"
    first = json.loads(path.read_bytes().splitlines()[0])
    path.write_bytes(path.read_bytes() + json.dumps(first | {"reward": 0.125}).encode() + b"\n")
    data = load(run_dir)
    assert len(data.sessions) == 9 and data.sessions[0].reward == 0.125


@pytest.mark.parametrize("name", ["calls.parquet", "traces.parquet", "sessions.jsonl", "ledger.json", "run.json"])
def test_a_missing_file_is_not_yet(run_dir: Path, name: str) -> None:
    (run_dir / name).unlink()
    gaps = load(run_dir).gaps
    assert [(gap.name, gap.state) for gap in gaps] == [(name, "not yet")]


@pytest.mark.parametrize("name", ["calls.parquet", "traces.parquet", "ledger.json", "run.json"])
def test_a_half_written_file_is_not_yet(run_dir: Path, name: str) -> None:
    blob = (run_dir / name).read_bytes()
    for size in (0, 3, len(blob) // 2, len(blob) - 5):
        (run_dir / name).write_bytes(blob[:size])
        gaps = load(run_dir).gaps
        assert [(gap.name, gap.state) for gap in gaps] == [(name, "not yet")], size


def test_a_missing_vocabulary_is_no_gap(run_dir: Path) -> None:
    (run_dir / "vocab.json").unlink()
    data = load(run_dir)
    assert data.vocab is None and data.gaps == []


def test_rows_of_another_shape_are_counted_not_fatal(run_dir: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"call_id": "a", "session_id": "s.0", "index": 0, "reply": {"role": "assistant"}},
        {"call_id": None, "session_id": "s.0"},
    ]
    pq.write_table(pa.Table.from_pylist(rows), run_dir / "calls.parquet")
    data = load(run_dir)
    assert data.calls["s.0"][0].reply == '{"role":"assistant"}'
    assert [gap.state for gap in data.gaps] == ["unreadable"] and "1 rows" in data.gaps[0].why
    pq.write_table(pa.table({"x": [1]}), run_dir / "traces.parquet")
    assert any("lacks the column trace_id" in gap.why for gap in load(run_dir).gaps)


def test_json_of_another_shape_is_shown_as_unreadable(run_dir: Path) -> None:
    (run_dir / "run.json").write_text("[1, 2]")
    (run_dir / "ledger.json").write_text('{"total": 3}')
    data = load(run_dir)
    assert data.run == {} and data.ledger_total is None
    assert [gap.name for gap in data.gaps] == ["ledger.json"]


@pytest.mark.parametrize("depth", [10, 200_000])
def test_deep_json_does_not_raise(run_dir: Path, depth: int) -> None:
    (run_dir / "run.json").write_text("[" * depth)
    assert [gap.name for gap in load(run_dir).gaps] == ["run.json"]


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    empty = tmp_path / "empty"
    empty.mkdir()
    for path in (tmp_path / "absent", file, empty):
        with pytest.raises(RunDirError) as caught:
            load(path)
        assert str(path) in str(caught.value) and "run.json" in caught.value.fix


# --- logs ----------------------------------------------------------------------------------------------------------


def test_logs_are_plain_and_cut_at_a_line(run_dir: Path) -> None:
    sid = load(run_dir).sessions[0].session_id
    big = run_dir / "logs" / sid / "node.log"
    big.write_text("".join(f"\x1b[31mline {n}\x1b[0m\n" for n in range(5000)))
    logs = {log.name: log for log in load(run_dir).logs(sid)}
    assert logs["harness"].text.startswith("● start") and "100% done" in logs["harness"].text
    assert "60%" not in logs["harness"].text
    assert logs["node.log"].shown < logs["node.log"].size
    assert logs["node.log"].text.splitlines()[-1] == "line 4999" and logs["node.log"].text.startswith("line ")


def test_logs_never_leave_the_run_directory(run_dir: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("SECRET")
    path = run_dir / "sessions.jsonl"
    first = json.loads(path.read_bytes().splitlines()[0])
    sid = first["session_id"]
    (run_dir / "logs" / sid / "link.log").symlink_to(secret)
    (run_dir / "logs" / sid / "folder").symlink_to(tmp_path)
    first["logs"] = {
        "up": "../secret",
        "abs": str(secret),
        "link": f"logs/{sid}/link.log",
        "through": f"logs/{sid}/folder/secret",
    }
    path.write_bytes(
        json.dumps(first).encode() + b"\n" + json.dumps(first | {"session_id": "../../x"}).encode() + b"\n"
    )
    data = load(run_dir)
    for session in data.sessions:
        assert all("SECRET" not in log.text for log in data.logs(session.session_id))
    assert [log.name for log in data.logs(sid)] == ["harness.log"]


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bPdata\x1b\\after", "after"),
        ("\x9b31mred", "red"),
        ("1%\r50%\r100%\nnext\r\n", "100%\nnext\n"),
        ("a\x00b\x07c\u202ed", "abcd"),
        ("cut \x1b[", "cut "),
        ("tab\tstays", "tab\tstays"),
    ],
)
def test_escape_sequences_are_removed(raw: str, shown: str) -> None:
    assert plain_text(raw) == shown

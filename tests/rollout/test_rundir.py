"""The run directory: what is committed stays, what is not is dropped, and a reader never meets half a file."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from polynya.errors import DiskFull, RunDirError
from polynya.rollout import rundir as rundir_module
from polynya.rollout.check import check_run
from polynya.rollout.rundir import RunDir, read_ledger, read_results
from polynya.rollout.runner import FINISHED
from polynya.schema import SessionResult, Status

from .disks import finished, small_disk

Open = Callable[..., RunDir]


@pytest.fixture
def opened() -> Iterator[list[RunDir]]:
    made: list[RunDir] = []
    yield made
    for run in made:
        run.close()


@pytest.fixture
def begin(tmp_path: Path, opened: list[RunDir]) -> Open:
    def make(path: Path | None = None) -> RunDir:
        run = RunDir(path or tmp_path / "run")
        opened.append(run)
        run.create()
        run.write_json("run.json", {"tasks": []})
        return run

    return make


@pytest.fixture
def resume(tmp_path: Path, opened: list[RunDir]) -> Open:
    def make(keep: frozenset[str] = FINISHED) -> RunDir:
        for run in opened:
            run.close()
        run = RunDir(tmp_path / "run")
        opened.append(run)
        run.resume(keep)
        return run

    return make


def sessions_in(path: Path, table: str) -> list[str]:
    found: list[str] = pq.read_table(path / f"{table}.parquet")["session_id"].to_pylist()
    return found


def test_rows_are_written_before_the_line_that_commits_them(begin: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begin()
    order: list[str] = []
    write_part, fsync = RunDir._write_part, rundir_module.os.fsync

    def spy_part(self: RunDir, name: str, session_id: str, table: Any) -> None:
        assert b"t.0" not in (run.path / "sessions.jsonl").read_bytes()
        write_part(self, name, session_id, table)
        order.append(name)

    def spy_fsync(fd: int) -> None:
        fsync(fd)
        order.append("synced " + Path(f"/proc/self/fd/{fd}").readlink().name)

    monkeypatch.setattr(RunDir, "_write_part", spy_part)
    monkeypatch.setattr(rundir_module.os, "fsync", spy_fsync)
    run.commit(*finished("t.0"))
    assert order[:5] == [
        "synced .t.0.calls.parquet.tmp", "calls", "synced .t.0.traces.parquet.tmp", "traces", "synced sessions.jsonl",
    ]  # fmt: skip


def test_committed_session_is_there_before_the_tables_are_merged(begin: Open, resume: Open) -> None:
    run = begin()
    ids = [f"t.{i}" for i in range(11)]
    for session_id in ids:
        run.commit(*finished(session_id))
    assert len(sessions_in(run.path, "traces")) < len(ids)
    assert [result.session_id for result in read_results(run.path)] == ids
    resume()
    assert sessions_in(run.path, "traces") == ids
    assert check_run(run.path) == []


@pytest.mark.parametrize("torn", [b"{", b'{"session_id":"t.9"', b"\0\0\0\0"])
def test_torn_last_line_is_passed_over_and_cut_off(begin: Open, resume: Open, torn: bytes) -> None:
    run = begin()
    run.commit(*finished("t.0"))
    before = (run.path / "sessions.jsonl").read_bytes()
    (run.path / "sessions.jsonl").write_bytes(before + torn)
    assert [result.session_id for result in read_results(run.path)] == ["t.0"]
    again = resume()
    assert (run.path / "sessions.jsonl").read_bytes() == before
    again.commit(*finished("t.1"))
    assert [result.session_id for result in read_results(run.path)] == ["t.0", "t.1"]


def test_line_that_cannot_be_read_is_an_error_with_its_number(begin: Open, resume: Open) -> None:
    run = begin()
    run.commit(*finished("t.0"))
    with (run.path / "sessions.jsonl").open("ab") as file:
        file.write(b"{}\n")
    with pytest.raises(RunDirError, match=r"sessions\.jsonl:2 cannot be read"):
        list(read_results(run.path))
    with pytest.raises(RunDirError, match=r"sessions\.jsonl:2 cannot be read"):
        resume()


def test_run_of_the_gateway_alone_is_not_gone_on_with(begin: Open, resume: Open) -> None:
    begin().write_json("run.json", {"command": "gateway"})
    with pytest.raises(RunDirError, match="polynya gateway"):
        resume()


def test_rows_without_a_line_are_dropped(begin: Open, resume: Open) -> None:
    run = begin()
    run.commit(*finished("t.0"))
    result, trajectory = finished("t.1")
    run._write_part("calls", "t.1", rundir_module.calls_table(trajectory.calls))
    run._write_part("traces", "t.1", rundir_module.traces_table(result, trajectory.traces))
    (run.path / "parts" / ".t.2.calls.parquet.tmp").write_bytes(b"half")
    resume()
    assert sessions_in(run.path, "calls") == sessions_in(run.path, "traces") == ["t.0"]
    assert sorted(path.name for path in (run.path / "parts").iterdir()) == ["t.0.calls.parquet", "t.0.traces.parquet"]
    assert check_run(run.path) == []


def test_session_that_runs_again_replaces_its_rows(begin: Open, resume: Open) -> None:
    run = begin()
    run.commit(*finished("t.0"))
    run.commit(*finished("t.1", 5, status=Status.INFRA_ERROR))
    run.merge()
    run.remove_work()
    again = resume()
    assert sessions_in(run.path, "calls") == ["t.0"]
    assert read_ledger(run.path).captured == 3
    again.commit(*finished("t.1", 4, attempt=2))
    again.merge()
    assert sessions_in(run.path, "calls") == ["t.0", "t.1"]
    assert [result.attempt for result in read_results(run.path)] == [1, 2]
    assert read_ledger(run.path).captured == 7
    assert check_run(run.path) == []


def test_parts_that_stay_behind_are_not_counted_twice(begin: Open, resume: Open) -> None:
    run = begin()
    run.commit(*finished("t.0"))
    run.merge()
    resume().merge()
    assert sessions_in(run.path, "calls") == ["t.0"]


def test_reader_finds_whole_files_at_any_moment(begin: Open) -> None:
    run = begin()
    run.commit(*finished("t.0"))
    over = threading.Event()
    seen: list[tuple[int, int, int]] = []
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not over.is_set():
                rows = (len(sessions_in(run.path, "calls")), len(sessions_in(run.path, "traces")))
                seen.append((*rows, len(list(read_results(run.path)))))
                read_ledger(run.path)
                msgspec.json.decode((run.path / "run.json").read_bytes())
        except BaseException as exc:
            failures.append(exc)

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(1, 16):
        run.commit(*finished(f"t.{i}", 50))
        run.write_json("run.json", {"tasks": ["x" * 5000] * i})
    run.merge()
    over.set()
    reader.join()
    assert failures == []
    for column in range(3):
        counts = [row[column] for row in seen]
        assert counts == sorted(counts)
    assert all(calls <= lines and traces <= lines for calls, traces, lines in seen)


def test_tables_hold_what_was_committed(begin: Open) -> None:
    run = begin()
    result, trajectory = finished("t.0", 4)
    run.commit(result, trajectory)
    (call,) = pq.read_table(run.path / "calls.parquet").to_pylist()
    (trace,) = pq.read_table(run.path / "traces.parquet").to_pylist()
    assert call["completion_ids"] == [0, 1, 2, 3] and call["t_end"] is None and call["parent_call_id"] is None
    assert trace["input_ids"] == [7, 8, 0, 1, 2, 3] and trace["loss_mask"] == [0, 0, 1, 1, 1, 1]
    assert trace["logprobs"] == [0, 0, -0.5, -0.5, -0.5, -0.5]
    assert trace["policy_spans"] == [{"version": "v1", "start": 0, "end": 4}]
    assert (trace["task_id"], trace["reward"], trace["status"]) == ("t", 1.0, "completed")
    assert next(read_results(run.path)) == result


def test_session_without_a_trajectory_is_committed_too(begin: Open) -> None:
    run = begin()
    result, _ = finished("t.0", 0)
    run.commit(msgspec.structs.replace(result, num_calls=0), None)
    assert [found.session_id for found in read_results(run.path)] == ["t.0"]
    assert sessions_in(run.path, "calls") == []


def test_directory_of_somebody_else_is_not_touched(tmp_path: Path, begin: Open) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    with pytest.raises(RunDirError, match=r"is not empty \('thesis.tex' is in it\)"):
        begin()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_folder_named_as_one_of_ours_is_still_somebody_elses(tmp_path: Path, begin: Open) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    with pytest.raises(RunDirError, match="'logs' is in it"):
        begin()


def test_run_that_never_began_does_not_block_its_directory(tmp_path: Path, begin: Open, opened: list[RunDir]) -> None:
    killed = RunDir(tmp_path / "run")
    killed.create()
    killed.close()
    assert (begin().path / "run.json").exists()


def test_results_without_run_json_are_not_overwritten(begin: Open, opened: list[RunDir]) -> None:
    run = begin()
    run.commit(*finished("t.0"))
    (run.path / "run.json").unlink()
    run.close()
    with pytest.raises(RunDirError, match="is not empty"):
        begin()


def test_discarding_takes_back_what_create_made(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "new" / "run")
    run.create()
    run.discard()
    run.close()
    assert not run.path.exists()


def test_discarding_keeps_logs_and_the_next_run_may_begin(tmp_path: Path, begin: Open) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    (run.logs / "engine.log").write_text("why it did not start")
    run.discard()
    run.close()
    assert (begin().logs / "engine.log").read_text() == "why it did not start"


def test_discarding_never_touches_a_run(begin: Open) -> None:
    run = begin()
    run.commit(*finished("t.0"))
    run.discard()
    assert check_run(run.path) == []


HOLDER = """
import sys
from pathlib import Path
from polynya.rollout.rundir import RunDir
run = RunDir(Path(sys.argv[1]))
run.create()
if sys.argv[2:]:
    run.write_json("run.json", {})
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("begun", [False, True])
def test_second_process_is_told_that_the_directory_is_in_use(
    tmp_path: Path, begin: Open, resume: Open, begun: bool
) -> None:
    argv = [sys.executable, "-c", HOLDER, str(tmp_path / "run"), *(["begun"] if begun else [])]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"open\n"
        for attempt in (begin, resume) if begun else (begin,):
            with pytest.raises(RunDirError, match="in use by another polynya process") as caught:
                attempt()
            assert "--out" in caught.value.fix
        other.kill()
    if begun:
        with pytest.raises(RunDirError, match="holds a run already"):
            begin()
        assert resume().results == {}
    else:
        begin()


def test_resume_without_a_run_says_so(tmp_path: Path, resume: Open) -> None:
    with pytest.raises(RunDirError, match=r"no run\.json in it") as caught:
        resume()
    assert "--resume" in caught.value.fix
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{")
    with pytest.raises(RunDirError, match=r"run\.json cannot be read"):
        resume()


def test_out_that_is_a_file_is_refused(tmp_path: Path, begin: Open) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RunDirError, match=r"file"):
            begin(path)


def test_full_disk_takes_nothing_back(tmp_path: Path, begin: Open, opened: list[RunDir]) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        run = begin(disk.path / "run")
        run.commit(*finished("t.0"))
        lines = (run.path / "sessions.jsonl").read_bytes()
        tables = {name: (run.path / f"{name}.parquet").read_bytes() for name in ("calls", "traces")}
        disk.fill()
        with pytest.raises(DiskFull, match="no space left") as caught:
            run.commit(*finished("t.1", 5000))
        assert "--resume" in caught.value.fix
        with pytest.raises(DiskFull):
            run.check_space()
        with pytest.raises(DiskFull):
            run.write_json("run.json", {"x": "y" * 100_000})
        assert (run.path / "sessions.jsonl").read_bytes() == lines
        assert {name: (run.path / f"{name}.parquet").read_bytes() for name in tables} == tables
        assert not [path for path in run.path.rglob("*") if path.name.endswith((".tmp", ".probe"))]
        disk.free()
        run.check_space()
        run.commit(*finished("t.1", 5000))
        run.merge()
        assert check_run(run.path) == []
        assert [result.session_id for result in read_results(run.path)] == ["t.0", "t.1"]
        run.close()


def test_line_that_does_not_fit_is_taken_back(tmp_path: Path, begin: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        run = begin(disk.path / "run")
        run.commit(*finished("t.0"))
        write_part = RunDir._write_part

        def then_full(self: RunDir, name: str, session_id: str, table: Any) -> None:
            write_part(self, name, session_id, table)
            if name == "traces":
                disk.fill()

        monkeypatch.setattr(RunDir, "_write_part", then_full)
        result, trajectory = finished("t.1")
        long: SessionResult = msgspec.structs.replace(result, logs={"x": "y" * 50_000})
        with pytest.raises(DiskFull):
            run.commit(long, trajectory)
        assert [found.session_id for found in read_results(run.path)] == ["t.0"]
        assert (run.path / "sessions.jsonl").read_bytes().endswith(b"}\n")
        run.close()

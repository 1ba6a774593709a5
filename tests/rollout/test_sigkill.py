"""A run that is killed with SIGKILL and goes on with ``--resume``: kept byte for byte, nothing lost, nothing twice."""

from __future__ import annotations

import hashlib
import json
import os
import select
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from polynya.rollout.check import check_run
from polynya.rollout.rundir import read_ledger, read_results
from polynya.runtimes import marks

SESSIONS = 12
AGENT = """
import json, os, sys, urllib.request
from pathlib import Path
folder = Path(sys.argv[1])
index = int(Path.cwd().parent.parent.name.rpartition(".")[2])
messages = []
for text in ("one", "two"):
    messages.append({"role": "user", "content": text})
    body = json.dumps({"model": "m", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    messages.append(json.load(urllib.request.urlopen(request))["choices"][0]["message"])
if index >= int(sys.argv[2]) and not (folder / "free").exists():
    with (folder / "said").open("a") as pipe:
        pipe.write(f"{index}\\n")
    (folder / "never").open().read()
"""
"""Sessions from a given index on report after their calls through a pipe, then block on another, unless they are freed."""


class Scene:
    """The same run, as often as it takes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "run"
        self.tasks = folder / "tasks.json"
        self.label = "polynya-" + hashlib.sha256(str(self.out).encode()).hexdigest()[:12]
        os.mkfifo(folder / "said")
        os.mkfifo(folder / "never")

    def write(self, blocked_from: int) -> None:
        task = {
            "task_id": "t",
            "instruction": "talk",
            "num_samples": SESSIONS,
            "harness": {
                "name": "shell",
                "settings": {"command": f"exec python3 agent.py {self.folder} {blocked_from}"},
            },
            "runtime": {"name": "local", "files": {"agent.py": AGENT}},
            "retries": 0,
        }
        self.tasks.write_text(json.dumps(task))

    def argv(self, *options: str) -> list[str]:
        command = [sys.executable, "-m", "polynya.cli.main", "run", str(self.tasks), "--engine", "scripted"]
        return [*command, "--out", str(self.out), "--concurrency", "4", *options]

    def kill_when(self, seen: Any, *options: str) -> None:
        """Run, and kill the process with its progress line in hand for which ``seen`` holds."""
        with subprocess.Popen(self.argv(*options), stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            lines: list[str] = []
            for line in process.stderr:
                lines.append(line)
                if seen(lines):
                    process.kill()
                    return
        pytest.fail("the run ended before it could be killed:\n" + "".join(lines))

    def kill_when_all_slots_are_blocked(self, *options: str) -> list[str]:
        """Kill with four agents blocked after their calls. Gives their sessions."""
        said = os.open(self.folder / "said", os.O_RDWR)
        text = b""
        try:
            with subprocess.Popen(self.argv(*options), stderr=subprocess.PIPE) as process:
                died = os.pidfd_open(process.pid)
                while text.count(b"\n") < 4:
                    ready, _, _ = select.select([said, died], [], [])
                    if said not in ready:
                        assert process.stderr is not None
                        pytest.fail(f"the run ended before it could be killed: {process.stderr.read().decode()}")
                    text += os.read(said, 1000)
                process.kill()
                os.close(died)
        finally:
            os.close(said)
        return [f"t.{line}" for line in text.decode().split()]

    def go_on(self, *options: str) -> dict[str, Any]:
        (self.folder / "free").touch()
        done = subprocess.run(self.argv("--json", *options), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        record: dict[str, Any] = json.loads(done.stdout)
        return record

    def lines(self) -> dict[str, bytes]:
        """The whole lines of sessions.jsonl by session."""
        whole = (self.out / "sessions.jsonl").read_bytes().split(b"\n")[:-1]
        return {json.loads(line)["session_id"]: line for line in whole}

    def rows(self, table: str, sessions: set[str]) -> list[dict[str, Any]]:
        """Rows of finished sessions: from the parts while they are there, else from the table."""
        parts = [self.out / "parts" / f"{session}.{table}.parquet" for session in sorted(sessions)]
        if all(part.exists() for part in parts):
            return [row for part in parts for row in pq.read_table(part).to_pylist()]
        found = pq.read_table(self.out / f"{table}.parquet").to_pylist()
        return sorted((row for row in found if row["session_id"] in sessions), key=lambda row: row["session_id"])

    def is_whole(self) -> None:
        """Every session once, everything accounted for, nothing left behind."""
        results = list(read_results(self.out))
        assert sorted(result.session_id for result in results) == sorted(f"t.{i}" for i in range(SESSIONS))
        assert {str(result.status) for result in results} == {"completed"}
        assert check_run(self.out) == []
        assert [label for label in marks.labels().values() if label.startswith(self.label)] == []
        assert not (self.out / "work").exists() and not (self.out / "parts").exists()
        assert not list(self.out.glob(".*.tmp"))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    marks.kill_labelled(lambda label: label.startswith(made.label))


def finished_lines(lines: list[str]) -> int:
    return sum("completed" in line for line in lines)


def test_killed_amid_blocked_agents_keeps_finished_sessions_and_runs_the_rest(scene: Scene) -> None:
    scene.write(blocked_from=5)
    blocked = scene.kill_when_all_slots_are_blocked()
    before = scene.lines()
    assert 1 <= len(before) <= 5 and not set(before) & set(blocked)
    rows = {table: scene.rows(table, set(before)) for table in ("calls", "traces")}
    record = scene.go_on("--resume")
    after = scene.lines()
    assert {session: after[session] for session in before} == before
    assert list(after)[: len(before)] == list(before)
    assert {table: scene.rows(table, set(before)) for table in rows} == rows
    scene.is_whole()
    ledger = read_ledger(scene.out)
    per_session = next(result.ledger for result in read_results(scene.out) if result.session_id in before)
    assert ledger.excluded == {"attempt_lost": per_session.captured * len(blocked)}
    assert ledger.trained == per_session.captured * SESSIONS
    assert record["resumed"] == 1
    for row in pq.read_table(scene.out / "calls.parquet").to_pylist():
        if row["session_id"] in blocked:
            assert (row["attempt"], row["trainable"], row["exclusion"]) in [(1, False, "attempt_lost"), (2, True, None)]
        else:
            assert row["exclusion"] is None


@pytest.mark.parametrize("count", [1, 6])
def test_killed_while_a_session_is_committed(scene: Scene, count: int) -> None:
    scene.write(blocked_from=SESSIONS)
    scene.kill_when(lambda lines: finished_lines(lines) == count)
    before = scene.lines()
    scene.go_on("--resume")
    after = scene.lines()
    assert {session: after[session] for session in before} == before
    scene.is_whole()


def test_killed_at_the_first_session(scene: Scene) -> None:
    scene.write(blocked_from=SESSIONS)
    scene.kill_when(lambda lines: "12 sessions to run" in lines[-1])
    scene.go_on("--resume")
    scene.is_whole()


def test_killed_before_the_run_began(scene: Scene) -> None:
    scene.write(blocked_from=SESSIONS)
    scene.kill_when(lambda lines: "starting the engine" in lines[-1])
    began = (scene.out / "run.json").exists()
    scene.go_on(*(["--resume"] if began else []))
    scene.is_whole()


def test_killed_twice(scene: Scene) -> None:
    scene.write(blocked_from=2)
    first = scene.kill_when_all_slots_are_blocked()
    kept = scene.lines()
    second = scene.kill_when_all_slots_are_blocked("--resume")
    assert {session: scene.lines()[session] for session in kept} == kept
    record = scene.go_on("--resume")
    scene.is_whole()
    assert record["resumed"] == 2
    attempts = {result.session_id: result.attempt for result in read_results(scene.out)}
    assert {session: attempts[session] for session in kept} == dict.fromkeys(kept, 1)
    assert all(attempts[session] == 3 for session in set(first) & set(second))
    calls = pq.read_table(scene.out / "calls.parquet").to_pylist()
    per_attempt = Counter((row["session_id"], row["attempt"]) for row in calls)
    expected = {(session, attempts[session]) for session in attempts}
    assert set(per_attempt.values()) == {2}
    assert expected <= set(per_attempt)
    assert {session for session, attempt in set(per_attempt) - expected} == {*first, *second}


def test_what_the_killed_run_left_is_swept_and_what_others_run_is_not(scene: Scene) -> None:
    scene.write(blocked_from=0)
    scene.kill_when_all_slots_are_blocked()
    stray = scene.out / "work" / "t.0" / "a1" / "workspace" / "deep"
    stray.mkdir(parents=True, exist_ok=True)
    mine, others = (
        subprocess.Popen(["sleep", "600"], env={"POLYNYA_LABEL": label, "PATH": os.environ["PATH"]})
        for label in (f"{scene.label}.t.0.a1", "polynya-000000000000.t.0.a1")
    )
    try:
        scene.go_on("--resume")
        assert mine.wait() == -9
        assert others.poll() is None
    finally:
        for process in (mine, others):
            process.kill()
            process.wait()
    scene.is_whole()

"""Runs whose storage fails: a full disk, no permission. What is finished stays, and the run goes on when it can."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from polynya.config import NodeLimits, Settings
from polynya.engines.scripted import Script, Step
from polynya.errors import DiskFull, RunDirError
from polynya.node import SessionEvent
from polynya.rollout.check import check_run
from polynya.rollout.rundir import RunDir, read_ledger, read_results
from polynya.rollout.runner import FINISHED, RunHooks, Runner
from polynya.schema import Stage, Status

from .conftest import Lab, shell_task
from .disks import Disk, small_disk

SCRIPT = Script(steps=[Step(text="an answer")])
TALK = """python3 - <<'PY'
import json, os, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * 10_000}]}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
json.load(urllib.request.urlopen(request))
PY
"""
"""A prompt that fits into no slack of a page."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path / "disk", "32m") as made:
        yield made


class Full:
    """Fills the disk when a session comes to a stage and two others are done."""

    def __init__(self, disk: Disk, stage: Stage) -> None:
        self.disk = disk
        self.stage = stage
        self.done = 0

    def on_event(self, event: SessionEvent) -> None:
        self.done += event.stage == Stage.DONE
        if event.stage == self.stage and self.done == 2:
            self.disk.fill()
            self.done = 100


def runner(disk: Disk, hooks: RunHooks | None = None, **options: object) -> Runner:
    lab = Lab(disk.path)
    lab.cache = disk.path.parent / "cache"
    settings = Settings(node=NodeLimits(init=1, ready=1, running=1, postrun=1))
    return lab.runner([shell_task(TALK, num_samples=6)], SCRIPT, hooks=hooks, settings=settings, **options)


# INIT: the workspace cannot be laid out. RUNNING: the journal refuses the call. POSTRUN: the tables refuse the rows.
@pytest.mark.parametrize("stage", [Stage.INIT, Stage.RUNNING, Stage.POSTRUN])
async def test_full_disk_ends_the_run_and_space_lets_it_go_on(disk: Disk, stage: Stage) -> None:
    out = disk.path / "run"
    with pytest.raises(DiskFull, match=f"no space left in {out}") as caught:
        await runner(disk, RunHooks(on_event=Full(disk, stage).on_event)).run()
    assert "--resume" in caught.value.fix
    lines = (out / "sessions.jsonl").read_bytes()
    kept = {result.session_id: result for result in read_results(out) if str(result.status) in FINISHED}
    assert 1 <= len(kept) < 6
    assert {result.status for result in kept.values()} == {Status.COMPLETED}
    assert all(result.reward is None for result in read_results(out) if result.session_id not in kept)
    assert lines.endswith(b"}\n")
    disk.free()
    record = await runner(disk, resume=True).run()
    after = {result.session_id: result for result in read_results(out)}
    assert record["summary"]["by_status"] == {"completed": 6}
    assert {session_id: after[session_id] for session_id in kept} == kept
    assert check_run(out) == []
    assert read_ledger(out).balanced()
    assert not (out / "work").exists()


async def test_disk_that_is_full_from_the_start_is_said_and_nothing_is_left(disk: Disk) -> None:
    disk.fill()
    with pytest.raises(DiskFull, match="no space"):
        await runner(disk).run()
    disk.free()
    assert (await runner(disk).run())["summary"]["by_status"] == {"completed": 6}
    assert check_run(disk.path / "run") == []


async def test_disk_that_only_one_agent_filled_costs_no_other_session(disk: Disk) -> None:
    hog = shell_task(f"head -c 100m /dev/zero > hog; {TALK}", task_id="hog")
    lab = Lab(disk.path)
    record = await lab.runner([hog, shell_task(TALK, task_id="other", num_samples=2)], SCRIPT, running=1).run()
    results = {result.session_id: result for result in read_results(lab.out)}
    assert results["hog.0"].reward is None
    assert [results[f"other.{i}"].status for i in range(2)] == [Status.COMPLETED] * 2
    assert record["summary"]["ledger_balanced"]
    assert check_run(lab.out) == []


async def test_read_only_disk_is_refused_with_a_fix(disk: Disk) -> None:
    disk.remount("ro")
    with pytest.raises(RunDirError, match="Read-only file system") as caught:
        await runner(disk).run()
    assert "--out" in caught.value.fix


WITHOUT_RIGHTS = """
import os, sys
from pathlib import Path
from polynya.errors import RunDirError
from polynya.rollout.rundir import RunDir, read_results
os.setgid(65534)
os.setuid(65534)
for action in (lambda run: run.create(), lambda run: run.resume(frozenset()), lambda run: list(read_results(run.path))):
    try:
        action(RunDir(Path(sys.argv[1])))
        print("done")
    except RunDirError as exc:
        print(exc)
"""


@pytest.mark.parametrize(
    ("mode", "owner", "words"),
    [
        (0o755, 0, "Permission denied"),
        (0o000, 0, "Permission denied"),
        (0o500, 65534, "Permission denied"),
    ],
)
def test_directory_that_may_not_be_written_is_refused_with_a_fix(
    tmp_path: Path, mode: int, owner: int, words: str
) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    shared = tmp_path / "shared"
    run = RunDir(shared / "run")
    run.create()
    run.write_json("run.json", {"tasks": []})
    run.close()
    for path in (shared / "run", shared):
        os.chown(path, owner, owner)
        path.chmod(mode)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == 0 and parent.is_relative_to("/tmp") and parent != Path("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o011)
    tmp_path.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RIGHTS, str(shared / "run")], capture_output=True, text=True, cwd="/"
    )
    shared.chmod(0o755)
    assert done.returncode == 0, done.stderr
    created, resumed, _ = done.stdout.splitlines()
    assert words in created and "--out" in created
    assert words in resumed

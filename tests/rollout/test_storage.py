"""Runs whose storage fails: a full disk, no permission. What is finished stays, and the run goes on when it can."""

from __future__ import annotations

import contextlib
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
from .disks import Disk, small_disk, without_rights

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


async def test_disk_that_one_agent_filled_gives_no_reward_and_the_others_run_on_resume(disk: Disk) -> None:
    hog = shell_task(f"head -c 100m /dev/zero > hog; {TALK}", task_id="hog")
    other = shell_task(TALK, task_id="other", num_samples=2)
    lab = Lab(disk.path)
    # Whether the others meet the full disk depends on how long the hog's workspace stays.
    with contextlib.suppress(DiskFull):
        await lab.runner([hog, other], SCRIPT, running=1).run()
    assert all(result.reward is None for result in read_results(lab.out) if result.task_id == "hog")
    record = await lab.runner([other], SCRIPT, resume=True).run()
    assert [result.status for result in read_results(lab.out)] == [Status.COMPLETED] * 2
    assert record["summary"]["ledger_balanced"]
    assert check_run(lab.out) == []


async def test_read_only_disk_is_refused_with_a_fix(disk: Disk) -> None:
    disk.remount("ro")
    with pytest.raises(RunDirError, match="Read-only file system") as caught:
        await runner(disk).run()
    assert "--out" in caught.value.fix


TRY = """
import sys
from pathlib import Path
from polynya.errors import RunDirError
from polynya.rollout.rundir import RunDir, read_results
for action in (lambda run: run.create(), lambda run: run.resume(frozenset()), lambda run: list(read_results(run.path))):
    try:
        action(RunDir(Path(sys.argv[1])))
        print("done")
    except RunDirError as exc:
        print(exc)
"""


@pytest.mark.parametrize(("mode", "readable"), [(0o755, True), (0o700, False)])
def test_directory_that_may_not_be_written_is_refused_with_a_fix(tmp_path: Path, mode: int, readable: bool) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving a directory to another user needs root")
    run = RunDir(tmp_path / "theirs" / "run")
    run.create()
    run.write_json("run.json", {"tasks": []})
    run.close()
    (run.path / ".lock").chmod(0o644)
    for path in (*run.path.iterdir(), run.path, run.path.parent):
        os.chown(path, 65534, 65534)
    run.path.parent.chmod(mode)
    done = subprocess.run(
        [sys.executable, "-c", TRY, str(run.path)], capture_output=True, text=True, preexec_fn=without_rights
    )
    assert done.returncode == 0, done.stderr
    *refused, results = done.stdout.splitlines()
    assert len(refused) == 2
    for line in refused:
        assert "Permission denied" in line and "--out" in line
    assert results == "done" if readable else "Permission denied" in results

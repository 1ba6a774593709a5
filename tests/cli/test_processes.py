"""The command as a process of its own: signals, the gateway verb, a disk that fills up."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from typing import Any

import pyarrow.parquet as pq
import pytest

from polynya.rollout.check import check_run
from polynya.rollout.rundir import read_ledger, read_results
from polynya.runtimes import marks

from ..rollout.disks import small_disk
from .conftest import Cli, Done


def post(url: str, body: dict[str, Any], key: str = "") -> dict[str, Any]:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        found: dict[str, Any] = json.load(response)
        return found


def talk(endpoint: dict[str, Any], calls: int) -> None:
    messages: list[dict[str, Any]] = []
    for turn in range(calls):
        messages.append({"role": "user", "content": f"turn {turn}"})
        body = {"model": "m", "messages": messages}
        reply = post(f"{endpoint['base_url']}/v1/chat/completions", body)
        messages.append(reply["choices"][0]["message"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_gateway_serves_until_the_signal_and_writes_the_run(cli: Cli, number: signal.Signals) -> None:
    with cli.start("gateway", "-e", "scripted", "--run", "out", "--port", "0") as process:
        assert process.stdout is not None
        endpoint = json.loads(process.stdout.readline())
        assert {"base_url", "session_key", "model"} <= endpoint.keys()
        assert endpoint["session_key"] in endpoint["base_url"]
        talk(endpoint, 3)
        origin = endpoint["base_url"].partition("/s/")[0]
        post(f"{origin}/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "by key"}]},
             endpoint["session_key"])  # fmt: skip
        with pytest.raises(urllib.error.HTTPError, match="401"):
            post(f"{origin}/v1/chat/completions", {"model": "m", "messages": []}, "sk-made-up")
        process.send_signal(number)
        stdout, stderr = process.communicate()
    assert (process.returncode, stdout) == (0, ""), stderr
    assert "4 calls" in stderr
    out = cli.folder / "out"
    assert check_run(out) == []
    (result,) = read_results(out)
    assert (result.session_id, str(result.status), result.num_calls, result.reward) == (
        "manual.0",
        "completed",
        4,
        None,
    )
    assert sorted(pq.read_table(out / "traces.parquet")["num_turns"].to_pylist()) == [1, 3]
    record = json.loads((out / "run.json").read_bytes())
    assert record["finished_at"] and record["summary"]["ledger_balanced"]
    assert not (out / "work").exists() and not (out / "parts").exists()


def test_gateway_that_nobody_called_writes_an_empty_run(cli: Cli) -> None:
    with cli.start("gateway", "-e", "scripted", "--run", "out") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert check_run(cli.folder / "out") == []
    assert [result.num_calls for result in read_results(cli.folder / "out")] == [0]


BLOCKED = "python3 ask.py; mkdir {0}/first && exit 0; [ -e {0}/free ] && exit 0; cat {0}/never"
"""The first session ends, whichever it is; the others wait."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_keeps_what_is_done_and_goes_on(cli: Cli, number: signal.Signals) -> None:
    os.mkfifo(cli.folder / "never")
    cli.tasks(cli.task(BLOCKED.format(cli.folder), num_samples=4))
    args = ("run", "tasks.yaml", "-e", "scripted", "-o", "out", "-c", "2")
    with cli.start(*args) as process:
        ended = re.search(r"t\.\d", _line_with(process, "completed"))
        process.send_signal(number)
        stdout, stderr = process.communicate()
    assert ended is not None and process.returncode == 130, stderr
    assert "go on with --resume --out out" in stderr and "Traceback" not in stderr
    out = cli.folder / "out"
    lines = (out / "sessions.jsonl").read_bytes().splitlines()
    # sessions that were cancelled while waiting may be written before the one whose end was shown
    (kept,) = [line for line in lines if json.loads(line)["session_id"] == ended[0]]
    assert json.loads(kept)["status"] == "completed"
    assert {str(result.status) for result in read_results(out)} == {"completed", "cancelled"}
    assert check_run(out) == []
    assert not [label for label in marks.labels().values() if f"{cli.folder}" in label]
    assert all(f"t.{number}" in stdout for number in range(4))
    (cli.folder / "free").touch()
    record = cli(*args, "--resume", "--json").one_object()
    assert record["summary"]["by_status"] == {"completed": 4}
    assert kept in (out / "sessions.jsonl").read_bytes().splitlines()
    assert check_run(out) == []


def _line_with(process: subprocess.Popen[str], *words: str) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if all(word in line for word in words):
            return line
    pytest.fail(f"no line with {words}")


def test_interrupt_before_the_run_began_leaves_nothing(cli: Cli) -> None:
    """The part that takes long here is an npm that never comes back."""
    (cli.folder / "bin").mkdir()
    npm = cli.folder / "bin" / "npm"
    npm.write_text("#!/bin/sh\necho begun >&2\nexec sleep 600\n")
    npm.chmod(0o755)
    cli.tasks(cli.task(harness="pi"))
    path = f"{cli.folder / 'bin'}:{os.environ['PATH']}"
    with cli.start("run", "tasks.yaml", "-e", "scripted", "-o", "out", PATH=path) as process:
        _line_with(process, "pi", "installing")
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate()
    assert (process.returncode, stdout) == (130, ""), stderr
    assert "interrupted" in stderr and "Traceback" not in stderr
    assert not (cli.folder / "out").exists()


@pytest.mark.parametrize("as_json", [False, True])
def test_disk_that_fills_up_is_one_message_and_the_run_goes_on_later(cli: Cli, as_json: bool) -> None:
    # A call of 80,000 ids takes some 400 kB of journal: the disk is full before all twelve are done.
    cli.tasks(cli.task("WORDS=16000 python3 ask.py", num_samples=12))
    args = ("run", "tasks.yaml", "-e", "scripted", "-o", "disk/run", "-c", "1")
    with small_disk(cli.folder / "disk", "4m") as disk:
        done = cli(*args, *(["--json"] if as_json else []))
        if as_json:
            done.refused_as_json(5, "DiskFull", "no space")
        else:
            done.refused(5, "no space", "--resume")
        out = disk.path / "run"
        kept = (out / "sessions.jsonl").read_bytes().splitlines()
        finished = [line for line in kept if json.loads(line)["status"] == "completed"]
        assert 1 <= len(finished) < 12
        disk.remount("size=64m")
        record = cli(*args, "--resume", "--json").one_object()
        assert record["summary"]["by_status"] == {"completed": 12}
        assert (out / "sessions.jsonl").read_bytes().splitlines()[: len(finished)] == finished
        assert check_run(out) == []
        assert read_ledger(out).balanced()


def test_directory_that_may_not_be_written_is_bad_input(cli: Cli) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving a directory to another user needs root")
    cli.tasks()
    theirs = cli.folder / "theirs"
    theirs.mkdir(mode=0o755)
    os.chown(theirs, 65534, 65534)
    with cli.start("run", "tasks.yaml", "-e", "scripted", "-o", "theirs/run", "--json", rights=False) as process:
        stdout, stderr = process.communicate()
    Done(process.returncode, stdout, stderr).refused_as_json(2, "RunDirError", "theirs/run", "Permission denied")
    assert list(theirs.iterdir()) == []

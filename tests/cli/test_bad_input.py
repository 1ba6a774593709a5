"""Everything that a user can get wrong: one message with field, value and fix, the documented exit code, nothing written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polynya.engines.scripted import Fault, Script, Step

from .conftest import Cli, engine_server

TEXT_ONLY = Script(steps=[Step(text="words", fault=Fault(kind="no_ids"))])


def untouched(cli: Cli, *expected: str) -> None:
    """Nothing was written beside the given names (the task file)."""
    assert sorted(path.name for path in cli.folder.iterdir()) == sorted(expected)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tasks: [1", ["tasks.yaml:1:", "not YAML"]),
        ("", ["tasks.yaml: holds NoneType, no task"]),
        ("[]", ["no task in the given files"]),
        ("5", ["tasks.yaml: holds int, no task"]),
        ("{task_id: a, instruction: x, harness: shell, samples: 4}", ["tasks.yaml.samples: there is no such field", "(value 4)"]),
        ("{task_id: a, instruction: x, harness: shell, num_samples: many}", ["tasks.yaml.num_samples", "(value 'many')"]),
        ("{task_id: a, instruction: x, harness: shell, budgets: {run: -1}}", ["tasks.yaml.budgets.run", "(value -1)"]),
        ("[{task_id: a, instruction: x, harness: shell}, {task_id: a, instruction: y, harness: shell}]",
         ["tasks.yaml[1].task_id: 'a' was used before, in tasks.yaml[0]"]),
        ("{task_id: a, instruction: x, harness: {name: shell, settings: {comand: x}}}", ["harness.settings.comand"]),
        ("{task_id: a, instruction: x, harness: {name: shell, settings: {command: x}}, evaluator: {name: command}}",
         ["command"]),
        ("{task_id: a, instruction: x, harness: {name: shell, settings: {command: x}}, evaluator: {name: oracle}}",
         ["evaluator.name 'oracle' is not known"]),
        ("{task_id: a, instruction: x, harness: {name: shell, settings: {command: x}}, builder: magic}",
         ["builder.name 'magic' is unknown"]),
    ],
)  # fmt: skip
def test_wrong_task_file_is_bad_input(cli: Cli, text: str, words: list[str]) -> None:
    (cli.folder / "tasks.yaml").write_text(text)
    cli("run", "tasks.yaml", "-e", "scripted", "-o", "out").refused(2, *words)
    cli("run", "tasks.yaml", "-e", "scripted", "-o", "out", "--json").refused_as_json(2, "TaskFileError", *words)
    untouched(cli, "tasks.yaml")


def test_missing_task_file_is_bad_input(cli: Cli) -> None:
    cli("run", "nowhere.yaml", "-e", "scripted").refused(2, "nowhere.yaml: No such file")
    cli("run", ".", "-e", "scripted").refused(2, "Is a directory")
    untouched(cli)


def test_resume_without_out_is_bad_input(cli: Cli) -> None:
    cli.tasks()
    cli("run", "tasks.yaml", "-e", "scripted", "--resume").refused(2, "--resume: --out is missing")
    untouched(cli, "tasks.yaml")


def test_resume_of_nothing_is_bad_input(cli: Cli) -> None:
    cli.tasks()
    cli("run", "tasks.yaml", "-e", "scripted", "--resume", "-o", "out").refused(2, "out: no run.json in it")
    untouched(cli, "tasks.yaml")


def test_directory_with_a_run_is_refused_and_kept(cli: Cli) -> None:
    cli.tasks()
    assert cli("run", "tasks.yaml", "-e", "scripted", "-o", "out").code == 0
    before = {path: path.read_bytes() for path in (cli.folder / "out").rglob("*") if path.is_file()}
    cli("run", "tasks.yaml", "-e", "scripted", "-o", "out").refused(2, "out holds a run already", "--resume")
    assert {path: path.read_bytes() for path in (cli.folder / "out").rglob("*") if path.is_file()} == before


def test_out_that_cannot_be_written_is_bad_input(cli: Cli) -> None:
    cli.tasks()
    (cli.folder / "file").write_text("mine")
    for out in ("file", "file/below", "/proc/run"):
        cli("run", "tasks.yaml", "-e", "scripted", "-o", out).refused(2, out, "--out")
    untouched(cli, "file", "tasks.yaml")


@pytest.mark.parametrize("engine", ["vllm", "ftp://host", "localhost:8000"])
def test_engine_that_is_none_is_bad_input(cli: Cli, engine: str) -> None:
    cli.tasks()
    cli("run", "tasks.yaml", "-e", engine, "-o", "out").refused(2, engine, "embedded")
    untouched(cli, "tasks.yaml")


def test_engine_that_is_down_is_a_part_that_does_not_work(cli: Cli, closed_port: int) -> None:
    cli.tasks()
    url = f"http://127.0.0.1:{closed_port}/v1"
    cli("run", "tasks.yaml", "-e", url, "-o", "out").refused(3, f"127.0.0.1:{closed_port}")
    cli("run", "tasks.yaml", "-e", url, "-o", "out", "--json").refused_as_json(3, "EngineUnavailable", str(closed_port))
    untouched(cli, "tasks.yaml")


def test_engine_that_is_down_loses_nothing_of_a_resumed_run(cli: Cli, closed_port: int) -> None:
    cli.tasks(cli.task(num_samples=2))
    assert cli("run", "tasks.yaml", "-e", "scripted", "-o", "out", "-n", "1").code == 0
    lines = (cli.folder / "out" / "sessions.jsonl").read_bytes()
    url = f"http://127.0.0.1:{closed_port}"
    cli("run", "tasks.yaml", "-e", url, "-o", "out", "--resume").refused(3, str(closed_port))
    assert (cli.folder / "out" / "sessions.jsonl").read_bytes() == lines
    record = cli("run", "tasks.yaml", "-e", "scripted", "-o", "out", "--resume", "--json").one_object()
    assert record["summary"]["by_status"] == {"completed": 2}


def test_engine_without_token_ids_has_an_exit_code_of_its_own(cli: Cli) -> None:
    cli.tasks()
    with engine_server(TEXT_ONLY) as url:
        cli("run", "tasks.yaml", "-e", url, "-o", "out").refused(4, "token ids", "--text-only")
        cli("run", "tasks.yaml", "-e", url, "-o", "out", "--json").refused_as_json(4, "EngineNotTrainable", "token ids")
        cli("gateway", "-e", url, "--run", "out").refused_as_json(4, "EngineNotTrainable", "token ids")
        untouched(cli, "tasks.yaml")
        done = cli("run", "tasks.yaml", "-e", url, "-o", "out", "--text-only", "--json")
    assert done.code == 0, done.stderr
    assert done.one_object()["summary"]["ledger"]["excluded"].keys() == {"text_only"}


def test_harness_that_cannot_be_installed_is_a_part_that_is_missing(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    (cli.folder / "bin").mkdir()
    monkeypatch.setenv("PATH", str(cli.folder / "bin"))
    cli.tasks(cli.task(harness="pi"))
    cli("run", "tasks.yaml", "-e", "scripted", "-o", "out").refused(3, "pi", "there is no npm", "install npm")
    cli("run", "tasks.yaml", "-e", "scripted", "-o", "out", "--json").refused_as_json(3, "HarnessMissing", "npm")
    untouched(cli, "bin", "tasks.yaml")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"harness": "hal9000"}, ["harness.name 'hal9000' is not known", "claude_code"]),
        ({"runtime": "mainframe"}, ["runtime.name 'mainframe' is not known", "bubblewrap"]),
    ],
)
def test_part_that_does_not_exist_is_missing(cli: Cli, fields: dict[str, Any], words: list[str]) -> None:
    cli.tasks(cli.task(**fields))
    cli("run", "tasks.yaml", "-e", "scripted", "-o", "out").refused(3, *words)
    untouched(cli, "tasks.yaml")


def test_port_that_is_taken_is_said(cli: Cli, taken_port: int) -> None:
    done = cli("gateway", "-e", "scripted", "--run", "out", "--port", str(taken_port))
    done.refused_as_json(3, "PortInUse", f"gateway.port: {taken_port} on 127.0.0.1 is taken")
    untouched(cli)


def test_unknown_builder_of_the_gateway_is_bad_input(cli: Cli) -> None:
    cli("gateway", "-e", "scripted", "--run", "out", "--builder", "magic").refused_as_json(2, "ConfigError", "'magic'")
    untouched(cli)


@pytest.mark.parametrize(
    "args",
    [
        ["run"],
        ["run", "t.yaml", "--concurrency", "0"],
        ["run", "t.yaml", "--samples", "none"],
        ["gateway", "--port", "70000"],
        ["bench", "everything"],
        ["fly"],
    ],
)
def test_options_that_do_not_parse_are_bad_input(cli: Cli, args: list[str]) -> None:
    done = cli(*args)
    assert (done.code, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr and "--help" in done.stderr
    untouched(cli)


def test_view_of_what_is_no_run_is_bad_input(cli: Cli) -> None:
    done = cli("view", "nowhere", "--no-open")
    assert done.code != 0
    assert "Traceback" not in done.stderr and "nowhere" in done.stderr
    untouched(cli)


def test_run_directory_that_was_altered_is_said(cli: Cli) -> None:
    cli.tasks()
    assert cli("run", "tasks.yaml", "-e", "scripted", "-o", "out").code == 0
    (cli.folder / "out" / "sessions.jsonl").write_text(json.dumps({"not": "ours"}) + "\n")
    cli("run", "tasks.yaml", "-e", "scripted", "-o", "out", "--resume").refused(2, "sessions.jsonl:1 cannot be read")


def test_changed_task_is_not_mixed_with_finished_sessions(cli: Cli, tmp_path: Path) -> None:
    cli.tasks()
    assert cli("run", "tasks.yaml", "-e", "scripted", "-o", "out").code == 0
    cli.tasks(cli.task(instruction="do something else"))
    cli("run", "tasks.yaml", "-e", "scripted", "-o", "out", "--resume").refused(2, "task t", "was changed")

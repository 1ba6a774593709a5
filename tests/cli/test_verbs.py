"""What each verb says of itself and prints."""

from __future__ import annotations

import json

import pytest

from polynya import __version__
from polynya.cli.main import app
from polynya.rollout.check import check_run
from polynya.rollout.rundir import read_results

from .conftest import Cli

VERBS = sorted(command.name or "" for command in app.registered_commands)


def plain(text: str) -> str:
    """Help without the frame that wraps it."""
    return " ".join(text.replace("│", " ").split())


def test_help_names_the_verbs_and_the_exit_codes(cli: Cli) -> None:
    done = cli("--help")
    text = plain(done.stdout)
    assert done.code == 0
    assert [verb for verb in VERBS if verb not in text] == []
    for meaning in (
        "0 all sessions finished", "1 some ended as infra_error", "2 bad input", "3 a part is missing",
        "4 the engine gives no token ids", "5 storage failed", "130 interrupted",
    ):  # fmt: skip
        assert meaning in text


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb_names_its_options(cli: Cli, verb: str) -> None:
    done = cli(verb, "--help")
    assert (done.code, done.stderr) == (0, "")
    options = {
        "run": ["--engine", "--model", "--out", "--resume", "--concurrency", "--samples", "--text-only", "--json"],
        "gateway": ["--engine", "--run", "--port", "base_url", "session_key"],
        "view": ["--output", "--no-open", "--json"],
        "bench": ["stages", "gateway"],
        "doctor": ["--engine", "--json", "Exit code 0"],
        "demo": ["--engine", "--out"],
    }
    assert [option for option in options.get(verb, ["Usage"]) if option not in plain(done.stdout)] == []


def test_no_verb_shows_the_help(cli: Cli) -> None:
    done = cli()
    assert "Usage" in done.stdout + done.stderr


def test_version_is_printed(cli: Cli) -> None:
    assert cli("--version").stdout.strip() == __version__


def test_run_prints_a_table_and_the_ledger(cli: Cli) -> None:
    cli.tasks(cli.task(num_samples=2))
    done = cli("run", "tasks.yaml", "-e", "scripted", "-o", "out")
    assert done.code == 0, done.stderr
    for word in ("t.0", "t.1", "completed", "2 sessions", "mean", "1.00", "balanced", "out/traces.parquet"):
        assert word in done.stdout
    assert "2 sessions to run" in done.stderr
    assert check_run(cli.folder / "out") == []


def test_run_as_json_prints_one_object(cli: Cli) -> None:
    cli.tasks(cli.task(num_samples=2))
    record = cli("run", "tasks.yaml", "-e", "scripted", "-o", "out", "--json").one_object()
    assert record == json.loads((cli.folder / "out" / "run.json").read_bytes())
    assert record["summary"]["by_status"] == {"completed": 2}
    assert record["engine"]["kind"] == "scripted" and record["finished_at"] >= record["started_at"]


def test_samples_override_the_task_files(cli: Cli) -> None:
    cli.tasks(cli.task(num_samples=5), cli.task(task_id="u"))
    record = cli("run", "tasks.yaml", "-e", "scripted", "-o", "out", "-n", "2", "--json").one_object()
    assert record["summary"]["sessions"] == record["summary"]["finished"] == 4


def test_run_directory_has_a_name_by_default(cli: Cli) -> None:
    cli.tasks()
    assert cli("run", "tasks.yaml", "-e", "scripted").code == 0
    (made,) = (cli.folder / "runs").iterdir()
    assert check_run(made) == []


def test_infrastructure_failures_are_an_exit_code(cli: Cli) -> None:
    cli.tasks(cli.task(), cli.task(task_id="broken", runtime={"name": "local", "prepare": ["exit 3"]}))
    done = cli("run", "tasks.yaml", "-e", "scripted", "-o", "out", "--json")
    assert done.code == 1
    assert done.one_object()["summary"]["by_status"] == {"completed": 1, "infra_error": 1}
    results = {result.task_id: result for result in read_results(cli.folder / "out")}
    assert results["broken"].reward is None
    assert results["broken"].error is not None and results["broken"].error.kind == "WorkspaceError"


def test_failing_agents_are_results_and_no_failure_of_the_run(cli: Cli) -> None:
    cli.tasks(cli.task("exit 7"))
    record = cli("run", "tasks.yaml", "-e", "scripted", "-o", "out", "--json").one_object()
    assert record["summary"]["by_status"] == {"failed": 1}
    assert record["summary"]["mean_reward"] == 0.0


def test_view_writes_a_page(cli: Cli) -> None:
    cli.tasks()
    assert cli("run", "tasks.yaml", "-e", "scripted", "-o", "out").code == 0
    page = cli("view", "out", "--no-open", "--json").one_object()["page"]
    assert page == str(cli.folder / "out" / "view.html")
    assert "t.0" in (cli.folder / "out" / "view.html").read_text()


def test_bench_as_json_prints_one_object(cli: Cli) -> None:
    report = cli("bench", "stages", "--sessions", "3", "--calls", "2", "--runtime", "local", "--json").one_object()
    assert (report["completed"], report["exact"], report["calls_captured"]) == (3, True, 6)


def test_doctor_says_what_works(cli: Cli) -> None:
    done = cli("doctor", "--engine", "scripted", "--json")
    report = done.one_object()
    assert done.code == (0 if report["usable"] else 3)
    assert {"machine", "runtime", "harness", "engine"} <= report["checks"].keys()
    assert {check["name"] for check in report["checks"]["runtime"]} >= {"local", "bubblewrap"}
    assert all(check["ok"] or check["fix"] for group in report["checks"].values() for check in group)
    table = cli("doctor").stdout
    assert "local" in table and "works" in table


def test_doctor_names_the_engine_that_does_not_work(cli: Cli, closed_port: int) -> None:
    done = cli("doctor", "--engine", f"http://127.0.0.1:{closed_port}", "--json")
    assert done.code == 3
    (check,) = done.one_object()["checks"]["engine"]
    assert not check["ok"] and check["fix"]

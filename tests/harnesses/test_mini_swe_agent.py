"""mini-swe-agent: its configuration, its installation with a pip of ours, and how recorded ends of real runs are read."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from polynya.errors import HarnessMissing, TaskFileError
from polynya.harnesses import _cache
from polynya.harnesses.base import Endpoint, Installed, Verdict
from polynya.harnesses.mini_swe_agent import CONFIG, MiniSweAgent
from polynya.runtimes.base import ExecResult
from polynya.schema import HarnessSpec

RECORDED = Path(__file__).parent / "recorded"
BASE = "http://127.0.0.1:8123/s/the-key"
ENDPOINT = Endpoint(base_url=BASE, api_key="the-key", model="policy", window=32_000, max_tokens=700)


def test_the_instruction_goes_in_by_the_configuration() -> None:
    settings = {"step_limit": 9, "command_timeout": 60, "system_template": "Be.", "instance_template": "{{task}}"}
    spec = HarnessSpec(name="mini_swe_agent", settings=settings, env={"MINE": "1", "OPENAI_API_KEY": "elsewhere"})
    MiniSweAgent().validate(spec)
    installed = Installed(version="1", programs={"python": "/cache/python"})
    made = MiniSweAgent().launch(spec, "--help {{x}}", ENDPOINT, installed, workdir="/workspace", home="/home/agent")
    assert made.argv[0] == "/cache/python"
    assert made.argv[-1] == f"/home/agent/{CONFIG}"
    assert "--help {{x}}" not in made.argv
    assert json.loads(made.home_files[CONFIG]) == {
        "run": {"task": "--help {{x}}"},
        "agent": {
            "step_limit": 9,
            "max_consecutive_format_errors": 3,
            "cost_limit": 0,
            "system_template": "Be.",
            "instance_template": "{{task}}",
        },
        "environment": {"timeout": 60},
    }
    assert (made.env["MINE"], made.env["OPENAI_API_KEY"]) == ("1", "the-key")
    assert made.env["OPENAI_API_BASE"] == f"{BASE}/v1"


@pytest.mark.parametrize(
    ("settings", "names"),
    [({"bare": True}, "bare"), ({"command_timeout": 0}, "command_timeout"), ({"step_limit": "9"}, "step")],
)
def test_what_it_does_not_know_is_refused(settings: dict[str, object], names: str) -> None:
    with pytest.raises(TaskFileError, match=names):
        MiniSweAgent().validate(HarnessSpec(name="mini_swe_agent", settings=settings))


@pytest.mark.parametrize(
    ("case", "exit_code", "verdict"),
    [
        ("ok", 0, Verdict(ok=True, reason="submitted")),
        ("limit", 0, Verdict(ok=False, reason="LimitsExceeded")),
        ("format", 0, Verdict(ok=False, reason="RepeatedFormatError")),
        ("400", 1, Verdict(ok=False, reason="litellm.BadRequestError: OpenAIException - scripted HTTP 400")),
        (
            "overflow",
            1,
            Verdict(ok=False, reason="litellm.BadRequestError: OpenAIException - scripted context overflow"),
        ),
        (
            "503",
            1,
            Verdict(
                ok=False,
                reason="litellm.ServiceUnavailableError: ServiceUnavailableError: OpenAIException - scripted HTTP 500",
                infra=True,
            ),
        ),
    ],
)
def test_verdict_of_recorded_runs(case: str, exit_code: int, verdict: Verdict) -> None:
    tail = (RECORDED / f"mini_swe_agent-2.4.6-{case}.txt").read_bytes()
    assert MiniSweAgent().verdict(ExecResult(exit_code=exit_code), tail) == verdict


@pytest.mark.parametrize(
    ("result", "stdout", "infra"),
    [
        (ExecResult(exit_code=1, stderr=b"No module named minisweagent"), b"", True),
        (ExecResult(exit_code=1), b"User:\nlitellm.Timeout\n", False),
        (ExecResult(exit_code=0), b"User:\n", False),
        (ExecResult(exit_code=-9, timed_out=True), b"", False),
    ],
)
def test_verdict_of_a_run_that_did_not_reach_its_end(result: ExecResult, stdout: bytes, infra: bool) -> None:
    verdict = MiniSweAgent().verdict(result, stdout)
    assert (verdict.ok, verdict.infra) == (False, infra)


async def test_a_python_that_cannot_make_an_environment_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ensurepip is not available'\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(HarnessMissing, match=r"ensurepip is not available(.|\n)*python3-venv"):
        await MiniSweAgent().install(HarnessSpec(name="mini_swe_agent"), tmp_path, lambda _: None)
    assert [path.name for path in (tmp_path / "harnesses").iterdir()] == [".mini_swe_agent-2.4.6.lock"]


async def test_it_is_installed_once_from_wheels_at_exact_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    log = tmp_path / "log"
    python.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\nif [ "$2" = venv ]; then mkdir "$3/bin"; cp "$0" "$3/bin/"; fi\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    for _ in range(2):
        installed = await MiniSweAgent().install(HarnessSpec(name="mini_swe_agent"), tmp_path, lambda _: None)
    lines = log.read_text().splitlines()
    assert len(lines) == 2
    assert lines[1].endswith("--only-binary :all: mini-swe-agent==2.4.6 litellm==1.110.2")
    folder = _cache.folder_of(tmp_path, "mini_swe_agent", "2.4.6")
    assert installed.programs["python"] == str(folder / "bin" / "python")
    assert installed.binds[0].source == folder
    assert (await MiniSweAgent().check(tmp_path)).detail.startswith("installed")

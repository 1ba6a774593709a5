"""The OpenHands preset: which Python it takes, what it is given, and how recorded ends of real runs are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polynya.errors import HarnessMissing, TaskFileError
from polynya.harnesses import _python, harness
from polynya.harnesses.base import Endpoint, Installed, Launch, Verdict
from polynya.harnesses.openhands import LONGEST_ARGUMENT, OpenHands
from polynya.runtimes.base import ExecResult
from polynya.schema import HarnessSpec, McpServer

RECORDED = Path(__file__).parent / "recorded"
BASE = "http://127.0.0.1:8123/s/the-key"
ENDPOINT = Endpoint(base_url=BASE, api_key="the-key", model="policy", window=32_000, max_tokens=700)


def launch(instruction: str, **fields: object) -> Launch:
    spec = HarnessSpec(name="openhands", **fields)  # type: ignore[arg-type]
    made = harness("openhands")
    made.validate(spec)
    installed = Installed(version="1", programs={"python": "/cache/python"})
    return made.launch(spec, instruction, ENDPOINT, installed, workdir="/workspace", home="/home/agent")


def test_the_instruction_is_the_task_word_for_word() -> None:
    made = launch("--help: write notes.txt")
    assert made.argv[-1] == "--task=--help: write notes.txt"
    assert (made.stdin, made.home_files) == (None, {})


@pytest.mark.parametrize("instruction", ["/help me", " /exit", "é" * LONGEST_ARGUMENT])
def test_an_instruction_that_is_long_or_looks_like_a_command_goes_in_by_a_file(instruction: str) -> None:
    made = launch(instruction)
    assert made.argv[-1] == "--file=/home/agent/.openhands/task.md"
    assert made.home_files == {".openhands/task.md": instruction}
    assert max(map(len, made.argv)) < 200


def test_the_endpoint_goes_in_by_variables_that_a_task_cannot_change() -> None:
    made = launch("go", env={"LLM_BASE_URL": "elsewhere", "LLM_API_KEY": "x", "LLM_MODEL": "x", "MINE": "1"})
    assert (made.env["LLM_BASE_URL"], made.env["LLM_API_KEY"]) == (f"{BASE}/v1", "the-key")
    assert (made.env["LLM_MODEL"], made.env["MINE"]) == ("openai/policy", "1")
    assert "--override-with-envs" in made.argv


def test_mcp_servers_stand_in_its_own_file() -> None:
    made = launch("go", mcp_servers=[McpServer(name="lab", command="./serve", args=["a"], env={"A": "b"})])
    found = json.loads(made.home_files[".openhands/mcp.json"])["mcpServers"]
    assert found == {"lab": {"command": "./serve", "args": ["a"], "env": {"A": "b"}}}


def test_settings_that_it_does_not_know_are_refused() -> None:
    with pytest.raises(TaskFileError, match="temperature"):
        OpenHands().validate(HarnessSpec(name="openhands", settings={"temperature": 1}))


ENDS = [
    ("ok", Verdict(ok=True, reason="finished")),
    (
        "400",
        Verdict(
            ok=False,
            reason="LLMBadRequestError: litellm.BadRequestError: OpenAIException - scripted HTTP 400",
        ),
    ),
    (
        "overflow",
        Verdict(
            ok=False,
            reason="LLMBadRequestError: litellm.BadRequestError: OpenAIException - scripted context overflow",
        ),
    ),
]


@pytest.mark.parametrize(("case", "verdict"), ENDS)
def test_verdict_of_recorded_runs_which_all_exited_0(case: str, verdict: Verdict) -> None:
    stdout = (RECORDED / f"openhands-1.16.0-{case}.txt").read_bytes()
    assert OpenHands().verdict(ExecResult(exit_code=0), stdout) == verdict


@pytest.mark.parametrize(
    ("result", "stdout", "ok", "infra"),
    [
        (ExecResult(exit_code=1), b"", False, True),
        (ExecResult(exit_code=127), b"x", False, True),
        (ExecResult(exit_code=-9, timed_out=True), b"", False, False),
        (ExecResult(exit_code=1), b'{"kind":"MessageEvent"}\nAgent finished\n', False, False),
        (ExecResult(exit_code=0), b'{"kind":"MessageEvent"}\nGoodbye!\n', False, False),
        (ExecResult(exit_code=0), b'{"kind":"MessageEvent","text":"\\nAgent finished\\n"}\n', False, False),
        (ExecResult(exit_code=0), "│ Agent finished │\n".encode(), False, False),
        (ExecResult(exit_code=0), b'{"kind":"ConversationErrorEvent","code":"LLMTimeoutError"}\n', False, True),
        (ExecResult(exit_code=0), b'of a long event"}\nAgent finished\n', True, False),
    ],
)
def test_verdict_of_other_ends(result: ExecResult, stdout: bytes, ok: bool, infra: bool) -> None:
    verdict = OpenHands().verdict(result, stdout)
    assert (verdict.ok, verdict.infra) == (ok, infra)


def fake_python(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a Python; ``bin`` is its PATH, ``pyenv`` its pyenv."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return tmp_path


async def test_without_its_python_it_says_so_in_one_line(places: Path) -> None:
    fake_python(places / "bin" / "python3", "echo 3.11; echo /x; echo /y")
    check = await OpenHands().check(places)
    assert (check.ok, check.detail) == (False, "needs Python 3.12; there is none")
    assert "python3.12-venv" in check.fix and "\n" not in check.fix
    with pytest.raises(HarnessMissing, match=r"3\.12; there is none"):
        await OpenHands().install(HarnessSpec(name="openhands"), places, lambda _: None)


async def test_a_launcher_that_has_no_python_is_passed_over(places: Path) -> None:
    """pyenv puts a ``python3.12`` on the PATH that only says that it is not chosen."""
    fake_python(places / "bin" / "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    assert await _python.find("3.12") is None
    for patch in ("3.12.1", "3.12.9"):
        fake_python(
            places / "pyenv" / "versions" / patch / "bin" / "python3.12", f"echo 3.12; echo /p/{patch}; echo /b"
        )
    found = await _python.find("3.12")
    assert found == _python.Interpreter(version="3.12", program=Path("/p/3.12.9"), base=Path("/b"))


async def test_it_is_installed_once_with_that_python(places: Path) -> None:
    log = places / "log"
    fake_python(
        places / "bin" / "python3.12",
        f'if [ "$1" = -c ]; then echo 3.12; echo "$0"; echo /b; exit; fi\n'
        f'echo "$@" >> {log}\nif [ "$2" = venv ]; then /bin/mkdir -p "$3/bin"; /bin/cp "$0" "$3/bin/python"; fi',
    )
    for _ in range(2):
        installed = await OpenHands().install(HarnessSpec(name="openhands"), places / "cache", lambda _: None)
    lines = log.read_text().splitlines()
    assert len(lines) == 2
    assert lines[1].endswith("--only-binary :all: --no-binary func-timeout openhands==1.16.0 litellm==1.110.2")
    folder = places / "cache" / "harnesses" / "openhands-1.16.0"
    assert [bind.source for bind in installed.binds] == [folder, Path("/b")]
    assert (await OpenHands().check(places / "cache")).detail == f"installed in {folder}"

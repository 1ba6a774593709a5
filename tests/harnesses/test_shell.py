from __future__ import annotations

from pathlib import Path

import pytest

from polynya.errors import HarnessMissing, TaskFileError
from polynya.harnesses import all_harnesses, harness
from polynya.harnesses.base import Endpoint, Verdict
from polynya.harnesses.shell import Shell
from polynya.runtimes.base import ExecResult
from polynya.runtimes.local import LocalProvider
from polynya.schema import HarnessSpec, RuntimeSpec

ENDPOINT = Endpoint(base_url="http://127.0.0.1:9/s/k", api_key="k", model="policy", window=1000, max_tokens=100)


async def test_the_command_finds_instruction_and_endpoint(tmp_path: Path) -> None:
    command = "cat; echo; printf '%s\\n' \"$POLYNYA_INSTRUCTION\"; env | sort | grep -e _BASE -e _KEY -e _MODEL -e OWN"
    spec = HarnessSpec(name="shell", settings={"command": command}, env={"OWN": "1", "OPENAI_API_KEY": "theirs"})
    shell = Shell()
    shell.validate(spec)
    installed = await shell.install(spec, tmp_path, print)
    launch = shell.launch(spec, "do 'it' \"now\"", ENDPOINT, installed, workdir="/w", home="/h")
    runtime = await LocalProvider().create(RuntimeSpec(), label=f"test-shell-{tmp_path.name}", root=tmp_path / "r")
    try:
        result = await runtime.exec(launch.argv, env=launch.env, stdin=launch.stdin)
    finally:
        await runtime.destroy()
    assert result.stdout.decode().splitlines() == [
        "do 'it' \"now\"",
        "do 'it' \"now\"",
        "ANTHROPIC_API_KEY=k",
        "ANTHROPIC_BASE_URL=http://127.0.0.1:9/s/k",
        "GEMINI_API_KEY=k",
        "GOOGLE_GEMINI_BASE_URL=http://127.0.0.1:9/s/k",
        "OPENAI_API_BASE=http://127.0.0.1:9/s/k/v1",
        "OPENAI_API_KEY=k",
        "OPENAI_BASE_URL=http://127.0.0.1:9/s/k/v1",
        "OWN=1",
        "POLYNYA_API_KEY=k",
        "POLYNYA_BASE_URL=http://127.0.0.1:9/s/k",
        "POLYNYA_MODEL=policy",
    ]


async def test_an_instruction_too_long_for_a_variable_comes_by_stdin_alone(tmp_path: Path) -> None:
    spec = HarnessSpec(name="shell", settings={"command": "wc -c"})
    installed = await Shell().install(spec, tmp_path, print)
    launch = Shell().launch(spec, "x" * 300_000, ENDPOINT, installed, workdir="/w", home="/h")
    assert "POLYNYA_INSTRUCTION" not in launch.env
    assert len(launch.stdin or b"") == 300_000


def test_the_exit_code_is_the_verdict() -> None:
    assert Shell().verdict(ExecResult(exit_code=0), b"") == Verdict(ok=True)
    assert Shell().verdict(ExecResult(exit_code=3), b"") == Verdict(ok=False, reason="the command ended with 3")
    assert Shell().verdict(ExecResult(exit_code=-9, timed_out=True), b"") == Verdict(ok=False, reason="timed out")


@pytest.mark.parametrize("settings", [{}, {"command": ""}, {"command": 1}, {"command": "x", "comand": "y"}])
def test_settings_that_cannot_be_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(TaskFileError, match=r"comand|command"):
        Shell().validate(HarnessSpec(name="shell", settings=settings))


def test_an_unknown_harness_lists_the_known() -> None:
    with pytest.raises(HarnessMissing, match=r"'nowhere'.*pi, .*shell"):
        harness("nowhere")
    assert {item.name for item in all_harnesses()} >= {"pi", "shell"}

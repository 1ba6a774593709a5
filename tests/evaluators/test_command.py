from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polynya.errors import EvaluatorError, TaskFileError
from polynya.evaluators.base import EvalContext
from polynya.evaluators.command import Command
from polynya.schema import Score

pytestmark = pytest.mark.sandbox
Make = Callable[..., EvalContext]


async def grade(context: EvalContext, **settings: Any) -> Score:
    Command().validate(settings)
    return await Command().evaluate(settings, context)


async def test_exit_0_is_one_and_anything_else_is_zero(workspace: Path, context: Make) -> None:
    (workspace / "answer").write_text("42\n")
    assert (await grade(context(), command="grep -qx 42 answer")).value == 1.0
    score = await grade(context(), command="echo wrong; grep -qx 43 answer")
    assert (score.value, score.detail) == (0.0, "wrong")


async def test_the_graders_files_win_and_never_reach_the_agents_workspace(workspace: Path, context: Make) -> None:
    (workspace / "check.sh").write_text("#!/bin/sh\nexit 0\n")
    score = await grade(context(), command="./check.sh", files={"check.sh": "#!/bin/sh\nexit 1\n", "deep/new": "x"})
    assert score.value == 0.0
    assert sorted(path.name for path in workspace.iterdir()) == ["check.sh"]
    assert "exit 0" in (workspace / "check.sh").read_text()


async def test_a_command_that_does_not_exist_is_no_verdict(context: Make) -> None:
    with pytest.raises(EvaluatorError, match="no-such-tool"):
        await grade(context(), command="no-such-tool")


async def test_a_hang_is_zero_because_the_agents_code_can_cause_it(context: Make) -> None:
    score = await grade(context(), command="echo begun; sleep 1000", timeout=0.5)
    assert score.value == 0.0
    assert score.detail == "timed out after 0.5 s\nbegun"


async def test_a_spent_stage_budget_is_no_verdict(context: Make) -> None:
    with pytest.raises(EvaluatorError, match=r"budgets\.postrun"):
        await grade(context(timeout=0.5), command="sleep 1000")


@pytest.mark.parametrize(("text", "value"), [("0.25\n", 0.25), ("1", 1.0), ('{"score": 0.5, "why": "half"}', 0.5)])
async def test_a_score_file_gives_the_number(context: Make, text: str, value: float) -> None:
    files = {"given": text}
    score = await grade(context(), command="cp given score; exit 1", files=files, score_file="score")
    assert score.value == value


@pytest.mark.parametrize("text", ["1.5", "-1", "NaN", "nan", "", "good", '{"scores": 1}', "true", "[1]"])
async def test_a_score_that_is_no_number_from_0_to_1_is_no_verdict(context: Make, text: str) -> None:
    with pytest.raises(EvaluatorError, match="score_file"):
        await grade(context(), command="cp given score", files={"given": text}, score_file="score")


async def test_a_score_that_the_agent_left_does_not_count(workspace: Path, context: Make) -> None:
    (workspace / "score").write_text("1.0")
    with pytest.raises(EvaluatorError, match="not written"):
        await grade(context(), command="true", score_file="score")
    assert (await grade(context(), command="exit 1", score_file="score")).value == 0.0


async def test_a_score_file_behind_a_link_is_not_read(workspace: Path, context: Make, tmp_path: Path) -> None:
    secret = tmp_path / "host-score"
    secret.write_text("1.0")
    (workspace / "score").symlink_to(secret)
    with pytest.raises(EvaluatorError, match="symbolic link"):
        await grade(context(), command="true", score_file="score")


async def test_a_grader_sees_no_network_and_no_key(context: Make) -> None:
    score = await grade(context(), command="! env | grep -i -e key -e token && ! ls /sys/class/net 2>/dev/null")
    assert score.value == 1.0


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, "command"),
        ({"command": ""}, "command"),
        ({"command": "x", "timeout": -1}, "timeout"),
        ({"command": "x", "files": {"../x": ""}}, r"\.\./x"),
        ({"command": "x", "score_file": "/abs"}, "/abs"),
        ({"command": "x", "score_from": "score_file"}, "score_file"),
        ({"command": "x", "comand": "x"}, "comand"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], names: str) -> None:
    with pytest.raises(TaskFileError, match=names):
        Command().validate(settings)

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from polynya.errors import EvaluatorError, TaskFileError
from polynya.evaluators.base import EvalContext
from polynya.evaluators.tests import Tests

pytestmark = pytest.mark.sandbox

Make = Callable[..., EvalContext]
GOOD = "def add(a, b):\n    return a + b\n"
BAD = "def add(a, b):\n    return a - b\n"
OFFICIAL = """
import pytest
from calc import add

@pytest.mark.parametrize("a,b,want", [(1, 2, 3), (0, 0, 0)])
def test_add(a, b, want):
    assert add(a, b) == want

class TestMore:
    def test_zero(self):
        assert add(0, 0) == 0
"""
PARAMETERS = ["tests/test_calc.py::test_add[1-2-3]", "tests/test_calc.py::test_add[0-0-0]"]
METHOD = "tests/test_calc.py::TestMore::test_zero"
SETTINGS = {"fail_to_pass": PARAMETERS, "pass_to_pass": [METHOD], "files": {"tests/test_calc.py": OFFICIAL}}


def put(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


async def test_all_named_tests_passed_is_one(workspace: Path, context: Make) -> None:
    put(workspace, calc_dot_py=GOOD)
    score = await Tests().evaluate(SETTINGS, context())
    assert (score.value, score.passed, score.failed) == (1.0, [*PARAMETERS, METHOD], [])


async def test_one_failing_test_is_zero_and_is_named(workspace: Path, context: Make) -> None:
    put(workspace, calc_dot_py=BAD)
    score = await Tests().evaluate(SETTINGS, context())
    assert score.value == 0.0
    assert score.failed == [PARAMETERS[0]]
    assert score.passed == [PARAMETERS[1], METHOD]


async def test_a_missing_test_has_failed_and_the_others_still_run(workspace: Path, context: Make) -> None:
    put(workspace, calc_dot_py=GOOD)
    missing = ["tests/test_calc.py::test_nowhere", "tests/test_gone.py::test_x"]
    score = await Tests().evaluate({**SETTINGS, "fail_to_pass": [*PARAMETERS, *missing]}, context())
    assert score.value == 0.0
    assert score.failed == missing
    assert score.passed == [*PARAMETERS, METHOD]


async def test_no_official_file_left_at_all_is_zero(workspace: Path, context: Make) -> None:
    put(workspace, calc_dot_py=GOOD)
    score = await Tests().evaluate({"fail_to_pass": ["tests/test_gone.py::test_x"]}, context())
    assert (score.value, score.failed) == (0.0, ["tests/test_gone.py::test_x"])


async def test_a_syntax_error_of_the_agent_is_zero_not_an_error(workspace: Path, context: Make) -> None:
    put(workspace, calc_dot_py="def add(:\n")
    score = await Tests().evaluate(SETTINGS, context())
    assert score.value == 0.0
    assert score.passed == []


async def test_the_official_file_wins_over_the_agents_edit(workspace: Path, context: Make) -> None:
    put(workspace, calc_dot_py=BAD, tests__test_calc_dot_py="def test_add(): pass\n")
    assert (await Tests().evaluate(SETTINGS, context())).value == 0.0


async def test_the_official_file_wins_over_a_link_and_nothing_is_written_behind_it(
    workspace: Path, context: Make, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    put(workspace, calc_dot_py=GOOD)
    (workspace / "tests").symlink_to(outside)
    assert (await Tests().evaluate(SETTINGS, context())).value == 1.0
    assert list(outside.iterdir()) == []


FORCE_PASS = """
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""


@pytest.mark.parametrize(
    "planted",
    [
        {"conftest_dot_py": FORCE_PASS},
        {"tests__conftest_dot_py": FORCE_PASS},
        {"cheat_dot_py": FORCE_PASS, "pytest_dot_ini": "[pytest]\naddopts = -p cheat\n"},
        {"cheat_dot_py": FORCE_PASS, "pyproject_dot_toml": "[tool.pytest.ini_options]\naddopts = '-p cheat'\n"},
        {"pytest_dot_py": "import os; os._exit(0)\n"},
        {"sitecustomize_dot_py": "import os; os._exit(0)\n"},
        {
            "cheat_dot_py": FORCE_PASS,
            "cheat-1_dot_dist-info__entry_points_dot_txt": "[pytest11]\ncheat = cheat\n",
            "cheat-1_dot_dist-info__METADATA": "Metadata-Version: 2.1\nName: cheat\nVersion: 1\n",
        },
    ],
    ids=[
        "root conftest",
        "conftest beside tests",
        "pytest.ini",
        "pyproject",
        "pytest.py",
        "sitecustomize",
        "entry point",
    ],
)
async def test_configuration_planted_by_the_agent_does_not_count(
    workspace: Path, context: Make, planted: dict[str, str]
) -> None:
    put(workspace, calc_dot_py=BAD, **planted)
    score = await Tests().evaluate(SETTINGS, context())
    assert score.value == 0.0
    assert score.failed == [PARAMETERS[0]]


async def test_an_official_conftest_and_configuration_count(workspace: Path, context: Make) -> None:
    put(workspace, src__calc_dot_py=GOOD)
    files = {
        "tests/conftest.py": "import pytest\n@pytest.fixture\ndef three(): return 3\n",
        "tests/test_f.py": "from calc import add\ndef test_f(three): assert add(1, 2) == three\n",
        "pytest.ini": "[pytest]\npythonpath = src\n",
    }
    score = await Tests().evaluate({"fail_to_pass": ["tests/test_f.py::test_f"], "files": files}, context())
    assert score.value == 1.0, score.detail


async def test_pythonpath_reaches_a_source_folder(workspace: Path, context: Make) -> None:
    put(workspace, src__calc_dot_py=GOOD)
    assert (await Tests().evaluate({**SETTINGS, "pythonpath": ["src"]}, context())).value == 1.0


async def test_a_process_that_leaves_early_keeps_nothing(workspace: Path, context: Make) -> None:
    put(workspace, calc_dot_py="import os\ndef add(a, b):\n    print('PASSED'); os._exit(0)\n")
    score = await Tests().evaluate(SETTINGS, context())
    assert score.value == 0.0
    assert "ended from within" in score.detail


async def test_a_hang_of_the_agents_code_is_zero(workspace: Path, context: Make) -> None:
    put(workspace, calc_dot_py="import time\ndef add(a, b):\n    time.sleep(1000)\n")
    score = await Tests().evaluate({**SETTINGS, "timeout": 3.0}, context())
    assert score.value == 0.0
    assert score.detail.startswith("timed out after 3 s")


async def test_the_spent_stage_budget_is_no_verdict(workspace: Path, context: Make) -> None:
    put(workspace, calc_dot_py="import time\ndef add(a, b):\n    time.sleep(1000)\n")
    with pytest.raises(EvaluatorError, match=r"budgets\.postrun"):
        await Tests().evaluate(SETTINGS, context(timeout=1.0))


async def test_an_interpreter_without_pytest_is_no_verdict(workspace: Path, context: Make) -> None:
    put(workspace, calc_dot_py=GOOD)
    with pytest.raises(EvaluatorError, match="pytest could not run"):
        await Tests().evaluate({**SETTINGS, "python": "/nowhere/python"}, context())


async def test_an_interpreter_in_the_workspace_is_refused(workspace: Path, context: Make) -> None:
    with pytest.raises(EvaluatorError, match="inside the workspace"):
        await Tests().evaluate({**SETTINGS, "python": "/workspace/.venv/bin/python"}, context())


async def test_a_broken_official_configuration_is_no_verdict(workspace: Path, context: Make) -> None:
    put(workspace, calc_dot_py=GOOD)
    files = {**SETTINGS["files"], "pytest.ini": "[pytest]\nminversion = 999\n"}  # type: ignore[dict-item]
    with pytest.raises(EvaluatorError, match="pytest"):
        await Tests().evaluate({**SETTINGS, "files": files}, context())


async def test_skipped_is_not_passed_and_expected_failure_is(workspace: Path, context: Make) -> None:
    text = (
        "import pytest\n@pytest.mark.skip\ndef test_s(): pass\n@pytest.mark.xfail\ndef test_x(): assert 0\n"
        "@pytest.fixture\ndef bad():\n    yield\n    assert 0\ndef test_t(bad): pass\n"
    )
    ids = ["test_o.py::test_s", "test_o.py::test_x", "test_o.py::test_t"]
    score = await Tests().evaluate({"fail_to_pass": ids, "files": {"test_o.py": text}}, context())
    assert score.passed == ["test_o.py::test_x"]
    assert score.failed == ["test_o.py::test_s", "test_o.py::test_t"]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, "fail_to_pass"),
        ({"fail_to_pass": ["../t.py::x"]}, "fail_to_pass"),
        ({"fail_to_pass": ["t.py::x"], "files": {"/etc/x": ""}}, "/etc/x"),
        ({"fail_to_pass": ["t.py::x"], "timeout": 0}, "timeout"),
        ({"fail_to_pass": ["t.py::x"], "python": "python3"}, "python3"),
        ({"fail_to_pass": ["t.py::x"], "fail": 1}, "evaluator.fail"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], names: str) -> None:
    with pytest.raises(TaskFileError, match=names):
        Tests().validate(settings)

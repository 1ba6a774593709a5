"""Named pytest tests decide: 1 when all of them passed, else 0.

Invariant: the tests run in a fresh sandbox on a copy of the workspace, by an interpreter that is not in the workspace, with
the official test files laid over the agent's and without configuration that the agent left. A test that does not exist,
is skipped or is never reached has not passed. It refuses to give a verdict when pytest itself could not run.

Code under test shares a process with pytest, so an agent that writes for this grader can still deceive it.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import msgspec

from polynya.errors import EvaluatorError, TaskFileError, WorkspaceError
from polynya.evaluators import _fresh, _settings
from polynya.evaluators.base import EvalContext
from polynya.runtimes.base import Bind, ExecResult, Runtime
from polynya.runtimes.files import check_path
from polynya.schema import Score

RUNNER = Path(__file__).with_name("_pytest_runner.py")
CONFIGURES_PYTEST = ("pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")
INJECTS_CODE = ("conftest.py", "sitecustomize.py", "usercustomize.py")
MAX_RESULTS = 64 << 20


class TestsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    __test__ = False

    fail_to_pass: list[str] = []
    pass_to_pass: list[str] = []
    files: dict[str, str] = {}
    """Official test files. A ``conftest.py``, or a configuration of pytest, counts only when it is among them."""
    timeout: Annotated[float, msgspec.Meta(gt=0)] = 120.0
    """Below ``budgets.postrun``: a hang beyond this is the agent's, one that the budget cuts is nobody's."""
    python: str | None = None
    """An interpreter inside the runtime that has pytest; None: the one that runs polynya."""
    pythonpath: list[str] = []
    """Folders of the workspace to import from, beside the workspace itself; e.g. ``[src]``."""


def grading_binds() -> list[Bind]:
    """What a grading runtime must show so that polynya's own interpreter and its pytest run inside."""
    folders = dict.fromkeys(Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix))
    found = dict.fromkeys([*folders, *(Path(prefix) for prefix in (sys.prefix, sys.base_prefix))])
    return [Bind(source=path, target=str(path)) for path in found if not path.is_relative_to("/usr")]


class Tests:
    __test__ = False
    name = "tests"

    def validate(self, settings: dict[str, Any]) -> None:
        self._read(settings)

    def _read(self, settings: dict[str, Any]) -> TestsSettings:
        found = _settings.read(self.name, settings, TestsSettings)
        if not found.fail_to_pass and not found.pass_to_pass:
            raise TaskFileError(
                "evaluator.fail_to_pass: [] and pass_to_pass: [] name no test", fix="name the tests that decide"
            )
        try:
            for name in (*found.files, *found.pythonpath):
                check_path(name, "evaluator.files")
            for test in (*found.fail_to_pass, *found.pass_to_pass):
                check_path(_file_of(test), "evaluator.fail_to_pass")
        except WorkspaceError as exc:
            raise TaskFileError(exc.message, fix=exc.fix) from exc
        if found.python is not None and not found.python.startswith("/"):
            raise TaskFileError(f"evaluator.python: {found.python!r} is not absolute", fix="write the whole path")
        return found

    async def evaluate(self, settings: dict[str, Any], context: EvalContext) -> Score:
        found = self._read(settings)
        async with _fresh.fresh(context, found.files) as runtime:
            python = found.python or sys.executable
            if PurePosixPath(python).is_relative_to(runtime.workdir):
                raise EvaluatorError(
                    f"evaluator.python: {python!r} is inside the workspace, where the agent may write",
                    fix="use an interpreter of the runtime",
                )
            await asyncio.to_thread(_remove_injections, runtime.workspace, found.files)
            script, config, results = await asyncio.to_thread(_prepare, runtime, found)
            result = await _fresh.run(runtime, [python, "-I", "-B", script, config], context, found.timeout)
            await runtime.kill_all()
            events = await asyncio.to_thread(_events, results)
            return _score(found, runtime.workdir, result, events)


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def _remove_injections(workspace: Path, official: Mapping[str, str]) -> None:
    """Python and pytest load these unasked. No official file: no say."""
    for folder, _, names in os.walk(workspace):
        for name in set(names) & set(INJECTS_CODE):
            path = Path(folder) / name
            if path.relative_to(workspace).as_posix() not in official:
                path.unlink()


def _prepare(runtime: Runtime, settings: TestsSettings) -> tuple[str, str, Path]:
    """Put the runner and its configuration into the grading home, out of the workspace, under a name of chance."""
    folder = runtime.home_path / f"grading-{secrets.token_hex(8)}"
    folder.mkdir()
    inside = f"{runtime.home}/{folder.name}"
    (folder / "run.py").write_bytes(RUNNER.read_bytes())
    wanted = [*settings.fail_to_pass, *settings.pass_to_pass]
    present = [name for name in dict.fromkeys(map(_file_of, wanted)) if (runtime.workspace / name).is_file()]
    configured = [name for name in CONFIGURES_PYTEST if name in settings.files]
    args = ["-c", f"{runtime.workdir}/{configured[0]}" if configured else os.devnull, f"--rootdir={runtime.workdir}"]
    args += ["-p", "no:cacheprovider", "-o", "addopts=", "-rA", "--tb=short", "--color=no"]
    args.append("--continue-on-collection-errors")
    if not any(PurePosixPath(name).name == "conftest.py" for name in settings.files):
        args.append("--noconftest")
    config = {
        "results": f"{inside}/results.jsonl",
        "wanted": wanted,
        "import_path": [*(f"{runtime.workdir}/{name}" for name in settings.pythonpath), runtime.workdir],
        # Without a file pytest would collect the whole workspace.
        "args": [*args, "--", *(f"{runtime.workdir}/{name}" for name in present)] if present else ["--version"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return f"{inside}/run.py", f"{inside}/config.json", folder / "results.jsonl"


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return []
    with os.fdopen(fd, "rb") as file:
        raw = file.read(MAX_RESULTS) or b""
    events = []
    for line in raw.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "event" in event:
            events.append(event)
    return events


def _score(settings: TestsSettings, workdir: str, result: ExecResult, events: list[dict[str, Any]]) -> Score:
    output = _settings.tail(result.stdout, result.stderr)
    kinds = {event["event"] for event in events}
    if "started" not in kinds:
        why = next((str(event.get("text")) for event in events if event["event"] == "no_pytest"), output[-800:])
        raise EvaluatorError(
            f"pytest could not run with {settings.python or sys.executable!r}: {why or f'exit {result.exit_code}'}",
            fix="install pytest for that interpreter, and let the grading runtime show it (grading_binds)",
        )
    code = next((event.get("code") for event in events if event["event"] == "ended"), None)
    internal = "\n".join(str(event.get("text")) for event in events if event["event"] == "internal")
    # Code 3 with a frame of the workspace, or an official conftest that cannot import the agent's code, is the agent's doing.
    blames_agent = f"{workdir}/" in internal if code == 3 else "while loading conftest" in output
    if code in (3, 4) and not blames_agent:
        raise EvaluatorError(f"pytest failed by itself (exit {code}): {(internal or output)[-800:]}")
    passed, failed = _sort(settings, events)
    note = f"timed out after {settings.timeout:g} s\n" if result.timed_out else ""
    if code is None and not result.timed_out:
        note = f"pytest was ended from within (exit {result.exit_code})\n"
    value = 1.0 if not failed and code in (0, 1) else 0.0
    return Score(name="tests", value=value, passed=passed, failed=failed, detail=note + output)


def _sort(settings: TestsSettings, events: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Passed: its call passed, and neither its setup nor its teardown failed."""
    outcomes: dict[str, dict[str, str]] = {}
    for event in events:
        if event["event"] == "test":
            outcomes.setdefault(str(event.get("id")), {})[str(event.get("when"))] = str(event.get("outcome"))
    passed: list[str] = []
    failed: list[str] = []
    for test in dict.fromkeys([*settings.fail_to_pass, *settings.pass_to_pass]):
        seen = outcomes.get(test, {})
        good = seen.get("call") == "passed" and "failed" not in seen.values()
        (passed if good else failed).append(test)
    return passed, failed

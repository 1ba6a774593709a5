"""A command decides: its exit code, or a number that it writes.

Invariant: it runs in a fresh sandbox on a copy of the workspace; ``files`` are laid over the copy and were never in the
agent's sight. A hang is 0, because the agent's code can cause it. It refuses a score that is no number in [0, 1], and a
command that does not exist.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from polynya.errors import EvaluatorError, TaskFileError, WorkspaceError
from polynya.evaluators import _fresh, _settings
from polynya.evaluators.base import EvalContext
from polynya.runtimes.files import check_path
from polynya.schema import Score

MAX_SCORE_BYTES = 1 << 16


class CommandSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    command: Annotated[str, msgspec.Meta(min_length=1)]
    files: dict[str, str] = {}
    timeout: Annotated[float, msgspec.Meta(gt=0)] = 120.0
    score_file: str | None = None
    """Below the workspace: a number, or JSON ``{"score": number}``."""
    score_from: Literal["exit_code", "score_file"] | None = None
    """None: ``score_file`` when one is named, else ``exit_code``."""


class Command:
    name = "command"

    def validate(self, settings: dict[str, Any]) -> None:
        self._read(settings)

    def _read(self, settings: dict[str, Any]) -> CommandSettings:
        found = _settings.read(self.name, settings, CommandSettings)
        try:
            for path in (*found.files, *([found.score_file] if found.score_file is not None else [])):
                check_path(path, "evaluator.files")
        except WorkspaceError as exc:
            raise TaskFileError(exc.message, fix=exc.fix) from exc
        if found.score_from == "score_file" and found.score_file is None:
            raise TaskFileError("evaluator.score_file is missing, and score_from is 'score_file'", fix="name the file")
        return found

    async def evaluate(self, settings: dict[str, Any], context: EvalContext) -> Score:
        found = self._read(settings)
        async with _fresh.fresh(context, found.files) as runtime:
            if found.score_file is not None:
                # A score that the agent left there is not the command's.
                _discard(runtime.workspace, found.score_file)
            result = await _fresh.run(runtime, ["/bin/sh", "-c", found.command], context, found.timeout)
            detail = _settings.tail(result.stdout, result.stderr)
            if result.timed_out:
                return Score(name=self.name, value=0.0, detail=f"timed out after {found.timeout:g} s\n{detail}")
            if result.exit_code in (126, 127):
                raise EvaluatorError(
                    f"evaluator.command {found.command!r:.200} ended with {result.exit_code} (not found, or not "
                    f"executable): {detail[-500:]}",
                    fix="see that the command exists inside the runtime",
                )
            if (found.score_from or ("score_file" if found.score_file else "exit_code")) == "exit_code":
                return Score(name=self.name, value=1.0 if result.exit_code == 0 else 0.0, detail=detail)
            assert found.score_file is not None
            await runtime.kill_all()
            if result.exit_code != 0 and not (runtime.workspace / found.score_file).exists():
                # Code of the agent that breaks the grader must not be able to take its own failure out of the data.
                return Score(name=self.name, value=0.0, detail=f"no score, exit {result.exit_code}\n{detail}")
            return Score(name=self.name, value=_score(runtime.workspace, found.score_file), detail=detail)


def _discard(root: Path, name: str) -> None:
    if not _has_links(root, name) and (root / name).is_file():
        (root / name).unlink()


def _has_links(root: Path, name: str) -> bool:
    path = root
    for part in Path(name).parts:
        path = path / part
        if path.is_symlink():
            return True
    return False


def _score(root: Path, name: str) -> float:
    if _has_links(root, name):
        raise EvaluatorError(f"evaluator.score_file {name!r} is, or lies behind, a symbolic link", fix="write a file")
    try:
        fd = os.open(root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            raw = file.read(MAX_SCORE_BYTES) or b""
    except OSError as exc:
        raise EvaluatorError(
            f"evaluator.score_file {name!r} was not written: {exc.strerror}", fix="see that the command writes it"
        ) from exc
    try:
        value = msgspec.json.decode(raw)
        if isinstance(value, dict):
            value = value["score"]
        number = float(value) if not isinstance(value, bool) else math.nan
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        number = math.nan
    if not 0.0 <= number <= 1.0:
        raise EvaluatorError(
            f"evaluator.score_file {name!r} holds {raw[:200]!r}, not a number in [0, 1]",
            fix='write a number or {"score": number}',
        )
    return number

"""Graders run for real: each context makes bubblewrap sandboxes with a copy of a workspace."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polynya.evaluators import grading_binds
from polynya.evaluators.base import EvalContext, Outcome
from polynya.runtimes.base import Runtime
from polynya.runtimes.bubblewrap import BubblewrapProvider
from polynya.runtimes.files import copy_workspace
from polynya.schema import RuntimeSpec, Status


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """What the agent left."""
    folder = tmp_path / "left"
    folder.mkdir()
    return folder


@pytest.fixture
def context(tmp_path: Path, workspace: Path) -> Callable[..., EvalContext]:
    numbers = itertools.count()

    async def fresh() -> Runtime:
        number = next(numbers)
        runtime = await BubblewrapProvider().create(
            RuntimeSpec(),
            label=f"test-eval-{tmp_path.name}-{number}",
            root=tmp_path / f"fresh{number}",
            binds=grading_binds(),
        )
        copy_workspace(workspace, runtime.workspace)
        return runtime

    def make(status: Status = Status.COMPLETED, timeout: float = 120.0, **fields: Any) -> EvalContext:
        known: dict[str, Any] = {
            "outcome": Outcome(status=status, exit_code=0),
            "fresh_runtime": fresh,
            "timeout": timeout,
            "instruction": "do it",
            "metadata": {},
        }
        return EvalContext(**{**known, **fields})

    return make

"""Runs of the scripted engine with the `shell` harness and no isolation: everything else is real."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polynya.config import NodeLimits, Settings
from polynya.engines.scripted import Script, ScriptedEngine
from polynya.rollout.parse import parse_task
from polynya.rollout.runner import RunHooks, Runner, RunOptions
from polynya.rollout.stress import stress_script, stress_task
from polynya.schema import TaskSpec


def shell_task(command: str = "true", **fields: Any) -> TaskSpec:
    """A task of the `shell` harness on the `local` runtime."""
    raw = {
        "task_id": "t",
        "instruction": "do it",
        "harness": {"name": "shell", "settings": {"command": command}},
        "runtime": {"name": "local"},
        "retries": 0,
    }
    return parse_task({**raw, **fields}, "test")


class Lab:
    """Makes runners that write below one folder."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "run"
        self.cache = folder / "cache"

    def runner(
        self,
        tasks: list[TaskSpec],
        script: Script | None = None,
        *,
        engine: Any = None,
        hooks: RunHooks | None = None,
        running: int = 8,
        **options: Any,
    ) -> Runner:
        limits = NodeLimits(running=running, init=8, ready=8, postrun=8)
        options = {"out": self.out, "cache": self.cache, "settings": Settings(node=limits), **options}
        return Runner(tasks, engine or ScriptedEngine(script), RunOptions(**options), hooks)

    def talk(self, sessions: int, calls: int) -> tuple[TaskSpec, Script]:
        return stress_task(sessions, calls, "local"), stress_script(calls, delay=0.0)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""For thousands of databases whose writes to a real disk show nothing."""


@pytest.fixture(scope="session")
def memory_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        yield Path(folder)

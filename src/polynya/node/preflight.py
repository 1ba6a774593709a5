"""What can be known before a session starts: names, settings, and whether the parts work on this machine.

The rooms above ask here, since runtimes, harnesses and evaluators are known to the node only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from polynya import evaluators, harnesses, runtimes
from polynya.errors import ConfigError, TaskFileError
from polynya.harnesses.base import Progress
from polynya.node import builders
from polynya.runtimes.base import Check
from polynya.runtimes.files import remove_tree
from polynya.schema import TaskSpec

__all__ = ["Check", "checks", "preflight", "sweep", "validate"]


async def preflight(tasks: Iterable[TaskSpec], cache: Path, progress: Progress) -> None:
    """Check every name and setting, then install each harness once and find each runtime.

    Raises TaskFileError for a task that can never run, HarnessMissing or RuntimeUnavailable for a part that is not here.
    """
    tasks = list(tasks)
    for task in tasks:
        validate(task)
    for name in dict.fromkeys(task.runtime.name for task in tasks):
        await runtimes.provider(name)
    seen: set[tuple[str, str | None]] = set()
    for task in tasks:
        key = (task.harness.name, task.harness.version)
        if key not in seen:
            seen.add(key)
            await harnesses.harness(task.harness.name).install(task.harness, cache, progress)


def validate(task: TaskSpec) -> None:
    """Raises PolynyaError naming task, field and value."""
    where = f"task {task.task_id}"
    harnesses.harness(task.harness.name).validate(task.harness)
    evaluators.validate_all(task.evaluator)
    try:
        builders.builder(task.builder.name)
    except ConfigError as exc:
        raise TaskFileError(f"{where}: {exc.message}", fix=exc.fix) from exc


async def checks(cache: Path) -> dict[str, list[Check]]:
    """What works here: every runtime and every harness."""
    return {
        "runtime": [await provider.check() for provider in runtimes.all_providers()],
        "harness": [await harness.check(cache) for harness in harnesses.all_harnesses()],
    }


async def sweep(label_prefix: str, work: Path) -> list[str]:
    """Remove what a killed process left behind: its sandboxes, in every runtime that works here, then their folders."""
    found: list[str] = []
    for provider in runtimes.all_providers():
        if (await provider.check()).ok:
            found += await provider.sweep(label_prefix)
    await asyncio.to_thread(lambda: remove_tree(*work.iterdir()))
    return found

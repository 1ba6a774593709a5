from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polynya.runtimes import BUILT_IN, marks
from polynya.runtimes.base import Runtime
from polynya.schema import RuntimeSpec

Make = Callable[..., Awaitable[Any]]


@pytest.fixture
def label(tmp_path: Path) -> Iterator[str]:
    """No process that carries it may outlive the test."""
    name = f"test-{os.getpid()}-{tmp_path.name}"
    yield name
    assert marks.kill_labelled(lambda found: found.startswith(name)) == {}


@pytest.fixture
async def make(tmp_path: Path, label: str) -> AsyncIterator[Make]:
    made: list[Runtime] = []

    async def create(name: str, binds: Any = (), **spec: Any) -> Runtime:
        number = len(made)
        runtime = await BUILT_IN[name]().create(
            RuntimeSpec(**spec), label=f"{label}.{number}", root=tmp_path / f"root{number}", binds=binds
        )
        made.append(runtime)
        return runtime

    yield create
    for runtime in made:
        await runtime.destroy()

"""The sandboxes, found by name. A third party registers one under the entry point group ``polynya.runtimes``.

Invariant: isolation is never given up silently. Without a name bubblewrap is taken where it works, and nothing else.

Whoever makes more than one sandbox holds a ``Spawner`` (``async with Spawner() as spawner``) and gives it along: then all share
one fork server. Without it each provider has its own, which runs while a sandbox of that provider lives.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Protocol, runtime_checkable

from polynya.errors import RuntimeUnavailable
from polynya.runtimes.base import RuntimeProvider
from polynya.runtimes.bubblewrap import BubblewrapProvider
from polynya.runtimes.local import LocalProvider
from polynya.runtimes.spawner import Spawner

__all__ = ["BUILT_IN", "DEFAULT", "Spawner", "all_providers", "names", "provider"]

BUILT_IN: dict[str, Callable[[], RuntimeProvider]] = {
    "bubblewrap": BubblewrapProvider,
    "local": LocalProvider,
}
DEFAULT = "bubblewrap"
GROUP = "polynya.runtimes"


def names() -> list[str]:
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


async def provider(name: str | None = None, spawner: Spawner | None = None) -> RuntimeProvider:
    """The provider of that name; None: bubblewrap, if it works here. Raises RuntimeUnavailable."""
    if name is None:
        chosen = _given(BUILT_IN[DEFAULT](), spawner)
        check = await chosen.check()
        if not check.ok:
            raise RuntimeUnavailable(
                f"no runtime is named and {DEFAULT} does not work here: {check.detail}",
                fix=f"{check.fix}; or say `runtime: local` to run without isolation",
            )
        return chosen
    if name in BUILT_IN:
        return _given(BUILT_IN[name](), spawner)
    for point in entry_points(group=GROUP, name=name):
        made: RuntimeProvider = point.load()()
        return _given(made, spawner)
    raise RuntimeUnavailable(f"runtime.name {name!r} is not known", fix=f"use one of {', '.join(names())}")


def all_providers(spawner: Spawner | None = None) -> list[RuntimeProvider]:
    """One of each, built-in and registered."""
    registered = [point.load() for point in entry_points(group=GROUP)]
    return [_given(make(), spawner) for make in (*BUILT_IN.values(), *registered)]


@runtime_checkable
class _Spawning(Protocol):
    spawner: Spawner


def _given(made: RuntimeProvider, spawner: Spawner | None) -> RuntimeProvider:
    """A provider that has a ``spawner``, a registered one too, is given the shared one in its place."""
    if spawner is not None and isinstance(made, _Spawning):
        made.spawner = spawner
    return made

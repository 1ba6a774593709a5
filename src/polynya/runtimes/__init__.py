"""The sandboxes, found by name. A third party registers one under the entry point group ``polynya.runtimes``.

Invariant: isolation is never given up silently. Without a name bubblewrap is taken where it works, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from polynya.errors import RuntimeUnavailable
from polynya.runtimes.base import RuntimeProvider
from polynya.runtimes.bubblewrap import BubblewrapProvider
from polynya.runtimes.local import LocalProvider

BUILT_IN: dict[str, Callable[[], RuntimeProvider]] = {"bubblewrap": BubblewrapProvider, "local": LocalProvider}
DEFAULT = "bubblewrap"
GROUP = "polynya.runtimes"


def names() -> list[str]:
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


async def provider(name: str | None = None) -> RuntimeProvider:
    """The provider of that name; None: bubblewrap, if it works here. Raises RuntimeUnavailable."""
    if name is None:
        chosen = BUILT_IN[DEFAULT]()
        check = await chosen.check()
        if not check.ok:
            raise RuntimeUnavailable(
                f"no runtime is named and {DEFAULT} does not work here: {check.detail}",
                fix=f"{check.fix}; or say `runtime: local` to run without isolation",
            )
        return chosen
    if name in BUILT_IN:
        return BUILT_IN[name]()
    for point in entry_points(group=GROUP, name=name):
        made: RuntimeProvider = point.load()()
        return made
    raise RuntimeUnavailable(f"runtime.name {name!r} is not known", fix=f"use one of {', '.join(names())}")


def all_providers() -> list[RuntimeProvider]:
    """One of each, built-in and registered."""
    registered = [point.load() for point in entry_points(group=GROUP)]
    return [make() for make in (*BUILT_IN.values(), *registered)]

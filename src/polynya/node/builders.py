"""Builders, found by name. A third party registers one under the entry point group ``polynya.builders``: a ``tokens.builders.Plan``.

Invariant: whatever a builder picks, ``tokens.builders.build`` proves each row and balances the ledger; what it leaves out is
excluded as ``left_out``.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from polynya.errors import ConfigError
from polynya.tokens.builders import BUILDERS, Plan

GROUP = "polynya.builders"


def names() -> list[str]:
    return sorted({*BUILDERS, *(point.name for point in entry_points(group=GROUP))})


def builder(name: str) -> Plan:
    """The builder of that name. Raises ConfigError that lists the known ones."""
    if name in BUILDERS:
        return BUILDERS[name]
    for point in entry_points(group=GROUP, name=name):
        plan: Plan = point.load()
        return plan
    raise ConfigError(f"builder.name {name!r} is unknown", fix=f"use one of {', '.join(names())}")

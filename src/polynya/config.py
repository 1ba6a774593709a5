"""One settings object, strict: an unknown name or an impossible value is an error, never ignored.

Read from nothing but what the caller passes; the command line fills it from options and ``POLYNYA_*`` variables.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec


class NodeLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pool sizes of one node. Each stage has its own pool, so a slow stage never holds another's workers."""

    init: Annotated[int, msgspec.Meta(ge=1)] = 4
    ready: Annotated[int, msgspec.Meta(ge=0)] = 4
    """Prepared runtimes that may wait for a RUNNING slot. 0: none; a RUNNING slot then waits for each INIT."""
    running: Annotated[int, msgspec.Meta(ge=1)] = 8
    postrun: Annotated[int, msgspec.Meta(ge=1)] = 4


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """0: any free port."""
    keepalive_seconds: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """A waiting streaming client gets a no-op event of its dialect at least this often."""
    first_event_grace: Annotated[float, msgspec.Meta(ge=0)] = 0.25
    """Headers of a streaming reply wait this long for an immediate refusal, so that it can be an HTTP status."""
    max_body_bytes: int = 32 * 1024 * 1024
    calls_in_flight_per_session: Annotated[int, msgspec.Meta(ge=1)] = 64
    engine_timeout_seconds: Annotated[float, msgspec.Meta(gt=0)] = 1800.0
    continuation: bool = True
    """A call that goes on from a captured one is prompted with that call's ids. Off: the engine renders every prompt."""
    thinking: Literal["retain", "template"] = "retain"
    """Where a user message makes a template leave out earlier thinking: keep it, as sampled, or split there as the template does."""


class JournalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    durability: Literal["fsync", "write"] = "fsync"
    """``fsync``: on the disk before it is visible. ``write``: handed to the kernel (survives SIGKILL, not power loss)."""
    segment_bytes: int = 256 * 1024 * 1024


class DispatchSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the rollout server gives out work. Times in seconds, each counted on one side's own monotonic clock."""

    lease_seconds: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """A node that renewed nothing for so long has lost its sessions."""
    heartbeat_seconds: Annotated[float, msgspec.Meta(gt=0)] = 2.0
    fence_seconds: Annotated[float, msgspec.Meta(gt=0)] = 8.0
    """A node that could not renew for so long kills its sessions itself: before the lease ends, whatever the network does."""
    suspect_seconds: Annotated[float, msgspec.Meta(gt=0)] = 2.5
    """What is left of the lease of a node at which somebody saw an error, until it renews."""
    max_queued: Annotated[int, msgspec.Meta(ge=1)] = 100_000
    """Sessions that may wait; with more no new task is let in."""
    max_leased: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Sessions that may be with nodes at a time, all together."""
    max_losses: Annotated[int, msgspec.Meta(ge=0)] = 5
    """Nodes that a session may lose before it is taken for their cause and ends as ``infra_error``."""
    probe_seconds: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """A node whose last session failed for infrastructure gets one session at a time, this long after it, twice as long after the next."""
    probe_max_seconds: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    callback_seconds: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Wait after the first failure of a callback; doubled after each further one."""
    callback_max_seconds: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    callback_tries: Annotated[int, msgspec.Meta(ge=1)] = 50
    """After so many failures a callback is given up; its result can still be pulled."""

    def __post_init__(self) -> None:
        if not self.heartbeat_seconds < self.fence_seconds < self.lease_seconds:
            raise ValueError("heartbeat_seconds < fence_seconds < lease_seconds must hold")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gateway: GatewaySettings = GatewaySettings()
    journal: JournalSettings = JournalSettings()
    node: NodeLimits = NodeLimits()


def cache_dir() -> Path:
    """Where models and harnesses are kept between runs: ``$POLYNYA_CACHE``, else ``$XDG_CACHE_HOME/polynya``, else ``~/.cache/polynya``."""
    if explicit := os.environ.get("POLYNYA_CACHE"):
        return Path(explicit).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "polynya"

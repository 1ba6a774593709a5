"""One machine's node: engine, journal, gateway and stages, and the agent that keeps them at work.

Invariant: what an earlier life of the node left behind (sandboxes, mounts, processes) is removed before it takes work. Refuses an
engine that gives no token ids, unless evaluation only was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from polynya import __version__
from polynya.capture.journal import Journal
from polynya.capture.store import CaptureStore
from polynya.config import NodeLimits, Settings
from polynya.engines.base import Engine, EngineInfo
from polynya.errors import EngineNotTrainable
from polynya.gateway.server import Gateway
from polynya.node import Node, NodeDeps, SessionEvent
from polynya.node.preflight import sweep
from polynya.rollout.service.agent import AgentSettings, NodeAgent
from polynya.rollout.service.archive import Archive
from polynya.rollout.service.control import Control


class HostOptions(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    state: Path
    """Of this node: its journal, its logs, its scratch space."""
    archive: Path
    cache: Path
    settings: Settings = Settings()
    text_only: bool = False
    labels: dict[str, str] = {}


def capacity_of(limits: NodeLimits) -> int:
    """Sessions that a node holds at a time: those that run, wait prepared, or are graded."""
    return limits.running + limits.ready + limits.postrun


def boot_clock() -> float:
    """Monotonic, and goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@contextlib.asynccontextmanager
async def hosted(
    control: Control,
    engine: Engine,
    options: HostOptions,
    *,
    on_event: Callable[[SessionEvent], None] = lambda event: None,
    progress: Callable[[str], None] = lambda line: None,
) -> AsyncIterator[NodeAgent]:
    """An agent, ready to ``run``. Raises EngineError, EngineNotTrainable, PolynyaError."""
    state = options.state.absolute()
    for folder in ("capture", "logs", "work"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    try:
        info = await engine.start()
        _trainable(info, text_only=options.text_only)
        label = "polynya-" + hashlib.sha256(str(state).encode()).hexdigest()[:12]
        if swept := await sweep(label, state / "work"):
            progress(f"removed {len(swept)} leftovers of an earlier life of node {options.name}")
        journal = Journal(state / "capture", options.settings.journal)
        await asyncio.to_thread(journal.start)
        try:
            gateway = Gateway(engine, CaptureStore(journal, time.time), options.settings.gateway)
            await gateway.start()
            try:
                deps = NodeDeps(
                    engine=engine,
                    gateway=gateway,
                    cache=options.cache,
                    work=state / "work",
                    logs=state / "logs",
                    label=label,
                    version=__version__,
                    progress=progress,
                )
                node = Node(deps, options.settings.node, on_event)
                settings = AgentSettings(
                    name=options.name,
                    capacity=capacity_of(options.settings.node),
                    model=info.model,
                    url=gateway.url,
                    labels=options.labels,
                )
                yield NodeAgent(
                    control, node, Archive(options.archive), settings, clock=boot_clock, epochs=time.time_ns
                )
            finally:
                await gateway.close()
        finally:
            await journal.close()
    finally:
        await engine.close()


def _trainable(info: EngineInfo, *, text_only: bool) -> None:
    if info.trainable or text_only:
        return
    missing = "token ids" if not info.token_ids else "logprobs"
    raise EngineNotTrainable(
        f"engine: {info.model} ({info.kind}) gives no {missing}, so nothing could be trained on",
        fix="start vLLM or SGLang themselves (a router may strip the fields), or pass --text-only for evaluation",
    )

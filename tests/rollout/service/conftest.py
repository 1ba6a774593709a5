"""A rollout server on a real port with real nodes in this process; the engine is scripted, the runtime is `local`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from polynya.client import AsyncClient
from polynya.config import DispatchSettings, NodeLimits, Settings
from polynya.engines.scripted import Script, ScriptedEngine
from polynya.node.preflight import validate
from polynya.rollout.registry.base import TokenKind
from polynya.rollout.service.agent import NodeAgent
from polynya.rollout.service.host import HostOptions, boot_clock, hosted
from polynya.rollout.service.http_control import HttpControl
from polynya.rollout.service.server import RolloutServer, ServerOptions, serving
from polynya.rollout.stress import stress_script, stress_task
from polynya.schema import Stage, TaskSpec

QUICK = DispatchSettings(
    lease_seconds=2.0, heartbeat_seconds=0.2, fence_seconds=1.5, suspect_seconds=0.5, probe_seconds=0.1
)


class Service:
    """One server and its nodes, in one folder."""

    def __init__(self, folder: Path, stack: contextlib.AsyncExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self._inner = contextlib.AsyncExitStack()
        self.server: RolloutServer
        self.agents: dict[str, tuple[NodeAgent, asyncio.Task[None]]] = {}
        self.engine: ScriptedEngine | None = None
        self._stages: dict[Stage, asyncio.Event] = {stage: asyncio.Event() for stage in Stage}

    async def serve(self, dispatch: DispatchSettings = QUICK, **options: Any) -> RolloutServer:
        await self.stop_server()
        made = ServerOptions(state=self.folder / "state", dispatch=dispatch, **options)
        self.server = await self._inner.enter_async_context(serving(made, validate, clock=boot_clock))
        return self.server

    async def until(self, stage: Stage) -> None:
        """Some session came to this stage."""
        await self._stages[stage].wait()

    async def stop_server(self) -> None:
        await self._inner.aclose()
        self._inner = contextlib.AsyncExitStack()

    async def node(
        self, name: str, script: Script | None = None, *, running: int = 4, remote: bool = True
    ) -> NodeAgent:
        """One more node; over HTTP, as on another machine, unless it is not ``remote``."""
        engine = self.engine = ScriptedEngine(script or Script())
        limits = NodeLimits(running=running, ready=running, init=running, postrun=running)
        options = HostOptions(
            name=name,
            state=self.folder / name,
            archive=self.server.archive.root,
            cache=self.folder / "cache",
            settings=Settings(node=limits),
        )
        control: Any = self.server.control()
        if remote:
            control = HttpControl(self.server.url, self.server.tokens[TokenKind.NODE])
            self._stack.push_async_callback(control.close)
        agent = await self._stack.enter_async_context(
            hosted(control, engine, options, on_event=lambda event: self._stages[event.stage].set())
        )
        task = asyncio.create_task(agent.run())
        self.agents[name] = (agent, task)
        self._stack.push_async_callback(_ended, task)
        return agent

    def client(self, kind: TokenKind = TokenKind.USER) -> AsyncClient:
        client = AsyncClient(self.server.url, self.server.tokens[kind])
        self._stack.push_async_callback(client.close)
        return client


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with contextlib.AsyncExitStack() as stack:
        made = Service(tmp_path, stack)
        stack.push_async_callback(made.stop_server)
        yield made


@pytest.fixture
def talk() -> Callable[..., tuple[TaskSpec, Script]]:
    """A task whose sessions make calls, and the script that answers them."""

    def make(sessions: int, calls: int = 2, task_id: str = "talk", **fields: Any) -> tuple[TaskSpec, Script]:
        import msgspec

        task = msgspec.structs.replace(stress_task(sessions, calls, "local"), task_id=task_id, **fields)
        return task, stress_script(calls, delay=0.0)

    return make

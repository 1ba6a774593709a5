"""A node with a real gateway and journal; runtimes are real (`local`) or counted fakes whose agents are coroutines."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from polynya import evaluators, runtimes
from polynya.capture.journal import Journal
from polynya.capture.store import CaptureStore
from polynya.config import NodeLimits
from polynya.engines.scripted import Script, ScriptedEngine
from polynya.evaluators.base import EvalContext
from polynya.gateway.server import Gateway
from polynya.node import Node, NodeDeps, SessionEvent, SessionHandle
from polynya.rollout.parse import parse_task
from polynya.runtimes import marks
from polynya.runtimes.base import Bind, Check, ExecResult
from polynya.schema import RuntimeSpec, Score, Session, Stage, session_id_of


class FakeRuntime:
    """A workspace without a sandbox; its only program is the provider's agent."""

    def __init__(self, provider: FakeProvider, label: str, root: Path) -> None:
        self.provider = provider
        self.label = label
        self.workspace = root / "workspace"
        self.home_path = root / "home"
        self.workdir, self.home = str(self.workspace), str(self.home_path)
        self.destroyed = False
        for folder in (self.workspace, self.home_path):
            folder.mkdir(parents=True)

    async def exec(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **_: Any) -> ExecResult:
        return ExecResult(exit_code=await self.provider.agent(dict(env or {})) or 0)

    async def kill_all(self) -> None: ...

    async def listen(self) -> None:
        return None

    async def destroy(self) -> None:
        if not self.destroyed:
            self.destroyed = True
            self.provider.alive -= 1
            await self.provider.on_destroy()


class FakeProvider:
    """``creating`` and ``agent`` may be replaced by a test; they run in place of the real thing."""

    name = "fake"

    def __init__(self) -> None:
        self.created: list[str] = []
        self.alive = 0
        self.creating: Callable[[], Awaitable[None]] = nothing
        self.agent: Callable[[dict[str, str]], Awaitable[int | None]] = nothing
        self.on_destroy: Callable[[], Awaitable[None]] = nothing

    async def check(self) -> Check:
        return Check(name=self.name, ok=True)

    async def create(self, spec: RuntimeSpec, *, label: str, root: Path, binds: Sequence[Bind] = ()) -> FakeRuntime:
        self.created.append(label)
        await self.creating()
        self.alive += 1
        return FakeRuntime(self, label, root)

    async def sweep(self, label_prefix: str) -> list[str]:
        return []


class FakeEvaluator:
    name = "fake"

    def __init__(self) -> None:
        self.verdict: Callable[[], Awaitable[float | None]] = nothing

    def validate(self, settings: dict[str, Any]) -> None: ...

    async def evaluate(self, settings: dict[str, Any], context: EvalContext) -> Score:
        return Score(name=self.name, value=await self.verdict())


async def nothing(*_: Any) -> None: ...


async def forever(*_: Any) -> None:
    await asyncio.Event().wait()


class Lab:
    """One node, and what happened in it."""

    node: Node

    def __init__(self, gateway: Gateway, engine: ScriptedEngine, work: Path, label: str) -> None:
        self.gateway = gateway
        self.engine = engine
        self.work = work
        self.label = label
        self.stages: dict[str, list[Stage]] = {}
        self.now: Counter[Stage] = Counter()
        self.peak: Counter[Stage] = Counter()
        self._changed = asyncio.Condition()
        self._telling: set[asyncio.Task[None]] = set()

    def on_event(self, event: SessionEvent) -> None:
        before = self.stages.setdefault(event.session_id, [])
        if before:
            self.now[before[-1]] -= 1
        before.append(event.stage)
        self.now[event.stage] += 1
        self.peak[event.stage] = max(self.peak[event.stage], self.now[event.stage])
        task = asyncio.ensure_future(self._tell())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once it holds; looked at whenever a session comes to a stage."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def settle(self) -> None:
        """Give everything that could go on now the chance to."""
        for _ in range(200):
            await asyncio.sleep(0)

    def submit(self, command: str = "true", sample: int = 0, attempt: int = 1, **fields: Any) -> SessionHandle:
        raw = {
            "task_id": "t",
            "instruction": "do it",
            "harness": {"name": "shell", "settings": {"command": command}},
            "runtime": "fake",
            **fields,
        }
        task = parse_task(raw, "test")
        session = Session(
            session_id=session_id_of("t", sample), group_id="t", task=task, sample_index=sample, attempt=attempt
        )
        return self.node.submit(session)

    def nothing_is_left(self) -> None:
        """No process, no folder, no key, no session of the gateway, no slot."""
        assert {pid: name for pid, name in marks.labels().items() if name.startswith(self.label)} == {}
        assert list(self.work.glob("*")) == []
        assert self.gateway._sessions == set()
        assert self.gateway._keyring._live == {}
        assert self.node.handles == {}
        assert +self.node.pools.in_stage == Counter()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeProvider:
    provider = FakeProvider()
    monkeypatch.setitem(runtimes.BUILT_IN, "fake", lambda: provider)
    return provider


@pytest.fixture
def grader(monkeypatch: pytest.MonkeyPatch) -> FakeEvaluator:
    evaluator = FakeEvaluator()
    monkeypatch.setitem(evaluators.BUILT_IN, "fake", lambda: evaluator)
    return evaluator


@pytest.fixture
async def make_lab(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Lab]]]:
    async with contextlib.AsyncExitStack() as stack:

        async def make(script: Script | None = None, **limits: int) -> Lab:
            engine = ScriptedEngine(script)
            await engine.start()
            journal = Journal(tmp_path / "capture")
            journal.start()
            stack.push_async_callback(journal.close)
            gateway = Gateway(engine, CaptureStore(journal, clock=lambda: 1.0))
            await gateway.start()
            stack.push_async_callback(gateway.close)
            work = tmp_path / "work"
            work.mkdir()
            label = f"test-node-{tmp_path.parent.name}-{tmp_path.name}"
            lab = Lab(gateway, engine, work, label)
            deps = NodeDeps(
                engine=engine,
                gateway=gateway,
                cache=tmp_path / "cache",
                work=work,
                logs=tmp_path / "logs",
                label=label,
                version="0",
                progress=lambda line: None,
            )
            lab.node = Node(deps, NodeLimits(**limits), lab.on_event)
            stack.push_async_callback(lab.node.stop)
            return lab

        yield make


async def ask(env: dict[str, str], *texts: str) -> None:
    """What an agent does: one call a text, the replies echoed."""
    messages: list[dict[str, Any]] = []
    async with aiohttp.ClientSession() as client:
        for text in texts:
            messages.append({"role": "user", "content": text})
            body = {"model": "m", "messages": messages}
            async with client.post(env["OPENAI_BASE_URL"] + "/chat/completions", json=body) as response:
                response.raise_for_status()
                messages.append((await response.json())["choices"][0]["message"])

"""A gateway with the scripted engine, and a client as an agent would be."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from polynya.capture.journal import Journal
from polynya.capture.store import CaptureStore
from polynya.config import GatewaySettings
from polynya.engines.base import Engine
from polynya.engines.scripted import Script, ScriptedEngine
from polynya.gateway.server import Gateway
from polynya.gateway.sessions import GatewaySession, SessionGrant

RECORDED_TABLE: dict[tuple[str, str], dict[str, int]] = {}
"""What ``test_recorded`` sent and saw accepted: harness and case → dialect → requests."""

DRIFT_TABLE: dict[str, tuple[int, int]] = {}
"""What ``test_drift`` counted: cause → breaks in 30 turns, rendered anew and continued."""


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if DRIFT_TABLE:
        terminalreporter.write_sep("-", "breaks in 30 turns")
        terminalreporter.write_line(f"{'cause':<56}{'rendered anew':>15}{'continued':>11}")
        for cause, (anew, continued) in DRIFT_TABLE.items():
            terminalreporter.write_line(f"{cause:<56}{anew:>15}{continued:>11}")
    if not RECORDED_TABLE:
        return
    terminalreporter.write_sep("-", "recorded requests")
    form = "{:<17}{:<20}{:<34}{:>9}"
    terminalreporter.write_line(form.format("harness", "case", "dialect", "accepted"))
    for (harness, case), found in sorted(RECORDED_TABLE.items()):
        for dialect, requests in sorted(found.items()):
            terminalreporter.write_line(form.format(harness, case, dialect, requests))
    total = sum(requests for found in RECORDED_TABLE.values() for requests in found.values())
    terminalreporter.write_line(form.format("all", f"{len(RECORDED_TABLE)} cases", "", total))


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until it holds. No clock: a condition that never holds is the test runner's time-out."""
    while not condition():  # noqa: ASYNC110  what is waited for has no event of its own
        await asyncio.sleep(0)


class Rig:
    """One gateway, its store and a client session."""

    def __init__(
        self, gateway: Gateway, store: CaptureStore, engine: Any, client: aiohttp.ClientSession, journal: Path
    ) -> None:
        self.gateway = gateway
        self.store = store
        self.engine = engine
        self.client = client
        self.journal = journal

    async def until(self, condition: Callable[[], bool]) -> None:
        await until(condition)

    async def idle(self) -> None:
        """All exchanges have ended on the gateway's side."""
        app = self.gateway.app
        assert app is not None
        await until(lambda: app.active == 0)

    async def open(self, session_id: str = "t.0", **grant: Any) -> Agent:
        session, key = await self.gateway.open_session(SessionGrant(session_id=session_id, **grant))
        return Agent(self, session, key)


class Agent:
    """A client that keeps its history as real harnesses do: the reply is echoed."""

    def __init__(self, rig: Rig, session: GatewaySession, key: str) -> None:
        self.rig = rig
        self.session = session
        self.key = key
        self.messages: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"{self.rig.gateway.base_url(self.key)}/v1/chat/completions"

    def body(self, text: str = "hi", **fields: Any) -> dict[str, Any]:
        return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}

    async def post(self, body: Any, **kwargs: Any) -> tuple[int, Any]:
        kwargs = {"data": body} if isinstance(body, bytes) else {"json": body, **kwargs}
        async with self.rig.client.post(self.url, **kwargs) as response:
            return response.status, await response.json()

    async def say(self, text: str) -> dict[str, Any]:
        self.messages.append({"role": "user", "content": text})
        status, reply = await self.post({"model": "m", "messages": self.messages})
        assert status == 200, reply
        message: dict[str, Any] = reply["choices"][0]["message"]
        self.messages.append(message)
        return message


@pytest.fixture
async def make_rig(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    async with contextlib.AsyncExitStack() as stack:

        async def make(script: Script | None = None, *, engine: Engine | None = None, **settings: Any) -> Rig:
            engine = engine or ScriptedEngine(script)
            await engine.start()
            journal = Journal(tmp_path / "capture")
            journal.start()
            stack.push_async_callback(journal.close)
            store = CaptureStore(journal, clock=lambda: 1_000.0)
            gateway = Gateway(engine, store, GatewaySettings(**settings))
            await gateway.start()
            stack.push_async_callback(gateway.close)
            client = await stack.enter_async_context(aiohttp.ClientSession())
            return Rig(gateway, store, engine, client, tmp_path / "capture")

        yield make

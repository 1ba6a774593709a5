"""Failures met in the field: retries, duplicates, cancels, lost sessions. docs/field-cases.md says where each case is shown."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from polynya.dialects.openai_chat import OpenAIChat
from polynya.dialects.registry import DIALECTS
from polynya.engines.compatible import CompatibleEngine
from polynya.engines.http import HttpSettings
from polynya.engines.scripted import Fault, Script, ScriptedApp, Step, serve

MakeRig = Callable[..., Any]
RETRY = {"x-stainless-retry-count": "1"}


def quick(url: str) -> CompatibleEngine:
    return CompatibleEngine(url, http=HttpSettings(backoff_base=0.001, backoff_cap=0.002, retries=1))


async def test_body_that_comes_again_is_a_new_call_unless_it_says_retry(make_rig: MakeRig) -> None:
    """33: a compaction loop that re-sends its body must not get the old answer for ever."""
    rig = await make_rig(Script(steps=[Step(text="same")]))
    agent = await rig.open()
    ids = [(await agent.post(agent.body()))[1]["id"] for _ in range(2)]
    assert len(set(ids)) == 2
    assert (await agent.post(agent.body(), headers=RETRY))[1]["id"] == ids[1]
    first, second = agent.session.capture.calls
    assert first.prompt_ids.tolist() == second.prompt_ids.tolist()


async def test_retry_while_the_first_is_in_flight_joins_it(make_rig: MakeRig) -> None:
    """33: in flight at the same time, with the header."""
    rig = await make_rig(Script(steps=[Step(text="once", hold=True)]))
    agent = await rig.open()
    first = asyncio.create_task(agent.post(agent.body()))
    await rig.engine.until(lambda: rig.engine.in_flight == 1)
    second = asyncio.create_task(agent.post(agent.body(), headers=RETRY))
    await rig.until(lambda: agent.session.flags["joined_requests"] == 1)
    rig.engine.desk.release()
    assert (await first) == (await second)
    assert rig.engine.desk.started == 1


async def test_four_hundred_slow_calls_at_once_are_four_hundred_engine_calls(make_rig: MakeRig) -> None:
    """34: a saturated loop made agents send again. All are kept alive, none is doubled. (Its lag is measured by the bench.)"""
    rig = await make_rig(Script(steps=[Step(text="late", hold=True)]), keepalive_seconds=0.05, first_event_grace=0.0)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def ask(number: int) -> bytes:
            agent = await rig.open(f"t.{number}")
            body = agent.body("word " * 20_000, stream=True)
            async with client.post(agent.url, json=body) as response:
                await response.content.readuntil(b"\n\n")
                alive.add(number)
                return await response.read()

        alive: set[int] = set()
        waiting = [asyncio.create_task(ask(number)) for number in range(400)]
        await rig.engine.until(lambda: rig.engine.in_flight == 400)
        await rig.until(lambda: len(alive) == 400)
        rig.engine.desk.release()
        answers = await asyncio.gather(*waiting)
    assert all(answer.endswith(b"data: [DONE]\n\n") for answer in answers)
    assert (rig.engine.desk.started, rig.engine.desk.aborted) == (400, 0)


async def test_large_bodies_are_parsed_beside_the_loop(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """35: while eight large prompts are being read, the health check and small calls are answered."""
    rig = await make_rig(Script(steps=[Step(text="ok")], window=16_000_000))
    agent = await rig.open()
    loop, may_go_on, parsing = asyncio.get_running_loop(), asyncio.Event(), []
    real = OpenAIChat()

    class Slow(OpenAIChat):
        def parse(self, body: bytes, path: str, history: Any = None) -> Any:
            if len(body) > 600_000:
                parsing.append(len(body))
                asyncio.run_coroutine_threadsafe(may_go_on.wait(), loop).result()
            return real.parse(body, path, history)

    monkeypatch.setitem(DIALECTS, "openai_chat", Slow())
    large = [asyncio.create_task(agent.post(agent.body("x" * 640_000, seed=n))) for n in range(4)]
    await rig.until(lambda: len(parsing) == 4)
    async with rig.client.get(f"{rig.gateway.url}/healthz") as response:
        assert response.status == 200
    assert (await agent.post(agent.body()))[0] == 200
    assert not any(task.done() for task in large)
    may_go_on.set()
    assert [status for status, _ in await asyncio.gather(*large)] == [200] * 4


async def test_a_thousand_sessions_that_start_at_once_all_get_in_and_reuse_their_connections(make_rig: MakeRig) -> None:
    """37: no connection is refused, and the upstream sockets of one wave serve the next."""
    # the probe's calls name no session
    app = Peers(Script(sessions={"": [Step(text="ok")]}, steps=[Step(text="ok", hold=True)]))
    async with serve(app) as url, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        rig = await make_rig(engine=quick(url))
        app.peers.clear()
        agents = [await rig.open(f"t.{number}") for number in range(1024)]

        async def ask(agent: Any, text: str) -> int:
            async with client.post(agent.url, json=agent.body(text)) as response:
                await response.read()
                return response.status

        wave = [asyncio.create_task(ask(agent, "one")) for agent in agents]
        await app.desk.until(lambda: app.desk.in_flight == 1024)
        app.desk.release()
        assert set(await asyncio.gather(*wave)) == {200}
        assert set(await asyncio.gather(*(ask(agent, "two") for agent in agents))) == {200}
        assert len(app.peers) <= 1024
        await rig.gateway.close()
        await rig.engine.close()


class Peers(ScriptedApp):
    """Knows who was connected to it."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.peers: set[Any] = set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.peers.add(scope["client"])
        await super().__call__(scope, receive, send)


async def test_streaming_client_of_a_slow_engine_has_its_headers_and_one_call(make_rig: MakeRig) -> None:
    """39: Claude Code sends again when no byte comes; headers and pings do, before the engine says anything."""
    rig = await make_rig(Script(steps=[Step(text="late", hold=True)]), keepalive_seconds=0.01, first_event_grace=0.0)
    agent = await rig.open()
    body = {"model": "m", "max_tokens": 50, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    async with rig.client.post(rig.gateway.base_url(agent.key) + "/v1/messages", json=body) as response:
        pings = [await response.content.readuntil(b"\n\n") for _ in range(5)]
        assert rig.engine.in_flight == 1
        rig.engine.desk.release()
        assert b"message_stop" in await response.read()
    assert pings == [b'event: ping\ndata: {"type":"ping"}\n\n'] * 5
    assert rig.engine.desk.started == 1


async def test_session_of_an_earlier_gateway_is_unknown_never_a_new_empty_one(make_rig: MakeRig) -> None:
    """41: after a restart a key of before opens nothing; the agent is told, and nothing is captured under it."""
    rig = await make_rig(Script(steps=[Step(text="ok")]))
    agent = await rig.open()
    await agent.say("turn 1")
    await rig.gateway.close()
    again = await make_rig(Script(steps=[Step(text="ok")]))
    for stream in (False, True):
        async with again.client.post(
            f"{again.gateway.base_url(agent.key)}/v1/chat/completions", json=agent.body(stream=stream)
        ) as response:
            assert response.status == 401
    assert again.engine.desk.started == 0
    assert again.gateway.app.side_requests["unknown_key"] == 2


async def test_engine_that_is_gone_is_503_with_retry_after_and_marks_the_session(make_rig: MakeRig) -> None:
    """43: the call fails within its budget, the session knows that it was infrastructure, its slot is free again."""
    async with serve(ScriptedApp(Script(steps=[Step(text="ok")]))) as url:
        rig = await make_rig(engine=quick(url), calls_in_flight_per_session=1)
    agent = await rig.open()
    for _ in range(2):
        async with rig.client.post(agent.url, json=agent.body()) as response:
            assert response.status == 503
            assert int(response.headers["retry-after"]) >= 1
            assert (await response.json())["error"]["code"] == "service_unavailable"
    assert agent.session.engine_error and agent.session.in_flight == {}
    await rig.engine.close()


async def test_short_sessions_leave_nothing_behind(make_rig: MakeRig) -> None:
    """46: hundreds of sessions come and go: no object of theirs, no file descriptor stays."""
    rig = await make_rig(Script(steps=[Step(text="ok")]))

    async def short(number: int) -> Any:
        agent = await rig.open(f"t.{number}")
        assert (await agent.post(agent.body()))[0] == 200
        await rig.gateway.close_session(agent.session)
        return weakref.ref(agent.session)

    await short(0)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    gone = [await short(number) for number in range(1, 300)]
    await rig.idle()
    gc.collect()
    assert [ref for ref in gone if ref() is not None] == []
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors


async def test_long_session_is_stored_in_proportion_to_its_last_prompt(make_rig: MakeRig) -> None:
    """46: two hundred turns, whose prompts add up to a hundred times the last one, take little more than the last one."""
    rig = await make_rig(Script(steps=[Step(text="a reply of some length " * 5)], window=8_000_000))
    agent = await rig.open()
    for turn in range(200):
        await agent.say(f"turn {turn}: " + "words " * 40)
    calls = agent.session.capture.calls
    stored = sum(call.context_ids.nbytes + call.sampled_ids.nbytes for call in calls)
    assert stored <= 1.3 * calls[-1].full_ids.nbytes
    messages = sum(len(message) for call in calls for message in call.intent.messages)
    assert messages <= 1.3 * sum(len(message) for message in calls[-1].messages)


async def test_client_that_hangs_up_while_the_engine_fails_leaves_a_closed_record(make_rig: MakeRig) -> None:
    """38: whatever the moment, the call ends as cancelled or failed and costs no token."""
    rig = await make_rig(Script(steps=[Step(fault=Fault(kind="hang"))]))
    agent = await rig.open()
    post = asyncio.create_task(agent.post(agent.body()))
    await rig.engine.until(lambda: rig.engine.in_flight == 1)
    post.cancel()
    await rig.engine.until(lambda: rig.engine.in_flight == 0)
    await rig.idle()
    await rig.gateway.close_session(agent.session)
    (call,) = agent.session.capture.calls
    assert (call.outcome, call.sampled_count) == ("cancelled", 0)

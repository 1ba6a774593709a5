"""Streaming clients over a non-streaming upstream call."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from polynya.engines.scripted import Fault, Script, ScriptedCall, Step

MakeRig = Callable[..., Any]


async def _events(response: Any) -> list[Any]:
    text = (await response.read()).decode()
    payloads = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


async def test_stream_rebuilds_the_whole_reply(make_rig: MakeRig) -> None:
    text, arguments = "word " * 200, '{"command": "' + "x" * 700 + '"}'
    step = Step(text=text, reasoning="why", tool_calls=[ScriptedCall(name="bash", arguments=arguments, id="c1")])
    rig = await make_rig(Script(steps=[step]))
    agent = await rig.open()
    async with rig.client.post(
        agent.url, json=agent.body(stream=True, stream_options={"include_usage": True})
    ) as response:
        assert response.headers["content-type"] == "text/event-stream"
        *events, usage, done = await _events(response)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == text
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "why"
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert calls[0]["id"] == "c1" and calls[0]["function"]["name"] == "bash"
    assert "".join(call["function"]["arguments"] for call in calls) == arguments
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    (call,) = agent.session.capture.calls
    assert usage["usage"]["completion_tokens"] == len(call.sampled_ids)
    assert done == "[DONE]"


async def test_waiting_client_gets_keepalive_events_of_the_dialect(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="late", hold=True)]), keepalive_seconds=0.02, first_event_grace=0.0)
    agent = await rig.open()
    async with rig.client.post(agent.url, json=agent.body(stream=True)) as response:
        for _ in range(3):
            event = json.loads((await response.content.readuntil(b"\n\n")).removeprefix(b"data: "))
            assert event["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}
        rig.engine.desk.release()
        assert (await _events(response))[-1] == "[DONE]"


async def test_immediate_refusal_is_an_http_status_not_a_stream(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(fault=Fault(kind="overflow"))]))
    agent = await rig.open()
    assert (await agent.post(agent.body(stream=True)))[0] == 400


async def test_failure_after_the_headers_is_an_error_event(make_rig: MakeRig) -> None:
    rig = await make_rig(
        Script(steps=[Step(text="x", hold=True, fault=None)]),
        keepalive_seconds=60,
        first_event_grace=0.0,
        engine_timeout_seconds=0.05,
    )
    agent = await rig.open()
    async with rig.client.post(agent.url, json=agent.body(stream=True)) as response:
        events = await _events(response)
    assert response.status == 200
    assert events[-1]["error"]["code"] == "service_unavailable"


async def test_reply_that_was_not_delivered_is_replayed_to_the_retry(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="z" * 8_000_000)]), first_event_grace=0.0)
    agent = await rig.open()
    async with rig.client.post(agent.url, json=agent.body(stream=True)) as response:
        await response.content.read(10)
        response.close()
    await rig.idle()
    (call,) = agent.session.capture.calls
    assert not call.delivered
    async with rig.client.post(agent.url, json=agent.body(stream=True)) as response:
        assert (await _events(response))[-1] == "[DONE]"
    await rig.idle()
    assert agent.session.capture.calls == [call]
    assert call.delivered

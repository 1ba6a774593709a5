"""OpenAI Responses over a WebSocket: the same replies and the same capture as by POST, on real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from polynya.engines.scripted import Fault, Script, ScriptedCall, Step
from polynya.gateway.websocket import MAX_WAITING
from polynya.tokens import build

MakeRig = Callable[..., Any]
CALL = ScriptedCall(name="exec", arguments='{"cmd":"ls"}', id="call_a")
SCRIPT = Script(steps=[Step(text="I look.", reasoning="because", tool_calls=[CALL]), Step(text="Done.")])
BASE = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You are an agent."}]}
SKILLS = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Skills: none."}]}
TASK = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]}
RESULT = {"type": "function_call_output", "call_id": "call_a", "output": "notes.txt"}
TOOL = {"type": "function", "name": "exec", "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}}}
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


def body(*items: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": list(items), "tools": [TOOL], "store": False, "stream": True, **fields}


class Socket:
    """A client's end."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self.ws = ws

    async def send(self, request: dict[str, Any]) -> None:
        await self.ws.send_str(json.dumps({"type": "response.create", **request}))

    async def events(self) -> list[dict[str, Any]]:
        """Of the next reply, up to its last one."""
        found: list[dict[str, Any]] = []
        while not found or found[-1]["type"] not in ENDS:
            found.append(await self.ws.receive_json())
        return found

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        await self.send(request)
        return (await self.events())[-1]


def url(agent: Any, path: str = "/v1/responses") -> str:
    return str(agent.rig.gateway.base_url(agent.key) + path)


async def socket(agent: Any, **kwargs: Any) -> Socket:
    return Socket(await agent.rig.client.ws_connect(url(agent), **kwargs))


async def by_post(agent: Any, request: dict[str, Any]) -> list[dict[str, Any]]:
    async with agent.rig.client.post(url(agent), json=request) as response:
        assert response.status == 200
        text = (await response.read()).decode()
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def prompts(agent: Any) -> list[list[int]]:
    return [call.prompt_ids.tolist() for call in agent.session.capture.calls]


def unnamed(events: Any) -> Any:
    """Without the ids and times that differ between any two replies."""
    if isinstance(events, dict):
        return {key: unnamed(value) for key, value in events.items() if key not in ("id", "item_id", "created_at")}
    return [unnamed(event) for event in events] if isinstance(events, list) else events


async def test_a_codex_turn_gives_the_ids_and_the_row_that_it_gives_by_post(make_rig: MakeRig) -> None:
    """Warm-up with the base prompt, then only what is new, as Codex does with ``store: false``."""
    rig = await make_rig(SCRIPT)
    posting, talking = await rig.open("t.0"), await rig.open("t.1")
    first = await by_post(posting, body(BASE, SKILLS, TASK))
    said = first[-1]["response"]["output"]
    await by_post(posting, body(BASE, SKILLS, TASK, *said, RESULT))

    ws = await socket(talking)
    warm = await ws.ask(body(BASE, generate=False))
    assert (warm["response"]["status"], warm["response"]["output"]) == ("completed", [])
    assert talking.session.capture.calls == []
    await ws.send(body(SKILLS, TASK, previous_response_id=warm["response"]["id"]))
    events = await ws.events()
    assert unnamed(events) == unnamed(first)
    await ws.ask(body(RESULT, previous_response_id=events[-1]["response"]["id"]))
    await ws.ws.close()
    await rig.idle()

    assert prompts(talking) == prompts(posting)
    for agent in (posting, talking):
        built = build(agent.session.capture.calls, session_id="s", builder="prefix_merging")
        assert [(row.num_turns, row.lane) for row in built.traces] == [(2, "main")]
        assert built.ledger.captured == built.ledger.trained > 0
    assert all(call.delivered for call in talking.session.capture.calls)
    assert rig.gateway.app.side_requests["prewarm"] == 1
    assert rig.engine.desk.started == 4


async def test_a_waiting_client_gets_events_that_change_nothing(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="late", hold=True)]), keepalive_seconds=0.02, first_event_grace=0.0)
    agent = await rig.open()
    ws = await socket(agent)
    await ws.send(body(TASK))
    waiting = [await ws.ws.receive_json() for _ in range(3)]
    assert [event["type"] for event in waiting] == ["response.created", *["response.in_progress"] * 2]
    assert [event["response"]["output"] for event in waiting] == [[], [], []]
    rig.engine.desk.release()
    last = (await ws.events())[-1]["response"]
    assert last["output"][0]["content"][0]["text"] == "late"
    assert {event["response"]["id"] for event in waiting} == {last["id"]}


async def test_a_client_that_goes_away_cancels_the_engine_call(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="x", hold=True)]))
    agent = await rig.open()
    ws = await socket(agent)
    await ws.send(body(TASK))
    await rig.engine.desk.until(lambda: rig.engine.desk.in_flight == 1)
    ws.ws._response.connection.transport.abort()
    await rig.engine.desk.until(lambda: rig.engine.desk.aborted == 1)
    await rig.idle()
    assert [(call.outcome, call.delivered) for call in agent.session.capture.calls] == [("cancelled", False)]


async def test_a_key_that_is_unknown_or_ended_is_refused_at_the_handshake(make_rig: MakeRig) -> None:
    rig = await make_rig()
    agent = await rig.open()
    await rig.gateway.close_session(agent.session)
    gateway = rig.gateway.url
    for where, status in ((url(agent), 410), (f"{gateway}/s/none/v1/responses", 401), (f"{gateway}/v1/responses", 401)):
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await rig.client.ws_connect(where)
        assert caught.value.status == status
    assert rig.store is not None and agent.session.capture.calls == []


async def test_other_paths_are_no_websockets(make_rig: MakeRig) -> None:
    rig = await make_rig()
    agent = await rig.open()
    for path in ("/v1/chat/completions", "/v1/messages", "/", "/v1/realtime"):
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await rig.client.ws_connect(url(agent, path))
        assert caught.value.status == 404


async def test_the_key_serves_in_the_authorization_header_too(make_rig: MakeRig) -> None:
    rig = await make_rig(SCRIPT)
    agent = await rig.open()
    headers = {"authorization": f"Bearer {agent.key}"}
    ws = Socket(await rig.client.ws_connect(f"{rig.gateway.url}/v1/responses", headers=headers))
    assert (await ws.ask(body(TASK)))["type"] == "response.completed"
    assert len(agent.session.capture.calls) == 1


@pytest.mark.parametrize(
    ("request_", "status", "code", "param"),
    [
        (body(TASK, previous_response_id="resp_none"), 404, "previous_response_not_found", "previous_response_id"),
        (body(), 400, None, "input"),
        ({"type": "response.steer"}, 400, None, "type"),
        (body(TASK, generate="maybe"), 400, None, None),
    ],
)
async def test_a_refusal_is_the_providers_error_message_and_the_connection_goes_on(
    make_rig: MakeRig, request_: dict[str, Any], status: int, code: str | None, param: str | None
) -> None:
    rig = await make_rig(SCRIPT)
    agent = await rig.open()
    ws = await socket(agent)
    error = await ws.ask(request_)
    assert (error["type"], error["status"]) == ("error", status)
    assert (error["error"]["code"], error["error"]["param"]) == (code, param)
    assert (await ws.ask(body(TASK)))["type"] == "response.completed"
    assert len(agent.session.capture.calls) == 1


@pytest.mark.parametrize("text", ["", "[]", "{", '{"type":1}', "\ud800", '{"input":[]}'])
async def test_what_is_no_request_harms_nobody(make_rig: MakeRig, text: str) -> None:
    rig = await make_rig(SCRIPT)
    ws = await socket(await rig.open())
    data = text.encode("utf-8", "surrogatepass")
    if text == "\ud800":
        await ws.ws.send_bytes(data)
    else:
        await ws.ws.send_str(text)
    assert (await ws.events())[-1]["status"] == 400
    assert (await ws.ask(body(TASK)))["type"] == "response.completed"


async def test_an_engine_that_is_down_is_said_with_the_wait_that_codex_needs(make_rig: MakeRig) -> None:
    """Codex takes an error without a retry-after for the end."""
    rig = await make_rig(Script(steps=[Step(fault=Fault(kind="http_error", status=429, retry_after="3", times=1))]))
    ws = await socket(await rig.open())
    error = await ws.ask(body(TASK))
    assert (error["status"], error["headers"], error["error"]["headers"]) == (
        503,
        {"retry-after": "3"},
        {"retry-after": "3"},
    )
    assert (await ws.ask(body(TASK)))["type"] == "response.completed"


async def test_a_failure_after_the_first_event_ends_the_response_as_failed(make_rig: MakeRig) -> None:
    rig = await make_rig(
        Script(steps=[Step(text="x", hold=True)]),
        keepalive_seconds=0.02,
        first_event_grace=0.0,
        engine_timeout_seconds=0.2,
    )
    ws = await socket(await rig.open())
    await ws.send(body(TASK))
    events = await ws.events()
    assert events[0]["type"] == "response.created"
    assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.failed", "failed")


async def test_a_session_that_ends_ends_its_requests_on_open_sockets(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="x", hold=True)]))
    agent = await rig.open()
    ws = await socket(agent)
    await ws.send(body(TASK))
    await rig.engine.desk.until(lambda: rig.engine.desk.in_flight == 1)
    await rig.gateway.close_session(agent.session)
    assert (await ws.events())[-1]["status"] == 410
    assert (await ws.ask(body(TASK)))["status"] == 410
    assert [call.outcome for call in agent.session.capture.calls] == ["cancelled"]


async def test_requests_of_one_stream_wait_for_each_other_and_streams_do_not(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="x", hold=True)]))
    ws = await socket(await rig.open())
    for stream_id, text in (("a", "one"), ("a", "two"), ("b", "three")):
        await ws.send({**body(TASK, {**TASK, "content": text}), "stream_id": stream_id})
    await rig.engine.desk.until(lambda: rig.engine.desk.in_flight == 2)
    assert rig.engine.desk.started == 2
    rig.engine.desk.release()
    ends: list[dict[str, Any]] = []
    while len(ends) < 3:
        event = await ws.ws.receive_json()
        if event["type"] in ENDS:
            ends.append(event)
    assert sorted(event["stream_id"] for event in ends) == ["a", "a", "b"]
    assert rig.engine.desk.started == 3


async def test_a_stored_reply_is_shown_again_and_can_be_deleted(make_rig: MakeRig) -> None:
    rig = await make_rig(SCRIPT)
    agent, other = await rig.open("t.0"), await rig.open("t.1")
    ws = await socket(agent)
    kept = (await ws.ask(body(TASK, store=True)))["response"]
    unkept = (await ws.ask(body(TASK, {**TASK, "content": "again"})))["response"]
    where = f"/v1/responses/{kept['id']}"
    async with rig.client.get(url(agent, where)) as response:
        assert (response.status, await response.json()) == (200, kept)
    for who, response_id in ((agent, unkept["id"]), (other, kept["id"]), (agent, "resp_none")):
        async with rig.client.get(url(who, f"/v1/responses/{response_id}")) as response:
            assert response.status == 404
            assert (await response.json())["error"]["type"] == "invalid_request_error"
    async with rig.client.delete(url(agent, where)) as response:
        assert await response.json() == {"id": kept["id"], "object": "response", "deleted": True}
    async with rig.client.delete(url(agent, where)) as response:
        assert response.status == 404
    assert (await ws.ask(body(RESULT, previous_response_id=kept["id"])))["status"] == 404
    assert (await ws.ask(body(RESULT, previous_response_id=unkept["id"])))["type"] == "response.completed"
    assert len(agent.session.capture.calls) == 3


async def test_a_message_beyond_the_limit_closes_the_connection(make_rig: MakeRig) -> None:
    rig = await make_rig(SCRIPT, max_body_bytes=100_000)
    agent = await rig.open()
    ws = await socket(agent)
    await ws.send(body({**TASK, "content": "x" * 200_000}))
    message = await ws.ws.receive()
    assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1009)
    assert agent.session.capture.calls == []


async def test_a_large_request_is_read_whole(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="ok")], window=4_000_000))
    agent = await rig.open()
    ws = await socket(agent)
    assert (await ws.ask(body({**TASK, "content": "x" * 2_000_000})))["type"] == "response.completed"
    assert np.count_nonzero(agent.session.capture.calls[0].prompt_ids == ord("x")) >= 2_000_000


async def test_more_requests_than_may_wait_are_refused_one_by_one(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="x", hold=True)]))
    ws = await socket(await rig.open())
    for number in range(70):
        await ws.send(body({**TASK, "content": str(number)}))
    refused = [await ws.ws.receive_json() for _ in range(6)]
    assert {event["status"] for event in refused} == {429}
    rig.engine.desk.release()
    for _ in range(64):
        assert (await ws.events())[-1]["type"] == "response.completed"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
async def test_the_providers_own_sdk_talks_over_it(make_rig: MakeRig) -> None:
    rig = await make_rig(SCRIPT)
    agent = await rig.open()
    base = rig.gateway.base_url(agent.key)
    client = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=agent.key, max_retries=0)
    async with client, client.responses.connect() as connection:
        await connection.response.create(model="m", input="go", tools=[TOOL])  # type: ignore[list-item]
        kinds = []
        async for event in connection:
            kinds.append(event.type)
            if event.type == "response.completed":
                assert event.response.output_text == "I look."
                break
    assert kinds[0] == "response.created"
    assert len(agent.session.capture.calls) == 1


async def test_a_server_that_stops_closes_its_sockets(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="x", hold=True)]))
    ws = await socket(await rig.open())
    await ws.send(body(TASK))
    await rig.engine.desk.until(lambda: rig.engine.desk.in_flight == 1)
    stopping = asyncio.create_task(rig.gateway.close())
    while (await ws.ws.receive()).type not in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED):
        pass
    await stopping
    assert rig.gateway.app.active == 0


async def test_a_session_that_sends_its_whole_history_each_time_is_held_once(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="x")]))
    agent = await rig.open()
    items: list[Any] = [BASE, TASK]
    for _ in range(5):
        events = await by_post(agent, body(*items, store=True))
        items += [*events[-1]["response"]["output"], {**TASK, "content": "go on"}]
    held = [message for history in agent.session._responses.values() for message in history]
    assert len(held) == sum(3 + 2 * turn for turn in range(5))
    assert len({id(message) for message in held}) == 2 + 5 * 2 - 1
    assert not any(request.messages for request, _ in agent.session.stored.values())


async def test_order_is_kept_after_a_request_was_refused_for_the_crowd(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="x", hold=True)]))
    agent = await rig.open()
    connection = await socket(agent)
    for number in range(MAX_WAITING + 1):
        await connection.send(body({**TASK, "content": f"{number}"}))
    assert (await connection.events())[-1]["type"] == "error"
    rig.engine.desk.release()
    assert (await connection.events())[-1]["type"] == "response.completed"
    await connection.send(body({**TASK, "content": "last"}))
    for _ in range(MAX_WAITING):
        await connection.events()
    asked = [call.messages[-1] for call in sorted(agent.session.capture.committed, key=lambda call: call.index)]
    assert b"last" in asked[-1]


async def test_requests_that_wait_are_not_begun_when_the_client_has_gone(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="x", hold=True)]))
    agent = await rig.open()
    connection = await socket(agent)
    for number in range(5):
        await connection.send(body({**TASK, "content": f"{number}"}))
    await rig.until(lambda: rig.engine.desk.started == 1)
    await connection.ws.close()
    await rig.idle()
    assert agent.session.calls_begun == 1


async def test_a_stored_reply_is_known_by_the_id_that_a_waiting_client_was_given(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="x", delay=0.1)]), keepalive_seconds=0.02, first_event_grace=0.0)
    agent = await rig.open()
    given = (await by_post(agent, body(TASK, store=True)))[-1]["response"]["id"]
    async with rig.client.get(f"{url(agent)}/{given}") as response:
        assert (response.status, (await response.json())["id"]) == (200, given)

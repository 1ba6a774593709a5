"""Calls through a real socket, from an agent to the scripted engine and back."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from polynya.capture.store import recover
from polynya.dialects.neutral import ChatRequest
from polynya.dialects.openai_chat import OpenAIChat
from polynya.dialects.registry import DIALECTS
from polynya.engines.scripted import Fault, Script, ScriptedCall, ScriptedEngine, Step
from polynya.schema import Budgets, Exclusion, SamplingSpec

MakeRig = Callable[..., Any]


async def test_reply_and_capture_are_what_the_script_says(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="Hello there")]))
    agent = await rig.open()
    message = await agent.say("hi")
    expected = rig.engine.script.expected("t.0", 0)
    assert message == {"role": "assistant", "content": "Hello there"}
    (call,) = agent.session.capture.calls
    np.testing.assert_array_equal(call.sampled_ids, expected.sampled_ids)
    np.testing.assert_array_equal(call.logprobs, expected.logprobs)
    assert call.exclusion is None
    assert call.delivered


async def test_each_prompt_of_an_echoing_agent_extends_the_call_before(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text=f"reply {i}") for i in range(5)]))
    agent = await rig.open()
    for i in range(5):
        await agent.say(f"turn {i}")
    calls = agent.session.capture.calls
    for earlier, later in itertools.pairwise(calls):
        full = earlier.full_ids
        np.testing.assert_array_equal(later.prompt_ids[: len(full)], full)
        assert later.keep == len(full)


async def test_capture_survives_in_the_journal(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="one"), Step(text="two")]))
    agent = await rig.open()
    await agent.say("a")
    await agent.say("b")
    await rig.gateway.close_session(agent.session)
    live = agent.session.capture.calls
    recovered = recover(rig.journal)[("t.0", 1)]
    assert recovered.sealed
    for ours, theirs in zip(live, recovered.calls, strict=True):
        np.testing.assert_array_equal(ours.prompt_ids, theirs.prompt_ids)
        np.testing.assert_array_equal(ours.sampled_ids, theirs.sampled_ids)
        np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)
        assert ours.messages_json == theirs.messages_json
        assert theirs.delivered


async def test_tool_call_arguments_and_ids_reach_the_client_unchanged(make_rig: MakeRig) -> None:
    arguments = '{"b": 1.50,  "a":"\\u00e9"}'
    rig = await make_rig(
        Script(steps=[Step(tool_calls=[ScriptedCall(name="run", arguments=arguments, id="functions.bash:0")])])
    )
    agent = await rig.open()
    status, reply = await agent.post(agent.body())
    choice = reply["choices"][0]
    assert status == 200
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"] == [
        {"id": "functions.bash:0", "type": "function", "function": {"name": "run", "arguments": arguments}}
    ]


async def test_malformed_tool_arguments_are_delivered_as_they_are(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(tool_calls=[ScriptedCall(name="run", arguments='{"a": ')])]))
    agent = await rig.open()
    status, reply = await agent.post(agent.body())
    assert status == 200
    assert reply["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": '


@pytest.mark.parametrize("place", ["authorization", "x-api-key", "x-goog-api-key", "query"])
async def test_key_serves_in_headers_too(make_rig: MakeRig, place: str) -> None:
    rig = await make_rig(Script(steps=[Step(text="ok")]))
    agent = await rig.open()
    headers = {"authorization": f"Bearer {agent.key}"} if place == "authorization" else {place: agent.key}
    query = f"?key={agent.key}" if place == "query" else ""
    url = f"{rig.gateway.url}/v1/chat/completions{query}"
    async with rig.client.post(url, json=agent.body(), headers={} if place == "query" else headers) as response:
        assert response.status == 200
    assert len(agent.session.capture.calls) == 1


async def test_unknown_key_is_refused_in_the_dialects_shape_and_captures_nothing(make_rig: MakeRig) -> None:
    rig = await make_rig()
    agent = await rig.open()
    forged = agent.key[:-1] + ("0" if agent.key[-1] != "0" else "1")
    for key in ("nonsense", "ply_session_00_11", forged, ""):
        async with rig.client.post(f"{rig.gateway.url}/s/{key}/v1/chat/completions", json=agent.body()) as response:
            assert response.status == 401
            assert (await response.json())["error"]["code"] == "invalid_api_key"
    assert agent.session.capture.calls == []


async def test_ended_key_answers_gone_and_other_sessions_stay(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="ok")]))
    first, second = await rig.open("t.0"), await rig.open("t.1")
    await rig.gateway.close_session(first.session)
    status, reply = await first.post(first.body())
    assert (status, reply["error"]["code"]) == (410, "session_ended")
    assert (await second.post(second.body()))[0] == 200


async def test_equal_requests_in_flight_are_one_engine_call(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="once", hold=True)]))
    agent = await rig.open()
    posts = [asyncio.create_task(agent.post(agent.body())) for _ in range(2)]
    await rig.engine.until(lambda: rig.engine.in_flight == 1)
    await rig.until(lambda: agent.session.flags["joined_requests"] == 1)
    rig.engine.desk.release()
    (_, first), (_, second) = await asyncio.gather(*posts)
    assert first == second
    assert len(agent.session.capture.calls) == 1


async def test_equal_request_after_a_delivered_reply_is_a_new_call(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="same")]))
    agent = await rig.open()
    await agent.post(agent.body())
    await agent.post(agent.body())
    assert len(agent.session.capture.calls) == 2


async def test_retry_header_replays_identical_bytes(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="same")]))
    agent = await rig.open()
    _, first = await agent.post(agent.body())
    _, second = await agent.post(agent.body(), headers={"x-stainless-retry-count": "1"})
    assert first == second
    assert len(agent.session.capture.calls) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_goes_away_cancels_the_engine_call(make_rig: MakeRig, stream: bool) -> None:
    rig = await make_rig(Script(steps=[Step(text="never", hold=True)]))
    agent = await rig.open()
    post = asyncio.create_task(agent.post(agent.body(stream=stream)))
    await rig.engine.until(lambda: rig.engine.in_flight == 1)
    post.cancel()
    await rig.engine.until(lambda: rig.engine.in_flight == 0)
    await rig.gateway.close_session(agent.session)
    (call,) = agent.session.capture.calls
    assert (call.outcome, call.sampled_count) == ("cancelled", 0)


async def test_closing_a_session_ends_its_calls_in_flight(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="never", hold=True)]))
    agent = await rig.open()
    post = asyncio.create_task(agent.post(agent.body()))
    await rig.engine.until(lambda: rig.engine.in_flight == 1)
    await rig.gateway.close_session(agent.session)
    assert (await post)[0] == 410
    assert [call.outcome for call in agent.session.capture.calls] == ["cancelled"]


@pytest.mark.parametrize(
    ("fault", "exclusion"),
    [
        (Fault(kind="short_logprobs"), Exclusion.LENGTH_MISMATCH),
        (Fault(kind="no_logprobs"), Exclusion.LENGTH_MISMATCH),
        (Fault(kind="nan_logprob"), Exclusion.NONFINITE_LOGPROB),
        (Fault(kind="sentinel_logprob"), Exclusion.NONFINITE_LOGPROB),
        (Fault(kind="no_ids"), Exclusion.TEXT_ONLY),
        (Fault(kind="no_prompt_ids"), Exclusion.INCOMPLETE_IDS),
        (Fault(kind="id_out_of_range"), Exclusion.ID_OUT_OF_RANGE),
    ],
)
async def test_unsound_capture_keeps_the_answer_and_names_the_reason(
    make_rig: MakeRig, fault: Fault, exclusion: Exclusion
) -> None:
    rig = await make_rig(Script(steps=[Step(text="fine for the harness", fault=fault)]))
    agent = await rig.open()
    status, reply = await agent.post(agent.body())
    assert status == 200
    assert reply["choices"][0]["message"]["content"] == "fine for the harness"
    (call,) = agent.session.capture.calls
    assert call.exclusion == exclusion
    assert call.sampled_count > 0


async def test_engine_failure_is_503_with_retry_after_and_marks_the_session(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(fault=Fault(kind="http_error", status=503, retry_after="7"))]))
    agent = await rig.open()
    async with rig.client.post(agent.url, json=agent.body()) as response:
        assert response.status == 503
        assert response.headers["retry-after"] == "7"
    assert "503" in agent.session.engine_error
    assert [call.outcome for call in agent.session.capture.calls] == ["failed"]


async def test_context_overflow_is_said_in_the_words_of_the_dialect(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(fault=Fault(kind="overflow"))]))
    agent = await rig.open()
    status, reply = await agent.post(agent.body())
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    assert agent.session.engine_error == ""


async def test_guided_decoding_is_captured_and_not_trainable(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="{}")]))
    agent = await rig.open()
    await agent.post(agent.body(tool_choice="required", tools=[{"type": "function", "function": {"name": "f"}}]))
    (call,) = agent.session.capture.calls
    assert call.exclusion == Exclusion.GRAMMAR_MASKED


async def test_call_budget_ends_with_well_formed_answers_then_429(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="work")]))
    agent = await rig.open(budgets=Budgets(calls=2))
    statuses = [(await agent.post(agent.body(f"turn {i}")))[0] for i in range(7)]
    assert statuses == [200, 200, 200, 200, 200, 200, 429]
    assert len(agent.session.capture.calls) == 2


async def test_every_sampling_value_goes_upstream_and_into_the_record(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="x")]))
    agent = await rig.open(sampling=SamplingSpec(temperature=0.7, max_tokens=64))
    await agent.post(agent.body(top_p=0.9, max_tokens=1000))
    (call,) = agent.session.capture.calls
    assert call.sampling["temperature"] == 0.7
    assert call.sampling["top_p"] == 0.9
    assert call.sampling["max_tokens"] == 64
    assert set(call.sampling) >= {"top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"}


async def test_max_tokens_beyond_the_window_is_clamped_not_refused(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="x")], window=200))
    agent = await rig.open()
    status, _ = await agent.post(agent.body("a" * 50, max_tokens=16_384))
    (call,) = agent.session.capture.calls
    assert status == 200
    assert call.sampling["max_tokens"] == 200 - call.prompt_len


async def test_prompt_is_not_counted_again_where_the_call_before_it_tells_that_it_fits(make_rig: MakeRig) -> None:
    class Counting(ScriptedEngine):
        counted = 0

        async def count_tokens(self, chat: ChatRequest) -> int:
            self.counted += 1
            return await super().count_tokens(chat)

    engine = Counting(Script(steps=[Step(text="x")], window=4_000))
    rig = await make_rig(engine=engine)
    agent = await rig.open()
    first = {"role": "user", "content": "é" * 1000}
    for messages in ([first], [first, {"role": "assistant", "content": "x"}, {"role": "user", "content": "go on"}]):
        assert (await agent.post({"model": "m", "messages": messages, "max_tokens": 1_400}))[0] == 200
    assert engine.counted == 1
    await agent.post({"model": "m", "messages": [{"role": "user", "content": "é" * 1001}], "max_tokens": 1_400})
    assert engine.counted == 2


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{", ""),
        (b"[]", ""),
        (b'{"messages": []}', ""),
        (b'{"model": "m", "messages": []}', "messages"),
        (b'{"model": "m", "messages": [{"role": "alien", "content": "x"}]}', "messages[0].role"),
        (b'{"model": "m", "messages": [{"role": "user", "content": 3}]}', "messages[0].content"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "n": 3}', "n"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": "hot"}', "temperature"),
    ],
)
async def test_bad_request_is_a_400_that_names_the_field_and_captures_nothing(
    make_rig: MakeRig, body: bytes, field: str
) -> None:
    rig = await make_rig()
    agent = await rig.open()
    status, reply = await agent.post(body)
    assert status == 400
    assert (reply["error"]["param"] or "") == field
    assert agent.session.capture.calls == []


async def test_body_above_the_limit_is_413(make_rig: MakeRig) -> None:
    rig = await make_rig(max_body_bytes=1000)
    agent = await rig.open()
    assert (await agent.post(agent.body("x" * 2000)))[0] == 413


async def test_side_endpoints_answer_without_a_capture(make_rig: MakeRig) -> None:
    rig = await make_rig()
    agent = await rig.open()
    base = rig.gateway.base_url(agent.key)
    async with rig.client.head(f"{base}/") as response:
        assert response.status == 200
    async with rig.client.get(f"{base}/v1/models") as response:
        assert [entry["id"] for entry in (await response.json())["data"]] == ["scripted"]
    async with rig.client.get(f"{rig.gateway.url}/healthz") as response:
        assert response.status == 200
    async with rig.client.post(f"{base}/v1/unheard-of", json={}) as response:
        assert response.status == 404
    async with rig.client.post(f"{base}/v1/messages?beta=true", json={}) as response:
        assert response.status == 400
        assert (await response.json())["type"] == "error"
    assert agent.session.capture.calls == []
    assert rig.gateway.app.side_requests["models"] == 1


async def test_outage_is_made_good_only_by_a_later_call_that_asks_the_same_again(make_rig: MakeRig) -> None:
    fault = Fault(kind="http_error", status=503, retry_after="0", times=1)
    rig = await make_rig(Script(steps=[Step(text="x", fault=fault)]))
    agent = await rig.open()
    assert (await agent.post(agent.body("the work")))[0] == 503
    assert agent.session.engine_error
    rig.engine.script = rig.engine.desk.script = Script(steps=[Step(text="fine")])
    assert (await agent.post(agent.body("a title for this chat")))[0] == 200
    assert agent.session.engine_error, "another conversation says nothing about this one"
    assert (await agent.post(agent.body("the work")))[0] == 200
    assert agent.session.engine_error == ""


async def test_call_in_flight_before_an_outage_does_not_make_it_good(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="early", hold=True)]))
    agent = await rig.open()
    early = asyncio.create_task(agent.post(agent.body("the work")))
    await rig.engine.until(lambda: rig.engine.in_flight == 1)
    rig.engine.script = rig.engine.desk.script = Script(steps=[Step(fault=Fault(kind="http_error", status=500))])
    assert (await agent.post(agent.body("the work", temperature=0.5)))[0] == 503
    rig.engine.desk.release()
    assert (await early)[0] == 200
    assert agent.session.engine_error


async def test_retry_at_once_after_a_hang_up_is_a_new_call_never_a_false_end(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="late", hold=True)]))
    agent = await rig.open()
    first = asyncio.create_task(agent.post(agent.body()))
    await rig.engine.until(lambda: rig.engine.in_flight == 1)
    (run,) = agent.session.in_flight.values()
    run.leave()
    second = asyncio.create_task(agent.post(agent.body()))
    await rig.until(lambda: any(other is not run for other in agent.session.in_flight.values()))
    await rig.engine.until(lambda: rig.engine.in_flight == 1)
    rig.engine.desk.release()
    assert (await second)[0] == 200
    await first
    assert [call.outcome for call in agent.session.capture.committed] == ["cancelled", "ok"]


async def test_number_that_no_record_holds_harms_nobody(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="ok")]))
    attacker, other = await rig.open("t.0"), await rig.open("t.1")
    status, reply = await attacker.post(attacker.body(seed=2**70))
    assert (status, reply["error"]["param"]) == (400, "seed")
    assert (await other.post(other.body()))[0] == 200


async def test_a_request_whose_body_comes_after_its_session_ended_is_gone_and_spoils_nothing(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="x")]))
    agent = await rig.open()
    body = json.dumps(agent.body()).encode()
    arrived = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield body[:5]
        await arrived.wait()
        yield body[5:]

    asked = asyncio.ensure_future(rig.client.post(agent.url, data=slowly()))
    await rig.until(lambda: rig.gateway.app.active == 1)
    await rig.gateway.close_session(agent.session)
    arrived.set()
    async with await asked as response:
        assert response.status == 410
    assert (agent.session.capture_error, rig.engine.desk.started) == ("", 0)


async def test_bug_of_the_gateway_is_an_error_in_the_clients_dialect_and_counted(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(OpenAIChat):
        def render(self, *_: Any) -> bytes:
            raise ZeroDivisionError

    monkeypatch.setitem(DIALECTS, "openai_chat", Broken())
    rig = await make_rig()
    agent = await rig.open()
    status, answer = await agent.post(agent.body())
    assert (status, answer["error"]["code"]) == (500, "internal_error")
    assert agent.session.flags["internal_errors"] == 1

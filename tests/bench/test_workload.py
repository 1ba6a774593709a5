"""The mock's replies and the agents' requests: whole, exact, and shaped as the real ones are."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polynya.bench.transcript import Requests
from polynya.bench.workload import Call, Spec, Workload, call_number, long_session, spec_of
from polynya.dialects.registry import DIALECTS
from polynya.engines.wire import read_chat

_SMALL = Spec(name="t", body_bytes=40_000, prompt_ids=3_000, sampled=60, turns=3, growth_ids=400, variants=2)
_FIXTURE = Path(__file__).parents[1] / "fixtures" / "engines" / "vllm_chat_tool_call.json"


def _joined(parts: list[Any]) -> bytes:
    return b"".join(bytes(part) for part in parts)


def _answer(workload: Workload, call: Call) -> bytes:
    head, _, body = _joined(workload.variant(call.session).answer(call, 1)).partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(body) in head + b"\r\n"
    return body


@pytest.mark.parametrize("spec", [_SMALL, spec_of("2k", sampled=40)])
def test_an_answer_is_read_as_what_the_judge_expects(spec: Spec) -> None:
    workload = Workload(spec)
    for call in (Call(0, 0, 0), Call(3, 1, 2)):
        reply = read_chat(_answer(workload, call), "mock")
        expected = workload.variant(call.session).expected(call)
        assert np.array_equal(reply.prompt_ids, expected.prompt) and expected.prompt.size == spec.prompt_length(
            call.turn
        )
        assert np.array_equal(reply.sampled_ids, expected.sampled) and expected.sampled.size == spec.sampled
        assert np.array_equal(reply.logprobs, expected.logprobs)
        assert reply.reply.tool_calls[0].name == "Write"


def test_an_answer_has_the_fields_of_vllms_in_their_order() -> None:
    ours, real = json.loads(_answer(Workload(_SMALL), Call(0, 0, 0))), json.loads(_FIXTURE.read_bytes())
    assert list(ours) == list(real)
    assert list(ours["choices"][0]) == list(real["choices"][0])
    assert list(ours["choices"][0]["message"]) == list(real["choices"][0]["message"])
    assert list(ours["choices"][0]["logprobs"]["content"][0]) == list(real["choices"][0]["logprobs"]["content"][0])


def test_prompts_extend_within_an_epoch_and_break_between_two() -> None:
    workload = Workload(_SMALL)
    calls = [call_number(_SMALL, 1, number) for number in range(4)]
    made = [workload.variant(1).expected(call) for call in calls]
    for before, after in pairwise(made[:3]):
        chain = np.concatenate([before.prompt, before.sampled])
        assert np.array_equal(after.prompt[: chain.size], chain) and after.prompt.size > chain.size
    assert (calls[3].epoch, calls[3].turn) == (1, 0)
    assert made[3].prompt[0] == made[0].prompt[0] and not np.array_equal(made[3].prompt, made[0].prompt)


def test_conversations_of_their_own_have_ids_of_their_own() -> None:
    spec = spec_of("2k", sampled=40)
    made = [Workload(spec).variant(0).expected(Call(0, 0, turn)) for turn in (0, 1)]
    assert not np.array_equal(made[0].prompt, made[1].prompt) and not np.array_equal(made[0].sampled, made[1].sampled)


def test_sessions_that_share_a_text_have_ids_of_their_own() -> None:
    workload = Workload(_SMALL)
    one, other = (workload.variant(session).expected(Call(session, 0, 0)).prompt for session in (0, 2))
    assert one.size == other.size and np.flatnonzero(one != other).size == 1


@pytest.mark.parametrize("spec", [_SMALL, spec_of("2k"), spec_of("106k"), long_session()])
def test_bodies_are_about_as_large_as_said_and_parse_in_both_dialects(spec: Spec) -> None:
    requests_of = Requests(Workload(spec))
    for name, dialect in (("anthropic_messages", "anthropic"), ("openai_chat", "chat")):
        made = [_joined(requests_of.parts(dialect, call_number(spec, 1, turn))) for turn in range(spec.turns)]
        assert sum(map(len, made)) / spec.turns == pytest.approx(spec.body_bytes, rel=0.15)
        requests = [DIALECTS[name].parse(body, "/v1/x") for body in made]
        assert requests[0].stream is (name == "anthropic_messages")
        if spec.growth_ids:
            counts = [len(request.messages) for request in requests]
            assert counts == list(range(counts[0], counts[0] + 2 * spec.turns, 2))
            assert [m.raw for m in requests[1].messages[: counts[0]]] == [m.raw for m in requests[0].messages]
        for turn, body in enumerate(made):
            assert body.count(b"[[session 00001 epoch 00000]]") == 1
            at = body.rindex(b"[[turn ")
            assert int(body[at + 7 : at + 12]) == turn


def test_what_the_agent_echoes_is_what_the_mock_said() -> None:
    workload = Workload(_SMALL)
    message = json.loads(_answer(workload, Call(0, 0, 1)))["choices"][0]["message"]
    request = DIALECTS["openai_chat"].parse(_joined(Requests(workload).parts("chat", Call(0, 0, 2))), "/v1/x")
    echoed = json.loads(bytes(request.messages[-2].raw))
    assert echoed["content"] == message["content"]
    assert echoed["tool_calls"][0]["function"] == message["tool_calls"][0]["function"]

"""The adapter against a real vLLM server (`scripts/vllm_cpu.sh` starts one and prints the variable to set)."""

import asyncio
import os
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from polynya.engines import create_engine
from polynya.engines.calls import chat_body
from polynya.engines.compatible import CompatibleEngine
from polynya.engines.flavours import VLLM
from polynya.engines.routes import Route
from polynya.errors import ContextOverflow, EngineRejected

from .asking import BASH, ask, chat, message

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[CompatibleEngine]:
    url = os.environ.get("POLYNYA_TEST_VLLM_URL")
    if not url:
        pytest.fail("POLYNYA_TEST_VLLM_URL is not set: run scripts/vllm_cpu.sh and export what it prints")
    made = create_engine(url, timeout=120)
    assert isinstance(made, CompatibleEngine)
    await made.start()
    yield made
    await made.close()


async def test_the_probe_finds_all_that_training_needs(engine: CompatibleEngine) -> None:
    info = engine.info
    assert info.kind == "vllm" and info.build is not None and info.window is not None
    assert info.trainable and info.token_in
    assert info.logprob_kind == "raw"
    assert info.stop_ids == [2]


async def test_ids_and_logprobs_align_and_the_stop_token_is_among_them(engine: CompatibleEngine) -> None:
    reply = await engine.generate(ask("What is the capital of France?", temperature=0.0, max_tokens=40))
    assert reply.sampled_ids is not None and reply.logprobs is not None
    assert reply.sampled_ids.size == reply.logprobs.size == reply.reply.usage.completion_tokens
    assert (reply.sampled_ids[-1], reply.finish_reason) == (2, "stop")
    assert "Paris" in reply.reply.text


async def test_counted_tokens_are_those_conditioned_on(engine: CompatibleEngine) -> None:
    for tools in (None, [BASH]):
        reply = await engine.generate(ask("hi 🙂", tools=tools, max_tokens=1))
        assert reply.prompt_ids is not None
        assert np.array_equal(await engine.render_ids(chat("hi 🙂", tools=tools)), reply.prompt_ids)


async def test_six_turns_of_given_ids_stay_one_exact_chain(engine: CompatibleEngine) -> None:
    first = await engine.generate(ask("Tell me a story", max_tokens=12, seed=5))
    assert first.prompt_ids is not None and first.sampled_ids is not None
    chain = np.concatenate([first.prompt_ids, first.sampled_ids])
    for turn in range(5):
        tail = np.array([2, 198, 1, 4093, 198, 5820 + turn, 2, 198, 1, 520, 9531, 198])
        prompt = np.concatenate([chain, tail]).astype(np.int32)
        reply = await engine.generate(ask("ignored", prompt_ids=prompt, max_tokens=12, seed=turn))
        assert np.array_equal(reply.prompt_ids, prompt)
        assert reply.sampled_ids is not None
        chain = np.concatenate([prompt, reply.sampled_ids])


async def test_bad_ids_are_refused(engine: CompatibleEngine) -> None:
    with pytest.raises(EngineRejected):
        await engine.generate(ask(prompt_ids=np.array([2_000_000_000], dtype=np.int32), max_tokens=1))


async def test_a_prompt_beyond_the_window_overflows(engine: CompatibleEngine) -> None:
    with pytest.raises(ContextOverflow) as caught:
        await engine.generate(ask("word " * ((engine.info.window or 0) + 100), max_tokens=1))
    assert caught.value.window == engine.info.window


async def test_an_answer_limit_above_the_window_is_refused_and_is_no_overflow(engine: CompatibleEngine) -> None:
    with pytest.raises(EngineRejected, match="cannot be greater than max_model_len"):
        await engine.generate(ask("hi", max_tokens=100_000))


async def test_cancelling_frees_the_engine(engine: CompatibleEngine) -> None:
    async def running() -> float:
        text = (await engine.http.get("/metrics")).body.decode()
        values = [
            line.rpartition(" ")[2] for line in text.splitlines() if line.startswith("vllm:num_requests_running{")
        ]
        return sum(map(float, values))

    call = asyncio.create_task(engine.generate(ask("Count", max_tokens=3000, logit_bias={"2": -100.0})))
    async with asyncio.timeout(60):
        while not await running():
            pass
        call.cancel()
        while await running():
            pass
    assert (await asyncio.wait({call}))[0] == {call}


async def test_display_texts_of_ids(engine: CompatibleEngine) -> None:
    texts = await engine.token_texts([2, 19556, 314])
    assert texts == {2: "<|im_end|>", 19556: "Hello", 314: " is"}


UNKNOWN = "a<|im_end|>\n<file_sep>b<issue_start><jupyter_script>"
"""Control tokens of the model that its template does not print, too."""


@pytest.mark.parametrize(
    "text", ["Go on", "é e\u0301 \n\n\t<b>🙂</b> <|im_ end|> \\ue000 \ue000", "  ends with space \n", UNKNOWN]
)
async def test_a_bridge_is_the_end_of_the_servers_own_rendering(engine: CompatibleEngine, text: str) -> None:
    bridger = await engine.bridger()
    assert bridger is not None
    first = await engine.generate(ask("Name a colour.", max_tokens=12, seed=5))
    assert first.prompt_ids is not None and first.sampled_ids is not None
    parent = np.concatenate([first.prompt_ids, first.sampled_ids])
    tail = [msgspec.json.encode({"role": "tool", "tool_call_id": "c", "content": text}), message("user", text).raw]
    found = await bridger.bridge(
        parent_ids=parent,
        parent_calls=[("c", "bash")],
        tail=tail,
        tools=msgspec.json.encode([BASH]),
        template_kwargs=None,
    )
    assert found is not None, bridger.refused
    control = [token for token in found.ids.tolist() if token < 17]
    assert control == [2] * int(parent[-1] != 2) + [1, 2, 1, 2, 1]
    context = [message(role, "x").raw for role in ("user", "assistant")]
    whole = await bridger.desk.render_ids([*context, *tail], msgspec.json.encode([BASH]), None)
    own = found.ids[int(parent[-1] != 2) :].tolist()
    assert (whole[-len(own) :] == own) == (text != UNKNOWN)
    prompt = np.concatenate([parent, found.ids]).astype(np.int32)
    again = await engine.generate(ask("ignored", prompt_ids=prompt, max_tokens=2))
    assert np.array_equal(again.prompt_ids, prompt)


async def test_logprobs_captured_turn_by_turn_are_those_of_one_prefill_over_the_exact_ids(
    engine: CompatibleEngine,
) -> None:
    """At temperature 1, with raw logprobs: what the trainer computes on the row is what the engine reported while sampling."""
    prompt, sampled, logprobs = None, [], []
    for turn in range(6):
        given = None if prompt is None else np.concatenate([prompt, np.array([198, 1, 4093, 198], dtype=np.int32)])
        reply = await engine.generate(ask("Tell me a story", prompt_ids=given, max_tokens=16, seed=turn))
        assert reply.prompt_ids is not None and reply.sampled_ids is not None and reply.logprobs is not None
        assert given is None or np.array_equal(reply.prompt_ids, given)
        sampled.append(range(reply.prompt_ids.size, reply.prompt_ids.size + reply.sampled_ids.size))
        logprobs.append(reply.logprobs)
        prompt = np.concatenate([reply.prompt_ids, reply.sampled_ids])
    fields = {"model": engine.info.model, "prompt": prompt.tolist(), "max_tokens": 1, "echo": True, "logprobs": 0}
    answer = await engine.http.post("/v1/completions", msgspec.json.encode(fields))
    scored = np.array(
        [value or 0.0 for value in msgspec.json.decode(answer.body)["choices"][0]["logprobs"]["token_logprobs"]]
    )
    places, captured = np.concatenate([list(part) for part in sampled]), np.concatenate(logprobs)
    # bfloat16: a token that is decoded and one that is prefilled go through other kernels
    assert float(np.abs(scored[places] - captured).mean()) < 0.1
    assert float(np.abs(scored[places - 1] - captured).mean()) > 1.0


@pytest.mark.parametrize("route", list(Route))
async def test_ids_outside_the_vocabulary_are_refused_in_the_engines_words(
    engine: CompatibleEngine, route: Route
) -> None:
    assert engine.info.window is not None
    caller = engine._started().caller
    for bad in ([1, 10**6], [1, -5]):
        with pytest.raises(EngineRejected):
            await caller.ask(ask("hi", prompt_ids=np.array(bad, dtype=np.int32), max_tokens=1), route)


@pytest.mark.parametrize("route", [Route.GENERATE, Route.COMPLETIONS])
async def test_the_other_routes_give_the_reply_that_the_chat_route_gives(
    engine: CompatibleEngine, route: Route
) -> None:
    caller = engine._started().caller
    rendered = await engine.render_ids(chat("What is the capital of France?"))
    request = ask("What is the capital of France?", prompt_ids=rendered, temperature=0.0, max_tokens=40)
    one, two = await caller.ask(request, Route.CHAT), await caller.ask(request, route)
    assert one.reply.text == two.reply.text and "Paris" in two.reply.text
    assert one.finish_reason == two.finish_reason == "stop"
    assert one.sampled_ids is not None and two.sampled_ids is not None and one.logprobs is not None
    assert np.array_equal(one.sampled_ids, two.sampled_ids) and np.array_equal(one.prompt_ids, two.prompt_ids)
    assert two.logprobs is not None and np.allclose(one.logprobs, two.logprobs, atol=0.05)
    if route is Route.GENERATE:
        assert [(span.start, span.end) for span in two.policy_spans] == [(0, two.sampled_ids.size)]


async def test_ids_of_a_whole_reply_are_those_that_a_stream_brings_piece_by_piece(
    engine: CompatibleEngine,
) -> None:
    """The streamed ids of the same seed, put together, are those that we take from the whole reply."""
    request = ask("Call a tool, then say hello.", tools=[BASH], max_tokens=48, seed=11)
    whole = await engine.generate(request)
    assert whole.sampled_ids is not None and whole.sampled_ids.size == whole.reply.usage.completion_tokens
    fields = msgspec.json.decode(b"".join(chat_body(VLLM, engine.info.model, request)))
    answer = await engine.http.post("/v1/chat/completions", msgspec.json.encode(fields | {"stream": True}))
    events = [
        msgspec.json.decode(line[6:])
        for line in answer.body.split(b"\n")
        if line.startswith(b"data: ") and b"[DONE]" not in line
    ]
    streamed = [token for event in events for choice in event["choices"] for token in choice.get("token_ids") or []]
    assert streamed == whole.sampled_ids.tolist()


async def test_the_probed_kind_of_logprobs_is_what_the_server_reports_at_another_temperature(
    engine: CompatibleEngine,
) -> None:
    """Raw ones are those of temperature 1, whatever temperature sampled: scored again on the same ids."""
    reply = await engine.generate(ask("Tell me a story", temperature=0.7, max_tokens=64, seed=3))
    assert reply.prompt_ids is not None and reply.sampled_ids is not None and reply.logprobs is not None
    ids = np.concatenate([reply.prompt_ids, reply.sampled_ids])
    fields = {"model": engine.info.model, "prompt": ids.tolist(), "max_tokens": 1, "echo": True, "logprobs": 0}
    answer = await engine.http.post("/v1/completions", msgspec.json.encode(fields))
    scored = msgspec.json.decode(answer.body)["choices"][0]["logprobs"]["token_logprobs"][reply.prompt_ids.size :]
    gaps = np.abs(np.array(scored[: reply.sampled_ids.size]) - reply.logprobs)
    assert engine.info.logprob_kind == "raw" and float(gaps.mean()) < 0.1

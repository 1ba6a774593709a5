"""The embedded engine with a real model: exact ids, raw logprobs, cancellation, and a child that never stays behind."""

import asyncio
import json
import os
import select
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import pytest_asyncio

from polynya.engines.base import Engine
from polynya.engines.http import HttpSettings
from polynya.engines.llamacpp import SLICE, LlamaCppEngine
from polynya.engines.llamacpp_child import ChildSettings
from polynya.errors import ConfigError, ContextOverflow, EngineUnavailable

from .asking import BASH, ask, chat

MODEL = "smollm2-135m"
SMALL = ChildSettings(window=2048)
CLOSE = 2e-3
"""Measured: 6e-5 between a sampled token's logprob and the score of its position; more where batches differ."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LlamaCppEngine]:
    made = LlamaCppEngine(MODEL, settings=SMALL, log=tmp_path_factory.mktemp("llamacpp") / "server.log")
    await made.start()
    yield made
    await made.close()


pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]


async def test_it_says_what_it_is(engine: LlamaCppEngine) -> None:
    info = engine.info
    assert isinstance(engine, Engine)
    assert info.trainable and info.token_in
    assert (info.kind, info.model, info.window, info.vocab_size) == ("embedded", MODEL, 2048, 49152)
    assert (info.logprob_kind, info.stop_ids[0], info.tool_parser) == ("raw", 2, "hermes+fenced-json")
    assert info.model_sha256 is not None and info.chat_template_sha256 is not None


async def test_the_prompt_is_the_template_with_one_begin_token(engine: LlamaCppEngine) -> None:
    reply = await engine.generate(ask("Say hi", max_tokens=1))
    assert reply.prompt_ids is not None
    text = await engine._detokenize(reply.prompt_ids.tolist())
    assert text.startswith("<|im_start|>system\n") and text.endswith(
        "<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert await engine._tokenize(text) == reply.prompt_ids.tolist()
    assert await engine.count_tokens(chat("Say hi")) == reply.prompt_ids.size == reply.reply.usage.prompt_tokens


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_logprobs_are_the_raw_softmax_of_each_position(engine: LlamaCppEngine, temperature: float) -> None:
    reply = await engine.generate(ask("Tell me a story", temperature=temperature, max_tokens=SLICE + 4, seed=3))
    assert reply.prompt_ids is not None and reply.sampled_ids is not None and reply.logprobs is not None
    assert reply.sampled_ids.size == reply.logprobs.size
    so_far = reply.prompt_ids.tolist()
    scored = []
    for token in reply.sampled_ids.tolist():
        scored.append(await engine._score(so_far, token))
        so_far.append(token)
    assert np.allclose(reply.logprobs, np.array(scored, dtype=np.float32), atol=CLOSE)


async def test_the_stop_token_is_sampled_and_not_in_the_text(engine: LlamaCppEngine) -> None:
    reply = await engine.generate(ask("What is the capital of France? One word.", temperature=0.0, max_tokens=200))
    assert reply.sampled_ids is not None and reply.sampled_ids[-1] in engine.info.stop_ids
    assert (reply.finish_reason, reply.reply.finish_reason) == ("stop", "stop")
    assert "Paris" in reply.reply.text and "<|im_end|>" not in reply.reply.text


async def test_slices_join_to_what_one_request_samples(engine: LlamaCppEngine) -> None:
    sliced = await engine.generate(ask("Count to thirty", temperature=0.0, max_tokens=3 * SLICE))
    whole = await engine.generate(ask("Count to thirty", temperature=0.0, max_tokens=3 * SLICE, stop=["\x00never"]))
    assert np.array_equal(sliced.sampled_ids, whole.sampled_ids)
    assert sliced.reply.text == whole.reply.text
    assert sliced.finish_reason == "length" and sliced.sampled_ids is not None and sliced.sampled_ids.size == 3 * SLICE


async def test_a_given_prompt_continues_the_same_with_and_without_the_cache(engine: LlamaCppEngine) -> None:
    first = await engine.generate(ask("Write a poem", temperature=0.0, max_tokens=40))
    assert first.prompt_ids is not None and first.sampled_ids is not None
    tail = await engine._tokenize("<|im_end|>\n<|im_start|>user\nShorter<|im_end|>\n<|im_start|>assistant\n")
    prompt = np.concatenate([first.prompt_ids, first.sampled_ids, np.array(tail)]).astype(np.int32)
    warm = await engine.generate(ask(prompt_ids=prompt, temperature=0.0, max_tokens=24))
    assert np.array_equal(warm.prompt_ids, prompt)
    assert warm.reply.usage.cached_tokens >= first.prompt_ids.size
    fresh = LlamaCppEngine(MODEL, settings=SMALL)
    await fresh.start()
    try:
        cold = await fresh.generate(ask(prompt_ids=prompt, temperature=0.0, max_tokens=24))
    finally:
        await fresh.close()
    assert cold.reply.usage.cached_tokens == 0
    assert np.array_equal(warm.sampled_ids, cold.sampled_ids)
    assert np.allclose(warm.logprobs, cold.logprobs, atol=0.05)  # type: ignore[arg-type]


async def test_tokens_that_end_inside_a_character_keep_their_ids_and_get_their_logprobs(engine: LlamaCppEngine) -> None:
    lead, rest = (await engine._tokenize("🙂"))[-2:]
    bias = {str(lead): 100.0, str(rest): 100.5}
    reply = await engine.generate(ask("hi", logit_bias=bias, max_tokens=SLICE + 3, seed=1))
    assert reply.sampled_ids is not None and reply.logprobs is not None
    assert set(reply.sampled_ids.tolist()) <= {lead, rest}
    assert np.isfinite(reply.logprobs).all() and (reply.logprobs <= 0).all()
    assert reply.flags["rescored_logprobs"] > 0
    assert reply.reply.text == await engine._detokenize(reply.sampled_ids.tolist())


async def test_a_seed_makes_a_reply_repeatable(engine: LlamaCppEngine) -> None:
    one, two = [await engine.generate(ask("Say something", seed=11, max_tokens=30)) for _ in range(2)]
    assert np.array_equal(one.sampled_ids, two.sampled_ids)


async def test_tool_choice_cannot_be_enforced_and_is_flagged(engine: LlamaCppEngine) -> None:
    import msgspec

    request = ask("hi", tools=[BASH], max_tokens=4)
    forced = msgspec.structs.replace(request.chat, tool_choice=msgspec.Raw(b'"required"'))
    reply = await engine.generate(msgspec.structs.replace(request, chat=forced))
    assert reply.flags["guidance_not_enforced"] == 1


async def test_a_prompt_beyond_the_window_overflows_with_both_numbers(engine: LlamaCppEngine) -> None:
    with pytest.raises(ContextOverflow) as caught:
        await engine.generate(ask("word " * 3000))
    assert caught.value.window == 2048 and caught.value.prompt_tokens is not None and caught.value.prompt_tokens > 3000


async def test_ids_beyond_the_vocabulary_are_refused_not_sampled_from(engine: LlamaCppEngine) -> None:
    from polynya.errors import EngineRejected

    with pytest.raises(EngineRejected, match="invalid tokens"):
        await engine.generate(ask(prompt_ids=np.array([99_999_999], dtype=np.int32)))


async def test_a_long_reply_ends_at_the_window(engine: LlamaCppEngine) -> None:
    prompt = np.array((await engine._tokenize("one two three " * 2000))[: 2048 - 5], dtype=np.int32)
    reply = await engine.generate(ask(prompt_ids=prompt))
    assert reply.sampled_ids is not None and 0 < reply.sampled_ids.size <= 5


async def busy_slots(engine: LlamaCppEngine) -> int:
    return sum(slot["is_processing"] for slot in json.loads(await engine._get("/slots")))


@pytest.mark.parametrize("words", [1, 1500])
async def test_cancelling_frees_the_slot(engine: LlamaCppEngine, words: int) -> None:
    call = asyncio.create_task(engine.generate(ask("zebra " * words, max_tokens=400, logit_bias={"2": -100.0})))
    async with asyncio.timeout(60):
        while not await busy_slots(engine):
            pass
        call.cancel()
        while await busy_slots(engine):
            pass
    assert (await asyncio.wait({call}))[0] == {call} and call.cancelled()
    assert (await engine.generate(ask("hi", max_tokens=2))).sampled_ids is not None


async def test_more_calls_than_slots_wait_for_their_turn(engine: LlamaCppEngine) -> None:
    replies = await asyncio.gather(*(engine.generate(ask(f"Number {n}?", max_tokens=20)) for n in range(5)))
    assert all(reply.sampled_ids is not None and reply.logprobs is not None for reply in replies)


async def test_display_texts_of_ids(engine: LlamaCppEngine) -> None:
    texts = await engine.token_texts([2, 19556])
    assert texts == {2: "<|im_end|>", 19556: "Hello"}


async def test_the_server_refuses_who_has_no_key(engine: LlamaCppEngine) -> None:
    assert engine.child is not None
    async with aiohttp.ClientSession() as http, http.post(f"{engine.child.address}/completion", json={}) as answer:
        assert answer.status == 401
    await engine.health()


async def test_a_broken_model_file_is_named_with_the_servers_words(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\0" * 64)
    with pytest.raises(EngineUnavailable, match=r"broken\.gguf.*whole, and a model"):
        await LlamaCppEngine(str(path), log=tmp_path / "log").start()


async def test_a_missing_model_file_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        await LlamaCppEngine("/no/such.gguf").start()


async def test_a_child_that_died_is_said_so(tmp_path: Path) -> None:
    engine = LlamaCppEngine(
        MODEL, settings=ChildSettings(window=512), http=HttpSettings(retries=0), log=tmp_path / "log"
    )
    await engine.start()
    assert engine.child is not None and engine.child.pid is not None
    gone = os.pidfd_open(engine.child.pid)
    os.kill(engine.child.pid, signal.SIGKILL)
    assert select.select([gone], [], [], 30)[0]
    os.close(gone)
    with pytest.raises(EngineUnavailable):
        await engine.generate(ask())
    await engine.close()
    await engine.close()


PARENT = """
import asyncio, sys
from polynya.engines.llamacpp import LlamaCppEngine
from polynya.engines.llamacpp_child import ChildSettings

async def main():
    engine = LlamaCppEngine(sys.argv[1], settings=ChildSettings(window=512))
    await engine.start()
    print(engine.child.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_the_child_dies_with_its_parent() -> None:
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, MODEL, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    child = os.pidfd_open(int(await parent.stdout.readline()))
    parent.kill()
    await parent.wait()
    assert select.select([child], [], [], 30)[0], "the server outlived its parent"
    os.close(child)

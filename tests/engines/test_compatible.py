"""The adapter for OpenAI-compatible servers, over real HTTP against the scripted server."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest

from polynya.engines.base import Engine
from polynya.engines.compatible import CompatibleEngine
from polynya.engines.http import HttpSettings
from polynya.engines.scripted import Fault, Script, ScriptedApp, Step, scripted_app, serve
from polynya.engines.scripted.script import FaultKind
from polynya.engines.scripted.tokens import MEDIA
from polynya.errors import ConfigError, ContextOverflow, EngineProtocolError, EngineRejected, EngineUnavailable
from polynya.schema import PolicySpan

from .asking import BASH, ask, chat


@asynccontextmanager
async def engine_on(script: Script) -> AsyncIterator[tuple[CompatibleEngine, ScriptedApp]]:
    app = scripted_app(script)
    settings = HttpSettings(backoff_base=0.001, backoff_cap=0.002)
    async with serve(app) as url:
        engine = CompatibleEngine(f"{url}/v1/", http=settings)
        await engine.start()
        try:
            yield engine, app
        finally:
            await engine.close()


def faulty(kind: FaultKind, **rest: object) -> Script:
    """Only the session ``s`` misbehaves; the probe does not."""
    return Script(sessions={"s": [Step(text="abc", fault=Fault(kind=kind, **rest))]})  # type: ignore[arg-type]


async def test_the_probe_finds_what_the_server_can_do() -> None:
    async with engine_on(Script(window=8192, seed=1)) as (engine, _):
        assert isinstance(engine, Engine)
        info = engine.info
    assert (info.kind, info.model, info.build, info.window) == ("vllm", "scripted", "scripted", 8192)
    assert info.trainable and info.token_in
    assert info.tokenizer_sha256 is not None and info.stop_ids == [256]
    assert info.detail["weight_version"] == "default"


async def test_another_chat_template_has_another_fingerprint_and_the_tokenizer_keeps_its_own() -> None:
    found = []
    for drops in (False, True, False):
        async with engine_on(Script(drop_reasoning=drops)) as (engine, _):
            found.append((engine.info.chat_template_sha256, engine.info.tokenizer_sha256))
    assert found[0] == found[2] and found[0][0] != found[1][0] and found[0][1] == found[1][1]
    assert all(template is not None for template, _ in found)


class Blindfolded(ScriptedApp):
    """Leaves images out in silence, as some servers of text models do."""

    def _render(self, messages, tools, *, generation_prompt=True):  # type: ignore[no-untyped-def]
        ids = super()._render(messages, tools, generation_prompt=generation_prompt)
        return ids[ids != MEDIA]


@pytest.mark.parametrize(
    ("app", "images"),
    [
        (ScriptedApp(Script()), True),
        (ScriptedApp(Script(images=False)), False),
        (Blindfolded(Script()), False),
    ],
    ids=["sees", "refuses", "leaves them out"],
)
async def test_the_probe_finds_whether_an_image_reaches_the_model(app: ScriptedApp, images: bool) -> None:
    async with serve(app) as url:
        engine = CompatibleEngine(url)
        info = await engine.start()
        await engine.close()
    assert info.images is images


@pytest.mark.parametrize("kind", ["raw", "processed"])
async def test_the_probe_tells_raw_from_processed_logprobs(kind: str) -> None:
    async with engine_on(Script(logprob_kind=kind, seed=1)) as (engine, _):  # type: ignore[arg-type]
        assert engine.info.logprob_kind == kind


async def test_the_logprob_kind_stays_unknown_when_the_answers_do_not_tell() -> None:
    async with engine_on(Script(sessions={"": [Step(text="x", fault=Fault(kind="nan_logprob"))]})) as (engine, _):
        assert engine.info.logprob_kind == "unknown"


@pytest.mark.parametrize("kind", ["no_ids", "no_prompt_ids", "no_logprobs"])
async def test_a_server_without_ids_or_logprobs_is_not_trainable(kind: FaultKind) -> None:
    async with engine_on(Script(steps=[Step(text="x", fault=Fault(kind=kind))])) as (engine, _):
        assert not engine.info.trainable


async def test_a_server_that_ignores_prompt_ids_has_no_token_in() -> None:
    async with engine_on(Script(token_in=False)) as (engine, _):
        assert engine.info.trainable and not engine.info.token_in


async def test_a_reply_is_what_the_script_expects() -> None:
    async with engine_on(Script()) as (engine, _):
        reply = await engine.generate(ask("do it", tools=[BASH]))
        expected = engine_script_expected(Script(), reply_prompt=reply.prompt_ids)
    assert np.array_equal(reply.sampled_ids, expected.sampled_ids)
    assert np.array_equal(reply.logprobs, expected.logprobs)
    assert reply.reply == expected.reply
    assert reply.upstream_id == "scripted-s-0-0" and reply.flags == {}


def engine_script_expected(script: Script, reply_prompt: object):  # type: ignore[no-untyped-def]
    tools = chat("x", tools=[BASH]).tools
    return script.expected("s", 0, tools=tools, prompt_tokens=len(reply_prompt))  # type: ignore[arg-type]


async def test_every_sampling_value_is_sent_and_the_model_is_the_engines_own() -> None:
    async with engine_on(Script()) as (engine, app):
        await engine.generate(ask(temperature=0.5, max_tokens=7, seed=3, stop=["\n"], logit_bias={"5": 1.0}))
        body = json.loads(app.bodies[-1])
    wanted = {
        "model": "scripted",
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_completion_tokens": 7,
        "seed": 3,
        "stop": ["\n"],
        "logit_bias": {"5": 1.0},
        "n": 1,
        "stream": False,
        "logprobs": True,
        "top_logprobs": 0,
        "return_token_ids": True,
    }
    assert {key: body.get(key) for key in wanted} == wanted
    assert app.headers[-1]["x-session-id"] == "s"


@pytest.mark.parametrize("size", [3, 20_000])
async def test_given_prompt_ids_are_sent_beside_the_messages_and_echoed(size: int) -> None:
    prompt = np.arange(size, dtype=np.int32) % 256
    async with engine_on(Script()) as (engine, app):
        reply = await engine.generate(ask(prompt_ids=prompt))
        body = json.loads(app.bodies[-1])
    assert np.array_equal(reply.prompt_ids, prompt)
    assert body["messages"] == [{"role": "user", "content": "hi"}]


async def test_a_long_prompt_is_read_back_exactly() -> None:
    async with engine_on(Script()) as (engine, _):
        reply = await engine.generate(ask("x" * 100_000))
        assert reply.prompt_ids is not None and reply.prompt_ids.size == await engine.count_tokens(chat("x" * 100_000))


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("overflow", ContextOverflow),
        ("bad_json", EngineProtocolError),
        ("reset", EngineUnavailable),
        ("reset_midway", EngineUnavailable),
        ("http_error", EngineUnavailable),
    ],
)
async def test_a_fault_of_the_whole_call_is_its_error(kind: FaultKind, error: type[Exception]) -> None:
    async with engine_on(faulty(kind)) as (engine, _):
        with pytest.raises(error):
            await engine.generate(ask())


async def test_a_retried_call_is_counted_in_its_flags() -> None:
    async with engine_on(faulty("http_error", times=2)) as (engine, _):
        assert (await engine.generate(ask())).flags == {"upstream_retries": 2}


async def test_a_prompt_beyond_the_window_says_both_numbers() -> None:
    async with engine_on(Script(window=200)) as (engine, _):
        with pytest.raises(ContextOverflow) as caught:
            await engine.generate(ask("x" * 300))
    assert (caught.value.prompt_tokens, caught.value.window) == (303, 200)


async def test_faults_of_ids_and_logprobs_are_handed_on_unjudged() -> None:
    async with engine_on(faulty("short_logprobs")) as (engine, _):
        reply = await engine.generate(ask())
        assert reply.logprobs is not None and reply.sampled_ids is not None
        assert reply.logprobs.size == reply.sampled_ids.size - 1
    for kind in ("nan_logprob", "null_logprob"):
        async with engine_on(faulty(kind)) as (engine, _):  # type: ignore[arg-type]
            reply = await engine.generate(ask())
            assert reply.logprobs is not None and np.isnan(reply.logprobs[0]) and reply.reply.text == "abc"
    async with engine_on(faulty("sentinel_logprob")) as (engine, _):
        reply = await engine.generate(ask())
        assert reply.logprobs is not None and reply.logprobs[0] == -9999
    async with engine_on(faulty("token_id_strings")) as (engine, _):
        reply = await engine.generate(ask())
        assert reply.sampled_ids is not None and reply.sampled_ids.tolist() == [97, 98, 99, 256]
    async with engine_on(faulty("bad_token_id_string")) as (engine, _):
        assert (await engine.generate(ask())).sampled_ids is None
    async with engine_on(faulty("echo_mismatch")) as (engine, _):
        reply = await engine.generate(ask())
        assert reply.prompt_ids is not None and reply.prompt_ids[-1] == 0


async def test_cancelling_aborts_the_call_in_the_engine() -> None:
    async with engine_on(faulty("hang")) as (engine, app):
        aborted = app.desk.aborted
        call = asyncio.create_task(engine.generate(ask()))
        await app.desk.until(lambda: app.desk.in_flight == 1)
        call.cancel()
        await app.desk.until(lambda: app.desk.aborted == aborted + 1)
        assert (await asyncio.wait({call}))[0] == {call}


async def test_token_texts_come_in_one_request_and_survive_the_separator() -> None:
    async with engine_on(Script()) as (engine, _):
        assert await engine.token_texts([104, 0xC3, 256]) == {
            104: "h",
            0xC3: "\N{REPLACEMENT CHARACTER}",
            256: "<|end|>",
        }
        assert await engine.token_texts([0x1F, 97]) == {0x1F: "\x1f", 97: "a"}


async def test_a_model_that_is_not_served_is_refused_by_name() -> None:
    async with serve(scripted_app()) as url:
        with pytest.raises(ConfigError, match=r"'other' is not served.*scripted"):
            await CompatibleEngine(url, model="other").start()


async def test_a_closed_port_is_unavailable_at_start() -> None:
    async with serve(scripted_app()) as url:
        pass
    with pytest.raises(EngineUnavailable, match="check that the server runs"):
        await CompatibleEngine(url, http=HttpSettings(retries=0)).start()


async def test_info_before_start_is_a_programming_error() -> None:
    with pytest.raises(RuntimeError, match="not started"):
        _ = CompatibleEngine("http://127.0.0.1:1").info


async def test_health_asks_the_server() -> None:
    async with engine_on(Script()) as (engine, _):
        await engine.health()


class PlainOpenAI:
    """A server that knows the standard only: no ids, no /version, no /tokenize."""

    def __init__(self) -> None:
        self.body: dict[str, object] = {}

    async def __call__(self, scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        body = (await receive()).get("body", b"")
        known = {
            "/v1/models": {"data": [{"id": "gpt", "owned_by": "someone"}]},
            "/v1/chat/completions": {"choices": [{"message": {"content": "hello"}, "finish_reason": "stop"}]},
        }
        found = known.get(scope["path"])
        if scope["path"] == "/v1/chat/completions":
            self.body = json.loads(body)
        await send({"type": "http.response.start", "status": 200 if found else 404, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(found or {}).encode()})


async def test_a_plain_openai_server_is_text_only_and_gets_standard_fields() -> None:
    app = PlainOpenAI()
    async with serve(app) as url:
        engine = CompatibleEngine(url)
        info = await engine.start()
        reply = await engine.generate(ask(top_k=5))
        texts = await engine.token_texts([1])
        with pytest.raises(EngineRejected, match="no /tokenize"):
            await engine.count_tokens(chat("x"))
        await engine.close()
    assert (info.kind, info.trainable, reply.reply.text, texts) == ("openai", False, "hello", {})
    assert reply.prompt_ids is None and reply.sampled_ids is None and reply.logprobs is None
    assert not {"top_k", "min_p", "repetition_penalty", "return_token_ids"} & set(app.body)


async def test_version_of_the_weights_is_that_before_and_after_the_call_and_salts_the_cache() -> None:
    script = Script(sessions={"s": [Step(text="abc"), Step(text="abc", hold=True)]}, policy_version="7")
    async with engine_on(script) as (engine, app):
        reply = await engine.generate(ask("one"))
        assert reply.policy_spans == [PolicySpan("7", 0, 4)]
        assert msgspec.json.decode(app.bodies[-1])["cache_salt"] == "7"
        begun = app.desk.started
        call = asyncio.create_task(engine.generate(ask("one", "two", "three")))
        await app.desk.until(lambda: app.desk.started == begun + 1)
        app.desk.policy_version = "8"
        app.desk.release()
        assert (await call).policy_spans == [PolicySpan("7..8", 0, 4)]

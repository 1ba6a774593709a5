"""The scripted engine in process."""

import asyncio

import msgspec
import numpy as np
import pytest

from polynya.dialects.neutral import ChatRequest
from polynya.dialects.wire import chat_message
from polynya.engines.base import EffectiveSampling, Engine, EngineRequest
from polynya.engines.scripted import Fault, Script, ScriptedEngine, Step
from polynya.errors import ContextOverflow, EngineProtocolError, EngineRejected, EngineUnavailable
from polynya.tokens.printed import GivenIds


def ask(text: str = "hi", affinity: str = "s", **rest: object) -> EngineRequest:
    chat = ChatRequest(dialect="chat", model="m", messages=[chat_message("user", text=text)])
    return EngineRequest(chat=chat, sampling=EffectiveSampling(), affinity=affinity, **rest)  # type: ignore[arg-type]


async def started(script: Script) -> ScriptedEngine:
    engine = ScriptedEngine(script)
    await engine.start()
    return engine


async def test_it_is_an_engine_and_says_what_it_is() -> None:
    engine: Engine = ScriptedEngine()
    with pytest.raises(RuntimeError, match="not started"):
        _ = engine.info
    info = await engine.start()
    assert isinstance(engine, Engine)
    assert (info.kind, info.trainable, info.token_in) == ("scripted", True, True)


async def test_a_reply_is_what_the_script_expects() -> None:
    engine = await started(Script(steps=[Step(text="hello")]))
    reply = await engine.generate(ask())
    expected = engine.script.expected("s", 0)
    assert np.array_equal(reply.sampled_ids, expected.sampled_ids)
    assert np.array_equal(reply.logprobs, expected.logprobs)
    assert reply.prompt_ids is not None and reply.prompt_ids.size == await engine.count_tokens(ask().chat)
    assert reply.reply.usage.prompt_tokens == reply.prompt_ids.size


async def test_given_prompt_ids_are_conditioned_on_and_echoed() -> None:
    engine = await started(Script())
    prompt = np.array([258, 7, 256, 259], dtype=np.int32)
    reply = await engine.generate(ask(prompt=GivenIds(prompt)))
    assert np.array_equal(reply.prompt_ids, prompt)
    assert engine.desk.calls[-1].token_in


async def test_an_engine_without_token_in_renders_the_messages() -> None:
    engine = await started(Script(token_in=False))
    reply = await engine.generate(ask(prompt=GivenIds(np.array([1, 2], dtype=np.int32))))
    assert reply.prompt_ids is not None and reply.prompt_ids.size != 2


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault(kind="http_error"), EngineUnavailable),
        (Fault(kind="http_error", status=429, retry_after="2"), EngineUnavailable),
        (Fault(kind="http_error", status=422), EngineRejected),
        (Fault(kind="overflow"), ContextOverflow),
        (Fault(kind="reset"), EngineUnavailable),
        (Fault(kind="bad_json"), EngineProtocolError),
    ],
)
async def test_a_fault_of_the_whole_call_is_its_error(fault: Fault, error: type[Exception]) -> None:
    engine = await started(Script(steps=[Step(text="x", fault=fault)]))
    with pytest.raises(error):
        await engine.generate(ask())
    assert engine.in_flight == 0


async def test_a_fault_lasts_for_its_number_of_attempts() -> None:
    engine = await started(Script(steps=[Step(text="x", fault=Fault(kind="http_error", times=1))]))
    with pytest.raises(EngineUnavailable):
        await engine.generate(ask())
    assert (await engine.generate(ask())).reply.text == "x"


async def test_faults_spoil_ids_and_logprobs() -> None:
    kinds = ["no_ids", "no_prompt_ids", "no_logprobs", "short_logprobs", "nan_logprob", "echo_mismatch"]
    sessions = {kind: [Step(text="abc", fault=Fault(kind=kind))] for kind in kinds}
    engine = await started(msgspec.structs.replace(Script(), sessions=sessions))
    got = {kind: await engine.generate(ask(affinity=kind)) for kind in kinds}
    assert got["no_ids"].sampled_ids is None and got["no_ids"].prompt_ids is None
    assert got["no_prompt_ids"].prompt_ids is None and got["no_prompt_ids"].sampled_ids is not None
    assert got["no_logprobs"].logprobs is None
    assert got["short_logprobs"].logprobs is not None and got["short_logprobs"].logprobs.size == 3
    assert got["nan_logprob"].logprobs is not None and np.isnan(got["nan_logprob"].logprobs[0])
    rendered = await engine.render_ids(ask().chat)
    assert not np.array_equal(got["echo_mismatch"].prompt_ids, rendered)


async def test_a_prompt_beyond_the_window_overflows() -> None:
    engine = await started(Script(window=10))
    with pytest.raises(ContextOverflow, match="maximum context length is 10 tokens"):
        await engine.generate(ask("a long question"))


async def test_a_cancelled_call_is_counted_as_aborted() -> None:
    engine = await started(Script(steps=[Step(text="x", fault=Fault(kind="hang"))]))
    call = asyncio.create_task(engine.generate(ask()))
    await engine.until(lambda: engine.in_flight == 1)
    call.cancel()
    await engine.until(lambda: engine.desk.aborted == 1)
    assert engine.in_flight == 0


async def test_a_held_call_answers_after_release() -> None:
    engine = await started(Script(steps=[Step(text="x", hold=True)]))
    call = asyncio.create_task(engine.generate(ask()))
    await engine.until(lambda: engine.in_flight == 1)
    assert not call.done()
    engine.desk.release()
    assert (await call).reply.text == "x"


async def test_the_policy_version_spans_the_sampled_ids() -> None:
    engine = await started(Script(steps=[Step(text="ab")], policy_version="v1"))
    span = (await engine.generate(ask())).policy_spans[0]
    assert (span.version, span.start, span.end) == ("v1", 0, 3)


async def test_ids_have_display_texts() -> None:
    assert await ScriptedEngine().token_texts([97, 256]) == {97: "a", 256: "<|end|>"}

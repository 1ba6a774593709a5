"""The ways by which a prompt of ids reaches a server, over real HTTP against the scripted server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from polynya.dialects.neutral import ToolCall
from polynya.engines.compatible import CompatibleEngine
from polynya.engines.routes import Route
from polynya.engines.scripted import Script, ScriptedCall, Step, serve, tokens
from polynya.errors import ConfigError, EngineProtocolError, NotContinuable
from polynya.schema import PolicySpan

from .asking import BASH, ask
from .routed import RoutedApp

ACTS = Step(text="Now.", reasoning="hm", tool_calls=[ScriptedCall(name="bash", arguments='{"command": "ls"}')])
PROMPT = tokens.render([tokens.WireMessage(role="user", content="go on from here")])
DEAF = {"token_in": False}


@asynccontextmanager
async def engine_on(app: RoutedApp, token_route: Route | None = None) -> AsyncIterator[CompatibleEngine]:
    async with serve(app) as url:
        engine = CompatibleEngine(url, token_route=token_route)
        try:
            await engine.start()
            yield engine
        finally:
            await engine.close()


@pytest.mark.parametrize(
    ("app", "route"),
    [
        (RoutedApp(Script(), "generate", "completions"), "chat"),
        (RoutedApp(Script(**DEAF), "generate", "completions"), "generate"),
        (RoutedApp(Script(**DEAF), "completions"), "completions"),
        (RoutedApp(Script(**DEAF)), ""),
    ],
    ids=["chat", "generate", "completions", "none"],
)
async def test_the_first_route_that_conditions_on_the_ids_is_used(app: RoutedApp, route: str) -> None:
    async with engine_on(app) as engine:
        assert (engine.token_route, engine.info.token_in) == (route, bool(route))


@pytest.mark.parametrize("route", ["generate", "completions"])
async def test_a_reply_comes_back_with_its_thought_its_call_and_its_own_ids(route: str) -> None:
    app = RoutedApp(Script(steps=[ACTS], **DEAF), route)
    async with engine_on(app) as engine:
        reply = await engine.generate(ask("hi", tools=[BASH], prompt_ids=PROMPT))
    said = reply.reply
    assert (said.text, said.reasoning, said.finish_reason) == ("Now.", "hm", "tool_calls")
    (call,) = said.tool_calls
    assert call == ToolCall(id=call.id, name="bash", arguments='{"command": "ls"}') and call.id
    assert reply.prompt_ids is not None and np.array_equal(reply.prompt_ids, PROMPT)
    expected = app.script.expected("", 0)
    assert reply.sampled_ids is not None and np.array_equal(reply.sampled_ids, expected.sampled_ids)
    assert reply.logprobs is not None and np.array_equal(reply.logprobs, expected.logprobs)


@pytest.mark.parametrize("route", ["generate", "completions"])
async def test_equal_replies_behind_other_prompts_have_calls_of_other_ids(route: str) -> None:
    async with engine_on(RoutedApp(Script(steps=[ACTS], **DEAF), "completions")) as engine:
        longer = np.concatenate([PROMPT[:-1], PROMPT])
        ids = [
            (await engine.generate(ask("hi", tools=[BASH], prompt_ids=prompt))).reply.tool_calls[0].id
            for prompt in (PROMPT, longer, PROMPT)
        ]
    assert ids[0] != ids[1] and ids[0] == ids[2]


async def test_generate_sends_the_sampling_that_the_engine_made_of_the_request_and_the_given_ids() -> None:
    app = RoutedApp(Script(steps=[Step(text="abc")], window=4096, **DEAF), "generate")
    async with engine_on(app) as engine:
        app.asked.clear()
        request = ask("hi", prompt_ids=PROMPT, temperature=0.5, seed=3)
        await engine.generate(request)
        await engine.generate(ask("hi", prompt_ids=PROMPT, max_tokens=2))
    generated = [asked for path, asked in app.asked if path.endswith("generate")]
    rendered = [asked for path, asked in app.asked if path.endswith("/render")]
    assert (rendered[0]["temperature"], rendered[0]["seed"]) == (0.5, 3)
    assert generated[0]["token_ids"] == PROMPT.tolist()
    assert generated[0]["sampling_params"] == {"temperature": 1.0, "max_tokens": 4096 - PROMPT.size, "logprobs": 0}
    assert generated[1]["sampling_params"]["max_tokens"] == 2
    assert generated[0]["return_token_ids"] is True
    assert generated[0]["cache_salt"] == "default"


@pytest.mark.parametrize(
    ("spoils", "text"),
    [
        ({}, "say stop here"),
        ({"stop_reason": "stop"}, "say "),
        ({"stop_reason": 256}, "say stop here"),
        ({"token_ids": [256], "logprobs": {"content": [{"token_id": 256, "logprob": -0.5}]}}, ""),
        ({"token_ids": [], "logprobs": {"content": []}}, ""),
    ],
    ids=["turn's end", "stop string", "stop token", "nothing but the turn's end", "nothing"],
)
async def test_generate_says_neither_the_turns_end_nor_the_stop_string(spoils: dict[str, Any], text: str) -> None:
    app = RoutedApp(Script(steps=[Step(text="say stop here")], **DEAF), "generate")
    async with engine_on(app) as engine:
        app.spoils = spoils
        reply = await engine.generate(ask("hi", prompt_ids=PROMPT))
    assert reply.reply.text == text
    assert reply.sampled_ids is not None and reply.sampled_ids.tolist()[-1:] in ([256], [])


async def test_generate_says_which_weights_sampled_which_token() -> None:
    app = RoutedApp(Script(steps=[Step(text="abcdef")], **DEAF), "generate")
    app.weights = [{"version": 7, "start": 0, "end": 4}, {"version": "8", "start": 4, "end": 7}]
    async with engine_on(app) as engine:
        reply = await engine.generate(ask("hi", prompt_ids=PROMPT))
    assert reply.policy_spans == [PolicySpan("7", 0, 4), PolicySpan("8", 4, 7)]


async def test_generate_carries_calls_of_messages_too_where_it_was_asked_for() -> None:
    app = RoutedApp(Script(steps=[Step(text="abc")]), "generate")
    app.weights = [{"version": "7", "start": 0, "end": 4}]
    async with engine_on(app, Route.GENERATE) as engine:
        reply = await engine.generate(ask("hello"))
        asked = await engine.render_ids(ask("hello").chat)
    assert reply.prompt_ids is not None and np.array_equal(reply.prompt_ids, asked)
    assert (reply.reply.text, reply.policy_spans) == ("abc", [PolicySpan("7", 0, 4)])


async def test_a_route_that_was_asked_for_and_does_not_work_is_an_error_with_the_fix() -> None:
    with pytest.raises(ConfigError, match=r"'generate'.*--enable-scale-out"):
        async with engine_on(RoutedApp(Script(), "completions"), Route.GENERATE):
            pass


@pytest.mark.parametrize(
    ("spoils", "words"),
    [
        ({"logprobs": {"content": [{"token_id": 1, "logprob": -0.5}]}}, "names other ids"),
        ({"token_ids": [2**40]}, "32 bits"),
    ],
)
async def test_generate_refuses_what_cannot_be_aligned(spoils: dict[str, Any], words: str) -> None:
    app = RoutedApp(Script(steps=[Step(text="abc")], **DEAF), "generate")
    async with engine_on(app) as engine:
        app.spoils = spoils
        with pytest.raises(EngineProtocolError, match=words):
            await engine.generate(ask("hi", prompt_ids=PROMPT))


async def test_ids_or_logprobs_that_are_absent_stay_absent() -> None:
    app = RoutedApp(Script(steps=[Step(text="abc")], **DEAF), "generate", "completions")
    async with engine_on(app) as engine:
        app.spoils = {"logprobs": None}
        assert (await engine.generate(ask("hi", prompt_ids=PROMPT))).logprobs is None
        app.spoils = {}
        assert await engine.step_down("generate") == "completions"
        app.spoils = {"logprobs": None, "token_ids": None}
        reply = await engine.generate(ask("hi", prompt_ids=PROMPT))
    assert (reply.logprobs, reply.sampled_ids) == (None, None)


async def test_completions_carries_no_forced_tool_and_no_response_format() -> None:
    app = RoutedApp(Script(steps=[ACTS], **DEAF), "completions")
    async with engine_on(app) as engine:
        request = ask("hi", tools=[BASH], prompt_ids=PROMPT)
        forced = msgspec.structs.replace(request.chat, tool_choice=msgspec.Raw(b'"required"'))
        with pytest.raises(NotContinuable):
            await engine.generate(msgspec.structs.replace(request, chat=forced))


async def test_completions_carries_no_tools_where_our_parser_does_not_read_the_templates_calls() -> None:
    async with engine_on(RoutedApp(Script(steps=[ACTS], **DEAF), "completions", hermes=False)) as engine:
        with pytest.raises(NotContinuable, match="cannot be read"):
            await engine.generate(ask("hi", tools=[BASH], prompt_ids=PROMPT))
        assert (await engine.generate(ask("hi", prompt_ids=PROMPT))).sampled_ids is not None


async def test_stepping_down_goes_to_the_next_route_that_works_and_only_once_for_each() -> None:
    app = RoutedApp(Script(), "generate", "completions")
    async with engine_on(app) as engine:
        app.obeys = False
        assert [await engine.step_down("chat"), await engine.step_down("chat")] == ["generate", "generate"]
        assert [await engine.step_down("generate"), await engine.step_down("completions")] == ["completions", ""]
        assert await engine.step_down("") == ""

"""Each failure as the SDK's own exception class, with a message that a person can act on; streamed or not, sync or async."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest
from google.genai import errors as google

from polynya.engines.scripted import Fault, Script, Step
from polynya.schema import Budgets

from .clients import SURFACES, Async, Sync, asking, clients, words

MakeRig = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
"""The SDKs' own."""
OK = Script(steps=[Step(text="ok")])
CLASSES: dict[int, tuple[type[Exception], type[Exception], type[Exception]]] = {
    400: (openai.BadRequestError, anthropic.BadRequestError, google.ClientError),
    401: (openai.AuthenticationError, anthropic.AuthenticationError, google.ClientError),
    404: (openai.NotFoundError, anthropic.NotFoundError, google.ClientError),
    410: (openai.APIStatusError, anthropic.APIStatusError, google.ClientError),
    413: (openai.APIStatusError, anthropic.RequestTooLargeError, google.ClientError),
    429: (openai.RateLimitError, anthropic.RateLimitError, google.ClientError),
    500: (openai.InternalServerError, anthropic.InternalServerError, google.ServerError),
    503: (openai.InternalServerError, anthropic.InternalServerError, google.ServerError),
}
surfaces = pytest.mark.parametrize("dialect", SURFACES)
kinds = pytest.mark.parametrize("kind", [Sync, Async])
streams = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


async def failure(
    base: str, dialect: str, kind: Any = Async, *, key: str = "x", stream: bool = False, **fields: Any
) -> Exception:
    async with clients(kind, base, key) as sdk:
        with pytest.raises(Exception) as caught:
            await sdk.ask(dialect, fields or asking(dialect, [words(dialect, "go")]), stream=stream)
    return caught.value


def assert_is(error: Exception, dialect: str, status: int, *said: str) -> None:
    column = {"anthropic_messages": 1, "google_generate": 2}.get(dialect, 0)
    assert isinstance(error, CLASSES[status][column]), (type(error), error)
    assert (getattr(error, "status_code", None) or getattr(error, "code", None)) == status
    for words_ in said:
        assert words_ in str(error), str(error)


@surfaces
@kinds
@streams
async def test_key_that_was_never_issued_is_401(make_rig: MakeRig, dialect: str, kind: Any, stream: bool) -> None:
    rig = await make_rig(OK)
    error = await failure(rig.gateway.url, dialect, kind, key="sk-own", stream=stream)
    assert_is(error, dialect, 401, "unknown session key", "/s/<key>")


@surfaces
@streams
async def test_key_that_has_ended_is_410(make_rig: MakeRig, dialect: str, stream: bool) -> None:
    rig = await make_rig(OK)
    agent = await rig.open()
    await rig.gateway.close_session(agent.session)
    error = await failure(rig.gateway.base_url(agent.key), dialect, stream=stream)
    assert_is(error, dialect, 410, "this session has ended")


@surfaces
@kinds
@streams
async def test_bad_request_names_the_field(make_rig: MakeRig, dialect: str, kind: Any, stream: bool) -> None:
    rig = await make_rig(OK)
    agent = await rig.open()
    fields = asking(dialect, [words(dialect, "go")])
    if dialect == "google_generate":
        fields["config"].candidate_count = 3
        named = "generationConfig.candidateCount"
    else:
        fields["extra_body"] = {"max_output_tokens" if dialect == "openai_responses" else "max_tokens": 0}
        named = "max_output_tokens" if dialect == "openai_responses" else "max_tokens"
    error = await failure(rig.gateway.base_url(agent.key), dialect, kind, stream=stream, **fields)
    assert_is(error, dialect, 400, named)
    assert agent.session.flags["bad_requests"] == 1


@pytest.mark.parametrize("kind", [Sync, Async])
async def test_path_that_is_not_served_is_404_in_each_sdks_shape(make_rig: MakeRig, kind: Any) -> None:
    rig = await make_rig(OK)
    agent = await rig.open()
    async with clients(kind, rig.gateway.base_url(agent.key)) as made:
        sdk: Any = made
        asked = {
            "openai_chat": (sdk.openai.embeddings.create, {"model": "m", "input": "x"}),
            "anthropic_messages": (sdk.anthropic.messages.batches.create, {"requests": []}),
            "google_generate": (sdk.google.models.embed_content, {"model": "m", "contents": "x"}),
        }
        for dialect, (call, fields) in asked.items():
            with pytest.raises(Exception) as caught:
                await (call(**fields) if kind is Async else asyncio.to_thread(call, **fields))
            assert_is(caught.value, dialect, 404, "is not served; POST to one of")


@surfaces
@streams
async def test_body_above_the_limit_is_413(make_rig: MakeRig, dialect: str, stream: bool) -> None:
    rig = await make_rig(OK, max_body_bytes=100_000)
    agent = await rig.open()
    fields = asking(dialect, [words(dialect, "x" * 3_000_000)])
    error = await failure(rig.gateway.base_url(agent.key), dialect, stream=stream, **fields)
    assert_is(error, dialect, 413, "larger than 100000 bytes")


@surfaces
@streams
async def test_budget_long_spent_is_429(make_rig: MakeRig, dialect: str, stream: bool) -> None:
    rig = await make_rig(OK)
    agent = await rig.open(budgets=Budgets(calls=1))
    base = rig.gateway.base_url(agent.key)
    async with clients(Async, base) as sdk:
        for _ in range(5):
            await sdk.ask(dialect, asking(dialect, [words(dialect, "go")]), stream=stream)
    error = await failure(base, dialect, stream=stream)
    assert_is(error, dialect, 429, "budget is spent")


@surfaces
@kinds
@streams
async def test_prompt_that_does_not_fit_is_said_in_the_words_that_make_clients_compact(
    make_rig: MakeRig, dialect: str, kind: Any, stream: bool
) -> None:
    rig = await make_rig(Script(steps=[Step(fault=Fault(kind="overflow"))]))
    agent = await rig.open()
    error = await failure(rig.gateway.base_url(agent.key), dialect, kind, stream=stream)
    wanted = {"anthropic_messages": "prompt is too long", "google_generate": "exceeds the maximum number of tokens"}
    assert_is(error, dialect, 400, wanted.get(dialect, "context"))
    if isinstance(error, openai.APIStatusError):
        assert error.code == "context_length_exceeded"


@surfaces
@streams
@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (Fault(kind="http_error", status=503), 503),
        (Fault(kind="http_error", status=500), 503),
        (Fault(kind="http_error", status=429), 503),
        (Fault(kind="reset"), 503),
        (Fault(kind="http_error", status=422), 400),
        (Fault(kind="bad_json"), 500),
    ],
    ids=["503", "500", "429", "reset", "422", "unreadable"],
)
async def test_failure_of_the_engine_is_the_sdks_server_error(
    make_rig: MakeRig, dialect: str, stream: bool, fault: Fault, status: int
) -> None:
    """An upstream 429 is the gateway's to wait out: clients see 503 with Retry-After, since Codex gives up on a bare 429."""
    rig = await make_rig(Script(steps=[Step(fault=fault)]))
    agent = await rig.open()
    error = await failure(rig.gateway.base_url(agent.key), dialect, stream=stream)
    assert_is(error, dialect, status, "scripted")
    if status == 503 and not isinstance(error, google.APIError):
        assert int(error.response.headers["retry-after"]) >= 1  # type: ignore[attr-defined]


@surfaces
@kinds
async def test_failure_after_the_headers_is_raised_by_the_sdk(make_rig: MakeRig, dialect: str, kind: Any) -> None:
    """The stream had begun: the error is an event, which the SDK must not take for an end."""
    rig = await make_rig(
        Script(steps=[Step(text="never", hold=True)]), first_event_grace=0.0, engine_timeout_seconds=0.05
    )
    agent = await rig.open()
    if dialect == "openai_responses":
        # this SDK hands the terminal event on; it is the caller who looks at its type
        async with clients(kind, rig.gateway.base_url(agent.key)) as made:
            sdk: Any = made
            create, fields = sdk.openai.responses.create, asking(dialect, [words(dialect, "go")])
            if kind is Async:
                events = [event async for event in await create(**fields, stream=True)]
            else:
                events = await asyncio.to_thread(lambda: list(create(**fields, stream=True)))
        assert events[-1].type == "response.failed"
        assert "no answer in 0.05 s" in events[-1].response.error.message
        return
    error = await failure(rig.gateway.base_url(agent.key), dialect, kind, stream=True)
    assert isinstance(error, openai.APIError | anthropic.APIError | google.APIError), repr(error)
    assert "no answer in 0.05 s" in str(error)


async def test_failure_while_openais_helper_waits_is_a_failed_response_of_the_same_id(make_rig: MakeRig) -> None:
    rig = await make_rig(
        Script(steps=[Step(text="never", hold=True)]),
        first_event_grace=0.0,
        keepalive_seconds=0.01,
        engine_timeout_seconds=0.2,
    )
    agent = await rig.open()
    async with clients(Async, rig.gateway.base_url(agent.key)) as made:
        sdk: Any = made
        async with sdk.openai.responses.stream(model="m", input="go") as stream:
            events = [event async for event in stream]
    assert [events[0].type, events[-1].type] == ["response.created", "response.failed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert len({event.response.id for event in events}) == 1


@surfaces
async def test_sdk_that_retries_gets_its_answer_after_a_failure(make_rig: MakeRig, dialect: str) -> None:
    """With the SDKs' own retries: the first try fails, the second is a call of its own, and the outage is made good."""
    rig = await make_rig(Script(steps=[Step(text="ok", fault=Fault(kind="http_error", status=503, times=1))]))
    agent = await rig.open()
    async with clients(Async, rig.gateway.base_url(agent.key)) as made:
        sdk: Any = made
        sdk.openai, sdk.anthropic = sdk.openai.with_options(max_retries=2), sdk.anthropic.with_options(max_retries=2)
        if dialect == "google_generate":
            with pytest.raises(google.ServerError):
                await sdk.ask(dialect, asking(dialect, [words(dialect, "go")]), stream=False)
        said = await sdk.ask(dialect, asking(dialect, [words(dialect, "go")]), stream=False)
    assert said.text == "ok"
    assert [call.outcome for call in agent.session.capture.committed] == ["failed", "ok"]
    assert agent.session.engine_error == ""

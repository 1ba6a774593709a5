"""What the providers' SDKs offer, through the gateway: each surface, sync and async, whole and streamed."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from typing import Any

import pydantic
import pytest
from google.genai import types

from polynya.dialects.registry import DIALECTS
from polynya.engines.base import EngineReply, EngineRequest
from polynya.engines.scripted import Script, ScriptedCall, ScriptedEngine, Step
from polynya.schema import Exclusion

from . import seen
from .clients import SURFACES, Async, Sync, asking, clients, message, words

MakeRig = Callable[..., Any]
TEXT = "Ä reply.\n\n漢字 🙂 " + "words " * 150
REASONING = "  let me think\n" * 30
ONE = [ScriptedCall(name="bash", arguments='{"command": "ls", "n": 2}', id="call_1")]
TWO = [*ONE, ScriptedCall(name="read", arguments="{}", id="call_2")]
SCENES = {
    "text": Step(text=TEXT),
    "empty": Step(),
    "tool": Step(tool_calls=ONE),
    "parallel tools": Step(text=TEXT, tool_calls=TWO),
    "reasoning": Step(text=TEXT, reasoning=REASONING),
    "reasoning and tools": Step(reasoning=REASONING, tool_calls=TWO),
}
PNG = base64.b64encode(b"a picture").decode()
PDF = base64.b64encode(b"%PDF").decode()
TXT = base64.b64encode("Ä document".encode()).decode()
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
"""The SDKs' own."""
surfaces = pytest.mark.parametrize("dialect", SURFACES)
kinds = pytest.mark.parametrize("kind", [Sync, Async])
streams = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


class Keeping(ScriptedEngine):
    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.asked: list[EngineRequest] = []

    async def generate(self, request: EngineRequest) -> EngineReply:
        self.asked.append(request)
        return await super().generate(request)


@surfaces
@kinds
@streams
@pytest.mark.parametrize("scene", SCENES)
async def test_reply_is_what_the_model_said(
    make_rig: MakeRig, dialect: str, kind: Any, stream: bool, scene: str
) -> None:
    step = SCENES[scene]
    rig = await make_rig(Script(steps=[step]))
    agent = await rig.open()
    async with clients(kind, rig.gateway.base_url(agent.key)) as sdk:
        said = await sdk.ask(dialect, asking(dialect, [words(dialect, "go")], tools=["bash", "read"]), stream=stream)
    assert (said.text, said.reasoning) == (step.text, step.reasoning)
    assert [(i, name, json.loads(arguments)) for i, name, arguments in said.calls] == [
        (call.id, call.name, json.loads(call.arguments)) for call in step.tool_calls
    ]
    (call,) = agent.session.capture.calls
    assert said.usage == (len(call.prompt_ids), len(call.sampled_ids))
    assert call.exclusion is None
    stop = {"openai_responses": "completed", "google_generate": "STOP", "anthropic_messages": "end_turn"}
    calls = {"openai_chat": "tool_calls", "anthropic_messages": "tool_use"}
    plain = stop.get(dialect, "stop")
    assert said.finish == (calls.get(dialect, plain) if step.tool_calls else plain)


@surfaces
@kinds
async def test_stream_that_waited_is_read_like_any_other(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, dialect: str, kind: Any
) -> None:
    """No-op events before the reply: the SDKs' types hold, and the numbers of Responses' events go on."""
    step = Step(text=TEXT, reasoning=REASONING, tool_calls=TWO, hold=True)
    rig = await make_rig(Script(steps=[step]), keepalive_seconds=0.01, first_event_grace=0.0)
    agent = await rig.open()
    alive = count_keepalives(monkeypatch)
    async with clients(kind, rig.gateway.base_url(agent.key)) as sdk:
        fields = asking(dialect, [words(dialect, "go")], tools=["bash", "read"])
        asked = asyncio.create_task(sdk.ask(dialect, fields, stream=True))
        await rig.until(lambda: alive() >= 4)
        rig.engine.desk.release()
        said = await asked
    assert (said.text, said.reasoning, len(said.calls)) == (step.text, step.reasoning, 2)


@pytest.mark.parametrize("dialect", ["openai_chat", "openai_responses", "anthropic_messages"])
async def test_stream_that_waited_is_gathered_by_the_sdks_own_helper(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, dialect: str
) -> None:
    """The helpers are stricter than the raw streams: OpenAI's wants ``response.created`` before anything else."""
    rig = await make_rig(Script(steps=[Step(text=TEXT, hold=True)]), keepalive_seconds=0.01, first_event_grace=0.0)
    agent = await rig.open()
    alive = count_keepalives(monkeypatch)

    async def ask(sdk: Any) -> Any:
        opened = {
            "openai_chat": sdk.openai.chat.completions.stream,
            "openai_responses": sdk.openai.responses.stream,
            "anthropic_messages": sdk.anthropic.messages.stream,
        }[dialect]
        async with opened(**asking(dialect, [words(dialect, "go")])) as stream:
            match dialect:
                case "openai_chat":
                    return (await stream.get_final_completion()).choices[0].message.content
                case "openai_responses":
                    return (await stream.get_final_response()).output_text
            return await stream.get_final_text()

    async with clients(Async, rig.gateway.base_url(agent.key)) as sdk:
        asked = asyncio.create_task(ask(sdk))
        await rig.until(lambda: alive() >= 4)
        rig.engine.desk.release()
        assert await asked == TEXT


async def test_response_that_waited_can_be_named_as_the_previous_one(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await make_rig(
        engine=Keeping(Script(steps=[Step(text="one", hold=True)])), keepalive_seconds=0.01, first_event_grace=0.0
    )
    agent = await rig.open()
    alive = count_keepalives(monkeypatch)

    async def ask(sdk: Any) -> list[Any]:
        return [event async for event in await sdk.openai.responses.create(model="m", input="go", stream=True)]

    async with clients(Async, rig.gateway.base_url(agent.key)) as made:
        sdk: Any = made
        asked = asyncio.create_task(ask(sdk))
        await rig.until(lambda: alive() >= 2)
        rig.engine.desk.release()
        events = await asked
        ids = {event.response.id for event in events if hasattr(event, "response")}
        assert len(ids) == 1
        await sdk.openai.responses.create(model="m", input="more", previous_response_id=ids.pop())
    said = [json.loads(bytes(message.raw))["content"] for message in rig.engine.asked[-1].chat.messages]
    assert said == ["go", "one", "more"]


def count_keepalives(patch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many no-op events the gateway sent so far."""
    sent: list[int] = []
    for name, dialect in list(DIALECTS.items()):

        class Counted(type(dialect)):  # type: ignore[misc]
            def keepalive(self, head: Any, number: int = 1) -> bytes:
                sent.append(number)
                return bytes(super().keepalive(head, number))

        patch.setitem(DIALECTS, name, Counted())
    return lambda: len(sent)


@surfaces
@streams
async def test_cut_reply_says_so(make_rig: MakeRig, dialect: str, stream: bool) -> None:
    rig = await make_rig(Script(steps=[Step(text=TEXT)]))
    agent = await rig.open()
    limit = {
        "openai_chat": "max_completion_tokens",
        "anthropic_messages": "max_tokens",
    }.get(dialect, "max_output_tokens")
    async with clients(Async, rig.gateway.base_url(agent.key)) as sdk:
        said = await sdk.ask(dialect, asking(dialect, [words(dialect, "go")], **{limit: 5}), stream=stream)
    assert said.finish in ("length", "incomplete", "max_tokens", "MAX_TOKENS")
    assert said.usage[1] == 5


def image(dialect: str) -> Any:
    match dialect:
        case "openai_chat":
            return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
        case "openai_responses":
            return {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}", "detail": "auto"}
        case "anthropic_messages":
            return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    return types.Part.from_bytes(data=b"a picture", mime_type="image/png")


def document(dialect: str, mime_type: str, data: str) -> Any:
    match dialect:
        case "openai_chat":
            return {"type": "file", "file": {"filename": "d", "file_data": f"data:{mime_type};base64,{data}"}}
        case "openai_responses":
            return {"type": "input_file", "filename": "d", "file_data": f"data:{mime_type};base64,{data}"}
        case "anthropic_messages" if mime_type == "text/plain":
            text = base64.b64decode(data).decode()
            return {"type": "document", "source": {"type": "text", "media_type": mime_type, "data": text}}
        case "anthropic_messages":
            return {"type": "document", "source": {"type": "base64", "media_type": mime_type, "data": data}}
    return types.Part.from_bytes(data=base64.b64decode(data), mime_type=mime_type)


@surfaces
@kinds
async def test_images_and_text_documents_reach_the_model(make_rig: MakeRig, dialect: str, kind: Any) -> None:
    rig = await make_rig(engine=Keeping(Script(steps=[Step(text="seen")])))
    agent = await rig.open()
    parts = [words(dialect, "one"), image(dialect), document(dialect, "text/plain", TXT), image(dialect)]
    async with clients(kind, rig.gateway.base_url(agent.key)) as sdk:
        assert (await sdk.ask(dialect, asking(dialect, parts), stream=False)).text == "seen"
    picture = ("image", f"data:image/png;base64,{PNG}")
    assert seen.engine_saw(rig.engine.asked[0].chat).pieces == [
        ("text", "one"),
        picture,
        ("text", "Ä document"),
        picture,
    ]


@surfaces
@pytest.mark.parametrize("what", ["image", "pdf"])
async def test_what_cannot_be_passed_is_the_sdks_bad_request(make_rig: MakeRig, dialect: str, what: str) -> None:
    rig = await make_rig(Script(steps=[Step(text="blind")], images=False))
    agent = await rig.open()
    part = image(dialect) if what == "image" else document(dialect, "application/pdf", PDF)
    async with clients(Async, rig.gateway.base_url(agent.key)) as sdk:
        with pytest.raises(Exception) as caught:
            await sdk.ask(dialect, asking(dialect, [words(dialect, "see"), part]), stream=True)
    status = getattr(caught.value, "status_code", None) or getattr(caught.value, "code", None)
    assert status == 400
    container = {"openai_responses": "input[0].content[1]", "google_generate": "contents[0].parts[1]"}
    assert container.get(dialect, "messages[0].content[1]") in str(caught.value)


class Weather(pydantic.BaseModel):
    city: str
    degrees: int


@surfaces
async def test_json_mode_is_passed_on_and_read_as_a_model(make_rig: MakeRig, dialect: str) -> None:
    """The SDKs' own helpers; a reply that a grammar shaped is captured and not trained."""
    rig = await make_rig(engine=Keeping(Script(steps=[Step(text='{"city":"Bergen","degrees":4}')])))
    agent = await rig.open()
    wanted = Weather(city="Bergen", degrees=4)
    async with clients(Async, rig.gateway.base_url(agent.key)) as made:
        sdk: Any = made
        parts = [words(dialect, "weather?")]
        match dialect:
            case "openai_chat":
                chat = await sdk.openai.chat.completions.parse(**asking(dialect, parts), response_format=Weather)
                got = chat.choices[0].message.parsed
            case "openai_responses":
                got = (await sdk.openai.responses.parse(**asking(dialect, parts), text_format=Weather)).output_parsed
            case "anthropic_messages":
                parsed = await sdk.anthropic.messages.parse(**asking(dialect, parts), output_format=Weather)
                got = parsed.parsed_output
            case _:
                fields = asking(dialect, parts, response_mime_type="application/json", response_schema=Weather)
                got = (await sdk.google.models.generate_content(**fields)).parsed
    assert got == wanted
    shape = json.loads(bytes(rig.engine.asked[0].chat.response_format))
    assert shape["type"] == "json_schema"
    schema = shape["json_schema"]["schema"]
    assert (schema["type"], set(schema["properties"])) == ("object", {"city", "degrees"})
    assert agent.session.capture.calls[0].exclusion == Exclusion.GRAMMAR_MASKED


@pytest.mark.parametrize("dialect", ["openai_chat", "anthropic_messages", "google_generate"])
async def test_stop_sequences_and_sampling_reach_the_engine(make_rig: MakeRig, dialect: str) -> None:
    rig = await make_rig(engine=Keeping(Script(steps=[Step(text="ok")])))
    agent = await rig.open()
    stop = {"openai_chat": "stop"}.get(dialect, "stop_sequences")
    warm = {"temperature": 0.25, "top_p": 0.5}
    # the newest Anthropic SDK has no such arguments any more; older ones and other clients send the fields
    warm = {"extra_body": warm} if dialect == "anthropic_messages" else warm
    fields = asking(dialect, [words(dialect, "go")], **{stop: ["END", "\n\n"]}, **warm)
    async with clients(Async, rig.gateway.base_url(agent.key)) as sdk:
        await sdk.ask(dialect, fields, stream=False)
    sampling = rig.engine.asked[0].sampling
    assert (sampling.stop, sampling.temperature, sampling.top_p) == (["END", "\n\n"], 0.25, 0.5)


async def _either(kind: Any, call: Any, **fields: Any) -> Any:
    return await (call(**fields) if kind is Async else asyncio.to_thread(call, **fields))


@kinds
async def test_tokens_are_counted_as_the_real_call_has_them(make_rig: MakeRig, kind: Any) -> None:
    rig = await make_rig(Script(steps=[Step(text="ok")]))
    agent = await rig.open()
    async with clients(kind, rig.gateway.base_url(agent.key)) as made:
        sdk: Any = made
        for dialect in ("openai_responses", "anthropic_messages", "google_generate"):
            parts = [words(dialect, "how long is this?")]
            real = await sdk.ask(dialect, asking(dialect, parts), stream=False)
            count, field = {
                "openai_responses": (sdk.openai.responses.input_tokens.count, "input"),
                "anthropic_messages": (sdk.anthropic.messages.count_tokens, "messages"),
                "google_generate": (sdk.google.models.count_tokens, "contents"),
            }[dialect]
            counted = await _either(kind, count, model="m", **{field: message(dialect, parts)})
            number = counted.total_tokens if dialect == "google_generate" else counted.input_tokens
            assert number == real.usage[0]
    assert len(agent.session.capture.calls) == 3


@kinds
async def test_models_are_listed(make_rig: MakeRig, kind: Any) -> None:
    rig = await make_rig()
    agent = await rig.open()
    async with clients(kind, rig.gateway.base_url(agent.key)) as made:
        sdk: Any = made
        for client in (sdk.openai, sdk.anthropic):
            page = await _either(kind, client.models.list)
            assert [model.id for model in page.data] == ["scripted"]

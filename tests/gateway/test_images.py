"""Images and documents in each dialect: passed in order to an engine that takes them, else refused by their place."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest

from polynya.engines.base import EngineReply, EngineRequest
from polynya.engines.scripted import Script, ScriptedEngine, Step

MakeRig = Callable[..., Any]
PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "anthropic": "/v1/messages",
    "google": "/v1beta/models/m:generateContent",
}
TYPES = {"png": "image/png", "pdf": "application/pdf", "txt": "text/plain", "wav": "audio/wav"}


class Keeping(ScriptedEngine):
    def __init__(self, *, images: bool = True) -> None:
        super().__init__(Script(steps=[Step(text="seen")], images=images))
        self.asked: list[EngineRequest] = []

    async def generate(self, request: EngineRequest) -> EngineReply:
        self.asked.append(request)
        return await super().generate(request)

    def parts(self) -> list[tuple[str, str]]:
        """Role and text or image of each part that the model saw."""
        found = []
        for message in self.asked[-1].chat.messages:
            sent = json.loads(bytes(message.raw))
            content = sent["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
            found += [(sent["role"], part.get("text") or part["image_url"]["url"]) for part in parts]
        return found


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def url(kind: str, text: str) -> str:
    return f"data:{TYPES[kind]};base64,{b64(text)}"


def part(dialect: str, kind: str, text: str) -> dict[str, Any]:
    """One part of the dialect: ``say`` for text, else a file of that kind."""
    if dialect == "chat":
        return {
            "say": {"type": "text", "text": text},
            "png": {"type": "image_url", "image_url": {"url": url("png", text), "detail": "low"}},
            "wav": {"type": "input_audio", "input_audio": {"data": b64(text), "format": "wav"}},
        }.get(kind) or {"type": "file", "file": {"filename": f"f.{kind}", "file_data": url(kind, text)}}
    if dialect == "responses":
        return {
            "say": {"type": "input_text", "text": text},
            "png": {"type": "input_image", "image_url": url("png", text), "detail": "auto"},
        }.get(kind) or {"type": "input_file", "filename": f"f.{kind}", "file_data": url(kind, text)}
    if dialect == "anthropic":
        source = {"type": "base64", "media_type": TYPES.get(kind, ""), "data": b64(text)}
        return {"say": {"type": "text", "text": text}, "png": {"type": "image", "source": source}}.get(kind) or {
            "type": "document",
            "source": source,
        }
    return {"text": text} if kind == "say" else {"inlineData": {"mimeType": TYPES[kind], "data": b64(text)}}


def body(dialect: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    match dialect:
        case "responses":
            return {"model": "m", "input": [{"role": "user", "content": parts}]}
        case "google":
            return {"contents": [{"role": "user", "parts": parts}]}
    return {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": parts}]}


def place(dialect: str, index: int) -> str:
    where = {"responses": "input[0].content", "google": "contents[0].parts"}.get(dialect, "messages[0].content")
    return f"{where}[{index}]"


async def post(rig: Any, agent: Any, dialect: str, sent: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with rig.client.post(rig.gateway.base_url(agent.key) + PATHS[dialect], json=sent) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("dialect", PATHS)
async def test_images_reach_the_model_in_order_between_the_texts(make_rig: MakeRig, dialect: str) -> None:
    rig = await make_rig(engine=Keeping())
    agent = await rig.open()
    kinds = [("say", "one"), ("png", "A"), ("say", "two"), ("png", "B"), ("png", "C")]
    status, _ = await post(rig, agent, dialect, body(dialect, [part(dialect, kind, text) for kind, text in kinds]))
    assert status == 200
    wanted = [("user", text if kind == "say" else url("png", text)) for kind, text in kinds]
    assert rig.engine.parts() == wanted
    (call,) = agent.session.capture.calls
    assert call.exclusion is None


@pytest.mark.parametrize("dialect", PATHS)
async def test_engine_without_eyes_refuses_an_image_by_its_place(make_rig: MakeRig, dialect: str) -> None:
    rig = await make_rig(engine=Keeping(images=False))
    agent = await rig.open()
    status, reply = await post(
        rig, agent, dialect, body(dialect, [part(dialect, "say", "see"), part(dialect, "png", "A")])
    )
    assert status == 400
    assert place(dialect, 1) in reply["error"]["message"] and "takes no images" in reply["error"]["message"]
    assert agent.session.capture.calls == [] and rig.engine.asked == []


@pytest.mark.parametrize("dialect", PATHS)
async def test_document_that_is_text_is_passed_as_text(make_rig: MakeRig, dialect: str) -> None:
    rig = await make_rig(engine=Keeping(images=False))
    agent = await rig.open()
    sent = body(dialect, [part(dialect, "say", "read"), part(dialect, "txt", "Ä line\nanother")])
    status, _ = await post(rig, agent, dialect, sent)
    assert status == 200
    assert "\n".join(text for _, text in rig.engine.parts()) == "read\nÄ line\nanother"


@pytest.mark.parametrize("kind", ["pdf", "wav"])
@pytest.mark.parametrize("dialect", PATHS)
async def test_document_or_audio_that_is_no_text_is_refused_by_its_place(
    make_rig: MakeRig, dialect: str, kind: str
) -> None:
    rig = await make_rig(engine=Keeping())
    agent = await rig.open()
    status, reply = await post(
        rig, agent, dialect, body(dialect, [part(dialect, "say", "x"), part(dialect, kind, "y")])
    )
    assert status == 400
    assert place(dialect, 1) in reply["error"]["message"]
    assert agent.session.capture.calls == []


@pytest.mark.parametrize(
    ("dialect", "sent", "named"),
    [
        ("chat", {"type": "file", "file": {"file_id": "file-1"}}, "a file by id"),
        ("chat", {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}, "http://127.0.0.1/x.png"),
        ("chat", {"type": "image_url"}, "image_url"),
        ("responses", {"type": "input_image", "file_id": "file-1"}, "file-1"),
        ("responses", {"type": "input_file", "file_id": "file-1"}, "file-1"),
        ("responses", {"type": "input_image", "image_url": "https://x/y.png"}, "https://x/y.png"),
        ("responses", {"type": "input_file", "file_url": "https://x/y.pdf"}, "input[0].content[0]"),
        ("anthropic", {"type": "image", "source": {"type": "file", "file_id": "file-1"}}, "an image by file"),
        ("anthropic", {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}, "an image by url"),
        ("anthropic", {"type": "document", "source": {"type": "file", "file_id": "file-1"}}, "a document by file"),
        ("anthropic", {"type": "document", "source": {"type": "url", "url": "https://x/y"}}, "a document by url"),
        ("google", {"fileData": {"mimeType": "image/png", "fileUri": "gs://b/x"}}, "gs://b/x"),
        ("google", {"inlineData": {"mimeType": "text/plain", "data": "###"}}, "no base64"),
        ("google", {"executableCode": {"code": "x"}}, "contents[0].parts[0]"),
    ],
)
async def test_file_that_would_have_to_be_fetched_is_refused_by_name(
    make_rig: MakeRig, dialect: str, sent: dict[str, Any], named: str
) -> None:
    rig = await make_rig(engine=Keeping())
    agent = await rig.open()
    status, reply = await post(rig, agent, dialect, body(dialect, [sent]))
    assert status == 400
    assert named in reply["error"]["message"]
    assert place(dialect, 0) in reply["error"]["message"]


async def test_images_of_tool_results_stand_in_the_tools_message(make_rig: MakeRig) -> None:
    rig = await make_rig(engine=Keeping())
    agent = await rig.open()
    shot, words = part("anthropic", "png", "S"), {"type": "text", "text": "a screenshot"}
    use = {"type": "tool_use", "id": "t1", "name": "shot", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [words, shot]}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    assert (await post(rig, agent, "anthropic", {"model": "m", "messages": messages}))[0] == 200
    wanted = [("tool", "a screenshot"), ("tool", url("png", "S"))]
    assert rig.engine.parts()[-2:] == wanted
    answer = {"name": "shot", "response": {"output": "a screenshot"}, "parts": [part("google", "png", "S")]}
    contents = [
        {"role": "model", "parts": [{"functionCall": {"name": "shot", "args": {}}}]},
        {"role": "user", "parts": [{"functionResponse": answer}]},
    ]
    assert (await post(rig, agent, "google", {"contents": contents}))[0] == 200
    assert rig.engine.parts()[-2:] == wanted
    call = {"type": "function_call", "call_id": "t1", "name": "shot", "arguments": "{}"}
    output = [part("responses", "say", "a screenshot"), part("responses", "png", "S")]
    items = [call, {"type": "function_call_output", "call_id": "t1", "output": output}]
    assert (await post(rig, agent, "responses", {"model": "m", "input": items}))[0] == 200
    assert rig.engine.parts()[-2:] == wanted


async def test_place_of_an_image_is_that_in_the_whole_conversation(make_rig: MakeRig) -> None:
    rig = await make_rig(engine=Keeping(images=False))
    agent = await rig.open()
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [part("chat", "say", "c"), part("chat", "png", "A")]},
    ]
    status, reply = await post(rig, agent, "chat", {"model": "m", "messages": messages})
    assert (status, reply["error"]["param"]) == (400, "messages[2].content[1]")

"""What a model should see of a request, read from the client's own JSON without any of polynya's code, and what the engine got.

Order inside one message is the documented one: results of tools first, then the rest; of an assistant's turn reasoning,
text, calls.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import msgspec

from polynya.dialects.neutral import ChatRequest

Piece = tuple[str, ...]
"""``("text", words)``, ``("call", id, name, canonical arguments)``, ``("result", id)`` or ``("image", data URL)``."""


class Seen(msgspec.Struct):
    pieces: list[Piece] = []
    tools: list[str] = []
    dropped: Counter[str] = msgspec.field(default_factory=Counter)

    def text(self, words: str | None) -> None:
        if words:
            self.pieces.append(("text", words))

    def call(self, call_id: str, name: str, arguments: Any) -> None:
        self.pieces.append(("call", call_id, name, canonical(arguments)))


def canonical(arguments: Any) -> str:
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return str(arguments)
    return json.dumps(value, sort_keys=True)


def expected(dialect: str, body: dict[str, Any]) -> Seen:
    seen = Seen()
    {
        "openai_chat": _chat,
        "openai_responses": _responses,
        "anthropic_messages": _anthropic,
        "google_generate": _google,
    }[dialect](seen, body)
    return seen


def engine_saw(chat: ChatRequest) -> Seen:
    seen = Seen(tools=[tool["function"]["name"] for tool in json.loads(bytes(chat.tools_raw or b"[]"))])
    for message in chat.messages:
        _chat_message(seen, json.loads(bytes(message.raw)))
    return seen


def assert_same(wanted: Seen, got: Seen) -> None:
    assert got.tools == wanted.tools
    for kind in ("call", "result", "image"):
        assert [p for p in got.pieces if p[0] == kind] == [p for p in wanted.pieces if p[0] == kind]
    _assert_texts(
        [p[1] for p in wanted.pieces if p[0] == "text"], "\n".join(p[1] for p in got.pieces if p[0] == "text")
    )


def _assert_texts(wanted: list[str], got: str) -> None:
    """All of ``wanted`` in order, and nothing but line ends between."""
    at = 0
    for words in wanted:
        found = got.find(words, at)
        assert found >= 0, f"not in the prompt, or not in order: {words[:200]!r}"
        assert not got[at:found].strip(), f"in the prompt and not in the request: {got[at:found][:200]!r}"
        at = found + len(words)
    assert not got[at:].strip()


def _chat(seen: Seen, body: dict[str, Any]) -> None:
    seen.tools = [tool["function"]["name"] for tool in body.get("tools") or []]
    for message in body["messages"]:
        _chat_message(seen, message)


def _chat_message(seen: Seen, message: dict[str, Any]) -> None:
    if message["role"] == "tool":
        seen.pieces.append(("result", message["tool_call_id"]))
    seen.text(message.get("reasoning_content") or message.get("reasoning"))
    content = message.get("content")
    for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        if part["type"] == "image_url":
            seen.pieces.append(("image", part["image_url"]["url"]))
        else:
            seen.text(part["text"])
    for call in message.get("tool_calls") or []:
        seen.call(call["id"], call["function"]["name"], call["function"]["arguments"])


def _responses(seen: Seen, body: dict[str, Any]) -> None:
    seen.text(body.get("instructions"))
    items = [{"role": "user", "content": body["input"]}] if isinstance(body["input"], str) else body["input"]
    tools = list(body.get("tools") or [])
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            _parts(seen, item["content"])
        elif kind == "reasoning":
            texts = [part["text"] for part in item["summary"]]
            for text in texts:
                seen.text(text)
            seen.dropped["foreign_reasoning"] += not texts
        elif kind == "function_call":
            seen.call(
                item["call_id"], "__".join(filter(None, (item.get("namespace"), item["name"]))), item["arguments"]
            )
        elif kind == "function_call_output":
            seen.pieces.append(("result", item["call_id"]))
            _parts(seen, item["output"])
        elif kind == "additional_tools":
            tools += item["tools"]
        else:
            raise AssertionError(f"a recorded item of type {kind}: teach this walker about it")
    for tool in tools:
        if tool["type"] == "namespace":
            seen.tools += [f"{tool['name']}__{inner['name']}" for inner in tool["tools"]]
        elif tool["type"] in ("function", "custom"):
            seen.tools.append(tool["name"])
        else:
            seen.dropped["provider_tool"] += 1


def _parts(seen: Seen, content: Any) -> None:
    if isinstance(content, str):
        seen.text(content)
        return
    for part in content:
        if part["type"] == "input_image":
            seen.pieces.append(("image", part["image_url"]))
        else:
            seen.text(part["text"])


def _anthropic(seen: Seen, body: dict[str, Any]) -> None:
    seen.tools = [tool["name"] for tool in body.get("tools") or []]
    system = body.get("system") or []
    for block in [{"text": system}] if isinstance(system, str) else system:
        if block["text"].startswith("x-anthropic-billing-header:"):
            seen.dropped["volatile_system"] += 1
        else:
            seen.text(block["text"])
    for message in body["messages"]:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        order = {"tool_result": 0, "text": 1, "image": 1, "thinking": 1, "tool_use": 2}
        for block in sorted(blocks, key=lambda block: order[block["type"]]):
            _anthropic_block(seen, block)


def _anthropic_block(seen: Seen, block: dict[str, Any]) -> None:
    match block["type"]:
        case "text":
            seen.text(block["text"])
        case "image":
            source = block["source"]
            seen.pieces.append(("image", f"data:{source['media_type']};base64,{source['data']}"))
        case "thinking":
            # recorded against another server: the signature is its own
            seen.dropped["foreign_reasoning"] += 1
        case "tool_use":
            seen.call(block["id"], block["name"], block["input"])
        case "tool_result":
            seen.pieces.append(("result", block["tool_use_id"]))
            content = block.get("content") or ""
            for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                _anthropic_block(seen, part)


def _google(seen: Seen, body: dict[str, Any]) -> None:
    for part in (body.get("systemInstruction") or {"parts": []})["parts"]:
        seen.text(part["text"])
    for tool in body.get("tools") or []:
        seen.tools += [declared["name"] for declared in tool["functionDeclarations"]]
    waiting: list[tuple[str, str]] = []
    turn = 0
    for content in body["contents"]:
        parts = content["parts"]
        for part in parts:
            if "functionResponse" in part:
                answer = part["functionResponse"]
                found = next(pair for pair in waiting if answer.get("id") == pair[0] or answer["name"] == pair[1])
                waiting.remove(found)
                seen.pieces.append(("result", found[0]))
                value = answer["response"]
                only = value["output"] if set(value) == {"output"} else None
                shown = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
                seen.text(only if isinstance(only, str) else shown)
        for part in parts:
            seen.text(part.get("text"))
        if content["role"] == "model":
            turn += 1
            calls = [part["functionCall"] for part in parts if "functionCall" in part]
            waiting = [(call.get("id") or f"call_{turn}_{i}", call["name"]) for i, call in enumerate(calls)]
            for call, (call_id, name) in zip(calls, waiting, strict=True):
                seen.call(call_id, name, call.get("args") or {})
            waiting = list(waiting)

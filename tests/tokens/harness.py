"""One conversation in the words of each dialect."""

from __future__ import annotations

import copy
import json
from typing import Any

from polynya.dialects.history import History
from polynya.dialects.neutral import ChatRequest
from polynya.dialects.registry import DIALECTS
from polynya.dialects.wire import sign
from polynya.tokens.canonical import root_digest
from polynya.tokens.matching import Chain, Matcher

NAMES = sorted(DIALECTS)
PATHS = {
    "openai_chat": "/v1/chat/completions",
    "anthropic_messages": "/v1/messages",
    "openai_responses": "/v1/responses",
    "google_generate": "/v1beta/models/m:generateContent",
}
PNG = "iVBORw0KGgo="
Entry = dict[str, Any]
Body = dict[str, Any]
LISTS = {"openai_responses": "input", "google_generate": "contents"}
"""Where a dialect keeps its messages, if not in ``messages``."""


def system(text: str) -> Entry:
    return {"role": "system", "text": text}


def user(*texts: str, image: str = "") -> Entry:
    return {"role": "user", "texts": list(texts), "image": image}


def assistant(text: str = "", *calls: tuple[str, str, Any], reasoning: str = "") -> Entry:
    """``calls``: id, name, arguments."""
    return {"role": "assistant", "text": text, "reasoning": reasoning, "calls": list(calls)}


def tool(call_id: str, text: str, name: str = "f") -> Entry:
    return {"role": "tool", "id": call_id, "text": text, "name": name}


def body(dialect: str, entries: list[Entry]) -> Body:
    """A request with these messages."""
    return {
        "openai_chat": _chat,
        "anthropic_messages": _anthropic,
        "openai_responses": _responses,
        "google_generate": _google,
    }[dialect](copy.deepcopy(entries))


def parse(dialect: str, sent: Body, history: History[Any] | None = None) -> ChatRequest:
    raw = json.dumps(sent, separators=(",", ":")).encode()
    return DIALECTS[dialect].parse(raw, PATHS[dialect], history)


def raws(request: ChatRequest) -> list[bytes]:
    return [message.raw for message in request.messages]


def chain_of(request: ChatRequest, matcher: Matcher[Any] | None = None) -> Chain:
    root = root_digest(
        model=request.model,
        tools=bytes(request.tools_raw or b""),
        template_kwargs=bytes(request.template_kwargs or b""),
    )
    return (matcher or Matcher()).chain(root, raws(request))


def head(dialect: str, sent: Body) -> bytes:
    """What identifies a whole request."""
    return chain_of(parse(dialect, sent)).hashes[-1]


def _chat(entries: list[Entry]) -> Body:
    messages: list[Any] = []
    for entry in entries:
        match entry["role"]:
            case "user":
                parts: list[Any] = [{"type": "text", "text": text} for text in entry["texts"]]
                if entry["image"]:
                    url = f"data:image/png;base64,{entry['image']}"
                    parts.append({"type": "image_url", "image_url": {"url": url}})
                plain = len(parts) == 1 and not entry["image"]
                messages.append({"role": "user", "content": entry["texts"][0] if plain else parts})
            case "assistant":
                message: Body = {"role": "assistant", "content": entry["text"] or None}
                if entry["reasoning"]:
                    message["reasoning_content"] = entry["reasoning"]
                if entry["calls"]:
                    message["tool_calls"] = [
                        {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
                        for id, name, arguments in entry["calls"]
                    ]
                messages.append(message)
            case "tool":
                messages.append({"role": "tool", "tool_call_id": entry["id"], "content": entry["text"]})
            case role:
                messages.append({"role": role, "content": entry["text"]})
    return {"model": "m", "messages": messages}


def _anthropic(entries: list[Entry]) -> Body:
    sent: Body = {"model": "m", "max_tokens": 9, "messages": []}
    messages = sent["messages"]
    results: list[Any] = []
    for entry in [*entries, None]:
        if results and (entry is None or entry["role"] != "tool"):
            messages.append({"role": "user", "content": results})
            results = []
        match entry and entry["role"]:
            case "system":
                sent["system"] = entry["text"]
            case "user":
                blocks: list[Any] = [{"type": "text", "text": text} for text in entry["texts"]]
                if entry["image"]:
                    source = {"type": "base64", "media_type": "image/png", "data": entry["image"]}
                    blocks.append({"type": "image", "source": source})
                if messages and messages[-1]["content"][0].get("type") == "tool_result":
                    messages[-1]["content"] += blocks
                else:
                    messages.append({"role": "user", "content": blocks})
            case "assistant":
                blocks = []
                if thought := entry["reasoning"]:
                    blocks.append({"type": "thinking", "thinking": thought, "signature": sign(thought)})
                if entry["text"]:
                    blocks.append({"type": "text", "text": entry["text"]})
                blocks += [
                    {"type": "tool_use", "id": i, "name": name, "input": args} for i, name, args in entry["calls"]
                ]
                messages.append({"role": "assistant", "content": blocks})
            case "tool":
                results.append({"type": "tool_result", "tool_use_id": entry["id"], "content": entry["text"]})
    return sent


def _responses(entries: list[Entry]) -> Body:
    sent: Body = {"model": "m", "input": []}
    for entry in entries:
        match entry["role"]:
            case "system":
                sent["instructions"] = entry["text"]
            case "user":
                parts: list[Any] = [{"type": "input_text", "text": text} for text in entry["texts"]]
                if entry["image"]:
                    parts.append({"type": "input_image", "image_url": f"data:image/png;base64,{entry['image']}"})
                sent["input"].append({"type": "message", "role": "user", "content": parts})
            case "assistant":
                if entry["reasoning"]:
                    summary = [{"type": "summary_text", "text": entry["reasoning"]}]
                    sent["input"].append({"type": "reasoning", "summary": summary})
                if entry["text"]:
                    said = [{"type": "output_text", "text": entry["text"]}]
                    sent["input"].append({"type": "message", "role": "assistant", "content": said})
                sent["input"] += [
                    {"type": "function_call", "call_id": id, "name": name, "arguments": json.dumps(arguments)}
                    for id, name, arguments in entry["calls"]
                ]
            case "tool":
                sent["input"].append({"type": "function_call_output", "call_id": entry["id"], "output": entry["text"]})
    return sent


def _google(entries: list[Entry]) -> Body:
    sent: Body = {"contents": []}
    for entry in entries:
        match entry["role"]:
            case "system":
                sent["systemInstruction"] = {"parts": [{"text": entry["text"]}]}
            case "user":
                parts: list[Any] = [{"text": text} for text in entry["texts"]]
                if entry["image"]:
                    parts.append({"inlineData": {"mimeType": "image/png", "data": entry["image"]}})
                sent["contents"].append({"role": "user", "parts": parts})
            case "assistant":
                parts = [{"text": entry["reasoning"], "thought": True}] if entry["reasoning"] else []
                parts += [{"text": entry["text"]}] if entry["text"] else []
                parts += [
                    {"functionCall": {"id": id, "name": name, "args": arguments}}
                    for id, name, arguments in entry["calls"]
                ]
                sent["contents"].append({"role": "model", "parts": parts})
            case "tool":
                answer = {"id": entry["id"], "name": entry["name"], "response": {"output": entry["text"]}}
                sent["contents"].append({"role": "user", "parts": [{"functionResponse": answer}]})
    return sent

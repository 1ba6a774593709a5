"""One conversation in the words of each dialect, and a harness that sends it back not quite as it got it."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

from polynya.dialects.history import History
from polynya.dialects.neutral import ChatReply, ChatRequest, ReplyHead, ToolCall
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


def root(request: ChatRequest) -> bytes:
    return root_digest(
        model=request.model,
        tools=bytes(request.tools_raw or b""),
        template_kwargs=bytes(request.template_kwargs or b""),
    )


def raws(request: ChatRequest) -> list[bytes]:
    return [message.raw for message in request.messages]


def chain_of(request: ChatRequest, matcher: Matcher[Any] | None = None) -> Chain:
    return (matcher or Matcher()).chain(root(request), raws(request))


def head(dialect: str, sent: Body) -> bytes:
    """The hash of a whole request."""
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


def javascript(value: Any) -> Any:
    """What comes out of ``JSON.stringify(JSON.parse(...))``: whole numbers without a point, integer-like keys first."""
    if isinstance(value, dict):
        first = sorted((key for key in value if key.isdecimal()), key=int)
        return {key: javascript(value[key]) for key in [*first, *(key for key in value if key not in first)]}
    if isinstance(value, list):
        return [javascript(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _refuse(constant: str) -> None:
    """JavaScript knows no NaN in JSON."""
    raise ValueError(constant)


class Harness:
    """Runs an agent in one dialect: it keeps its history in the dialect's own shape, and drifts."""

    def __init__(self, dialect: str, dice: random.Random) -> None:
        self.dialect = dialect
        self.dice = dice
        self.history = History[Any](7)
        self._sent = body(dialect, [system("be good"), user("go")])
        self._list = self._sent[{"openai_responses": "input", "google_generate": "contents"}.get(dialect, "messages")]
        self._keeps_ids = dice.random() < 0.5
        """(Of calls, in the one dialect whose clients may leave them out; of items.)"""
        self._keeps_thinking = dice.random() < 0.5

    def request(self) -> ChatRequest:
        if self.dialect == "anthropic_messages":
            for message in self._list:
                for block in message["content"]:
                    block.pop("cache_control", None)
            self._list[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
        return parse(self.dialect, self._sent, self.history)

    def take(self, request: ChatRequest, reply: ChatReply, turn: int) -> None:
        """A reply goes into the history, and what its tools gave."""
        rendered = json.loads(
            DIALECTS[self.dialect].render(
                request, reply, ReplyHead(reply_id=f"r{turn}", created=turn, model=request.model)
            )
        )
        getattr(self, f"_take_{self.dialect}")(rendered)
        results = [tool(call.id, f" {call.name} gave {turn}\n", call.name) for call in reply.tool_calls]
        reminder = [user(f"reminder {turn}")] if not results or self.dice.random() < 0.2 else []
        after = body(self.dialect, [*results, *reminder])
        for entry in after[{"openai_responses": "input", "google_generate": "contents"}.get(self.dialect, "messages")]:
            if not self._keeps_ids and self.dialect == "google_generate":
                for part in entry["parts"]:
                    part.get("functionResponse", {}).pop("id", None)
            self._list.append(entry)

    def _respelled(self, arguments: str) -> str:
        """Arguments as text, through a JavaScript client that reads them (or not)."""
        try:
            value = json.loads(arguments, parse_constant=_refuse)
        except ValueError:
            return arguments
        return (
            arguments if self.dice.random() < 0.5 else json.dumps(javascript(value), indent=self.dice.choice([None, 1]))
        )

    def _trimmed(self, text: str) -> str:
        return text.strip() if self.dice.random() < 0.5 else text

    def _take_openai_chat(self, rendered: Body) -> None:
        message = rendered["choices"][0]["message"] | {"refusal": None, "annotations": [], "audio": None}
        thought = message.pop("reasoning_content", "")
        if self._keeps_thinking and thought:
            message[self.dice.choice(["reasoning", "reasoning_content"])] = thought
        message["content"] = self._trimmed(message["content"] or "") or self.dice.choice([None, "", []])
        for index, call in enumerate(message.get("tool_calls", [])):
            call["index"] = index
            call["function"]["arguments"] = self._respelled(call["function"]["arguments"])
        self._list.append(message)

    def _take_anthropic_messages(self, rendered: Body) -> None:
        blocks = []
        for block in rendered["content"]:
            if block["type"] == "thinking" and not self._keeps_thinking:
                continue
            if block["type"] == "text":
                block["text"] = self._trimmed(block["text"])
                if not block["text"].strip():
                    continue
            if block["type"] == "tool_use":
                block["input"] = javascript(block["input"])
            blocks.append(block)
        self._list.append({"role": "assistant", "content": blocks})

    def _take_openai_responses(self, rendered: Body) -> None:
        for item in rendered["output"]:
            if item["type"] == "reasoning" and not self._keeps_thinking:
                continue
            if item["type"] == "message":
                item["content"][0]["text"] = self._trimmed(item["content"][0]["text"])
            if item["type"] == "function_call":
                item["arguments"] = self._respelled(item["arguments"])
            if not self._keeps_ids:
                item.pop("id")
                item.pop("status", None)
            self._list.append(item)

    def _take_google_generate(self, rendered: Body) -> None:
        parts = []
        for part in rendered["candidates"][0]["content"]["parts"]:
            if part.get("thought"):
                if not self._keeps_thinking:
                    continue
                part.pop("thoughtSignature")
            elif "text" in part:
                part["text"] = self._trimmed(part["text"])
            if call := part.get("functionCall"):
                call["args"] = javascript(call["args"])
                if not self._keeps_ids:
                    call.pop("id")
            parts.append(part)
        self._list.append({"role": "model", "parts": parts})


def random_reply(dice: random.Random, turn: int) -> ChatReply:
    """Some text, some reasoning, some calls; never nothing at all."""
    values = [3.0, 3, 0.1, 1e21, 2**60, -0.0, True, None, "1", "ä\n", {"10": 1, "9": [2.0]}, {"b": {}, "a": []}]
    calls = []
    for n in range(dice.randint(0, 3)):
        arguments = json.dumps(
            {key: dice.choice(values) for key in dice.sample(["z", "10", "9", "a"], 3)},
            ensure_ascii=dice.random() < 0.5,
        )
        arguments = dice.choice([arguments] * 6 + ["", "{}", '{"cut": ', "[1.0, 2]", '"text"', "null", "\n"])
        calls.append(ToolCall(id=f"call{turn}x{n}", name=dice.choice(["f", "g"]), arguments=arguments))
    text = dice.choice(["", " \n"] if calls else ["\nI am done"]) + dice.choice(
        ["", f"said {turn} \n"] if calls else [" "]
    )
    return ChatReply(text=text, reasoning=dice.choice(["", f"thought {turn}\n"]), tool_calls=calls)

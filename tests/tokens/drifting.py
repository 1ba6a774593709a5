"""Harnesses that send back what they were shown, each spelled in its own way, from whole replies and from streams."""

from __future__ import annotations

import json
import random
from typing import Any

from polynya.dialects.history import History
from polynya.dialects.neutral import ChatReply, ChatRequest, ReplyHead, ToolCall
from polynya.dialects.openai_responses import regrouped
from polynya.dialects.registry import DIALECTS

from .harness import LISTS, Body, body, parse, system, tool, user

RESPONSES_TOOLS: list[Body] = [
    {
        "type": "namespace",
        "name": "fs",
        "tools": [{"type": "function", "name": "f" * 70}, {"type": "custom", "name": "edit"}],
    },
    {"type": "custom", "name": "patch"},
    {"type": "local_shell"},
    {"type": "function", "name": "g"},
]


def shown(request: ChatRequest, reply: ChatReply, turn: int, *, stream: bool) -> Body:
    """A reply as the provider's own SDK hands it on."""
    dialect = DIALECTS[request.dialect]
    head = ReplyHead(reply_id=f"r{turn}", created=turn, model=request.model)
    if not stream:
        whole: Body = json.loads(dialect.render(request, reply, head))
        return whole
    events = b"".join(dialect.stream(request, reply, head)).replace(b"\r\n", b"\n").split(b"\n\n")
    payloads = [json.loads(data) for event in events if (data := event.partition(b"data: ")[2]) not in (b"", b"[DONE]")]
    return _ASSEMBLED[request.dialect](payloads)


def _chat_stream(payloads: list[Body]) -> Body:
    message: Body = {"role": "assistant", "content": None}
    for delta in (payload["choices"][0]["delta"] for payload in payloads):
        for field in ("content", "reasoning_content"):
            if field in delta:
                message[field] = (message.get(field) or "") + delta[field]
        for piece in delta.get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if piece["index"] == len(calls):
                calls.append(piece)
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return {"choices": [{"message": message}]}


def _anthropic_stream(payloads: list[Body]) -> Body:
    blocks: list[Body] = []
    pieces = ""
    for event in payloads:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            pieces = ""
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                pieces += delta["partial_json"]
                continue
            field = delta["type"].removesuffix("_delta")
            blocks[-1][field] += delta[field]
        elif event["type"] == "content_block_stop" and pieces:
            blocks[-1]["input"] = json.loads(pieces)
    return {"content": blocks}


def _responses_stream(payloads: list[Body]) -> Body:
    return {"output": [event["item"] for event in payloads if event["type"] == "response.output_item.done"]}


def _google_stream(payloads: list[Body]) -> Body:
    return {"contents": [payload["candidates"][0]["content"] for payload in payloads]}


_ASSEMBLED = {
    "openai_chat": _chat_stream,
    "anthropic_messages": _anthropic_stream,
    "openai_responses": _responses_stream,
    "google_generate": _google_stream,
}


def javascript(value: Any) -> Any:
    """What comes out of ``JSON.stringify(JSON.parse(...))``: whole numbers without a point, integer-like keys first."""
    if isinstance(value, dict):
        first = sorted((key for key in value if key.isdecimal()), key=int)
        return {key: javascript(value[key]) for key in [*first, *(key for key in value if key not in first)]}
    if isinstance(value, list):
        return [javascript(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Harness:
    """Runs an agent in one dialect: it keeps its history in the dialect's own shape, and drifts."""

    def __init__(self, dialect: str, dice: random.Random) -> None:
        self.dialect = dialect
        self.dice = dice
        self.history = History[Any](7)
        self._sent = body(dialect, [system("be good"), user("go")])
        if dialect == "openai_responses":
            self._sent["tools"] = RESPONSES_TOOLS
        self._list = self._sent[LISTS.get(dialect, "messages")]
        self._reply_of: dict[str, int] = {}
        self._keeps_ids = dice.random() < 0.5
        """(Of calls, in the one dialect whose clients may leave them out; of items.)"""
        self._keeps_thinking = dice.random() < 0.5
        self._streams = dice.random() < 0.5
        self._javascript = dice.random() < 0.5

    def request(self) -> ChatRequest:
        if self.dialect == "anthropic_messages":
            for message in self._list:
                for block in message["content"]:
                    block.pop("cache_control", None)
            self._list[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
        return parse(self.dialect, self._sent, self.history)

    def messages(self, request: ChatRequest) -> list[bytes]:
        """As the session has them, which knows which reply gave a call."""
        found = request.messages
        if self.dialect == "openai_responses":
            found = regrouped(found, self._reply_of)
        return [message.raw for message in found]

    def take(self, request: ChatRequest, reply: ChatReply, turn: int) -> None:
        """A reply goes into the history, and what its tools gave."""
        self._reply_of |= dict.fromkeys((call.id for call in reply.tool_calls), turn)
        getattr(self, f"_take_{self.dialect}")(shown(request, reply, turn, stream=self._streams))
        results = [tool(call.id, f" {call.name} gave {turn}\n", call.name) for call in reply.tool_calls]
        reminder = [user(f"reminder {turn}")] if not results or self.dice.random() < 0.2 else []
        for entry in body(self.dialect, [*results, *reminder])[LISTS.get(self.dialect, "messages")]:
            if not self._keeps_ids and self.dialect == "google_generate":
                for part in entry["parts"]:
                    part.get("functionResponse", {}).pop("id", None)
            self._list.append(entry)

    def _object(self, value: Any) -> Any:
        """Arguments, through the client's own objects."""
        return javascript(value) if self._javascript else value

    def _respelled(self, arguments: str) -> str:
        """Arguments as text, through a client that reads them (or not)."""
        try:
            value = json.loads(arguments)
        except ValueError:
            return arguments
        if not isinstance(value, dict) or self.dice.random() < 0.5:
            return arguments
        return json.dumps(self._object(value), indent=self.dice.choice([None, 1]))

    def _trimmed(self, text: str) -> str:
        return text.strip() if self.dice.random() < 0.5 else text

    def _take_openai_chat(self, answer: Body) -> None:
        message = answer["choices"][0]["message"] | {"refusal": None, "annotations": [], "audio": None}
        thought = message.pop("reasoning_content", "")
        if self._keeps_thinking and thought:
            message[self.dice.choice(["reasoning", "reasoning_content"])] = thought
        message["content"] = self._trimmed(message["content"] or "") or self.dice.choice([None, "", []])
        for index, call in enumerate(message.get("tool_calls", [])):
            call["index"] = index
            call["function"]["arguments"] = self._respelled(call["function"]["arguments"])
        self._list.append(message)

    def _take_anthropic_messages(self, answer: Body) -> None:
        blocks = []
        for block in answer["content"]:
            if block["type"] == "thinking" and not self._keeps_thinking:
                continue
            if block["type"] == "text":
                block["text"] = self._trimmed(block["text"])
                if not block["text"].strip():
                    continue
            if block["type"] == "tool_use":
                block["input"] = self._object(block["input"]) or self.dice.choice([{}, None])
            blocks.append(block)
        self._list.append({"role": "assistant", "content": blocks})

    def _take_openai_responses(self, answer: Body) -> None:
        for item in answer["output"]:
            if item["type"] == "reasoning" and not self._keeps_thinking:
                continue
            if item["type"] == "message":
                item["content"][0]["text"] = self._trimmed(item["content"][0]["text"])
            if item["type"] == "function_call":
                item["arguments"] = self._respelled(item["arguments"])
            if item["type"] == "local_shell_call":
                item["action"] = {"timeout_ms": None, "user": None, **item["action"]}
            if not self._keeps_ids:
                item.pop("id")
                item.pop("status", None)
            self._list.append(item)

    def _take_google_generate(self, answer: Body) -> None:
        said = answer.get("contents") or [answer["candidates"][0]["content"]]
        for content in said:
            for part in list(content["parts"]):
                if part.get("thought"):
                    part.pop("thoughtSignature", None)
                    if not self._keeps_thinking:
                        content["parts"].remove(part)
                if call := part.get("functionCall"):
                    call["args"] = self._object(call["args"])
                    if not call["args"] and self.dice.random() < 0.5:
                        del call["args"]
                    if not self._keeps_ids:
                        call.pop("id")
        self._list += [content for content in said if content["parts"]]


_DEEP = 100
ODD_ARGUMENTS = [
    "",
    "{}",
    " \n",
    "null",
    '{"cut": ',
    "[1.0, 2]",
    '"text"',
    '{"a": 1, "a": 2}',
    '{"b": 1.0, "a": 1e5, "c": 1E+2, "d": -0.0, "e": 12345678901234567890}',
    '{"a": "\\u00e9\\/\\ud83d\\ude00", "\\u0062": 0}',
    '{"a": "\\ud800"}',
    '{"a": "two\nlines"}',
    '{"a": ' + "[" * _DEEP + "1.0" + "]" * _DEEP + "}",
    '{"_raw_arguments": "x"}',
    '{"_raw_arguments": "x", "a": 1}',
    '{"input": "text", "more": 1}',
    '{"type": "exec", "env": {}, "command": ["ls"], "user": null}',
    "*** Begin Patch",
]


def random_reply(dice: random.Random, turn: int, request: ChatRequest) -> ChatReply:
    """Some text, some reasoning, some calls; never nothing at all."""
    values = [3.0, 3, 0.1, 1e21, 2**60, -0.0, True, None, "1", "ä\n", {"10": 1, "9": [2.0]}, {"b": {}, "a": []}]
    names = [spec.name for spec in request.tools] or ["f", "g"]
    calls = []
    for n in range(dice.randint(0, 3)):
        arguments = json.dumps(
            {key: dice.choice(values) for key in dice.sample(["z", "10", "9", "a"], 3)},
            ensure_ascii=dice.random() < 0.5,
        )
        arguments = dice.choice([arguments, dice.choice(ODD_ARGUMENTS)])
        calls.append(ToolCall(id=f"call{turn}x{n}", name=dice.choice([*names, "invented"]), arguments=arguments))
    text = dice.choice(["", " \n"] if calls else ["\nI am done"]) + dice.choice(
        ["", f"said {turn} \n"] if calls else [" "]
    )
    long = "word " * 100 if dice.random() < 0.2 else ""
    return ChatReply(text=text + long, reasoning=dice.choice(["", f"thought {turn}\n"]), tool_calls=calls)

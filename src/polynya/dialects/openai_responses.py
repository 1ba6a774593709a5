"""OpenAI Responses: requests. (Replies are in ``responses_reply``.)

``reasoning``, ``message`` and call items between two inputs are **one** assistant message; outputs that interleave with the
calls of one reply are put after them. ``developer`` is ``system``, where it stands. Sources: recorded traffic of Codex CLI and
the SDKs, the provider's API reference. Refuses item and part types that it cannot pass on, naming them.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from polynya.dialects import media, responses_reply
from polynya.dialects.base import BadRequest, WireError
from polynya.dialects.history import History
from polynya.dialects.neutral import ChatMessage, ChatReply, ChatRequest, ReplyHead, Role, SamplingParams, ToolCall
from polynya.dialects.responses_tools import custom_arguments, shell_arguments, tool_box, upstream_name
from polynya.dialects.wire import bounded, chat_message, decode_as, encode, readable

COMPACTION_REQUEST = (
    "Condense the conversation so far into a summary from which another agent can go on with the work: the task, what was "
    "done and found, what is left to do. Answer with the summary only."
)


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_data: str | None = None
    file_id: str | None = None


class _Item(msgspec.Struct):
    type: str = "message"
    role: str | None = None
    content: str | list[_Part] | None = None
    summary: list[_Part] | None = None
    encrypted_content: str | None = None
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: str = ""
    input: str = ""
    action: msgspec.Raw = msgspec.Raw(b"{}")
    output: str | list[_Part] | None = None
    tools: list[msgspec.Raw] = []


class _Text(msgspec.Struct):
    format: msgspec.Raw = msgspec.Raw(b"null")


class _Request(msgspec.Struct):
    model: str
    input: str | list[_Item]
    instructions: str | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: msgspec.Raw = msgspec.Raw(b"null")
    parallel_tool_calls: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    text: _Text | None = None
    previous_response_id: str | None = None
    store: bool | None = None


class _NamedChoice(msgspec.Struct):
    type: str = ""
    name: str = ""
    namespace: str | None = None
    mode: str = "auto"


class _Format(msgspec.Struct):
    type: str = "text"
    name: str = "response"
    schema: msgspec.Raw = msgspec.Raw(b"{}")


_KNOWN = {field.name for field in msgspec.structs.fields(_Request)}
_request = msgspec.json.Decoder(_Request)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_choice_decoder = msgspec.json.Decoder(str | _NamedChoice)
_format_decoder = msgspec.json.Decoder(_Format)
_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


_HELD_ELSEWHERE = {
    "conversation": "send the history as input, or previous_response_id",
    "prompt": "send its text as instructions or input",
    "background": "send the request without it: a reply is given on its own connection",
}


class OpenAIResponses:
    name = "openai_responses"

    def parse(self, body: bytes, path: str, history: History[Any] | None = None) -> ChatRequest:
        body = readable(body)
        wire: _Request = decode_as(_request, body, "")
        items = [_Item(role="user", content=wire.input)] if isinstance(wire.input, str) else wire.input
        compaction = path.endswith("/compact") or any(item.type == "compaction_trigger" for item in items)
        if not items and not wire.previous_response_id:
            raise BadRequest("input: [] is empty; send at least one item", field="input")
        raw_tools = [
            *(wire.tools or []),
            *(tool for item in items if item.type == "additional_tools" for tool in item.tools),
        ]
        box = tool_box(raw_tools, "tools")
        notes = media.Notes()
        notes.drop("provider_tool", len(box.dropped))
        messages = _Conversation(notes).messages(items)
        if wire.instructions:
            messages.insert(0, chat_message("system", text=wire.instructions))
        if compaction:
            messages.append(chat_message("user", text=COMPACTION_REQUEST))
        if wire.max_output_tokens is not None and wire.max_output_tokens < 1:
            raise BadRequest(f"max_output_tokens: {wire.max_output_tokens} is below 1", field="max_output_tokens")
        leftovers: dict[str, Any] = {key: value for key, value in _object.decode(body).items() if key not in _KNOWN}
        media.refuse_held_elsewhere(leftovers, _HELD_ELSEWHERE)
        if box.dropped:
            leftovers["dropped_tools"] = box.dropped
        return ChatRequest(
            dialect=self.name,
            model=wire.model,
            messages=messages,
            tools=box.specs,
            tools_raw=box.raw(),
            tool_choice=_choice(wire.tool_choice, notes),
            response_format=_response_format(wire.text),
            parallel_tool_calls=wire.parallel_tool_calls,
            sampling=bounded(
                SamplingParams(temperature=wire.temperature, top_p=wire.top_p, max_tokens=wire.max_output_tokens),
                {"max_tokens": "max_output_tokens"},
            ),
            stream=bool(wire.stream),
            tool_aliases=box.aliases,
            instructions=bool(wire.instructions),
            stored=wire.store is not False,
            previous_response_id=wire.previous_response_id or "",
            compaction=compaction,
            images=notes.images,
            dropped=notes.dropped,
            leftovers=leftovers,
        )

    def render(self, request: ChatRequest, reply: ChatReply, head: ReplyHead) -> bytes:
        return responses_reply.render(request, reply, head)

    def echoed(self, request: ChatRequest, reply: ChatReply) -> ChatReply:
        return responses_reply.echoed(request, reply)

    def keepalive(self, head: ReplyHead, number: int = 1) -> bytes:
        return responses_reply.waiting(head, number)

    def stream(self, request: ChatRequest, reply: ChatReply, head: ReplyHead, waited: int = 0) -> Iterator[bytes]:
        return responses_reply.stream(request, reply, head, waited)

    def error(self, error: WireError) -> bytes:
        return responses_reply.error(error)

    def stream_error(self, error: WireError, head: ReplyHead, waited: int = 0) -> bytes:
        return responses_reply.stream_error(error, head, waited)

    def token_count(self, count: int) -> bytes:
        return encode({"object": "response.input_tokens", "input_tokens": count})

    def models(self, names: list[str], created: int) -> bytes:
        data = [{"id": name, "object": "model", "created": created, "owned_by": "polynya"} for name in names]
        return encode({"object": "list", "data": data})


def regrouped(messages: list[ChatMessage], reply_of: Mapping[str, int]) -> list[ChatMessage]:
    """Calls of different replies in turns of their own, each before its results.

    Items do not say where a reply ends: ``call, output, call, output`` is two replies, or one that a client wrote down as its
    calls were done. ``reply_of``: which reply gave a call, by the call's id. A call that nobody knows stays where it is.
    """
    found: list[ChatMessage] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        several = message.role == "assistant" and message.raw.count(b'"arguments":') > 1
        calls = message.tool_calls if several else []
        turns = _by_reply(calls, reply_of)
        if len(turns) < 2:
            found.append(message)
            continue
        end = at
        while end < len(messages) and messages[end].role == "tool":
            end += 1
        results = messages[at:end]
        at = end
        for number, turn in enumerate(turns):
            text, reasoning = ("", "") if number else (message.text, message.reasoning)
            found.append(chat_message("assistant", text=text, reasoning=reasoning, tool_calls=turn))
            ids = {call.id for call in turn}
            found += [result for result in results if result.tool_call_id in ids]
        known = {call.id for call in calls}
        found += [result for result in results if result.tool_call_id not in known]
    return found


def _by_reply(calls: list[ToolCall], reply_of: Mapping[str, int]) -> list[list[ToolCall]]:
    turns: list[list[ToolCall]] = []
    last: int | None = None
    for call in calls:
        reply = reply_of.get(call.id, last)
        if not turns or (last is not None and reply != last):
            turns.append([])
        turns[-1].append(call)
        last = reply
    return turns


class _Assistant:
    """Items of one turn of the model, gathered until an input comes."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[ToolCall] = []

    def message(self) -> ChatMessage:
        text = "\n".join(text for text in self.texts if text)
        return chat_message("assistant", text=text, reasoning="\n".join(self.reasoning), tool_calls=self.calls)


class _Conversation:
    def __init__(self, notes: media.Notes) -> None:
        self._notes = notes
        self._found: list[ChatMessage] = []
        self._open: _Assistant | None = None
        self._outputs: list[ChatMessage] = []
        """Results of the open turn: more calls of the same turn may still follow them."""

    def messages(self, items: list[_Item]) -> list[ChatMessage]:
        for i, item in enumerate(items):
            self._add(item, f"input[{i}]")
        self._close()
        return self._found

    def _add(self, item: _Item, where: str) -> None:
        match item.type:
            case "message":
                self._message(item, where)
            case "reasoning":
                self._turn(after_outputs=True).reasoning += self._thoughts(item)
            case "function_call" | "custom_tool_call" | "local_shell_call":
                self._turn(after_outputs=False).calls.append(self._call(item))
            case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
                self._outputs.append(self._output(item, where))
            case "compaction" | "compaction_summary":
                self._close()
                self._found.append(chat_message("user", text=_summary(item)))
            case "additional_tools" | "compaction_trigger":
                pass
            case other:
                fix = "send the item itself" if other == "item_reference" else "leave it out"
                raise BadRequest(f"{where}.type: {other!r} is not served; {fix}", field=f"{where}.type")

    def _message(self, item: _Item, where: str) -> None:
        role = _ROLES.get(item.role or "")
        if role is None:
            known = ", ".join(_ROLES)
            raise BadRequest(f"{where}.role: {item.role!r} is unknown; use one of {known}", field=f"{where}.role")
        text, parts = self._content(item.content, f"{where}.content")
        if role == "assistant":
            self._turn(after_outputs=True).texts.append(text)
            return
        self._close()
        self._found.append(chat_message(role, text=text, parts=parts))

    def _turn(self, *, after_outputs: bool) -> _Assistant:
        """The open turn. Text or reasoning after outputs begins a new one; a call after outputs may be of the same reply."""
        if self._open is None or (after_outputs and self._outputs):
            self._close()
            self._open = _Assistant()
        return self._open

    def _close(self) -> None:
        if self._open is not None:
            self._found.append(self._open.message())
        self._found += self._outputs
        self._open, self._outputs = None, []

    def _call(self, item: _Item) -> ToolCall:
        if item.type == "local_shell_call":
            return ToolCall(id=item.call_id, name="local_shell", arguments=shell_arguments(item.action))
        arguments = custom_arguments(item.input) if item.type == "custom_tool_call" else item.arguments
        return ToolCall(id=item.call_id, name=upstream_name(item.name, item.namespace or ""), arguments=arguments)

    def _thoughts(self, item: _Item) -> list[str]:
        """The readable text of a reasoning item, summed up or whole; what is only encrypted is another model's."""
        content = item.content if isinstance(item.content, list) else []
        texts = [part.text for part in [*(item.summary or content)] if part.text]
        if not texts and item.encrypted_content:
            self._notes.drop("foreign_reasoning")
        return texts

    def _output(self, item: _Item, where: str) -> ChatMessage:
        text, parts = self._content(item.output, f"{where}.output")
        return chat_message("tool", text=text, parts=parts, tool_call_id=item.call_id)

    def _content(self, content: str | list[_Part] | None, where: str) -> tuple[str, list[dict[str, Any]] | None]:
        """The text, and content parts when there are images."""
        if not isinstance(content, list):
            return content or "", None
        parts = [_part(part, f"{where}[{i}]", self._notes) for i, part in enumerate(content)]
        text = "\n".join(part["text"] for part in parts if part["type"] == "text" and part["text"])
        return text, None if all(part["type"] == "text" for part in parts) else parts


def _part(part: _Part, where: str, notes: media.Notes) -> dict[str, Any]:
    match part.type:
        case "input_text" | "output_text" | "text" | "summary_text":
            return {"type": "text", "text": part.text or ""}
        case "refusal":
            return {"type": "text", "text": part.refusal or ""}
        case "input_image" | "input_file" if part.file_id:
            raise media.unserved(f"{where}.file_id", f"the stored file {part.file_id!r}")
        case "input_image":
            return media.image(notes, part.image_url or "", where)
        case "input_file":
            return media.data_url(notes, part.file_data or "", where)
        case other:
            raise BadRequest(f"{where}.type: {other!r} is not served", field=f"{where}.type")


def _summary(item: _Item) -> str:
    """The text of a compaction item of ours; a foreign one says nothing that can be read here."""
    try:
        text = base64.b64decode(item.encrypted_content or "", validate=True).decode()
    except ValueError:
        text = ""
    return f"Summary of the conversation so far:\n{text}"


def _choice(raw: msgspec.Raw, notes: media.Notes) -> msgspec.Raw | None:
    if bytes(raw) == b"null":
        return None
    choice = decode_as(_choice_decoder, raw, "tool_choice")
    if isinstance(choice, str):
        return msgspec.Raw(encode(choice))
    if choice.type == "allowed_tools":
        return msgspec.Raw(encode(choice.mode))
    if not choice.name:
        notes.drop("provider_tool_choice")
        return None
    name = upstream_name(choice.name, choice.namespace or "")
    return msgspec.Raw(encode({"type": "function", "function": {"name": name}}))


def _response_format(text: _Text | None) -> msgspec.Raw | None:
    if text is None or bytes(text.format) == b"null":
        return None
    wanted: _Format = decode_as(_format_decoder, text.format, "text.format")
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return msgspec.Raw(b'{"type":"json_object"}')
    schema = {"name": wanted.name, "schema": msgspec.Raw(bytes(wanted.schema))}
    return msgspec.Raw(encode({"type": "json_schema", "json_schema": schema}))

"""Google generateContent and streamGenerateContent.

``model`` contents in a row (the provider's own SDK keeps one for each chunk of a stream) are one assistant message; a
``functionCall`` without an id gets an ordinal one, a ``functionResponse`` is matched by id, else by name in order. Thought
parts are reasoning, kept out of the text; a thought signature of ours says nothing that the text does not. The path carries
the model's name. Sources: recorded traffic of Gemini CLI and the SDKs, the provider's API reference. Refuses part kinds that
it cannot pass on, naming them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from polynya.dialects import media
from polynya.dialects.base import HTTP_STATUS, BadRequest, Fault, WireError
from polynya.dialects.history import History
from polynya.dialects.neutral import ChatMessage, ChatReply, ChatRequest, ReplyHead, SamplingParams, ToolCall, ToolSpec
from polynya.dialects.wire import (
    arguments_object,
    arguments_text,
    bounded,
    chat_message,
    decode_as,
    encode,
    function_tools,
    pieces,
    readable,
    sign,
    with_argument_objects,
)

_MODEL = re.compile(r"/models/(?P<model>.+):(?P<method>generateContent|streamGenerateContent|countTokens)$")


class _Blob(msgspec.Struct, rename="camel"):
    mime_type: str = "application/octet-stream"
    data: str = ""
    file_uri: str = ""


class _Call(msgspec.Struct):
    name: str
    args: Any = None
    id: str | None = None


class _ResponsePart(msgspec.Struct, rename="camel"):
    inline_data: _Blob | None = None
    file_data: _Blob | None = None


class _Response(msgspec.Struct):
    name: str
    response: Any = None
    id: str | None = None
    parts: list[_ResponsePart] = []


class _Part(msgspec.Struct, rename="camel"):
    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    inline_data: _Blob | None = None
    file_data: _Blob | None = None
    function_call: _Call | None = None
    function_response: _Response | None = None


class _Content(msgspec.Struct):
    parts: list[_Part] = []
    role: str | None = None


class _Declaration(msgspec.Struct, rename="camel"):
    name: str
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw(b"null")
    parameters_json_schema: msgspec.Raw = msgspec.Raw(b"null")


class _FunctionConfig(msgspec.Struct, rename="camel"):
    mode: str | None = None
    allowed_function_names: list[str] | None = None


class _ToolConfig(msgspec.Struct, rename="camel"):
    function_calling_config: _FunctionConfig | None = None


class _Generation(msgspec.Struct, rename="camel"):
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    max_output_tokens: int | None = None
    stop_sequences: list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    candidate_count: int | None = None
    response_mime_type: str | None = None
    response_schema: msgspec.Raw = msgspec.Raw(b"null")
    response_json_schema: msgspec.Raw = msgspec.Raw(b"null")


class _Request(msgspec.Struct, rename="camel"):
    contents: list[_Content]
    system_instruction: _Content | str | None = None
    tools: list[dict[str, msgspec.Raw]] | None = None
    tool_config: _ToolConfig | None = None
    generation_config: _Generation | None = None


_KNOWN = {"contents", "systemInstruction", "tools", "toolConfig", "generationConfig"}
_request = msgspec.json.Decoder(_Request)
_declarations = msgspec.json.Decoder(list[_Declaration])
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_any = msgspec.json.Decoder()
_CAMEL: dict[str, str] = {
    "generate_content_request": "generateContentRequest",
    "function_declarations": "functionDeclarations",
}
_CAMEL |= {
    field.name: field.encode_name
    for kind in (
        _Blob,
        _Part,
        _Response,
        _ResponsePart,
        _Declaration,
        _FunctionConfig,
        _ToolConfig,
        _Generation,
        _Request,
    )
    for field in msgspec.structs.fields(kind)
    if field.name != field.encode_name
}
_SNAKE = re.compile(rb'"(?:%b)"\s*:' % "|".join(_CAMEL).encode())
"""A key as the provider's own SDK writes some (``mime_type``). A text cannot match: its quotes are escaped."""
_PERHAPS_SNAKE = re.compile(rb'_(?:%b)"' % "|".join(sorted({key.partition("_")[2] for key in _CAMEL})).encode())
"""Ten times faster, since underscores are rarer than quotes."""
_CLIENTS_OWN = {"args", "response", "parameters", "parametersJsonSchema", "responseSchema", "responseJsonSchema"}


def _camel(value: Any) -> Any:
    """The protocol's keys in one spelling, as the provider takes both; what belongs to the client's tools stays as it is."""
    if isinstance(value, list):
        return [_camel(item) for item in value]
    if not isinstance(value, dict):
        return value
    named = {_CAMEL.get(key, key): item for key, item in value.items()}
    return {key: item if key in _CLIENTS_OWN else _camel(item) for key, item in named.items()}


class GoogleGenerate:
    name = "google_generate"

    def parse(self, body: bytes, path: str, history: History[Any] | None = None) -> ChatRequest:
        found = _MODEL.search(path)
        if found is None:
            raise BadRequest(f"path: {path!r} names no model and method", field="path")
        body = readable(body)
        if _PERHAPS_SNAKE.search(body) and _SNAKE.search(body):
            body = encode(_camel(decode_as(_any, body, "")))
        fields: dict[str, msgspec.Raw] = decode_as(_object, body, "")
        if found["method"] == "countTokens" and "generateContentRequest" in fields:
            body = bytes(fields["generateContentRequest"])
            fields = decode_as(_object, body, "generateContentRequest")
        wire: _Request = decode_as(_request, body, "")
        if not wire.contents:
            raise BadRequest("contents: [] is empty; send at least one content", field="contents")
        generation = wire.generation_config or _Generation()
        if generation.candidate_count not in (None, 1):
            count = generation.candidate_count
            raise BadRequest(
                f"generationConfig.candidateCount: {count} is not possible here, one call is one sample",
                field="generationConfig.candidateCount",
            )
        leftovers: dict[str, Any] = {key: value for key, value in fields.items() if key not in _KNOWN}
        notes = media.Notes()
        media.refuse_held_elsewhere(leftovers, {"cachedContent": "send the contents themselves"})
        tools, tools_raw = _tools(wire.tools or [], leftovers, notes)
        return ChatRequest(
            dialect=self.name,
            model=found["model"],
            messages=[*_system(wire.system_instruction), *_Conversation(notes).messages(wire.contents)],
            tools=tools,
            tools_raw=tools_raw,
            tool_choice=_choice(wire.tool_config),
            response_format=_response_format(generation),
            sampling=bounded(
                SamplingParams(
                    temperature=generation.temperature,
                    top_p=generation.top_p,
                    top_k=None if generation.top_k is None else int(generation.top_k),
                    presence_penalty=generation.presence_penalty,
                    frequency_penalty=generation.frequency_penalty,
                    max_tokens=generation.max_output_tokens,
                    stop=generation.stop_sequences or [],
                    seed=generation.seed,
                ),
                {
                    "seed": "generationConfig.seed",
                    "top_k": "generationConfig.topK",
                    "max_tokens": "generationConfig.maxOutputTokens",
                },
            ),
            stream=found["method"] == "streamGenerateContent",
            images=notes.images,
            dropped=notes.dropped,
            leftovers=leftovers,
        )

    def render(self, request: ChatRequest, reply: ChatReply, head: ReplyHead) -> bytes:
        return encode(_response(head, _parts(reply), reply, _finish(reply)))

    def echoed(self, request: ChatRequest, reply: ChatReply) -> ChatReply:
        return with_argument_objects(reply)

    def keepalive(self, head: ReplyHead, number: int = 1) -> bytes:
        return _data({"candidates": [{"content": {"role": "model", "parts": [{"text": ""}]}, "index": 0}]})

    def stream(self, request: ChatRequest, reply: ChatReply, head: ReplyHead, waited: int = 0) -> Iterator[bytes]:
        *earlier, last = _stream_parts(reply) or [{"text": ""}]
        for part in earlier:
            yield _data(_response(head, [part], reply, None))
        yield _data(_response(head, [last], reply, _finish(reply)))

    def error(self, error: WireError) -> bytes:
        return encode(_error(error))

    def stream_error(self, error: WireError, head: ReplyHead, waited: int = 0) -> bytes:
        return _data(_error(error))

    def models(self, names: list[str], created: int) -> bytes:
        methods = ["generateContent", "countTokens"]
        return encode(
            {
                "models": [
                    {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": methods}
                    for name in names
                ]
            }
        )

    def token_count(self, count: int) -> bytes:
        return encode({"totalTokens": count})


class _Conversation:
    """Contents → messages, with ids for calls that have none."""

    def __init__(self, notes: media.Notes) -> None:
        self._notes = notes
        self._turn = 0
        self._said: list[tuple[_Part, str]] = []
        """Parts of the model's turn so far, with their places."""
        self._waiting: list[ToolCall] = []
        """Calls of the latest model turn that no response answered yet."""

    def messages(self, contents: list[_Content]) -> list[ChatMessage]:
        found: list[ChatMessage] = []
        for i, content in enumerate(contents):
            where = f"contents[{i}]"
            if content.role == "model":
                self._said += [(part, f"{where}.parts[{j}]") for j, part in enumerate(content.parts)]
                if i + 1 == len(contents) or contents[i + 1].role != "model":
                    found.append(self._assistant())
            elif content.role in (None, "user", "function", "tool"):
                found += self._user(content.parts, where)
            else:
                raise BadRequest(f"{where}.role: {content.role!r} is unknown; use user or model", field=f"{where}.role")
        return found

    def _assistant(self) -> ChatMessage:
        self._turn += 1
        said, self._said = self._said, []
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for part, where in said:
            if part.function_call is not None:
                call = part.function_call
                call_id = call.id or f"call_{self._turn}_{len(calls)}"
                calls.append(ToolCall(id=call_id, name=call.name, arguments=arguments_text(call.args or {})))
            elif part.text is not None:
                (thoughts if part.thought else texts).append(part.text)
            elif part.thought_signature is None:
                raise _unserved(part, where)
        self._waiting = list(calls)
        return chat_message("assistant", text="".join(texts), reasoning="".join(thoughts), tool_calls=calls)

    def _user(self, parts: list[_Part], where: str) -> list[ChatMessage]:
        results = [
            self._result(part.function_response, f"{where}.parts[{i}].functionResponse")
            for i, part in enumerate(parts)
            if part.function_response is not None
        ]
        rest = [
            _content_part(part, f"{where}.parts[{i}]", self._notes)
            for i, part in enumerate(parts)
            if part.function_response is None
        ]
        if not rest:
            return results
        text = "\n".join(part["text"] for part in rest if part["type"] == "text" and part["text"])
        only_text = all(part["type"] == "text" for part in rest)
        return [*results, chat_message("user", text=text, parts=None if only_text else rest)]

    def _result(self, response: _Response, where: str) -> ChatMessage:
        """By id, else the first open call of that name, else the first open one."""
        open_calls = self._waiting
        matched = next((call for call in open_calls if response.id and call.id == response.id), None)
        matched = matched or next((call for call in open_calls if call.name == response.name), None)
        matched = matched or (open_calls[0] if open_calls else None)
        if matched is not None:
            open_calls.remove(matched)
        value = response.response
        only = value.get("output") if isinstance(value, dict) and set(value) == {"output"} else None
        text = only if isinstance(only, str) else encode(value).decode()
        call_id = matched.id if matched else response.id or response.name
        if not response.parts:
            return chat_message("tool", text=text, tool_call_id=call_id)
        parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
        for i, part in enumerate(response.parts):
            parts.append(_blob_part(part.inline_data, part.file_data, f"{where}.parts[{i}]", self._notes))
        return chat_message("tool", text=text, parts=parts, tool_call_id=call_id)


def _system(content: _Content | str | None) -> list[ChatMessage]:
    if isinstance(content, str) or content is None:
        text = content or ""
    else:
        for i, part in enumerate(content.parts):
            if part.text is None:
                raise _unserved(part, f"systemInstruction.parts[{i}]")
        text = "\n".join(part.text or "" for part in content.parts)
    return [chat_message("system", text=text)] if text else []


def _content_part(part: _Part, where: str, notes: media.Notes) -> dict[str, Any]:
    if part.text is not None:
        return {"type": "text", "text": part.text}
    if part.inline_data is None and part.file_data is None:
        raise _unserved(part, where)
    return _blob_part(part.inline_data, part.file_data, where, notes)


def _blob_part(inline: _Blob | None, file: _Blob | None, where: str, notes: media.Notes) -> dict[str, Any]:
    if inline is not None:
        return media.blob(notes, inline.mime_type, inline.data, f"{where}.inlineData")
    raise media.unserved(f"{where}.fileData", f"the file {file.file_uri!r}" if file is not None else "an empty part")


def _unserved(part: _Part, where: str) -> BadRequest:
    return BadRequest(
        f"{where}: this kind of part is not served; send text, inlineData or functionResponse", field=where
    )


def _tools(
    tools: list[dict[str, msgspec.Raw]], leftovers: dict[str, Any], notes: media.Notes
) -> tuple[list[ToolSpec], msgspec.Raw | None]:
    """Function declarations; the provider's own tools (search, code execution) are dropped and named in ``leftovers``."""
    specs: list[ToolSpec] = []
    dropped: list[str] = []
    for i, tool in enumerate(tools):
        declared = tool.get("functionDeclarations")
        dropped += [key for key in tool if key != "functionDeclarations"]
        for item in (
            decode_as(_declarations, declared, f"tools[{i}].functionDeclarations") if declared is not None else []
        ):
            schema = bytes(item.parameters_json_schema)
            if schema == b"null":
                schema = encode(_lowered(_any.decode(bytes(item.parameters)) or {}))
            specs.append(ToolSpec(name=item.name, description=item.description or "", parameters=msgspec.Raw(schema)))
    if dropped:
        leftovers["dropped_tools"] = dropped
        notes.drop("provider_tool", len(dropped))
    return specs, function_tools(specs)


def _lowered(schema: Any) -> Any:
    """OpenAPI type names (``STRING``) as JSON Schema has them."""
    if isinstance(schema, dict):
        return {
            key: value.lower() if key == "type" and isinstance(value, str) else _lowered(value)
            for key, value in schema.items()
        }
    return [_lowered(item) for item in schema] if isinstance(schema, list) else schema


def _choice(config: _ToolConfig | None) -> msgspec.Raw | None:
    calling = config.function_calling_config if config else None
    if calling is None or calling.mode is None:
        return None
    names = calling.allowed_function_names or []
    if calling.mode.upper() == "ANY" and len(names) == 1:
        return msgspec.Raw(encode({"type": "function", "function": {"name": names[0]}}))
    named = {"AUTO": "auto", "ANY": "required", "NONE": "none", "VALIDATED": "auto"}.get(calling.mode.upper())
    if named is None:
        field = "toolConfig.functionCallingConfig.mode"
        raise BadRequest(f"{field}: {calling.mode!r} is unknown; use AUTO, ANY or NONE", field=field)
    return msgspec.Raw(encode(named))


def _response_format(generation: _Generation) -> msgspec.Raw | None:
    if generation.response_mime_type != "application/json":
        return None
    schema = bytes(generation.response_json_schema)
    if schema == b"null":
        schema = encode(_lowered(_any.decode(bytes(generation.response_schema))))
    if schema == b"null":
        return msgspec.Raw(b'{"type":"json_object"}')
    return msgspec.Raw(
        encode({"type": "json_schema", "json_schema": {"name": "response", "schema": msgspec.Raw(schema)}})
    )


def _parts(reply: ChatReply) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    if reply.reasoning:
        parts.append({"text": reply.reasoning, "thought": True, "thoughtSignature": sign(reply.reasoning)})
    if reply.text:
        parts.append({"text": reply.text})
    parts += [
        {"functionCall": {"id": call.id, "name": call.name, "args": arguments_object(call.arguments)}}
        for call in reply.tool_calls
    ]
    return parts


def _stream_parts(reply: ChatReply) -> list[dict[str, Any]]:
    """The same parts, with long text cut into pieces."""
    parts: list[dict[str, Any]] = []
    for part in _parts(reply):
        if "text" in part and not part.get("thought"):
            parts += [{"text": piece} for piece in pieces(part["text"])]
        else:
            parts.append(part)
    return parts


def _response(head: ReplyHead, parts: list[dict[str, Any]], reply: ChatReply, finish: str | None) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
    if finish is not None:
        candidate["finishReason"] = finish
    usage = {
        "promptTokenCount": reply.usage.prompt_tokens,
        "candidatesTokenCount": reply.usage.completion_tokens,
        "totalTokenCount": reply.usage.prompt_tokens + reply.usage.completion_tokens,
        "cachedContentTokenCount": reply.usage.cached_tokens,
    }
    return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": head.model, "responseId": head.reply_id}


def _finish(reply: ChatReply) -> str:
    return {"length": "MAX_TOKENS", "content_filter": "SAFETY"}.get(reply.finish_reason, "STOP")


_STATUS = {
    Fault.UNAUTHORISED: "UNAUTHENTICATED",
    Fault.NOT_FOUND: "NOT_FOUND",
    Fault.RATE_LIMITED: "RESOURCE_EXHAUSTED",
    Fault.UNAVAILABLE: "UNAVAILABLE",
    Fault.INTERNAL: "INTERNAL",
    Fault.STORAGE_FULL: "INTERNAL",
    Fault.NOT_IMPLEMENTED: "UNIMPLEMENTED",
}


def _error(error: WireError) -> dict[str, Any]:
    message = error.message
    if error.fault == Fault.CONTEXT_OVERFLOW:
        message = f"The input token count exceeds the maximum number of tokens allowed. {message}"
    status = _STATUS.get(error.fault, "INVALID_ARGUMENT")
    return {"error": {"code": HTTP_STATUS[error.fault], "message": message, "status": status}}


def _data(payload: dict[str, Any]) -> bytes:
    return b"data: " + encode(payload) + b"\r\n\r\n"

"""What the dialects share: strict decoding with a named field, SSE events, pieces of text, and messages in upstream shape."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from polynya.dialects.base import BadRequest
from polynya.dialects.history import History
from polynya.dialects.neutral import ChatMessage, ChatReply, ChatRequest, Role, SamplingParams, ToolCall, ToolSpec

encode = msgspec.json.Encoder().encode
_any = msgspec.json.Decoder()
decode = _any.decode
_raws = msgspec.json.Decoder(list[msgspec.Raw])
R = TypeVar("R")
V = TypeVar("V")
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
_SHORT = 4096
_LONG = 65536
_BACKSLASH, _U, _D = b"\\ud"
_BACKSLASH_U = 0x755C
DELTA_CHARS = 1024
"""Characters of a synthetic delta: few large deltas are valid and cheap."""
_SIGNATURE = b"polynya:"


def readable(body: bytes) -> bytes:
    """The body itself, unless it holds half a surrogate pair: clients that cut texts by UTF-16 units send such escapes.

    No tokenizer takes them, and the client would send them again with every later turn, so they become U+FFFD.
    """
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as exc:
            raise BadRequest(f"body is not UTF-8: {exc.reason} at byte {exc.start}") from exc
    if not _escapes_surrogates(body):
        return body
    return _ESCAPE.sub(lambda found: b"\\ufffd" if found.group(1) else found.group(), body)


def _escapes_surrogates(body: bytes) -> bool:
    r"""Whether ``\ud`` or ``\uD`` is in it. (A search for so short a text goes byte by byte; numpy's is ten times faster.)"""
    if len(body) < _SHORT:
        return b"\\ud" in body or b"\\uD" in body
    octets = np.frombuffer(body, dtype=np.uint8)
    if octets.size < _LONG and not ((octets[:-1] == _BACKSLASH) & (octets[1:] == _U)).any():
        return False
    for offset in (0, 1):
        pairs = np.frombuffer(body, dtype="<u2", offset=offset, count=max(0, len(body) - offset) // 2)
        at = np.flatnonzero(pairs == _BACKSLASH_U) * 2 + offset + 2
        if at.size and ((octets[at[at < octets.size]] | 0x20) == _D).any():
            return True
    return False


def decode_as(decoder: msgspec.json.Decoder[Any], raw: bytes | msgspec.Raw, where: str) -> Any:
    """Decode, or raise BadRequest with the path of the field."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as exc:
        text, _, path = str(exc).partition(" - at `$")
        field = (where + path.rstrip("`")).lstrip(".")
        raise BadRequest(f"{field or 'body'}: {text}", field=field) from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadRequest(f"{where or 'body'} is not JSON: {exc}", field=where) from exc


class Reader(msgspec.Struct, Generic[R, V], frozen=True):
    """How a dialect reads a request whose one long list may go on from an earlier request's."""

    name: str
    """Of the list."""
    decoder: msgspec.json.Decoder[R]
    """Of the request; the list stays raw."""
    list_of: Callable[[R], msgspec.Raw]
    read: Callable[[msgspec.Raw, str], V]
    """One element, at a place."""
    frame: Callable[[bytes, R], ChatRequest]
    """All but the list, of the body (whose list may be cut) and the decoded request."""

    def __call__(self, history: History[V] | None, body: bytes) -> tuple[ChatRequest, list[V]]:
        if history is None:
            return self._whole(body)
        cut = history.cut(body, b'"%b":[' % self.name.encode())
        if (known := history.framed(cut)) is not None:
            frame, part = known
            with contextlib.suppress(msgspec.DecodeError, RecursionError):
                raws: list[msgspec.Raw] = _raws.decode(readable(b"[" + part + b"]"))
                values = self._values(raws, len(cut.values))
                history.remember(cut, raws, values)
                return frame, [*cut.values, *values]
        text = readable(cut.body)
        request: R = decode_as(self.decoder, text, "")
        listed = self.list_of(request)
        if not cut.is_of(text, listed):
            return self._whole(body)
        raws = decode_as(_raws, listed, self.name)
        values = self._values(raws, len(cut.values))
        frame = self.frame(text, request)
        history.keep_frame(cut, history.remember(cut, raws, values), frame)
        return frame, [*cut.values, *values]

    def _whole(self, body: bytes) -> tuple[ChatRequest, list[V]]:
        text = readable(body)
        request: R = decode_as(self.decoder, text, "")
        values = self._values(decode_as(_raws, self.list_of(request), self.name), 0)
        return self.frame(text, request), values

    def _values(self, raws: list[msgspec.Raw], first: int) -> list[V]:
        return [self.read(raw, f"{self.name}[{i}]") for i, raw in enumerate(raws, first)]


def bounded(sampling: SamplingParams, names: Mapping[str, str]) -> SamplingParams:
    """The same, or BadRequest for an integer that no engine takes. ``names``: our field → the client's."""
    for ours, limit in (("seed", 2**63), ("top_k", 2**31), ("max_tokens", 2**31)):
        value = getattr(sampling, ours)
        if value is not None and not -limit <= value < limit:
            field = names.get(ours, ours)
            raise BadRequest(f"{field}: {value} is out of range; use a number below {limit}", field=field)
    return sampling


def kept(value: Any) -> bytes:
    """JSON that is held for long: msgspec's own bytes may hold twice the memory of their length."""
    return bytes(memoryview(encode(value)))


def pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), DELTA_CHARS):
        yield text[start : start + DELTA_CHARS]


def event(name: str, payload: dict[str, Any]) -> bytes:
    """One named SSE event."""
    return b"event: " + name.encode() + b"\ndata: " + encode(payload) + b"\n\n"


def arguments_object(arguments: str) -> dict[str, Any]:
    """Tool arguments for a dialect that carries objects. What is no JSON object is delivered whole, under one key."""
    try:
        value = _any.decode(arguments) if arguments.strip() else {}
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return {"_raw_arguments": arguments}
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"_raw_arguments": arguments}


def arguments_json(arguments: str) -> str:
    """The same as text: the model's own, byte for byte, where that is an object already."""
    value = arguments_object(arguments)
    own = "_raw_arguments" not in value and arguments.lstrip().startswith("{")
    return arguments if own else encode(value).decode()


def arguments_text(value: Any) -> str:
    """The reverse: an echoed object as the text that goes upstream; null, as some clients write none at all, is ``{}``."""
    if value is None:
        return "{}"
    if isinstance(value, dict) and set(value) == {"_raw_arguments"} and isinstance(value["_raw_arguments"], str):
        raw: str = value["_raw_arguments"]
        return raw
    return encode(value).decode()


def with_calls(reply: ChatReply, spelled: Callable[[ToolCall], ToolCall]) -> ChatReply:
    """The reply with its calls spelled anew; the same object when that changes none."""
    calls = [spelled(call) for call in reply.tool_calls]
    return reply if calls == reply.tool_calls else msgspec.structs.replace(reply, tool_calls=calls)


def with_argument_objects(reply: ChatReply) -> ChatReply:
    """The reply after its arguments were objects on the way."""
    return with_calls(
        reply,
        lambda call: msgspec.structs.replace(call, arguments=arguments_text(arguments_object(call.arguments))),
    )


def chat_message(
    role: Role,
    *,
    text: str = "",
    parts: list[dict[str, Any]] | None = None,
    reasoning: str = "",
    tool_calls: list[ToolCall] | None = None,
    tool_call_id: str = "",
) -> ChatMessage:
    """A message with its upstream form. ``parts``: content parts when there is media; then ``text`` is their text."""
    wire: dict[str, Any] = {"role": role, "content": parts if parts is not None else text}
    calls = tool_calls or []
    if reasoning:
        wire["reasoning_content"] = reasoning
    if calls:
        wire["content"] = text or None
        wire["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    if tool_call_id:
        wire["tool_call_id"] = tool_call_id
    media = sum(part.get("type") != "text" for part in parts or [])
    return ChatMessage(role=role, raw=kept(wire), media=media)


def function_tools(specs: list[ToolSpec]) -> msgspec.Raw | None:
    """Tools as OpenAI Chat has them, in its order of fields: templates print them as they stand."""
    wire = []
    for spec in specs:
        described = {"description": spec.description} if spec.description else {}
        wire.append({"type": "function", "function": {"name": spec.name, **described, "parameters": spec.parameters}})
    return msgspec.Raw(kept(wire)) if wire else None


def sign(reasoning: str) -> str:
    """A signature for reasoning that polynya showed, so that it is known again when it is echoed."""
    digest = hashlib.blake2b(reasoning.encode("utf-8", "surrogatepass"), digest_size=19).digest()
    return base64.b64encode(_SIGNATURE + digest).decode()


def is_ours(signature: str) -> bool:
    """Whether it stood beside reasoning that polynya showed, whatever became of the text."""
    try:
        return base64.b64decode(signature, validate=True).startswith(_SIGNATURE)
    except ValueError:
        return False

"""The one internal message form. Every dialect parses into it and renders from it.

Invariant: nothing that a provider's client sent is lost. What the neutral form has no field for stays beside it, as the
raw bytes of the message (``ChatMessage.raw``) and of the request's other fields (``ChatRequest.leftovers``).
Tool-call ids and argument text are kept byte for byte. Pure data: no I/O, no clock.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "tool_calls", "content_filter", "abort"]


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    id: str
    name: str
    arguments: str
    """As the model wrote it or the client echoed it: usually JSON, perhaps malformed. Never re-serialised."""


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    description: str = ""
    parameters: msgspec.Raw = msgspec.Raw(b"{}")
    """JSON schema, as sent."""


class ToolAlias(msgspec.Struct, frozen=True, kw_only=True):
    """How the client knows a tool that goes upstream as a plain function."""

    kind: Literal["function", "custom", "local_shell"] = "function"
    name: str
    namespace: str = ""


class WireFunction(msgspec.Struct):
    name: str = ""
    arguments: Any = ""


class WireCall(msgspec.Struct):
    id: str | None = None
    function: WireFunction = msgspec.field(default_factory=WireFunction)


class WirePart(msgspec.Struct):
    type: str = "text"
    text: str | None = None
    refusal: str | None = None


class WireMessage(msgspec.Struct):
    """An OpenAI Chat message, as far as polynya reads it."""

    role: str
    content: str | list[msgspec.Raw] | None = None
    tool_calls: list[WireCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
_message = msgspec.json.Decoder(WireMessage)
_part = msgspec.json.Decoder(WirePart)


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A message in its upstream form. What it says is read from there when it is asked for: a session keeps each once."""

    role: Role
    raw: bytes
    """The message as an OpenAI Chat message object, ready to be sent upstream."""
    media: int = 0
    """Parts that are no text (images, files, audio)."""

    @property
    def said(self) -> WireMessage:
        return _message.decode(self.raw)

    @property
    def text(self) -> str:
        """Joined text parts."""
        said = self.said
        if not isinstance(said.content, list):
            return said.content or said.refusal or ""
        parts = [_part.decode(raw) for raw in said.content]
        return "\n".join(filter(None, (part.text or part.refusal for part in parts if part.type in TEXT_PARTS)))

    @property
    def reasoning(self) -> str:
        said = self.said
        return said.reasoning_content or said.reasoning or ""

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [
            ToolCall(id=call.id or "", name=call.function.name, arguments=_argument_text(call.function.arguments))
            for call in self.said.tool_calls or []
        ]

    @property
    def tool_call_id(self) -> str:
        return self.said.tool_call_id or ""


def _argument_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """What the client asked of the sampler; None: not said."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    stop: list[str] = []
    seed: int | None = None
    logit_bias: dict[str, float] | None = None


class _Typed(msgspec.Struct):
    type: object = None


def _free(response_format: msgspec.Raw | None) -> bool:
    """No format, null, or an object whose own ``type`` is text. Anything else is taken for a grammar."""
    if response_format is None or bytes(response_format).strip() == b"null":
        return True
    try:
        return msgspec.json.decode(response_format, type=_Typed).type == "text"
    except msgspec.DecodeError:
        return False


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One model request, whatever dialect it came in."""

    dialect: str
    model: str
    """The name that the client used; the engine's own name replaces it upstream."""
    messages: list[ChatMessage]
    tools: list[ToolSpec] = []
    tools_raw: msgspec.Raw | None = None
    """The tool list as OpenAI Chat JSON, ready to be sent upstream."""
    tool_choice: msgspec.Raw | None = None
    response_format: msgspec.Raw | None = None
    parallel_tool_calls: bool | None = None
    sampling: SamplingParams = SamplingParams()
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    """A streaming client wants a final usage event."""
    template_kwargs: msgspec.Raw | None = None
    """``chat_template_kwargs``, as sent."""
    tool_aliases: dict[str, ToolAlias] = {}
    """Upstream function name → the client's tool, for those that differ."""
    instructions: bool = False
    """The first message is the request's own ``instructions``: it stands before any history and is not part of it."""
    previous_response_id: str = ""
    """The history before ``messages`` is that of an earlier reply of the session."""
    stored: bool = False
    """The client may ask for this reply again by its id."""
    compaction: bool = False
    """The client asks for its history to be condensed."""
    images: list[str] = []
    """Where images stand in the client's JSON, in order: an engine that takes none is the client's to hear of by place."""
    dropped: dict[str, int] = {}
    """What the model will not see, by rule (``media.DropRule``)."""
    leftovers: dict[str, Any] = {}
    """Fields of the request that polynya has no use for; kept for the record, not sent upstream."""

    @property
    def guided(self) -> bool:
        """The engine will mask the distribution by a grammar, so the logprobs are not the policy's own."""
        choice = bytes(self.tool_choice) if self.tool_choice is not None else b"null"
        free_choice = choice.strip() in (b"null", b'"auto"', b'"none"')
        return not (free_choice and _free(self.response_format))


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one call. Never None: clients read integers."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class ChatReply(msgspec.Struct, frozen=True, kw_only=True):
    """What the model said, parsed by the engine's (or polynya's, for the embedded engine) own parsers."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []
    finish_reason: str = "stop"
    usage: Usage = Usage()


class ReplyHead(msgspec.Struct, frozen=True, kw_only=True):
    """What a dialect prints around a reply: ids and times, made by the caller, since dialects read no clock."""

    reply_id: str
    created: int
    """Unix seconds."""
    model: str
    """The name that the client asked for."""

"""The scripted engine's toy tokenizer and chat template: exact, reversible, and stable over turns.

A text is its UTF-8 bytes (ids 0 to 255). Roles, tool calls and reasoning are control ids from 256 on, which no text can
spell, so a message's content never turns into a control token. Ids from 512 to 767 decode to the same bytes as 0 to 255
but are never produced by ``encode``: a sampler that emits them makes the drift that a real byte-pair tokenizer has.

    [TOOLS json END] SYSTEM text END  USER text END  ASSISTANT [THINK text UNTHINK] text {CALL name ARGS json} END  TOOL text END  ASSISTANT

Invariant: when a client echoes text, reasoning and tool calls of a reply, the next prompt starts with the earlier prompt
and its sampled ids. Tool-call ids are not part of the template. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from polynya.dialects.neutral import ChatMessage, ChatRequest, ToolCall
from polynya.schema import Int32Array

END, SYSTEM, USER, ASSISTANT, TOOL, TOOLS, CALL, ARGS, THINK, UNTHINK, MEDIA = range(256, 267)
ALTERNATE = 512
"""``ALTERNATE + b`` decodes to byte ``b`` and is never encoded."""
VOCAB_SIZE = 768
CONTROL_TEXT = {
    END: "<|end|>",
    SYSTEM: "<|system|>",
    USER: "<|user|>",
    ASSISTANT: "<|assistant|>",
    TOOL: "<|tool|>",
    TOOLS: "<|tools|>",
    CALL: "<|call|>",
    ARGS: "<|args|>",
    THINK: "<|think|>",
    UNTHINK: "<|/think|>",
    MEDIA: "<|media|>",
}
_ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL, "function": TOOL}


class WireFunction(msgspec.Struct):
    name: str = ""
    arguments: Any = ""


class WireCall(msgspec.Struct):
    function: WireFunction
    id: str = ""


class WireMessage(msgspec.Struct):
    """An OpenAI Chat message, as far as the template prints it."""

    role: str
    content: Any = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[WireCall] | None = None


def wire_message(message: ChatMessage) -> WireMessage:
    return msgspec.json.decode(message.raw, type=WireMessage)


def encode(text: str) -> Int32Array:
    """UTF-8 bytes as ids; unpaired surrogates are kept, so every Python string has ids."""
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8).astype(np.int32)


def decode(ids: Sequence[int] | Int32Array) -> str:
    """Text of ids, control ids spelled out; bytes that are no UTF-8 become U+FFFD."""
    out: list[str] = []
    run = bytearray()
    for value in np.asarray(ids, dtype=np.int64).tolist():
        if 0 <= value < 256:
            run.append(value)
        elif ALTERNATE <= value < ALTERNATE + 256:
            run.append(value - ALTERNATE)
        else:
            out.append(run.decode("utf-8", "replace"))
            run.clear()
            out.append(CONTROL_TEXT.get(value, "\N{REPLACEMENT CHARACTER}"))
    out.append(run.decode("utf-8", "replace"))
    return "".join(out)


def encode_reply(text: str, reasoning: str, calls: Sequence[tuple[str, str]], *, ended: bool) -> Int32Array:
    """Ids of an assistant turn, as sampled and as printed in the next prompt."""
    parts: list[Int32Array] = []
    if reasoning:
        parts += [_control(THINK), encode(reasoning), _control(UNTHINK)]
    parts.append(encode(text))
    for name, arguments in calls:
        parts += [_control(CALL), encode(name), _control(ARGS), encode(arguments)]
    if ended:
        parts.append(_control(END))
    return np.concatenate(parts)


def parse_reply(ids: Int32Array) -> tuple[str, str, list[ToolCall]]:
    """``(text, reasoning, tool calls)`` of sampled ids. An unfinished call or thought stays text, as real parsers leave it."""
    ids = ids[:-1] if ids.size and ids[-1] == END else ids
    reasoning = ""
    if ids.size and ids[0] == THINK:
        close = np.flatnonzero(ids == UNTHINK)
        if close.size:
            reasoning, ids = decode(ids[1 : close[0]]), ids[close[0] + 1 :]
    opens = np.flatnonzero(ids == CALL).tolist()
    if not opens:
        return decode(ids), reasoning, []
    calls: list[ToolCall] = []
    for start, stop in zip(opens, [*opens[1:], int(ids.size)], strict=True):
        split = np.flatnonzero(ids[start:stop] == ARGS)
        if not split.size:
            return decode(ids), reasoning, []
        at = start + int(split[0])
        calls.append(ToolCall(id="", name=decode(ids[start + 1 : at]), arguments=decode(ids[at + 1 : stop])))
    return decode(ids[: opens[0]]), reasoning, calls


def render(
    messages: Sequence[WireMessage],
    tools: bytes | None = None,
    *,
    drop_reasoning: bool = False,
    generation_prompt: bool = True,
) -> Int32Array:
    """The chat template. ``drop_reasoning`` prints no reasoning of earlier turns, as Qwen's template does."""
    parts: list[Int32Array] = []
    if tools is not None and tools.strip() not in (b"", b"null", b"[]"):
        parts += [_control(TOOLS), encode(tools.decode()), _control(END)]
    for message in messages:
        role = _ROLES.get(message.role, USER)
        parts.append(_control(role))
        if role == ASSISTANT:
            thought = "" if drop_reasoning else message.reasoning or message.reasoning_content or ""
            calls = [(c.function.name, _argument_text(c.function.arguments)) for c in message.tool_calls or []]
            parts.append(encode_reply(_text_of(message.content), thought, calls, ended=True))
        else:
            parts += _content(message.content)
            parts.append(_control(END))
    if generation_prompt:
        parts.append(_control(ASSISTANT))
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)


def render_chat(chat: ChatRequest, *, drop_reasoning: bool = False) -> Int32Array:
    tools = bytes(chat.tools_raw) if chat.tools_raw is not None else None
    return render([wire_message(m) for m in chat.messages], tools, drop_reasoning=drop_reasoning)


def turn_of(prompt: Int32Array) -> int:
    """How many assistant turns the prompt holds before the one that is asked for."""
    return max(int(np.count_nonzero(prompt == ASSISTANT)) - 1, 0)


def _control(token: int) -> Int32Array:
    return np.array([token], dtype=np.int32)


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return ""


def _content(content: Any) -> list[Int32Array]:
    if not isinstance(content, list):
        return [encode(_text_of(content))]
    parts: list[Int32Array] = []
    for part in content:
        is_text = isinstance(part, dict) and "text" in part
        parts.append(encode(str(part["text"])) if is_text else _control(MEDIA))
    return parts


def _argument_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()

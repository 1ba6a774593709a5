"""Requests for engine tests."""

from __future__ import annotations

from typing import Any

import msgspec

from polynya.dialects.neutral import ChatMessage, ChatRequest, ToolSpec
from polynya.dialects.wire import chat_message
from polynya.engines.base import EffectiveSampling, EngineRequest
from polynya.schema import Int32Array
from polynya.tokens.printed import GivenIds

BASH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a bash command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def message(role: str, text: str) -> ChatMessage:
    return chat_message(role, text=text)  # type: ignore[arg-type]


def chat(*texts: str, tools: list[dict[str, Any]] | None = None, **rest: Any) -> ChatRequest:
    """Messages that alternate between user and assistant."""
    roles = ("user", "assistant")
    if tools:
        rest["tools"] = [
            ToolSpec(
                name=tool["function"]["name"],
                parameters=msgspec.Raw(msgspec.json.encode(tool["function"]["parameters"])),
            )
            for tool in tools
        ]
        rest["tools_raw"] = msgspec.Raw(msgspec.json.encode(tools))
    messages = [message(roles[index % 2], text) for index, text in enumerate(texts)]
    return ChatRequest(dialect="chat", model="client-name", messages=messages, **rest)


def ask(
    *texts: str,
    affinity: str = "s",
    prompt_ids: Int32Array | None = None,
    tools: list[dict[str, Any]] | None = None,
    **sampling: Any,
) -> EngineRequest:
    return EngineRequest(
        chat=chat(*(texts or ("hi",)), tools=tools),
        sampling=EffectiveSampling(**sampling),
        affinity=affinity,
        prompt=None if prompt_ids is None else GivenIds(prompt_ids),
    )

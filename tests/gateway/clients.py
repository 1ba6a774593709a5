"""The providers' own SDKs behind one small interface: what to ask in each one's words, sync and async, whole and streamed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anthropic
import openai
from google import genai
from google.genai import types

from . import sdk_shapes
from .sdk_shapes import Said

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"command": {"type": "string"}}}
SURFACES = ["openai_chat", "openai_responses", "anthropic_messages", "google_generate"]


def message(dialect: str, parts: list[Any]) -> Any:
    if dialect == "google_generate":
        return [{"role": "user", "parts": parts}]
    return [{"role": "user", "content": parts}]


def words(dialect: str, text: str) -> Any:
    return {
        "openai_chat": {"type": "text", "text": text},
        "openai_responses": {"type": "input_text", "text": text},
        "anthropic_messages": {"type": "text", "text": text},
        "google_generate": {"text": text},
    }[dialect]


def tool(dialect: str, name: str) -> Any:
    match dialect:
        case "openai_chat":
            return {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
        case "openai_responses":
            return {"type": "function", "name": name, "parameters": SCHEMA, "strict": False}
        case "anthropic_messages":
            return {"name": name, "input_schema": SCHEMA}
    return types.Tool(function_declarations=[types.FunctionDeclaration(name=name, parameters_json_schema=SCHEMA)])


def asking(
    dialect: str,
    parts: list[Any],
    *,
    tools: Sequence[str] = (),
    **extra: Any,
) -> dict[str, Any]:
    """Arguments of the SDK's call. ``extra`` goes in as it is (into the config, for Google)."""
    offered = [tool(dialect, name) for name in tools]
    if dialect == "google_generate":
        off = types.AutomaticFunctionCallingConfig(disable=True)
        config = types.GenerateContentConfig(tools=offered or None, automatic_function_calling=off, **extra)
        return {"model": "m", "contents": message(dialect, parts), "config": config}
    fields = {"model": "m", ("input" if dialect == "openai_responses" else "messages"): message(dialect, parts)}
    if offered:
        fields["tools"] = offered
    if dialect == "anthropic_messages":
        fields["max_tokens"] = 5000
    return fields | extra


class Sync:
    """The blocking clients, in a thread."""

    def __init__(self, base: str, key: str) -> None:
        self.openai = openai.OpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=base, api_key=key, max_retries=0)
        self.google = genai.Client(api_key=key, http_options=types.HttpOptions(base_url=base))

    async def ask(self, dialect: str, fields: dict[str, Any], *, stream: bool) -> Said:
        return await asyncio.to_thread(self._ask, dialect, fields, stream)

    def _ask(self, dialect: str, fields: dict[str, Any], stream: bool) -> Said:
        if dialect == "google_generate":
            models = self.google.models
            if stream:
                return sdk_shapes.of_events(dialect, list(models.generate_content_stream(**fields)))
            return sdk_shapes.of_whole(dialect, models.generate_content(**fields))
        create = {
            "openai_chat": self.openai.chat.completions.create,
            "openai_responses": self.openai.responses.create,
            "anthropic_messages": self.anthropic.messages.create,
        }[dialect]
        found: Any = create(**fields, **_streaming(dialect, stream))
        return sdk_shapes.of_events(dialect, list(found)) if stream else sdk_shapes.of_whole(dialect, found)

    async def close(self) -> None:
        self.openai.close()
        self.anthropic.close()
        self.google.close()


class Async:
    def __init__(self, base: str, key: str) -> None:
        self.openai = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(base_url=base, api_key=key, max_retries=0)
        self.google = genai.Client(api_key=key, http_options=types.HttpOptions(base_url=base)).aio

    async def ask(self, dialect: str, fields: dict[str, Any], *, stream: bool) -> Said:
        if dialect == "google_generate":
            if stream:
                chunks = await self.google.models.generate_content_stream(**fields)
                return sdk_shapes.of_events(dialect, [chunk async for chunk in chunks])
            return sdk_shapes.of_whole(dialect, await self.google.models.generate_content(**fields))
        create: Any = {
            "openai_chat": self.openai.chat.completions.create,
            "openai_responses": self.openai.responses.create,
            "anthropic_messages": self.anthropic.messages.create,
        }[dialect]
        found = await create(**fields, **_streaming(dialect, stream))
        if stream:
            return sdk_shapes.of_events(dialect, [event async for event in found])
        return sdk_shapes.of_whole(dialect, found)

    async def close(self) -> None:
        await self.openai.close()
        await self.anthropic.close()
        await self.google.aclose()


def _streaming(dialect: str, stream: bool) -> dict[str, Any]:
    if stream and dialect == "openai_chat":
        return {"stream": True, "stream_options": {"include_usage": True}}
    return {"stream": stream}


@contextlib.asynccontextmanager
async def clients(kind: type[Sync] | type[Async], base: str, key: str = "x") -> AsyncIterator[Sync | Async]:
    made = kind(base, key)
    try:
        yield made
    finally:
        await made.close()

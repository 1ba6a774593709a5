"""One call to an OpenAI-compatible server: the request's bytes, the sending, the reading.

Invariant: messages and tools are the client's own bytes; large bodies are built and read off the event loop. A prompt given
as ids goes *beside* the messages, so that a server which ignores it still answers and the validator sees another echo.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from polynya.engines.base import EngineReply, EngineRequest
from polynya.engines.flavours import Flavour
from polynya.engines.http import EngineHttp, decode
from polynya.engines.wire import THREAD_BYTES, chat_fields, cut_prompt, read_chat

AFFINITY_HEADER = "x-session-id"
"""What session-aware routers in front of engines can be told to hash by."""
THREAD_IDS = 16_384


class TokenIds(msgspec.Struct):
    tokens: list[int]


class _Text(msgspec.Struct):
    prompt: str | None = None
    """vLLM."""
    text: str | None = None
    """SGLang."""


async def call(http: EngineHttp, flavour: Flavour, model: str, request: EngineRequest) -> EngineReply:
    """One chat completion."""
    given = request.prompt.array if request.prompt is not None else None
    large = given is not None and given.size > THREAD_IDS
    if large:
        sent = await asyncio.to_thread(chat_body, flavour, model, request)
    else:
        sent = chat_body(flavour, model, request)
    headers = {AFFINITY_HEADER: request.affinity} if request.affinity else None
    answer = await http.post("/v1/chat/completions", *sent, headers=headers)
    what = f"{flavour.kind} /v1/chat/completions"
    body, prompt = cut_prompt(answer.body)
    if len(body) > THREAD_BYTES:
        reply = await asyncio.to_thread(read_chat, body, what, prompt)
    else:
        reply = read_chat(body, what, prompt)
    return msgspec.structs.replace(reply, flags={**reply.flags, **answer.flags}) if answer.flags else reply


def chat_body(flavour: Flavour, model: str, request: EngineRequest) -> list[bytes]:
    extra: dict[str, Any] = {"model": model, **flavour.sampling(request.sampling), **flavour.asks}
    if request.cache_salt and flavour.salts:
        extra["cache_salt"] = request.cache_salt
    parts = chat_fields(request.chat, extra, whole=True)
    if request.prompt is not None and flavour.prompt_path:
        parts[-1:] = [*flavour.prompt(request.prompt), parts[-1]]
    return parts


async def tokenize(http: EngineHttp, model: str, text: str) -> list[int]:
    """Ids of a text, without the tokens that a prompt starts or ends with."""
    fields = {"model": model, "prompt": text, "add_special_tokens": False}
    answer = await http.post("/tokenize", msgspec.json.encode(fields))
    return decode(answer.body, TokenIds, "/tokenize").tokens


async def detokenize(http: EngineHttp, flavour: Flavour, model: str, ids: list[int]) -> str:
    """Text of ids, control tokens spelled out."""
    fields: dict[str, Any] = {"model": model, "tokens": ids}
    if flavour.kind == "sglang":
        fields["skip_special_tokens"] = False
    answer = await http.post("/detokenize", msgspec.json.encode(fields))
    found = decode(answer.body, _Text, "/detokenize")
    return found.prompt if found.prompt is not None else found.text or ""

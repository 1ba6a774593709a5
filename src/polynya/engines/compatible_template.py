"""The chat template and tokenizer of an OpenAI-compatible server as a ``TemplateDesk``, by ``/tokenize`` and ``/detokenize``.

These endpoints make a control token of every text that spells one. Invariant: plain text never becomes one: it is cut inside
each spelling that is one (``vocabulary.Fences``) before it is encoded.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from polynya.engines.bridging import Bridger
from polynya.engines.calls import detokenize
from polynya.engines.flavours import Flavour
from polynya.engines.http import EngineHttp, decode
from polynya.engines.vocabulary import Fences, discover
from polynya.tokens.bridge import Vocabulary

_AT_ONCE = 8
_MARGIN, _PER_MESSAGE = 1024, 64
"""Tokens that a template may print besides the messages' own bytes, from the stand-in assistant's turn on."""


class _Tokens(msgspec.Struct):
    tokens: list[int]
    token_strs: list[str] | None = None


class CompatibleTemplate:
    def __init__(self, http: EngineHttp, flavour: Flavour, model: str) -> None:
        self._http = http
        self._flavour = flavour
        self._model = model
        self._few = asyncio.Semaphore(_AT_ONCE)
        self._vocabulary = Vocabulary(special={}, stop_ids=frozenset())
        self._fences = Fences(self._pieces)

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    async def learn(self, stop_ids: list[int]) -> bool:
        """Find the control tokens. False: nothing is known to end a turn."""
        found = await discover(self.render, self.encode_special, stop_ids=stop_ids)
        if found is None:
            return False
        self._vocabulary = found
        self._fences.add(found.special)
        return True

    async def render(self, messages: list[bytes], tools: bytes | None, template_kwargs: bytes | None) -> str:
        """The end of the prompt's text at least, from the last assistant's turn on."""
        ids = await self.render_ids(messages, tools, template_kwargs)
        bound = sum(map(len, messages)) + _PER_MESSAGE * len(messages) + _MARGIN
        return await self.decode(ids[-bound:])

    async def render_ids(self, messages: list[bytes], tools: bytes | None, template_kwargs: bytes | None) -> list[int]:
        head = msgspec.json.encode({"model": self._model, "add_generation_prompt": True})[:-1]
        parts = [head, b',"messages":[', b",".join(messages), b"]"]
        if tools is not None:
            parts += [b',"tools":', tools]
        if template_kwargs is not None:
            parts += [b',"chat_template_kwargs":', template_kwargs]
        answer = await self._http.post("/tokenize", *parts, b"}")
        return decode(answer.body, _Tokens, "/tokenize").tokens

    async def encode(self, texts: list[str]) -> list[list[int]]:
        return list(await asyncio.gather(*(self._fences.encode(text) for text in texts)))

    async def _pieces(self, text: str) -> tuple[list[int], list[str]]:
        found = await self._tokenize(text, return_token_strs=True)
        return found.tokens, found.token_strs or []

    async def encode_special(self, text: str) -> list[int]:
        return (await self._tokenize(text)).tokens

    async def decode(self, ids: list[int]) -> str:
        return await detokenize(self._http, self._flavour, self._model, ids)

    async def _tokenize(self, text: str, **extra: Any) -> _Tokens:
        fields = {"model": self._model, "prompt": text, "add_special_tokens": False, **extra}
        async with self._few:
            answer = await self._http.post("/tokenize", msgspec.json.encode(fields))
        return decode(answer.body, _Tokens, "/tokenize")


async def compatible_bridger(http: EngineHttp, flavour: Flavour, model: str, stop_ids: list[int]) -> Bridger | None:
    """None: nothing is known to end this model's turns."""
    desk = CompatibleTemplate(http, flavour, model)
    return Bridger(desk) if await desk.learn(stop_ids) else None

"""The embedded model's own chat template and tokenizer as a ``TemplateDesk``, by llama.cpp's native endpoints.

Invariant: plain text never becomes a control token: ``parse_special`` is off, and the user-defined tokens that llama.cpp
recognises all the same are cut inside before they are encoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from polynya.engines.bridging import Bridger
from polynya.engines.http import decode
from polynya.engines.llamacpp_wire import Rendered, Text, TokenList
from polynya.engines.vocabulary import Fences, atomic, discover
from polynya.tokens.bridge import Vocabulary

Send = Callable[[str, bytes], Awaitable[bytes]]
"""Path and body to the body of the answer; raises EngineError."""


class _Piece(msgspec.Struct):
    id: int
    piece: str | list[int]
    """Bytes where it is no whole UTF-8."""


class _Pieces(msgspec.Struct):
    tokens: list[_Piece]


class LlamaTemplate:
    def __init__(self, send: Send) -> None:
        self._send = send
        # a connection keeps a thread of the server to itself for seconds, and it has few
        self._few = asyncio.Semaphore(2)
        self._vocabulary = Vocabulary(special={}, stop_ids=frozenset())
        self._fences = Fences(self._pieces)

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    async def learn(self, template: str, stop_ids: Iterable[int]) -> bool:
        """Find the control tokens. False: nothing is known to end a turn."""
        found = await discover(self.render, self.encode_special, template=template, stop_ids=stop_ids)
        if found is None:
            return False
        spellings = list(found.special)
        plain = await asyncio.gather(*(atomic(self._plain, spelling) for spelling in spellings))
        self._fences.add(spelling for spelling, token in zip(spellings, plain, strict=True) if token is not None)
        self._vocabulary = found
        return True

    async def render(self, messages: list[bytes], tools: bytes | None, template_kwargs: bytes | None) -> str:
        fields = [b'"messages":[' + b",".join(messages) + b"]"]
        if tools is not None:
            fields.append(b'"tools":' + tools)
        if template_kwargs is not None:
            fields.append(b'"chat_template_kwargs":' + template_kwargs)
        async with self._few:
            body = await self._send("/apply-template", b"{" + b",".join(fields) + b"}")
        return decode(body, Rendered, "llama.cpp /apply-template").prompt

    async def render_ids(self, messages: list[bytes], tools: bytes | None, template_kwargs: bytes | None) -> list[int]:
        return await self.encode_special(await self.render(messages, tools, template_kwargs))

    async def encode(self, texts: list[str]) -> list[list[int]]:
        return list(await asyncio.gather(*(self._fences.encode(text) for text in texts)))

    async def encode_special(self, text: str) -> list[int]:
        return await self._tokenize(text, parse_special=True)

    async def decode(self, ids: list[int]) -> str:
        async with self._few:
            body = await self._send("/detokenize", msgspec.json.encode({"tokens": ids}))
        return decode(body, Text, "llama.cpp /detokenize").content

    async def _plain(self, text: str) -> list[int]:
        return await self._tokenize(text, parse_special=False)

    async def _pieces(self, text: str) -> tuple[list[int], list[str]]:
        body = await self._ask(text, parse_special=False, with_pieces=True)
        found = decode(body, _Pieces, "llama.cpp /tokenize").tokens
        return [one.id for one in found], [one.piece for one in found if isinstance(one.piece, str)]

    async def _tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        body = await self._ask(text, parse_special=parse_special)
        return decode(body, TokenList, "llama.cpp /tokenize").tokens

    async def _ask(self, text: str, **fields: bool) -> bytes:
        async with self._few:
            return await self._send("/tokenize", msgspec.json.encode({"content": text, "add_special": False, **fields}))


async def llama_bridger(send: Send, template: str, stop_ids: Iterable[int]) -> Bridger | None:
    """None: nothing is known to end this model's turns."""
    desk = LlamaTemplate(send)
    return Bridger(desk) if await desk.learn(template, stop_ids) else None

"""The adapter for OpenAI-compatible servers: vLLM, SGLang, or a plain OpenAI API (text only).

Messages and tools go upstream as the client wrote them, replies are never streamed, and what comes back is handed on unjudged.
A given prompt is sent *beside* the messages: a server that ignores it still answers, and the validator sees another echo.
Invariant: ``EngineInfo`` says only what the start-up probe saw. Refuses nothing at start but an engine that does not answer or
does not serve the model; whether text-only is good enough is the caller's choice (``EngineInfo.trainable``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec
import numpy as np

from polynya.dialects.neutral import ChatRequest
from polynya.engines.base import EngineInfo, EngineReply, EngineRequest
from polynya.engines.bridging import Bridger, LazyBridger
from polynya.engines.calls import TokenIds, call, detokenize, tokenize
from polynya.engines.compatible_template import compatible_bridger
from polynya.engines.flavours import Flavour
from polynya.engines.http import EngineHttp, HttpSettings, decode
from polynya.engines.probe import probe
from polynya.engines.versions import bracketed, weight_version
from polynya.engines.wire import chat_fields
from polynya.errors import EngineRejected
from polynya.schema import Int32Array

_SEPARATOR = "\x1f"
_TEXTS_AT_ONCE = 512


class CompatibleEngine:
    """``base_url`` may end in ``/v1``. ``model`` is needed only where the server serves several."""

    def __init__(
        self, base_url: str, *, model: str | None = None, api_key: str | None = None, http: HttpSettings | None = None
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1").rstrip("/")
        self.http = EngineHttp(self.base_url, api_key=api_key, settings=http)
        self._asked_model = model
        self._found: tuple[EngineInfo, Flavour] | None = None
        self._bridger = LazyBridger(self._make_bridger)

    async def start(self) -> EngineInfo:
        try:
            self._found = await probe(self.http, self._asked_model)
        except BaseException:
            await self.close()
            raise
        return self._found[0]

    @property
    def info(self) -> EngineInfo:
        return self._started()[0]

    def _started(self) -> tuple[EngineInfo, Flavour]:
        if self._found is None:
            raise RuntimeError(f"the engine at {self.base_url} was not started: await start() first")
        return self._found

    async def generate(self, request: EngineRequest) -> EngineReply:
        info, flavour = self._started()
        if info.detail.get("weight_version") is None:
            return await call(self.http, flavour, info.model, request)
        before = await weight_version(self.http)
        # What was cached under other weights is not to be gone on from.
        reply = await call(self.http, flavour, info.model, msgspec.structs.replace(request, cache_salt=before or ""))
        if reply.policy_spans or reply.sampled_ids is None:
            return reply
        spans = bracketed(before, await weight_version(self.http), int(reply.sampled_ids.size))
        return msgspec.structs.replace(reply, policy_spans=spans)

    async def render_ids(self, chat: ChatRequest) -> Int32Array:
        """The prompt that ``generate`` conditions on for these messages, by the engine's own template and tokenizer."""
        info, flavour = self._started()
        if not flavour.tokenizes:
            raise EngineRejected(f"the engine at {self.base_url} has no /tokenize endpoint", status=501)
        body = chat_fields(chat, {"model": info.model, "add_generation_prompt": True})
        answer = await self.http.post("/tokenize", *body)
        return np.array(decode(answer.body, TokenIds, "/tokenize").tokens, dtype=np.int32)

    async def count_tokens(self, chat: ChatRequest) -> int:
        return int((await self.render_ids(chat)).size)

    async def token_texts(self, ids: Iterable[int]) -> dict[int, str]:
        info, flavour = self._started()
        if not flavour.tokenizes:
            return {}
        wanted = list(dict.fromkeys(int(token) for token in ids))
        mark = await tokenize(self.http, info.model, _SEPARATOR)
        texts: dict[int, str] = {}
        for start in range(0, len(wanted), _TEXTS_AT_ONCE):
            texts |= await self._texts(info.model, wanted[start : start + _TEXTS_AT_ONCE], mark)
        return texts

    async def _texts(self, model: str, ids: list[int], mark: list[int]) -> dict[int, str]:
        """Decode all ids in one request, with a separator between them that no other token spells."""
        joined = [piece for token in ids for piece in (*mark, token)] + mark
        parts = (await self._detokenize(model, joined)).split(_SEPARATOR)
        if len(parts) == len(ids) + 2 and not set(mark) & set(ids):
            return dict(zip(ids, parts[1:-1], strict=True))
        one_by_one = await asyncio.gather(*(self._detokenize(model, [token]) for token in ids))
        return dict(zip(ids, one_by_one, strict=True))

    async def _detokenize(self, model: str, ids: list[int]) -> str:
        _, flavour = self._started()
        return await detokenize(self.http, flavour, model, ids)

    async def bridger(self) -> Bridger | None:
        return await self._bridger.get()

    async def _make_bridger(self) -> Bridger | None:
        info, flavour = self._started()
        if not (info.token_in and flavour.tokenizes):
            return None
        return await compatible_bridger(self.http, flavour, info.model, info.stop_ids)

    async def health(self) -> None:
        _, flavour = self._started()
        await self.http.get(flavour.health)

    async def close(self) -> None:
        await self.http.close()

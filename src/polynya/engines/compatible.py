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
from polynya.dialects.wire import chat_message
from polynya.engines.base import EngineInfo, EngineReply, EngineRequest
from polynya.engines.bridging import Bridger, LazyBridger
from polynya.engines.calls import TokenIds, detokenize, tokenize
from polynya.engines.compatible_template import compatible_bridger
from polynya.engines.http import EngineHttp, HttpSettings, decode
from polynya.engines.probe import Found, probe
from polynya.engines.routes import Route, find_route
from polynya.engines.versions import bracketed, weight_version
from polynya.engines.wire import chat_fields
from polynya.errors import EngineError, EngineRejected
from polynya.schema import Int32Array

_SEPARATOR = "\x1f"
_TEXTS_AT_ONCE = 512
_ANY_CHAT = ChatRequest(dialect="chat", model="", messages=[chat_message("user", text="Tell me a story.")])


class CompatibleEngine:
    """``base_url`` may end in ``/v1``. ``model`` is needed only where the server serves several.

    ``token_route``: the first to be used, in place of the first that works. ``generate`` then carries every call, so that the
    engine says which weights sampled which token.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        http: HttpSettings | None = None,
        token_route: Route | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1").rstrip("/")
        self.http = EngineHttp(self.base_url, api_key=api_key, settings=http)
        self._asked_model = model
        self._asked_route = token_route
        self._found: Found | None = None
        self._route: Route | None = None
        self._stepping = asyncio.Lock()
        self._bridger = LazyBridger(self._make_bridger)

    async def start(self) -> EngineInfo:
        try:
            self._found = await probe(self.http, self._asked_model, self._asked_route)
        except BaseException:
            await self.close()
            raise
        self._route = self._found.route
        return self._found.info

    @property
    def info(self) -> EngineInfo:
        return self._started().info

    def _started(self) -> Found:
        if self._found is None:
            raise RuntimeError(f"the engine at {self.base_url} was not started: await start() first")
        return self._found

    async def generate(self, request: EngineRequest) -> EngineReply:
        info = self._started().info
        if info.detail.get("weight_version") is None:
            return await self._ask(request)
        before = await weight_version(self.http)
        # What was cached under other weights is not to be gone on from.
        reply = await self._ask(msgspec.structs.replace(request, cache_salt=before or ""))
        if reply.policy_spans or reply.sampled_ids is None:
            return reply
        spans = bracketed(before, await weight_version(self.http), int(reply.sampled_ids.size))
        return msgspec.structs.replace(reply, policy_spans=spans)

    async def _ask(self, request: EngineRequest) -> EngineReply:
        always = self._route is Route.GENERATE and self._asked_route is Route.GENERATE
        route = self._route if request.prompt is not None or always else None
        return await self._started().caller.ask(request, route or Route.CHAT)

    @property
    def token_route(self) -> str:
        return self._route or ""

    async def step_down(self, route: str) -> str:
        async with self._stepping:
            if self._route is not None and route == self._route:
                routes = list(Route)
                left = routes[routes.index(self._route) + 1 :]
                self._route = await self._next_route(left[0]) if left else None
            return self.token_route

    async def _next_route(self, first: Route) -> Route | None:
        try:
            return await find_route(self._started().caller, await self.render_ids(_ANY_CHAT), first)
        except EngineError:
            return None

    async def render_ids(self, chat: ChatRequest) -> Int32Array:
        """The prompt that ``generate`` conditions on for these messages, by the engine's own template and tokenizer."""
        info, flavour = self._started().info, self._started().caller.flavour
        if not flavour.tokenizes:
            raise EngineRejected(f"the engine at {self.base_url} has no /tokenize endpoint", status=501)
        body = chat_fields(chat, {"model": info.model, "add_generation_prompt": True})
        answer = await self.http.post("/tokenize", *body)
        return np.array(decode(answer.body, TokenIds, "/tokenize").tokens, dtype=np.int32)

    async def count_tokens(self, chat: ChatRequest) -> int:
        return int((await self.render_ids(chat)).size)

    async def token_texts(self, ids: Iterable[int]) -> dict[int, str]:
        info, flavour = self._started().info, self._started().caller.flavour
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
        flavour = self._started().caller.flavour
        return await detokenize(self.http, flavour, model, ids)

    async def bridger(self) -> Bridger | None:
        return await self._bridger.get()

    async def _make_bridger(self) -> Bridger | None:
        info, flavour = self._started().info, self._started().caller.flavour
        if not (info.token_in and flavour.tokenizes):
            return None
        return await compatible_bridger(self.http, flavour, info.model, info.stop_ids)

    async def health(self) -> None:
        flavour = self._started().caller.flavour
        await self.http.get(flavour.health)

    async def close(self) -> None:
        await self.http.close()

"""The ways by which a prompt of ids reaches an OpenAI-compatible server, and its reply comes back parsed.

``chat``: the ids beside the messages; one request. ``generate``: vLLM's token-in token-out pair, the engine's own parsers run
in ``/derender``; three requests, and the reply says which weights sampled which token. ``completions``: ids in, text out, and
the text is parsed here. Invariant: in each of them ids, logprobs and the echoed prompt are the engine's own. ``completions``
refuses what only the engine can do with messages: a forced tool, a response format, a template whose calls our parser does
not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from polynya.dialects.neutral import ChatReply, ChatRequest, Usage
from polynya.dialects.wire import chat_message
from polynya.engines import toolparse
from polynya.engines.base import EffectiveSampling, EngineReply, EngineRequest
from polynya.engines.calls import AFFINITY_HEADER, TokenIds, call, chat_body, detokenize
from polynya.engines.flavours import Flavour
from polynya.engines.http import EngineHttp, decode
from polynya.engines.wire import cut_prompt, read_chat
from polynya.errors import EngineProtocolError, EngineRejected, EngineUnavailable, NotContinuable
from polynya.schema import Float32Array, Int32Array, PolicySpan
from polynya.tokens.printed import GivenIds, PrintedIds, listed
from polynya.tokens.routing import read_routing

_TAIL = 16
"""Of a prompt's ids, those that are looked at for an opened thought."""


class Route(StrEnum):
    """In the order in which they are tried."""

    CHAT = "chat"
    GENERATE = "generate"
    COMPLETIONS = "completions"


class _Rendered(msgspec.Struct):
    sampling_params: dict[str, Any]
    token_ids: msgspec.Raw
    features: msgspec.Raw = msgspec.Raw(b"null")
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: Any = None


class _SampledToken(msgspec.Struct, gc=False):
    token_id: int
    logprob: float | None = None


class _SampledLogprobs(msgspec.Struct):
    content: list[_SampledToken] | None = None


class _Weights(msgspec.Struct):
    start: int
    end: int
    version: str | int | None = None


class _GeneratedChoice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: _SampledLogprobs | None = None
    routed_experts: msgspec.Raw = msgspec.Raw(b"null")
    weight_versions: list[_Weights] | None = None


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Counted(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _CachedTokens | None = None

    @property
    def usage(self) -> Usage:
        details = self.prompt_tokens_details
        cached = (details.cached_tokens or 0) if details is not None else 0
        return Usage(
            prompt_tokens=self.prompt_tokens, completion_tokens=self.completion_tokens or 0, cached_tokens=cached
        )


class _Generated(msgspec.Struct):
    choices: list[_GeneratedChoice]
    request_id: str = ""
    usage: _Counted = msgspec.field(default_factory=_Counted)


class _CompletedLogprobs(msgspec.Struct):
    token_logprobs: list[float | None] | None = None


class _CompletedChoice(msgspec.Struct):
    text: str
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _CompletedLogprobs | None = None
    routed_experts: msgspec.Raw = msgspec.Raw(b"null")
    prompt_token_ids: list[int] | None = None


class _Completed(msgspec.Struct):
    choices: list[_CompletedChoice]
    id: str = ""
    usage: _Counted = msgspec.field(default_factory=_Counted)


class Caller(msgspec.Struct, kw_only=True):
    """Who is asked, and what was found out about it."""

    http: EngineHttp
    flavour: Flavour
    model: str
    stop_ids: Sequence[int] = ()
    window: int | None = None
    reads_calls: bool | None = None
    """Our parser reads the calls that the model's template prints; None: not looked at yet."""

    async def ask(self, request: EngineRequest, route: Route) -> EngineReply:
        """One reply. Raises EngineError; NotContinuable for a request that this route cannot carry."""
        if route is Route.GENERATE:
            return await self._generate(request)
        if route is Route.COMPLETIONS and request.prompt is not None:
            return await self._complete(request)
        return await call(self.http, self.flavour, self.model, request)

    def _headers(self, request: EngineRequest) -> dict[str, str] | None:
        return {AFFINITY_HEADER: request.affinity} if request.affinity else None

    async def _generate(self, request: EngineRequest) -> EngineReply:
        what = "/inference/v1/generate"
        chat = b"".join(chat_body(self.flavour, self.model, msgspec.structs.replace(request, prompt=None)))
        answer = await self.http.post("/v1/chat/completions/render", chat, headers=self._headers(request))
        rendered = decode(answer.body, _Rendered, "/v1/chat/completions/render")
        body = await asyncio.to_thread(self._generate_body, request, rendered)
        answer = await self.http.post(what, *body, headers=self._headers(request))
        rest, prompt = cut_prompt(answer.body)
        found = decode(rest, _Generated, what)
        choice = _only(found.choices, what)
        sampled = _ids(choice.token_ids, what)
        reply = EngineReply(
            reply=await self._derendered(rest, choice, found, chat, prompt),
            prompt=prompt,
            sampled_ids=sampled,
            logprobs=_logprobs_of(choice, what),
            routing=read_routing(bytes(choice.routed_experts)),
            finish_reason=choice.finish_reason or "stop",
            policy_spans=[
                PolicySpan(None if span.version is None else str(span.version), span.start, span.end)
                for span in choice.weight_versions or []
            ],
            upstream_id=found.request_id,
        )
        return msgspec.structs.replace(reply, flags={**reply.flags, **answer.flags}) if answer.flags else reply

    def _generate_body(self, request: EngineRequest, rendered: _Rendered) -> list[bytes]:
        sampling = rendered.sampling_params
        sampling["logprobs"] = 0
        fields: dict[str, Any] = {
            "model": self.model,
            "features": rendered.features,
            "reasoning_ended": rendered.reasoning_ended,
            "reasoning_parser_kwargs": rendered.reasoning_parser_kwargs,
            "sampling_params": sampling,
            "return_token_ids": True,
            "output_mode": "tokens",
            "stream": False,
        }
        if request.cache_salt:
            fields["cache_salt"] = request.cache_salt
        if request.prompt is None:
            ids = [bytes(rendered.token_ids)[1:-1]]
        else:
            ids = request.prompt.print()
            if request.sampling.max_tokens is None and self.window is not None:
                # the engine's own bound was reckoned from the prompt that it rendered
                sampling["max_tokens"] = max(1, self.window - len(request.prompt.ids))
        return [msgspec.json.encode(fields)[:-1] + b',"token_ids":[', *ids, b"]}"]

    async def _derendered(
        self, body: bytes, choice: _GeneratedChoice, found: _Generated, chat: bytes, prompt: PrintedIds | None
    ) -> ChatReply:
        """What the engine's own parsers make of the sampled ids. The turn's end is no text."""
        ids = choice.token_ids
        said = choice.finish_reason or "stop"
        if said == "stop" and ids and ids[-1] in self.stop_ids:
            ids = ids[:-1]
        if not ids:
            return ChatReply(finish_reason=said, usage=found.usage.usage)
        response = {
            "request_id": found.request_id,
            "model": self.model,
            "created": 0,
            "choices": [{"index": 0, "finish_reason": said, "token_ids": ids}],
            "usage": found.usage,
        }
        sent = b'{"generate_response":%b,"prompt_token_ids":[%b],"prompt_tokens":%d,"chat_request":%b}' % (
            msgspec.json.encode(response),
            b"" if prompt is None else prompt.text,
            found.usage.prompt_tokens,
            chat,
        )
        answer = await self.http.post("/v1/chat/completions/derender", sent)
        reply = read_chat(answer.body, "/v1/chat/completions/derender").reply
        text = reply.text
        if isinstance(choice.stop_reason, str) and (at := text.rfind(choice.stop_reason)) >= 0:
            # the ids keep a stop string, a reply does not
            text = text[:at]
        finish = "tool_calls" if reply.tool_calls and said == "stop" else said
        return msgspec.structs.replace(reply, text=text, finish_reason=finish, usage=found.usage.usage)

    async def _complete(self, request: EngineRequest) -> EngineReply:
        what = "/v1/completions"
        given, chat = request.prompt, request.chat
        assert given is not None
        if chat.guided:
            raise NotContinuable("a forced tool or a response format cannot be asked of /v1/completions")
        if chat.tools and not await self._reads_calls():
            raise NotContinuable("tool calls of this model's template cannot be read from the text of /v1/completions")
        fields: dict[str, Any] = {"model": self.model, **self.flavour.sampling(request.sampling)}
        fields.pop(self.flavour.max_tokens_field, None)
        ids = given.ids
        room = None if self.window is None else max(1, self.window - len(ids))
        limits = [limit for limit in (request.sampling.max_tokens, room) if limit is not None]
        if limits:
            # left out, it is 16
            fields["max_tokens"] = min(limits)
        fields |= {"logprobs": 0, "return_token_ids": True, "skip_special_tokens": False, "stream": False, "n": 1}
        fields["spaces_between_special_tokens"] = False
        if request.cache_salt and self.flavour.salts:
            fields["cache_salt"] = request.cache_salt
        body = [msgspec.json.encode(fields)[:-1] + b',"prompt":[', *given.print(), b"]}"]
        answer = await self.http.post(what, *body, headers=self._headers(request))
        rest, prompt = cut_prompt(answer.body)
        found = decode(rest, _Completed, what)
        done = _only(found.choices, what)
        logprobs = done.logprobs.token_logprobs if done.logprobs is not None else None
        sampled = None if done.token_ids is None else _ids(done.token_ids, what)
        said = done.finish_reason or "stop"
        reply, flags = toolparse.read_reply(
            done.text,
            chat,
            finish=said,
            usage=found.usage.usage,
            opened=await self._thinks(ids),
            seed=ids.tobytes() + b"|" + (b"" if sampled is None else sampled.tobytes()),
        )
        return EngineReply(
            reply=reply,
            prompt=prompt,
            sampled_ids=sampled,
            logprobs=None if logprobs is None else np.array(logprobs, dtype=np.float32),
            routing=read_routing(bytes(done.routed_experts)),
            finish_reason=said,
            upstream_id=found.id,
            flags={**answer.flags, **flags},
        )

    async def _reads_calls(self) -> bool:
        """Else tools would come to nothing in silence."""
        if self.reads_calls is None:
            arguments = {"x": "zq"}
            call = {"id": "zqCall001", "type": "function", "function": {"name": "zq_tool", "arguments": arguments}}
            messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
            fields = {"model": self.model, "messages": messages, "add_generation_prompt": False}
            answer = await self.http.post("/tokenize", msgspec.json.encode(fields))
            ids = decode(answer.body, TokenIds, "/tokenize").tokens
            text = await detokenize(self.http, self.flavour, self.model, ids)
            found = toolparse.parse_calls(text, {"zq_tool"}).calls
            self.reads_calls = len(found) == 1 and msgspec.json.decode(found[0].arguments) == arguments
        return self.reads_calls

    async def _thinks(self, ids: Int32Array) -> bool:
        """Whether the prompt ends inside a thought."""
        text = await detokenize(self.http, self.flavour, self.model, ids[-_TAIL:].tolist())
        return text.rstrip().endswith("<think>")


def _only(choices: list[Any], what: str) -> Any:
    if not choices:
        raise EngineProtocolError(f"{what}: choices is empty", fix="see the engine's own log")
    return choices[0]


def _ids(ids: list[int], what: str) -> Int32Array:
    found = listed(ids)
    if found is None:
        raise EngineProtocolError(f"{what}: token_ids holds an id that does not fit into 32 bits")
    return found


def _logprobs_of(choice: _GeneratedChoice, what: str) -> Float32Array | None:
    """NaN for a null. They name their ids: those must be the sampled ones."""
    content = choice.logprobs.content if choice.logprobs is not None else None
    if content is None:
        return None
    if [entry.token_id for entry in content] != choice.token_ids:
        raise EngineProtocolError(f"{what}: logprobs.content names other ids than token_ids")
    return np.array([entry.logprob for entry in content], dtype=np.float32)


async def find_route(caller: Caller, prompt: Int32Array, first: Route = Route.CHAT) -> Route | None:
    """The first route from ``first`` on that is seen to condition on the ids that it is given. None: there is none."""
    routes = list(Route)
    for route in routes[routes.index(first) :]:
        if await _works(caller, prompt, route):
            return route
    return None


async def _works(caller: Caller, prompt: Int32Array, route: Route) -> bool:
    """Send a prompt that no messages render to; only a server that conditions on it echoes it."""
    if route is Route.CHAT and not caller.flavour.prompt_path:
        return False
    if route is not Route.CHAT and caller.flavour.kind != "vllm":
        return False
    other = np.concatenate([prompt, prompt[-3:], prompt[:2]]).astype(np.int32)
    chat = ChatRequest(dialect="chat", model=caller.model, messages=[chat_message("user", text="Tell me a story.")])
    sampling = EffectiveSampling(max_tokens=1, seed=1)
    try:
        reply = await caller.ask(EngineRequest(chat=chat, sampling=sampling, prompt=GivenIds(other)), route)
    except (EngineRejected, EngineProtocolError):
        return False
    except EngineUnavailable as exc:
        if exc.status is None:
            raise
        return False
    complete = reply.sampled_ids is not None and reply.logprobs is not None
    return complete and reply.prompt_ids is not None and np.array_equal(reply.prompt_ids, other)

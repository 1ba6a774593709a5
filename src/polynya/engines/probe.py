"""What an OpenAI-compatible server is and can do, found by asking it: kind, model, ids, logprobs, prompts as ids.

Invariant: nothing is believed from a version number; each capability is seen in an answer to a one-token call. What cannot
be decided stays unknown (``logprob_kind``) or off. Costs at most ten one-token calls at start.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np

from polynya.dialects.neutral import ChatRequest
from polynya.dialects.wire import chat_message
from polynya.engines.base import EffectiveSampling, EngineInfo, EngineReply, EngineRequest
from polynya.engines.calls import call, tokenize
from polynya.engines.flavours import OPENAI, SGLANG, VLLM, Flavour
from polynya.engines.http import EngineHttp, decode
from polynya.engines.routes import Caller, Route, find_route
from polynya.errors import ConfigError, EngineError, EngineRejected, EngineTimeout, EngineUnavailable
from polynya.schema import Int32Array

PROBE_TEXT = "The quick brown fox: 0123, naïve café 🙂 漢字\n\tdef f(x):\n        return x"
"""``tokenizer_sha256`` is over the ids of this text, comma-separated: it tells tokenizers apart, it is not the file's hash."""
_QUESTIONS = ("Tell me a story.", "Name any thing at all.", "Write a random word.")
_IMAGE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAAT0lEQVR42u3PQQkAAAgEsItmNKMZzQi+hcEKLF3zWgQEBAQEBAQE"
    "BAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQELgsfAgFp1e18twAAAABJRU5ErkJggg=="
)
"""64 × 64 pixels of one colour: some processors refuse smaller ones."""
_CALL = {"id": "zqCall001", "type": "function", "function": {"name": "probe", "arguments": '{"x": 1}'}}
_CONVERSATIONS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
    {
        "messages": [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "zqCall001", "content": "t"},
        ],
        "tools": [{"type": "function", "function": {"name": "probe", "parameters": {"type": "object"}}}],
    },
)
"""``chat_template_sha256`` is over the ids that the server's template makes of these."""
_SAME = 0.02
"""Numerics of two runs of one prompt differ by less."""
_OTHER = 0.1


class _Card(msgspec.Struct):
    id: str
    owned_by: str = ""
    max_model_len: int | None = None


class _Rendered(msgspec.Struct):
    tokens: list[int]
    token_strs: list[str] | None = None


class _Cards(msgspec.Struct):
    data: list[_Card] = []


class Found(msgspec.Struct, frozen=True, kw_only=True):
    info: EngineInfo
    caller: Caller
    route: Route | None
    """By which prompts of ids are given; None: not at all."""


async def probe(http: EngineHttp, asked_model: str | None, first_route: Route | None = None) -> Found:
    """Raises EngineUnavailable when nothing answers, ConfigError when the model is not served or ``first_route`` does not work."""
    cards = decode((await http.get("/v1/models")).body, _Cards, "/v1/models").data
    card = _pick(cards, asked_model, http.base_url)
    flavour, build = await _flavour(http, card)
    reply: EngineReply | None = None
    if flavour is not OPENAI:
        try:
            reply = await _ask(http, flavour, card.id)
        except EngineRejected:
            # it does not take the fields that bring ids: then it is served as what it is, text only
            flavour = OPENAI
    with_ids = reply is not None and _has(reply.prompt_ids) and _has(reply.sampled_ids)
    with_logprobs = reply is not None and reply.logprobs is not None and reply.logprobs.size > 0
    images = await _takes_images(http, flavour, card.id)
    kind = await _logprob_kind(http, flavour, card.id) if with_ids and with_logprobs else "unknown"
    stop_ids = await _turn_end(http, flavour, card.id)
    caller = Caller(http=http, flavour=flavour, model=card.id, stop_ids=stop_ids, window=card.max_model_len)
    route: Route | None = None
    if with_ids and reply is not None and reply.prompt_ids is not None:
        route = await find_route(caller, reply.prompt_ids, first_route or Route.CHAT)
    if first_route is not None and route is not first_route:
        raise ConfigError(
            f"token_route: the engine at {http.base_url} takes no prompts of ids by {first_route.value!r}",
            fix="for generate start vLLM with --enable-scale-out, or leave token_route out",
        )
    detail: dict[str, Any] = {}
    if (version := await _optional(http, "/weight_info")) is not None:
        detail["weight_version"] = version.get("weight_version")
    fingerprint = await _fingerprint(http, flavour, card.id)
    if fingerprint is not None:
        detail["tokenizer_sha256_over"] = "ids of a fixed probe text"
    template = await _template_fingerprint(http, flavour, card.id)
    if template is not None:
        detail["chat_template_sha256_over"] = "ids of fixed conversations"
    info = EngineInfo(
        kind=flavour.kind,
        model=card.id,
        build=build,
        window=card.max_model_len,
        token_ids=with_ids,
        logprobs=with_logprobs,
        token_in=route is not None,
        images=images,
        logprob_kind=kind,
        tokenizer_sha256=fingerprint,
        chat_template_sha256=template,
        stop_ids=stop_ids,
        detail=detail,
    )
    return Found(info=info, caller=caller, route=route)


def _pick(cards: list[_Card], asked: str | None, url: str) -> _Card:
    served = [card.id for card in cards]
    if asked is None:
        if not cards:
            raise EngineUnavailable(f"the engine at {url} serves no model", fix="name the model with --model")
        return cards[0]
    for card in cards:
        if card.id == asked:
            return card
    if len(cards) > 0:
        raise ConfigError(f"model: {asked!r} is not served at {url}", fix=f"use one of {', '.join(served[:8])}")
    return _Card(id=asked)


async def _flavour(http: EngineHttp, card: _Card) -> tuple[Flavour, str | None]:
    version = await _optional(http, "/version")
    info = None
    if card.owned_by != "vllm":
        info = await _optional(http, "/server_info") or await _optional(http, "/get_server_info")
    if card.owned_by == "sglang" or (info is not None and "disaggregation_mode" in info):
        return SGLANG, str(info["version"]) if info and info.get("version") else None
    if card.owned_by == "vllm" or version is not None:
        return VLLM, str(version["version"]) if version and version.get("version") else None
    return OPENAI, None


async def _optional(http: EngineHttp, path: str) -> dict[str, Any] | None:
    """A JSON object, or None where the server has no such page."""
    try:
        found = msgspec.json.decode((await http.get(path)).body)
    except EngineTimeout:
        raise
    except (EngineError, msgspec.DecodeError):
        return None
    return found if isinstance(found, dict) else None


def _has(ids: Int32Array | None) -> bool:
    return ids is not None and ids.size > 0


async def _ask(
    http: EngineHttp,
    flavour: Flavour,
    model: str,
    *,
    question: Any = _QUESTIONS[0],
    temperature: float = 1.0,
    bias: dict[str, float] | None = None,
) -> EngineReply:
    chat = ChatRequest(dialect="chat", model=model, messages=[chat_message("user", text=question)])
    sampling = EffectiveSampling(temperature=temperature, max_tokens=1, seed=1, logit_bias=bias)
    return await call(http, flavour, model, EngineRequest(chat=chat, sampling=sampling))


async def _takes_images(http: EngineHttp, flavour: Flavour, model: str) -> bool:
    """An image must make the prompt longer: a server that leaves it out in silence takes none."""
    text = {"type": "text", "text": _QUESTIONS[0]}
    image = {"type": "image_url", "image_url": {"url": _IMAGE}}
    try:
        blind = await _ask(http, flavour, model, question=[text])
        seeing = await _ask(http, flavour, model, question=[text, image])
    except EngineTimeout:
        raise
    except EngineError:
        # some servers say with a 500 that their model has no eyes
        return False
    return seeing.reply.usage.prompt_tokens > blind.reply.usage.prompt_tokens


async def _logprob_kind(http: EngineHttp, flavour: Flavour, model: str) -> str:
    """Sample at temperature 2, then force the same token at temperature 1 by a bias.

    Raw logprobs see neither temperature nor bias, so both are equal; processed ones are near 0 when forced.
    """
    for question in _QUESTIONS:
        try:
            free = await _ask(http, flavour, model, question=question, temperature=2.0)
            token = _only(free.sampled_ids)
            if token is None:
                return "unknown"
            forced = await _ask(http, flavour, model, question=question, bias={str(token): 100.0})
        except EngineRejected:
            return "unknown"
        if _only(forced.sampled_ids) != token or free.logprobs is None or forced.logprobs is None:
            continue
        one, two = float(free.logprobs[0]), float(forced.logprobs[0])
        if not (np.isfinite(one) and np.isfinite(two)) or one > -_OTHER:
            # a token that is nearly certain looks the same in both
            continue
        if abs(one - two) < _SAME:
            return "raw"
        if abs(one - two) > _OTHER / 2:
            return "processed"
    return "unknown"


def _only(ids: Int32Array | None) -> int | None:
    return int(ids[0]) if ids is not None and ids.size == 1 else None


async def _fingerprint(http: EngineHttp, flavour: Flavour, model: str) -> str | None:
    if not flavour.tokenizes:
        return None
    try:
        ids = await tokenize(http, model, PROBE_TEXT)
    except EngineError:
        return None
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()


async def _template_fingerprint(http: EngineHttp, flavour: Flavour, model: str) -> str | None:
    """Over what the server's template makes of two conversations, one of them with tools. A template may refuse either."""
    if not flavour.tokenizes:
        return None
    digest, rendered = hashlib.sha256(), False
    for fields in _CONVERSATIONS:
        body = msgspec.json.encode({"model": model, "add_generation_prompt": True, **fields})
        try:
            ids = decode((await http.post("/tokenize", body)).body, _Rendered, "/tokenize").tokens
        except EngineTimeout:
            raise
        except EngineError:
            digest.update(b"refused;")
            continue
        rendered = True
        digest.update(",".join(map(str, ids)).encode() + b";")
    return digest.hexdigest() if rendered else None


async def _turn_end(http: EngineHttp, flavour: Flavour, model: str) -> list[int]:
    """The control token that the template prints right after an assistant's text: the one that ends a sampled turn.

    Two replies are rendered that differ in their text only; what they end with alike starts with that token.
    """
    if not flavour.tokenizes:
        return []
    try:
        one, two = [await _rendered_reply(http, model, text) for text in ("alpha 1", "omega 2")]
    except EngineError:
        return []
    same = 0
    while same < min(len(one.tokens), len(two.tokens)) and one.tokens[-1 - same] == two.tokens[-1 - same]:
        same += 1
    if same == 0 or one.token_strs is None:
        return []
    spelled = one.token_strs[-same]
    return [one.tokens[-same]] if spelled.startswith("<") and spelled.endswith(">") else []


async def _rendered_reply(http: EngineHttp, model: str, text: str) -> _Rendered:
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": text}]
    fields = {"model": model, "messages": messages, "add_generation_prompt": False, "return_token_strs": True}
    return decode((await http.post("/tokenize", msgspec.json.encode(fields))).body, _Rendered, "/tokenize")

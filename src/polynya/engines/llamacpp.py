"""The embedded engine: llama.cpp in a child process, driven through its native endpoints so that ids and logprobs are exact.

A reply is made in three steps: the prompt is evaluated by a request that can be cancelled between batches, then tokens are
sampled in slices of ``SLICE``, each one request on the cached prefix, because llama.cpp does not notice that the client of an
unstreamed request has gone, and its streamed replies leave out ids inside a UTF-8 character. A logprob that llama.cpp leaves
out for the same reason is asked for by scoring that position. ``logprob_kind`` is ``raw``: the model's own softmax, whatever
temperature sampled. Invariant: sampled ids are the server's ``tokens``, in order, stop token included.

Refuses guided decoding: ``tool_choice`` and ``response_format`` are not enforced, which is counted in the flags.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from polynya.dialects.neutral import ChatRequest, Usage
from polynya.engines import toolparse
from polynya.engines.base import EffectiveSampling, EngineInfo, EngineReply, EngineRequest
from polynya.engines.bridging import Bridger, LazyBridger
from polynya.engines.http import EngineHttp, HttpSettings, decode
from polynya.engines.llamacpp_child import ChildSettings, LlamaChild
from polynya.engines.llamacpp_template import llama_bridger
from polynya.engines.llamacpp_wire import (
    Completion,
    Models,
    Props,
    Rendered,
    Text,
    TokenList,
    matched_logprobs,
    sampling_fields,
)
from polynya.engines.models import DEFAULT_MODEL, Progress, ResolvedModel, resolve_model
from polynya.engines.vocabulary import END_SPELLINGS
from polynya.engines.wire import chat_fields
from polynya.errors import ContextOverflow, EngineProtocolError, EngineUnavailable
from polynya.schema import Int32Array

SLICE = 16
"""Sampled tokens per request: what is still sampled after a cancel, well below a second on any CPU that serves at all."""
PROBE_TEXT = "The quick brown fox: 0123, naïve café 🙂 漢字\n\tdef f(x):\n        return x  # <|im_end|>"
"""``tokenizer_sha256`` is over the ids of this text, comma-separated."""
_UNSEEDED = 0xFFFF_FFFF


class _Sampled(msgspec.Struct):
    ids: list[int] = []
    logprobs: list[float] = []
    text: str = ""
    finish: str = "length"
    stopped: bool = False
    """By a stop token, which is the last id."""
    rescored: int = 0
    whole: bool = True
    """No slice ended inside a character, so ``text`` is right."""


class LlamaCppEngine:
    """``model`` is what ``models.resolve_model`` takes; ``log`` is where the server's own log goes."""

    def __init__(
        self,
        model: str | None = None,
        *,
        settings: ChildSettings | None = None,
        http: HttpSettings | None = None,
        log: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.model = model or DEFAULT_MODEL
        self.settings = settings or ChildSettings()
        self._http_settings = http or HttpSettings()
        self._log = log
        self._progress = progress
        self._info: EngineInfo | None = None
        self._child: LlamaChild | None = None
        self._http: EngineHttp | None = None
        self._slots = asyncio.Semaphore(self.settings.slots)
        self._bos: list[int] = []
        self._plain: int = 0
        self._thinks = False
        self._template = ""
        self._bridger = LazyBridger(self._make_bridger)
        self._token_route = "completion"

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise RuntimeError("the embedded engine was not started: await start() first")
        return self._info

    @property
    def child(self) -> LlamaChild | None:
        return self._child

    async def start(self) -> EngineInfo:
        resolved = await asyncio.to_thread(resolve_model, self.model, progress=self._progress)
        log = self._log or Path(tempfile.mkdtemp(prefix="polynya-llamacpp-")) / "server.log"
        self._child = LlamaChild(resolved.path, self.settings, log)
        address = await self._child.start()
        self._http = EngineHttp(address, api_key=self._child.api_key, settings=self._http_settings)
        try:
            self._info = await self._probe(resolved)
        except BaseException:
            await self.close()
            raise
        return self._info

    async def _probe(self, resolved: ResolvedModel) -> EngineInfo:
        props = decode(await self._get("/props"), Props, "llama.cpp /props")
        models = decode(await self._get("/v1/models"), Models, "llama.cpp /v1/models")
        self._bos = (await self._tokenize("", special=True))[:1]
        self._plain = (await self._tokenize("a"))[-1]
        self._template = props.chat_template
        self._thinks = "<think>" in self._template
        ends = [await self._tokenize(spelling) for spelling in dict.fromkeys((props.eos_token, *END_SPELLINGS))]
        probe = await self._tokenize(PROBE_TEXT)
        version = await asyncio.to_thread(_xllamacpp_version)
        return EngineInfo(
            kind="embedded",
            model=resolved.name,
            build=f"xllamacpp {version}, llama.cpp {props.build_info or 'unknown'}",
            window=props.default_generation_settings.n_ctx or self.settings.window,
            vocab_size=models.vocab_size,
            token_ids=True,
            logprobs=True,
            token_in=True,
            logprob_kind="raw",
            tool_parser=toolparse.PARSER_NAME,
            model_sha256=resolved.sha256,
            tokenizer_sha256=hashlib.sha256(",".join(map(str, probe)).encode()).hexdigest(),
            chat_template_sha256=hashlib.sha256(props.chat_template.encode()).hexdigest(),
            stop_ids=[ids[0] for ids in ends if len(ids) == 1],
            detail={"tokenizer_sha256_over": "ids of a fixed probe text", "slots": self.settings.slots},
        )

    async def generate(self, request: EngineRequest) -> EngineReply:
        given = request.prompt
        prompt = await self.render_ids(request.chat) if given is None else given.ids
        room = (self.info.window or 0) - int(prompt.size)
        if room < 1:
            raise ContextOverflow(
                f"the prompt has {prompt.size} tokens; the window of the embedded engine is {self.info.window}",
                fix="raise the engine's window, or shorten the prompt",
                prompt_tokens=int(prompt.size),
                window=self.info.window,
            )
        limit = min(request.sampling.max_tokens or room, room)
        async with self._slots:
            ids = prompt.tolist()
            cached = await self._prefill(ids)
            sampled = await self._sample(ids, request.sampling, limit)
        text = sampled.text if sampled.whole else await self._detokenize(sampled.ids, drop_last=sampled.stopped)
        opened = self._thinks and (await self._detokenize(ids[-6:])).rstrip().endswith("<think>")
        return self._reply(request.chat, prompt, sampled, text, opened=opened, cached=cached)

    def _reply(
        self, chat: ChatRequest, prompt: Int32Array, sampled: _Sampled, text: str, *, opened: bool, cached: int
    ) -> EngineReply:
        sampled_ids = np.array(sampled.ids, dtype=np.int32)
        usage = Usage(
            prompt_tokens=int(prompt.size), completion_tokens=len(sampled.ids), cached_tokens=min(cached, prompt.size)
        )
        reply, flags = toolparse.read_reply(
            text,
            chat,
            finish=sampled.finish,
            usage=usage,
            opened=opened,
            seed=prompt.tobytes() + b"|" + sampled_ids.tobytes(),
            thinks=self._thinks,
        )
        if sampled.rescored:
            flags["rescored_logprobs"] = sampled.rescored
        if chat.guided:
            flags["guidance_not_enforced"] = 1
        return EngineReply(
            reply=reply,
            prompt=prompt,
            sampled_ids=sampled_ids,
            logprobs=np.array(sampled.logprobs, dtype=np.float32),
            finish_reason=sampled.finish,
            flags=flags,
        )

    async def _prefill(self, prompt: list[int]) -> int:
        """Evaluate the prompt into a slot; returns how many of its tokens were there already."""
        fields = {"prompt": prompt, "n_predict": 0, "stream": True, "cache_prompt": True, "return_progress": True}
        body = await self._post("/completion", fields)
        last = body.rstrip().rpartition(b"data: ")[2]
        return decode(last, Completion, "llama.cpp /completion").timings.cache_n

    async def _sample(self, prompt: list[int], sampling: EffectiveSampling, limit: int) -> _Sampled:
        fields = sampling_fields(sampling, self.info.window or 0)
        # a stop string could lie across two slices
        width = limit if sampling.stop else SLICE
        out = _Sampled()
        while len(out.ids) < limit:
            seed = _UNSEEDED if sampling.seed is None else (sampling.seed + len(out.ids)) % _UNSEEDED
            asked = min(width, limit - len(out.ids))
            ask = {**fields, "prompt": prompt + out.ids, "n_predict": asked, "seed": seed}
            got = decode(await self._post("/completion", ask), Completion, "llama.cpp /completion")
            if got.tokens_predicted != len(got.tokens):
                raise EngineProtocolError(
                    f"llama.cpp: tokens has {len(got.tokens)} ids, tokens_predicted says {got.tokens_predicted}"
                )
            logprobs = matched_logprobs(got.tokens, got.completion_probabilities)
            out.whole = out.whole and not (logprobs and logprobs[-1] is None)
            for position in [p for p, value in reversed(list(enumerate(logprobs))) if value is None]:
                before = prompt + out.ids + got.tokens[:position]
                logprobs[position] = await self._score(before, got.tokens[position])
                out.rescored += 1
            out.ids += got.tokens
            out.logprobs += [float("nan") if value is None else value for value in logprobs]
            out.text += got.content
            if got.stop_type in ("eos", "word"):
                out.finish, out.stopped = "stop", got.stop_type == "eos"
                break
            if got.truncated or not got.tokens:
                break
        return out

    async def _score(self, before: list[int], token: int) -> float | None:
        """Raw logprob of ``token`` after ``before``. A plain letter is forced, so that llama.cpp shows the entry."""
        sampling = EffectiveSampling(logit_bias={str(self._plain): 1e6})
        for width in (64, 4096, self.info.vocab_size or 1 << 20):
            fields = sampling_fields(sampling, self.info.window or 0) | {
                "prompt": before,
                "n_predict": 1,
                "n_probs": width,
            }
            got = decode(await self._post("/completion", fields), Completion, "llama.cpp /completion")
            for entry in got.completion_probabilities[:1]:
                for candidate in entry.top_logprobs:
                    if candidate.id == token:
                        return candidate.logprob
        return None

    async def render_ids(self, chat: ChatRequest) -> Int32Array:
        """The prompt that ``generate`` conditions on for these messages."""
        rendered = decode(
            await self._send("/apply-template", b"".join(chat_fields(chat))), Rendered, "llama.cpp /apply-template"
        )
        ids = await self._tokenize(rendered.prompt)
        if self._bos and ids[:1] != self._bos:
            ids = self._bos + ids
        return np.array(ids, dtype=np.int32)

    async def count_tokens(self, chat: ChatRequest) -> int:
        return int((await self.render_ids(chat)).size)

    async def token_texts(self, ids: Iterable[int]) -> dict[int, str]:
        wanted = list(dict.fromkeys(int(token) for token in ids))
        texts = await asyncio.gather(*(self._detokenize([token]) for token in wanted))
        return dict(zip(wanted, texts, strict=True))

    async def bridger(self) -> Bridger | None:
        return await self._bridger.get()

    async def _make_bridger(self) -> Bridger | None:
        return await llama_bridger(self._send, self._template, self.info.stop_ids)

    @property
    def token_route(self) -> str:
        return self._token_route

    async def step_down(self, route: str) -> str:
        """There is one route only."""
        self._token_route = ""
        return ""

    async def health(self) -> None:
        await self._get("/health")

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
        if self._child is not None:
            await self._child.close()
        self._http = self._child = None

    async def _tokenize(self, text: str, *, special: bool = False) -> list[int]:
        # the template prints its own begin-of-text token where it wants one; render_ids adds a missing one
        fields = {"content": text, "add_special": special, "parse_special": True}
        return decode(await self._post("/tokenize", fields), TokenList, "llama.cpp /tokenize").tokens

    async def _detokenize(self, ids: list[int], *, drop_last: bool = False) -> str:
        fields = {"tokens": ids[:-1] if drop_last else ids}
        return decode(await self._post("/detokenize", fields), Text, "llama.cpp /detokenize").content

    async def _post(self, path: str, fields: dict[str, Any]) -> bytes:
        return await self._send(path, msgspec.json.encode(fields))

    async def _send(self, path: str, body: bytes) -> bytes:
        return (await self._reach().post(path, body)).body

    async def _get(self, path: str) -> bytes:
        return (await self._reach().get(path)).body

    def _reach(self) -> EngineHttp:
        if self._http is None or self._child is None:
            raise EngineUnavailable("the embedded engine is not running", fix="await start() first")
        if not self._child.running():
            raise self._child.died()
        return self._http


def _xllamacpp_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("xllamacpp")
    except PackageNotFoundError:
        return "unknown"

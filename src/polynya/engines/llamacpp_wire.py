"""What the embedded engine sends to and reads from llama.cpp's native endpoints.

Invariant: one logprob per sampled id, of that very id. llama.cpp leaves out the entry of a token that ends inside a UTF-8
character, so entries are matched to ids only where one way of matching exists; the others are ``None`` here, to be scored.
Samplers are named in full: temperature first, then the truncations, as vLLM has it; at temperature 1 with neutral values
that is the raw softmax.
"""

from __future__ import annotations

from typing import Any

import msgspec

from polynya.engines.base import EffectiveSampling
from polynya.errors import EngineProtocolError

SAMPLERS = ["penalties", "temperature", "top_k", "top_p", "min_p"]


class TopEntry(msgspec.Struct):
    id: int
    logprob: float | None = None


class Entry(msgspec.Struct):
    id: int
    logprob: float | None = None
    top_logprobs: list[TopEntry] = []


class Timings(msgspec.Struct):
    cache_n: int = 0


class Completion(msgspec.Struct):
    tokens: list[int] = []
    content: str = ""
    completion_probabilities: list[Entry] = []
    stop_type: str = "none"
    tokens_evaluated: int = 0
    tokens_predicted: int = 0
    truncated: bool = False
    timings: Timings = msgspec.field(default_factory=Timings)


class Rendered(msgspec.Struct):
    prompt: str


class TokenList(msgspec.Struct):
    tokens: list[int]


class Text(msgspec.Struct):
    content: str


class _Defaults(msgspec.Struct):
    n_ctx: int = 0


class Props(msgspec.Struct):
    chat_template: str = ""
    bos_token: str = ""
    eos_token: str = ""
    build_info: str = ""
    default_generation_settings: _Defaults = msgspec.field(default_factory=_Defaults)


class _Meta(msgspec.Struct):
    n_vocab: int | None = None


class _Card(msgspec.Struct):
    meta: _Meta | None = None


class Models(msgspec.Struct):
    data: list[_Card] = []

    @property
    def vocab_size(self) -> int | None:
        return self.data[0].meta.n_vocab if self.data and self.data[0].meta else None


def sampling_fields(sampling: EffectiveSampling, window: int) -> dict[str, Any]:
    """Every sampler value, none left to llama.cpp's defaults (0.8, 40, 0.95, 0.05)."""
    fields: dict[str, Any] = {
        "samplers": SAMPLERS,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "typical_p": 1.0,
        "top_n_sigma": -1.0,
        "xtc_probability": 0.0,
        "dry_multiplier": 0.0,
        "dynatemp_range": 0.0,
        "mirostat": 0,
        "repeat_last_n": window,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "return_tokens": True,
        "n_probs": 1,
        "post_sampling_probs": False,
        "cache_prompt": True,
        "stream": False,
    }
    if sampling.stop:
        fields["stop"] = sampling.stop
    if sampling.logit_bias:
        fields["logit_bias"] = [[int(token), bias] for token, bias in sampling.logit_bias.items()]
    return fields


def matched_logprobs(tokens: list[int], entries: list[Entry]) -> list[float | None]:
    """The logprob of each token; None where its entry is missing, or where it is not certain whose entry it is."""
    if len(tokens) == len(entries):
        if any(entry.id != token for token, entry in zip(tokens, entries, strict=True)):
            raise EngineProtocolError("llama.cpp: completion_probabilities name other ids than tokens")
        return [_number(entry.logprob) for entry in entries]
    left = _embed(tokens, entries)
    right = _embed(tokens[::-1], entries[::-1])
    if left is None or right is None:
        raise EngineProtocolError("llama.cpp: completion_probabilities are no subsequence of tokens")
    right = [len(tokens) - 1 - position for position in reversed(right)]
    found: list[float | None] = [None] * len(tokens)
    for entry, first, last in zip(entries, left, right, strict=True):
        if first == last:
            found[first] = _number(entry.logprob)
    return found


def _embed(tokens: list[int], entries: list[Entry]) -> list[int] | None:
    positions: list[int] = []
    at = 0
    for entry in entries:
        while at < len(tokens) and tokens[at] != entry.id:
            at += 1
        if at == len(tokens):
            return None
        positions.append(at)
        at += 1
    return positions


def _number(logprob: float | None) -> float:
    return float("nan") if logprob is None else logprob

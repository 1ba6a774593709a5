"""The dialect differences between OpenAI-compatible engines: which fields are asked for, and how a prompt is given as ids.

Invariant: every field of ``EffectiveSampling`` that the engine knows is sent in every request, so nothing is left to its
defaults. A strict OpenAI server gets standard fields only. Pure; the adapter in ``compatible`` does the talking.
"""

from __future__ import annotations

from typing import Any

import msgspec

from polynya.engines.base import EffectiveSampling
from polynya.tokens.printed import GivenIds


class Flavour(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    asks: dict[str, Any]
    """Beside the sampling: what must come back."""
    max_tokens_field: str = "max_completion_tokens"
    top_k_off: int | None = 0
    """How "no top-k" is spelled; None: the engine has no such fields (top_k, min_p, repetition_penalty)."""
    prompt_path: tuple[str, ...] = ()
    """Where prompt ids go in the request; empty: nowhere."""
    salts: bool = True
    """Takes ``cache_salt``."""
    tokenizes: bool = True
    """Has ``/tokenize`` with messages, and ``/detokenize``."""
    health: str = "/health"

    def sampling(self, sampling: EffectiveSampling) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
        }
        if self.top_k_off is not None:
            fields["top_k"] = sampling.top_k or self.top_k_off
            fields["min_p"] = sampling.min_p
            fields["repetition_penalty"] = sampling.repetition_penalty
        if sampling.max_tokens is not None:
            fields[self.max_tokens_field] = sampling.max_tokens
        if sampling.stop:
            fields["stop"] = sampling.stop
        if sampling.seed is not None:
            fields["seed"] = sampling.seed
        if sampling.logit_bias:
            fields["logit_bias"] = sampling.logit_bias
        return fields

    def prompt(self, ids: GivenIds) -> list[bytes]:
        """The field that gives a prompt as ids, as JSON with its leading comma, in pieces."""
        if not self.prompt_path:
            raise TypeError(f"{self.kind} takes no prompt ids")
        opening = b"{".join(b'"%b":' % name.encode() for name in self.prompt_path)
        return [b"," + opening + b"[", *ids.print(), b"]" + b"}" * (len(self.prompt_path) - 1)]


# top_logprobs must be the integer 0: null or absent gives no logprobs at all
_IDS = {"n": 1, "stream": False, "logprobs": True, "top_logprobs": 0, "return_token_ids": True}
VLLM = Flavour(kind="vllm", asks=_IDS, prompt_path=("kv_transfer_params", "prompt_token_ids"))
SGLANG = Flavour(
    kind="sglang",
    asks={**_IDS, "return_prompt_token_ids": True, "return_meta_info": True},
    top_k_off=-1,
    prompt_path=("input_ids",),
)
OPENAI = Flavour(
    kind="openai", asks={"n": 1, "stream": False}, top_k_off=None, salts=False, tokenizes=False, health="/v1/models"
)

"""The seam to the inference server. The gateway knows engines by this protocol only.

Invariant: ``EngineReply`` holds what the engine itself reported: prompt ids, sampled ids, one raw logprob per sampled id.
An adapter never pads, cuts, re-tokenises or guesses; what is missing is ``None`` and the validator decides.
A reply is whole or it is an error from ``polynya.errors``; there are no half replies.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import msgspec

from polynya.dialects.neutral import ChatReply, ChatRequest
from polynya.engines.bridging import Bridger
from polynya.errors import EngineProtocolError
from polynya.schema import Float32Array, Int32Array, PolicySpan
from polynya.tokens.printed import GivenIds, PrintedIds, read_ids
from polynya.tokens.routing import Routing


class EffectiveSampling(msgspec.Struct, frozen=True, kw_only=True):
    """Every value that is sent upstream, none left to the engine's own defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    """None: up to the end of the window."""
    stop: list[str] = []
    seed: int | None = None
    logit_bias: dict[str, float] | None = None


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the start-up probe found."""

    kind: str
    """``embedded``, ``scripted``, ``vllm``, ``sglang``, ``openai``."""
    model: str
    """The name that the engine answers to."""
    build: str | None = None
    window: int | None = None
    """Tokens of prompt and reply together."""
    vocab_size: int | None = None
    token_ids: bool = False
    """Prompt ids and sampled ids come back."""
    logprobs: bool = False
    token_in: bool = False
    """A prompt can be given as ids, with the reply still parsed."""
    images: bool = False
    """Image parts of a message reach the model."""
    logprob_kind: str = "unknown"
    tool_parser: str | None = None
    model_sha256: str | None = None
    tokenizer_sha256: str | None = None
    chat_template_sha256: str | None = None
    stop_ids: list[int] = []
    detail: dict[str, Any] = {}

    @property
    def trainable(self) -> bool:
        return self.token_ids and self.logprobs


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One call, ready to be sent."""

    chat: ChatRequest
    sampling: EffectiveSampling
    affinity: str = ""
    """Equal for the calls of one session, so that its prefix cache is hit."""
    cache_salt: str = ""
    """Prefixes are shared only among calls with the same; empty: among all."""
    prompt: GivenIds | None = None
    """Continuation: the prompt *is* these ids. None: the engine renders ``chat.messages``."""


class EngineReply(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine reported, unjudged."""

    reply: ChatReply
    prompt: Int32Array | PrintedIds | None
    """The ids that the engine conditioned on; as printed where they came so."""
    sampled_ids: Int32Array | None
    """With the stop token when one was sampled."""
    sampled_text: bytes = b""
    """``sampled_ids`` in canonical print, where they came so."""
    logprobs: Float32Array | None
    """Nats, one per sampled id; NaN where the engine gave null."""
    routing: Routing | None = None
    """Of a mixture of experts, where the engine reports it."""
    finish_reason: str = "stop"
    """The engine's own word."""
    policy_spans: list[PolicySpan] = []
    """Over the sampled ids; empty when the engine does not say."""
    upstream_id: str = ""
    flags: dict[str, int] = {}
    """Counted oddities, e.g. ``unparsed_tool_markup``."""

    @property
    def prompt_ids(self) -> Int32Array | None:
        """``prompt``, read. None also when an id does not fit into 32 bits. Raises EngineProtocolError."""
        if not isinstance(self.prompt, PrintedIds):
            return self.prompt
        try:
            return read_ids(self.prompt.text)
        except ValueError as exc:
            raise EngineProtocolError(f"prompt_token_ids: {exc}") from exc


@runtime_checkable
class Engine(Protocol):
    """An inference server that polynya talks to, or starts itself."""

    async def start(self) -> EngineInfo:
        """Start (if ours) and probe. Raises EngineError with a fix when it cannot serve."""
        ...

    @property
    def info(self) -> EngineInfo:
        """The result of ``start``; raises RuntimeError before it."""
        ...

    async def generate(self, request: EngineRequest) -> EngineReply:
        """One call. Cancelling the task aborts the work in the engine within a second."""
        ...

    async def count_tokens(self, chat: ChatRequest) -> int:
        """Prompt tokens that ``generate`` would condition on for this request."""
        ...

    async def token_texts(self, ids: Iterable[int]) -> dict[int, str]:
        """Display text of single ids, best effort (a partial UTF-8 piece is shown as U+FFFD). May be empty."""
        ...

    async def bridger(self) -> Bridger | None:
        """What continues a call in token space; made once. None: no prompt as ids, or a template that cannot be bridged."""
        ...

    @property
    def token_route(self) -> str:
        """How prompts of ids are given now; empty: not at all."""
        ...

    async def step_down(self, route: str) -> str:
        """``route`` turned out not to condition on the ids it was given: the one that is used from here on, as ``token_route``."""
        ...

    async def health(self) -> None:
        """Return when the engine answers; raises EngineUnavailable."""
        ...

    async def close(self) -> None:
        """Stop what ``start`` started. Idempotent."""
        ...

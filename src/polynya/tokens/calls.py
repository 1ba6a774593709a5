"""What a builder sees of one captured call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from polynya.schema import Exclusion, Float32Array, Int16Array, Int32Array, Lane, PolicySpan


class CapturedCall(Protocol):
    """One model call of one session attempt, read-only.

    Calls are given to builders in commit order, which is the only ordering key (clocks step, commits do not).
    """

    @property
    def call_id(self) -> str: ...

    @property
    def lane(self) -> Lane: ...

    @property
    def agent(self) -> str:
        """The harness's own name of the agent that asked; empty when it gives none."""
        ...

    @property
    def outcome(self) -> str:
        """``ok``, ``cancelled``, ``failed`` or ``unfinished``."""
        ...

    @property
    def exclusion(self) -> Exclusion | None:
        """Why capture already refuses to train this call; None: it is sound."""
        ...

    @property
    def delivered(self) -> bool:
        """The harness got the reply in full."""
        ...

    @property
    def sampled_count(self) -> int:
        """Sampled tokens, by ids where there are ids, else by the engine's usage number."""
        ...

    @property
    def prompt_len(self) -> int:
        """Of ``prompt_ids``."""
        ...

    @property
    def prompt_ids(self) -> Int32Array:
        """The ids that the engine conditioned on. May be rebuilt from deltas on each access: keep it."""
        ...

    @property
    def full_ids(self) -> Int32Array:
        """``prompt_ids`` and ``sampled_ids``, in an array of the caller's own."""
        ...

    @property
    def extends(self) -> CapturedCall | None:
        """The call whose ``prompt + sampled`` this prompt is known to begin with, id by id; None: not known."""
        ...

    @property
    def sampled_ids(self) -> Int32Array: ...

    @property
    def logprobs(self) -> Float32Array: ...

    @property
    def routed_experts(self) -> Int16Array | None:
        """``(len(prompt_ids) + len(sampled_ids) - 1, width)``; None: not known."""
        ...

    @property
    def routed_experts_shape(self) -> list[int]: ...

    @property
    def finish_reason(self) -> str: ...

    @property
    def policy_spans(self) -> list[PolicySpan]:
        """Over the sampled ids."""
        ...

    @property
    def messages(self) -> Sequence[bytes]:
        """Of the request: the raw JSON of each."""
        ...

    @property
    def reply(self) -> bytes:
        """Raw JSON of the reply as a message; empty: there is none."""
        ...

    @property
    def messages_json(self) -> str:
        """The request's messages and the reply, as a JSON list."""
        ...

    @property
    def tools_json(self) -> str: ...

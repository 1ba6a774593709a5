"""Calls without a gateway: plain arrays with the attributes that builders read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from polynya.schema import Exclusion, Float32Array, Int32Array, Lane, PolicySpan


class FakeCall:
    def __init__(
        self,
        call_id: str,
        prompt: list[int],
        sampled: list[int],
        *,
        logprobs: list[float] | None = None,
        lane: Lane = Lane.MAIN,
        agent: str = "",
        outcome: str = "ok",
        exclusion: Exclusion | None = None,
        delivered: bool = True,
        finish_reason: str = "stop",
        spans: list[PolicySpan] | None = None,
        messages: list[bytes] | None = None,
        reply: bytes = b"{}",
    ) -> None:
        self.call_id = call_id
        self.prompt_ids: Int32Array = np.array(prompt, dtype=np.int32)
        self.sampled_ids: Int32Array = np.array(sampled, dtype=np.int32)
        values = [-0.5 - i / 64 for i in range(len(sampled))] if logprobs is None else logprobs
        self.logprobs: Float32Array = np.array(values, dtype=np.float32)
        self.lane = lane
        self.agent = agent
        self.outcome = outcome
        self.exclusion = exclusion
        self.delivered = delivered
        self.finish_reason = finish_reason
        self.policy_spans = spans or []
        self.extends: FakeCall | None = None
        self.messages = messages or []
        self.reply = reply
        self.routed_experts = None
        self.routed_experts_shape: list[int] = []
        self.messages_json = "[]"
        self.tools_json = "[]"

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def full_ids(self) -> Int32Array:
        return np.concatenate([self.prompt_ids, self.sampled_ids])

    @property
    def sampled_count(self) -> int:
        return len(self.sampled_ids)


@pytest.fixture
def call() -> Callable[..., FakeCall]:
    return FakeCall

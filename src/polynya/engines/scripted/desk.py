"""The state that both forms of the scripted engine share: attempts per call, counters, the hold, and what a fault does to a reply.

Invariant: the reply of a call depends on the script, its affinity, its turn and its attempt only; counters are for tests to read.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable

import msgspec
import numpy as np

from polynya.dialects.neutral import ToolSpec
from polynya.engines.base import EffectiveSampling, EngineReply
from polynya.engines.scripted import tokens
from polynya.engines.scripted.script import Expected, Fault, Script
from polynya.errors import ContextOverflow
from polynya.schema import Float32Array, Int32Array, PolicySpan

KEPT_CALLS = 4096


class CallRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One call as the engine saw it."""

    affinity: str
    turn: int
    attempt: int
    prompt_ids: Int32Array
    token_in: bool
    """The prompt came as ids."""
    sampling: EffectiveSampling
    fault: str = ""


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    record: CallRecord
    expected: Expected
    fault: Fault | None
    delay: float
    hold: bool


class Desk:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.policy_version = script.policy_version
        self.calls: deque[CallRecord] = deque(maxlen=KEPT_CALLS)
        """The newest calls, oldest first."""
        self.started = 0
        self.finished = 0
        self.aborted = 0
        """Calls whose client went away before the answer."""
        self._attempts: Counter[tuple[str, int, int]] = Counter()
        self._released = asyncio.Event()
        self._changed = asyncio.Condition()

    @property
    def in_flight(self) -> int:
        return self.started - self.finished - self.aborted

    def plan(
        self, affinity: str, prompt: Int32Array, tools: list[ToolSpec], sampling: EffectiveSampling, *, token_in: bool
    ) -> Planned:
        """Decide one call. Raises ContextOverflow as a real engine would."""
        window = self.script.window
        if prompt.size >= window or prompt.size + (sampling.max_tokens or 0) > window:
            raise ContextOverflow(
                f"This model's maximum context length is {window} tokens. However, your prompt contains "
                f"{prompt.size} input tokens, which exceeds this limit even without any output tokens. "
                "Please reduce the length of the input prompt.",
                prompt_tokens=int(prompt.size),
                window=window,
            )
        turn = tokens.turn_of(prompt)
        key = (affinity, turn, int(prompt.size))
        attempt = self._attempts[key]
        step = self.script.step(affinity, turn, tools)
        breaks_off = step.fault is not None and step.fault.kind == "abort"
        done = int(prompt[np.flatnonzero(prompt == tokens.ASSISTANT)[-1] + 1 :].size) if breaks_off else 0
        expected = self.script.expected(
            affinity,
            turn,
            tools=tools,
            max_tokens=None if sampling.max_tokens is None else sampling.max_tokens + done,
            temperature=sampling.temperature,
            prompt_tokens=int(prompt.size),
        )
        fault = expected.step.fault
        if fault is not None:
            self._attempts[key] += 1
            fault = fault if fault.strikes(attempt) else None
        if breaks_off:
            half = expected.sampled_ids.size // 2
            start, end = (0, half) if fault is not None and not done else (done, expected.sampled_ids.size)
            expected = self.script.part(expected, start, end, affinity, turn)
        record = CallRecord(
            affinity=affinity,
            turn=turn,
            attempt=attempt,
            prompt_ids=prompt,
            token_in=token_in,
            sampling=sampling,
            fault=fault.kind if fault else "",
        )
        self.calls.append(record)
        delay = expected.step.delay + self.script.delay
        return Planned(record=record, expected=expected, fault=fault, delay=delay, hold=expected.step.hold)

    async def work(self, planned: Planned) -> None:
        """Seem to be busy for as long as the script says."""
        if planned.delay > 0:
            await asyncio.sleep(planned.delay)
        if planned.hold:
            await self._released.wait()

    def release(self) -> None:
        """Let every held call, also a later one, answer."""
        self._released.set()

    async def count(self, what: str) -> None:
        async with self._changed:
            setattr(self, what, getattr(self, what) + 1)
            self._changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once ``condition`` holds; it is looked at whenever a call starts, ends or is aborted."""
        async with self._changed:
            await self._changed.wait_for(condition)


def spoiled(planned: Planned, policy_version: str | None) -> EngineReply:
    """The reply as the engine reports it, with the fault of the step done to it."""
    expected, kind = planned.expected, planned.fault.kind if planned.fault else ""
    prompt: Int32Array | None = planned.record.prompt_ids
    ids: Int32Array | None = expected.sampled_ids
    assert prompt is not None and ids is not None
    if kind in ("no_ids", "no_prompt_ids"):
        prompt = None
    if kind in ("no_ids", "bad_token_id_string"):
        ids = None
    if kind == "echo_mismatch" and prompt is not None:
        prompt = np.append(prompt, np.int32(0)).astype(np.int32)
    if kind == "id_out_of_range" and ids is not None:
        ids = ids.copy()
        ids[0] = 2_000_000_000
    spans = [PolicySpan(policy_version, 0, int(expected.sampled_ids.size))] if policy_version is not None else []
    return EngineReply(
        reply=expected.reply,
        prompt=prompt,
        sampled_ids=ids,
        logprobs=_spoiled_logprobs(expected.logprobs, kind),
        finish_reason=expected.reply.finish_reason
        if expected.reply.finish_reason in ("length", "abort")
        else expected.step.finish_reason,
        policy_spans=spans,
        upstream_id=f"scripted-{planned.record.affinity}-{planned.record.turn}-{planned.record.attempt}",
    )


def _spoiled_logprobs(logprobs: Float32Array, kind: str) -> Float32Array | None:
    if kind == "no_logprobs":
        return None
    if kind == "short_logprobs":
        return logprobs[:-1]
    bad = {"nan_logprob": np.nan, "null_logprob": np.nan, "sentinel_logprob": -9999.0}.get(kind)
    if bad is not None and logprobs.size:
        logprobs = logprobs.copy()
        logprobs[0] = bad
    return logprobs

"""Which sampling values go upstream. All of them are sent, none is left to an engine's hidden defaults."""

from __future__ import annotations

from polynya.dialects.neutral import SamplingParams
from polynya.engines.base import EffectiveSampling
from polynya.schema import SamplingSpec

NEUTRAL = EffectiveSampling()


def effective(asked: SamplingParams, task: SamplingSpec) -> EffectiveSampling:
    """Merge what the client asked with what the task says.

    ``policy: harness``: the client's value, else the task's, else the neutral one. ``policy: override``: the task's value,
    else the neutral one; the client's sampling values are ignored, its length and stop strings are not. ``max_tokens`` is
    always the smaller of the two.
    """
    harness = task.policy == "harness"

    def pick(ours: float | None, theirs: float | None, neutral: float) -> float:
        first, second = (theirs if harness else None), ours
        return first if first is not None else second if second is not None else neutral

    caps = [cap for cap in (asked.max_tokens, task.max_tokens) if cap is not None]
    top_k = asked.top_k if harness and asked.top_k is not None else task.top_k
    return EffectiveSampling(
        temperature=pick(task.temperature, asked.temperature, NEUTRAL.temperature),
        top_p=pick(task.top_p, asked.top_p, NEUTRAL.top_p),
        top_k=max(0, top_k or 0),
        min_p=pick(task.min_p, asked.min_p, NEUTRAL.min_p),
        presence_penalty=pick(None, asked.presence_penalty, NEUTRAL.presence_penalty),
        frequency_penalty=pick(None, asked.frequency_penalty, NEUTRAL.frequency_penalty),
        repetition_penalty=pick(None, asked.repetition_penalty, NEUTRAL.repetition_penalty),
        max_tokens=min(caps) if caps else None,
        stop=asked.stop,
        seed=asked.seed if harness and asked.seed is not None else task.seed,
        logit_bias=asked.logit_bias if harness else None,
    )

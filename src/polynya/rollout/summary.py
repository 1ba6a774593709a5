"""The numbers at the end of a run. A null reward is counted apart, never as zero."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from polynya.schema import SessionResult, TaskSpec
from polynya.tokens.ledger import total


def summarise(tasks: Sequence[TaskSpec], results: Iterable[SessionResult]) -> dict[str, Any]:
    done = list(results)
    rewards = [result.reward for result in done if result.reward is not None]
    ledger = total(result.ledger for result in done)
    return {
        "tasks": len(tasks),
        "sessions": sum(task.num_samples for task in tasks),
        "finished": len(done),
        "by_status": dict(sorted(Counter(str(result.status) for result in done).items())),
        "scored": len(rewards),
        "unscored": len(done) - len(rewards),
        "mean_reward": round(statistics.fmean(rewards), 4) if rewards else None,
        "traces": sum(result.num_traces for result in done),
        "calls": ledger.calls,
        "ledger": msgspec.to_builtins(ledger),
        "ledger_balanced": ledger.balanced() and all(result.ledger.balanced() for result in done),
    }

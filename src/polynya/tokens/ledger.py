"""Sums of ledgers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from polynya.schema import Exclusion, Ledger


def total(ledgers: Iterable[Ledger]) -> Ledger:
    """The ledger of all sessions together; balanced if each is."""
    captured = trained = calls = 0
    excluded: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    breaks: Counter[str] = Counter()
    for ledger in ledgers:
        captured += ledger.captured
        trained += ledger.trained
        calls += ledger.calls
        excluded.update(ledger.excluded)
        outcomes.update(ledger.calls_by_outcome)
        breaks.update(ledger.chain_breaks)
    return Ledger(
        captured=captured,
        trained=trained,
        excluded=dict(sorted(excluded.items())),
        calls=calls,
        calls_by_outcome=dict(sorted(outcomes.items())),
        chain_breaks=dict(sorted(breaks.items())),
    )


def lost(sampled_tokens: int, calls: int) -> Ledger:
    """The ledger of an attempt that died: everything captured, nothing trained, one reason."""
    return Ledger(
        captured=sampled_tokens,
        excluded={str(Exclusion.ATTEMPT_LOST): sampled_tokens} if sampled_tokens else {},
        calls=calls,
        calls_by_outcome={"attempt_lost": calls} if calls else {},
    )

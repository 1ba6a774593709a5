"""Public records."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polynya.schema import Ledger


@given(st.integers(0, 99), st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=3), st.integers(-1, 1))
def test_ledger_is_balanced_only_when_each_token_went_somewhere(
    trained: int, excluded: dict[str, int], off: int
) -> None:
    ledger = Ledger(captured=trained + sum(excluded.values()) + off, trained=trained, excluded=excluded)
    assert ledger.balanced() is (off == 0)

"""The collector while a process serves, and after."""

from __future__ import annotations

import gc

from polynya.gateway.heap import serving_heap


def test_the_collector_runs_seldom_while_serving_and_as_before_afterwards() -> None:
    before = gc.get_threshold()
    with serving_heap():
        assert gc.get_threshold()[0] > before[0]
        assert gc.isenabled() and gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0

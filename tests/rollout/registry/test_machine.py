"""R1: whatever is asked of a registry, in whatever order, it answers as a dict would, and a crash changes nothing that it said."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from .machine import RegistryMachine
from .world import size


def test_any_history_is_that_of_the_model() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        RegistryMachine,
        settings=settings(
            max_examples=int(os.environ.get("POLYNYA_R1_EXAMPLES") or size(300, 20_000)),
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )

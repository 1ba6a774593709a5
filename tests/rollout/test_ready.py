"""The READY buffer keeps the RUNNING pool at work while runtimes are prepared."""

from __future__ import annotations

import pytest

from polynya.rollout.ready import ready_report, utilisation
from polynya.schema import Provenance, SessionResult, Status

from .conftest import Lab


def ended(begun: float, init: float, running: float) -> SessionResult:
    return SessionResult(
        session_id="t.0", task_id="t", group_id="t", sample_index=0, attempt=1, status=Status.COMPLETED, reward=None,
        timings={"init": init, "running": running}, started_at=begun, provenance=Provenance(polynya="0"),
    )  # fmt: skip


def test_utilisation_is_of_the_time_between_the_first_start_and_the_last_end() -> None:
    results = [ended(0.0, 2.0, 5.0), ended(0.0, 2.0, 5.0), ended(7.0, 2.0, 5.0)]
    assert utilisation(results, 2) == {"utilisation": pytest.approx(15 / 24), "seconds": 12.0}


async def test_with_the_buffer_the_next_agent_is_ready_when_a_slot_is_free(lab: Lab) -> None:
    report = await ready_report(lab.out, lab.cache, sessions=6, running=2, init_seconds=0.5, run_seconds=0.7)
    assert report["on"]["utilisation"] > report["off"]["utilisation"]

"""Many sessions at once: what is captured is what the engine said, token by token."""

from __future__ import annotations

import pyarrow.parquet as pq

from polynya.rollout.check import check_run
from polynya.rollout.stress import compare, stages_report

from .conftest import Lab


async def test_sixty_four_sessions_at_once_are_captured_exactly(lab: Lab) -> None:
    task, script = lab.talk(sessions=64, calls=3)
    record = await lab.runner([task], script, running=64).run()
    assert record["summary"]["by_status"] == {"completed": 64}
    assert not compare(lab.out, script, 64, 3)
    assert check_run(lab.out) == []
    assert len(set(pq.read_table(lab.out / "traces.parquet")["session_id"].to_pylist())) == 64
    said = sum(len(script.expected(f"stress.{i}", turn).sampled_ids) for i in range(64) for turn in range(3))
    assert record["summary"]["ledger"]["trained"] == record["summary"]["ledger"]["captured"] == said


async def test_comparison_notices_what_differs(lab: Lab) -> None:
    task, script = lab.talk(sessions=2, calls=2)
    await lab.runner([task], script).run()
    other = lab.talk(sessions=2, calls=3)[1]
    assert compare(lab.out, script, 3, 2) == {"sessions_missing": 1}
    assert compare(lab.out, other, 2, 3)["calls_missing"] == 2


async def test_report_of_the_bench_counts_everything(lab: Lab) -> None:
    report = await stages_report(lab.out, lab.cache, sessions=4, calls=2, runtime="local")
    assert (report["completed"], report["calls_captured"], report["exact"]) == (4, 8, True)
    assert report["tokens_captured"] == report["tokens_trained"] > 0

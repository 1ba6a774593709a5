"""Infrastructure failures run again within the task's bound; nothing else does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from polynya import runtimes
from polynya.engines.scripted import Fault, Script, Step
from polynya.errors import RuntimeFailure
from polynya.harnesses.base import Verdict
from polynya.harnesses.shell import Shell
from polynya.node import SessionEvent
from polynya.rollout.check import check_run
from polynya.rollout.rundir import read_results
from polynya.rollout.runner import RunHooks
from polynya.runtimes.base import Bind, ExecResult
from polynya.runtimes.local import LocalProvider, LocalRuntime
from polynya.schema import RuntimeSpec, Stage, Status

from .conftest import Lab, shell_task


class Flaky(LocalProvider):
    """Cannot make the first sandboxes of a session."""

    name = "flaky"

    def __init__(self, failures: int, error: Exception) -> None:
        super().__init__()
        self.failures = failures
        self.error = error
        self.tried: list[str] = []

    async def create(self, spec: RuntimeSpec, *, label: str, root: Path, binds: Sequence[Bind] = ()) -> LocalRuntime:
        self.tried.append(label.rpartition(".")[2])
        if len(self.tried) <= self.failures:
            raise self.error
        return await super().create(spec, label=label, root=root, binds=binds)


def flaky(monkeypatch: pytest.MonkeyPatch, failures: int, error: Exception) -> Flaky:
    provider = Flaky(failures, error)
    monkeypatch.setitem(runtimes.BUILT_IN, "flaky", lambda: provider)
    return provider


@pytest.mark.parametrize(
    ("retries", "status", "attempt", "reward"),
    [(0, Status.INFRA_ERROR, 1, None), (1, Status.INFRA_ERROR, 2, None), (2, Status.COMPLETED, 3, 1.0)],
)
async def test_runtime_that_cannot_be_made_is_tried_again_within_bounds(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, retries: int, status: Status, attempt: int, reward: float | None
) -> None:
    provider = flaky(monkeypatch, 2, RuntimeFailure("no more sandboxes"))
    stages: list[Stage] = []
    hooks = RunHooks(on_event=lambda event: stages.append(event.stage))
    await lab.runner([shell_task(runtime="flaky", retries=retries)], hooks=hooks).run()
    (result,) = read_results(lab.out)
    assert (result.status, result.attempt, result.reward) == (status, attempt, reward)
    assert provider.tried == [f"a{number}" for number in range(1, attempt + 1)]
    assert stages.count(Stage.DONE) == attempt
    assert check_run(lab.out) == []


async def test_bug_is_not_tried_again(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = flaky(monkeypatch, 1, ZeroDivisionError("a bug"))
    await lab.runner([shell_task(runtime="flaky", retries=5)]).run()
    (result,) = read_results(lab.out)
    assert (result.status, result.reward, len(provider.tried)) == (Status.INFRA_ERROR, None, 1)
    assert result.error is not None
    assert (result.error.kind, result.error.message) == ("ZeroDivisionError", "a bug")


async def test_failing_agent_is_not_tried_again(lab: Lab) -> None:
    seen: list[SessionEvent] = []
    await lab.runner([shell_task("exit 1", retries=5)], hooks=RunHooks(on_event=seen.append)).run()
    (result,) = read_results(lab.out)
    assert (result.status, result.attempt, result.reward) == (Status.FAILED, 1, 0.0)
    assert [event.stage for event in seen].count(Stage.DONE) == 1


async def test_sessions_without_a_verdict_run_again_on_resume(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    flaky(monkeypatch, 1, RuntimeFailure("not today"))
    task = shell_task(runtime="flaky", num_samples=3)
    first = await lab.runner([task]).run()
    assert first["summary"]["by_status"] == {"completed": 2, "infra_error": 1}
    kept = {result.session_id: result for result in read_results(lab.out) if result.status == Status.COMPLETED}
    second = await lab.runner([task], resume=True).run()
    assert second["summary"]["by_status"] == {"completed": 3}
    after = {result.session_id: result for result in read_results(lab.out)}
    assert {session_id: after[session_id] for session_id in kept} == kept
    assert check_run(lab.out) == []


async def test_one_broken_session_does_not_stop_the_others(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stuck(self: Any) -> None:
        await destroy(self)
        if ".t.1." in self.label:
            raise OSError("the kernel says no")

    destroy = LocalRuntime.destroy
    monkeypatch.setattr(LocalRuntime, "destroy", stuck)
    record = await lab.runner([shell_task(num_samples=4)]).run()
    assert record["summary"]["by_status"] == {"completed": 3, "infra_error": 1}
    broken = next(result for result in read_results(lab.out) if result.session_id == "t.1")
    assert (broken.reward, broken.flags) == (None, {"cleanup_failed": 1})
    assert check_run(lab.out) == []


async def test_outage_that_the_harness_reports_itself_is_tried_again(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict(self: Shell, result: ExecResult, stdout_tail: bytes) -> Verdict:
        return Verdict(ok=result.exit_code == 0, reason="error: 503 from the API", infra=result.exit_code != 0)

    monkeypatch.setattr(Shell, "verdict", verdict)
    task, _ = lab.talk(sessions=1, calls=1)
    script = Script(steps=[Step(text="fine", fault=Fault(kind="http_error", status=503, times=1))])
    await lab.runner([msgspec.structs.replace(task, retries=1)], script).run()
    (result,) = read_results(lab.out)
    assert (result.status, result.attempt, result.reward) == (Status.COMPLETED, 2, 1.0)

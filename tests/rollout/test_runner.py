"""Whole runs: what lies in the run directory afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from polynya.engines.base import EngineInfo
from polynya.engines.scripted import Fault, Script, ScriptedEngine, Step
from polynya.errors import EngineNotTrainable, HarnessMissing, RunDirError, RuntimeUnavailable, TaskFileError
from polynya.rollout.check import check_run
from polynya.rollout.rundir import read_results
from polynya.rollout.stress import compare
from polynya.schema import Status

from .conftest import Lab, shell_task

ASK = """python3 - <<'PY'
import json, os, urllib.request
def ask(messages):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
messages = [{"role": "user", "content": "hi"}]
open("out.txt", "w").write(ask(messages)["content"])
PY
"""


async def test_run_writes_what_a_trainer_needs(lab: Lab) -> None:
    task, script = lab.talk(sessions=3, calls=4)
    record = await lab.runner([task], script).run()
    assert record["summary"]["by_status"] == {"completed": 3}
    assert check_run(lab.out) == []
    assert not compare(lab.out, script, 3, 4)
    rows = pq.read_table(lab.out / "traces.parquet").to_pylist()
    assert [(row["num_turns"], row["task_id"], row["reward"]) for row in rows] == [(4, "stress", 1.0)] * 3
    assert [message["role"] for message in json.loads(rows[0]["messages"])] == ["user", "assistant"] * 4
    assert sorted(path.name for path in lab.out.iterdir() if not path.name.startswith(".")) == [
        "calls.parquet", "capture", "ledger.json", "logs", "run.json", "sessions.jsonl", "traces.parquet", "vocab.json",
    ]  # fmt: skip


async def test_reward_comes_from_the_evaluator(lab: Lab) -> None:
    good = shell_task(ASK, task_id="good", evaluator={"name": "command", "command": "grep -q 'fine' out.txt"})
    bad = shell_task(ASK, task_id="bad", evaluator={"name": "command", "command": "grep -q 'other' out.txt"})
    await lab.runner([good, bad], Script(steps=[Step(text="fine")])).run()
    assert {result.task_id: result.reward for result in read_results(lab.out)} == {"good": 1.0, "bad": 0.0}


async def test_engine_that_fails_gives_no_reward_and_is_retried_within_bounds(lab: Lab) -> None:
    engine = ScriptedEngine(Script(steps=[Step(fault=Fault(kind="http_error", status=503, retry_after="0"))]))
    await lab.runner([shell_task(ASK, retries=2)], engine=engine).run()
    (result,) = read_results(lab.out)
    assert (result.status, result.reward, result.attempt) == (Status.INFRA_ERROR, None, 3)
    assert result.error is not None and result.error.boundary == "engine"
    assert result.ledger.calls == 3


async def test_tokens_of_a_retried_attempt_stand_in_the_ledger(lab: Lab) -> None:
    task, _ = lab.talk(sessions=1, calls=2)
    script = Script(steps=[Step(text="first"), Step(text="last", fault=Fault(kind="http_error", status=503, times=1))])
    await lab.runner([msgspec.structs.replace(task, retries=1)], script).run()
    (result,) = read_results(lab.out)
    assert (result.status, result.attempt) == (Status.COMPLETED, 2)
    lost = len(script.expected("stress.0", 0).sampled_ids)
    assert result.ledger.excluded == {"attempt_lost": lost}
    assert result.ledger.balanced()
    assert check_run(lab.out) == []


async def test_agent_that_runs_out_of_time_is_built_and_scored(lab: Lab) -> None:
    task = shell_task(
        ASK + "sleep 600", budgets={"run": 1.5}, evaluator={"name": "command", "command": "grep -q fine out.txt"}
    )
    await lab.runner([task], Script(steps=[Step(text="fine")])).run()
    (result,) = read_results(lab.out)
    assert (result.status, result.reward, result.num_traces) == (Status.TIMEOUT, 1.0, 1)


async def test_harness_that_fails_is_scored_as_it_stands(lab: Lab) -> None:
    await lab.runner([shell_task("exit 3")]).run()
    (result,) = read_results(lab.out)
    assert (result.status, result.exit_code, result.reward) == (Status.FAILED, 3, 0.0)


async def test_spent_call_budget_is_its_own_status(lab: Lab) -> None:
    await lab.runner(
        [shell_task(ASK + ASK.replace('"hi"', '"more"'), budgets={"calls": 1})], Script(steps=[Step(text="x")])
    ).run()
    (result,) = read_results(lab.out)
    assert result.status == Status.BUDGET_EXHAUSTED
    assert result.ledger.calls == 1


async def test_evaluator_that_breaks_gives_no_reward(lab: Lab) -> None:
    task = shell_task(evaluator={"name": "command", "command": "no-such-program-here"})
    await lab.runner([task]).run()
    (result,) = read_results(lab.out)
    assert (result.status, result.reward) == (Status.COMPLETED, None)
    assert result.error is not None and result.error.boundary == "evaluator"


async def test_engine_without_ids_is_refused_for_training_and_serves_evaluation(lab: Lab) -> None:
    class TextOnly(ScriptedEngine):
        async def start(self) -> EngineInfo:
            await super().start()
            self._info = EngineInfo(kind="openai", model="m", token_ids=False)
            return self._info

    script = Script(steps=[Step(text="hello", fault=Fault(kind="no_ids"))])
    with pytest.raises(EngineNotTrainable, match="token ids"):
        await lab.runner([shell_task(ASK)], engine=TextOnly(script)).run()
    other = Lab(lab.out.parent / "second")
    record = await other.runner([shell_task(ASK)], engine=TextOnly(script), text_only=True).run()
    assert record["summary"]["ledger"]["excluded"].keys() == {"text_only"}
    assert pq.read_table(other.out / "traces.parquet").num_rows == 0


async def test_stop_keeps_what_is_done_and_resume_runs_the_rest(lab: Lab) -> None:
    task = shell_task(ASK, num_samples=6)
    script = Script(steps=[Step(text="x")])
    runner = lab.runner([task], script, running=1)
    runner._hooks = type(runner._hooks)(on_event=lambda event: runner.stop() if event.result else None)
    await runner.run()
    before = {result.session_id: result for result in read_results(lab.out)}
    assert 1 <= sum(result.status == Status.COMPLETED for result in before.values()) < 6
    record = await lab.runner([task], script, resume=True).run()
    after = {result.session_id: result for result in read_results(lab.out)}
    assert record["summary"]["by_status"] == {"completed": 6}
    kept = [session_id for session_id, result in before.items() if result.status == Status.COMPLETED]
    assert [after[session_id] for session_id in kept] == [before[session_id] for session_id in kept]
    assert check_run(lab.out) == []


async def test_resume_with_a_changed_task_is_refused(lab: Lab) -> None:
    await lab.runner([shell_task("true")]).run()
    with pytest.raises(RunDirError, match=r"task t .* was changed"):
        await lab.runner([shell_task("exit 0")], resume=True).run()
    with pytest.raises(RunDirError, match="not among the given tasks"):
        await lab.runner([shell_task("true", task_id="other")], resume=True).run()


async def test_more_samples_of_a_finished_task_can_be_added(lab: Lab) -> None:
    await lab.runner([shell_task(num_samples=1)]).run()
    record = await lab.runner([shell_task(num_samples=3)], resume=True).run()
    assert record["summary"]["by_status"] == {"completed": 3}


async def test_second_run_into_one_directory_is_refused(lab: Lab) -> None:
    await lab.runner([shell_task()]).run()
    with pytest.raises(RunDirError, match="holds a run already"):
        await lab.runner([shell_task()]).run()


@pytest.mark.parametrize(
    ("fields", "kind", "word"),
    [
        ({"harness": "no-such-agent"}, HarnessMissing, "no-such-agent"),
        ({"harness": {"name": "shell", "settings": {"comand": "x"}}}, TaskFileError, "comand"),
        ({"runtime": {"name": "no-such-box"}}, RuntimeUnavailable, "no-such-box"),
        ({"evaluator": {"name": "no-such-grader"}}, Exception, "no-such-grader"),
        ({"evaluator": {"name": "command"}}, TaskFileError, "command"),
        ({"builder": "no-such-builder"}, TaskFileError, "no-such-builder"),
        ({"callback": "http://x"}, TaskFileError, "callback 'http://x' needs the rollout server"),
        ({"early_stop": 1}, TaskFileError, "early_stop 1 needs the rollout server"),
        ({"max_concurrent": 1}, TaskFileError, "max_concurrent 1 needs the rollout server"),
    ],
)
async def test_what_can_never_run_is_refused_before_anything_is_written(
    lab: Lab, fields: dict[str, object], kind: type[Exception], word: str
) -> None:
    with pytest.raises(kind, match=word):
        await lab.runner([shell_task(**fields)]).run()
    assert not lab.out.exists()


async def test_nothing_is_left_running(lab: Lab) -> None:
    await lab.runner([shell_task("sleep 600 & sleep 600 & exit 0", num_samples=2)]).run()
    label = str(lab.out.absolute())
    leftovers = [path for path in Path("/proc").glob("[0-9]*/environ") if label.encode() in _read(path)]
    assert leftovers == []
    assert not (lab.out / "work").exists()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""

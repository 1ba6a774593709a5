"""R4, the registry's half: a process that is killed at any time keeps every task and every result that it acknowledged."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from polynya.rollout.registry.base import Outcome

from .world import LEASE, completion, direct, hello, size

WRITER = """
import asyncio, sys
from polynya.rollout.registry import open_registry
from polynya.rollout.registry.base import Completion, NodeHello
from polynya.schema import HarnessSpec, Provenance, SessionResult, Status, TaskSpec

def say(text):
    sys.stdout.write(text + "\\n")
    sys.stdout.flush()

async def main():
    registry = open_registry(sys.argv[1])
    await registry.start(0.0, 10.0)
    await registry.register(NodeHello(node="n", epoch=int(sys.argv[2]), capacity=1), 0.0, 10.0)

    async def write(worker):
        for i in range(100_000):
            name = f"r{sys.argv[2]}w{worker}t{i}"
            await registry.submit(TaskSpec(task_id=name, instruction="x", harness=HarnessSpec(name="shell"), num_samples=2))
            say(f"task {name}")
            for session in (await registry.claim("n", int(sys.argv[2]), 1, 0.0, 10.0)).sessions:
                result = SessionResult(session_id=session.session_id, task_id=session.task.task_id, group_id=session.group_id,
                    sample_index=session.sample_index, attempt=session.attempt, status=Status.COMPLETED, reward=1.0,
                    provenance=Provenance(polynya="x"))
                await registry.complete(Completion(node="n", result=result))
                say(f"done {session.session_id} {session.attempt}")

    await asyncio.gather(*(write(worker) for worker in range(4)))

asyncio.run(main())
"""


@pytest.mark.parametrize("seed", range(2))
def test_killed_writer_loses_nothing_that_it_acknowledged(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    tasks: list[str] = []
    done: dict[str, int] = {}
    for life in range(1, size(6, 60) + 1):
        _one_life(tmp_path / "r.db", life, rng.randrange(20, 400), tasks, done)
        registry = direct(tmp_path / "r.db")
        kept = {task.task_id for task in registry.tasks(limit=10**6)}
        deliveries = registry.results(limit=10**6, acked=True)
        results = [d.result.session_id for d in deliveries if d.result]
        assert [name for name in tasks if name not in kept] == []
        assert [name for name in done if name not in set(results)] == []
        assert len(set(results)) == len(results)
        assert [d.cursor for d in deliveries] == list(range(1, len(deliveries) + 1))
        counts = registry.counts()
        assert counts.queued + counts.leased + counts.done == 2 * len(kept)
        registry.close()
    assert len(tasks) > 20
    assert len(done) > 20
    _goes_on(tmp_path / "r.db", done)


def _one_life(path: Path, life: int, lines: int, tasks: list[str], done: dict[str, int]) -> None:
    """Killed as soon as it has acknowledged so much, in the middle of whatever its four writers do then."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(life)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(lines):
            line = process.stdout.readline()
            assert line, "the writer ended by itself"
            _note(line, tasks, done)
        process.kill()
        for line in process.stdout.read().splitlines(keepends=True):
            if line.endswith(b"\n"):
                _note(line, tasks, done)
    assert process.returncode == -9


def _note(line: bytes, tasks: list[str], done: dict[str, int]) -> None:
    kind, name, *attempt = line.decode().split()
    if kind == "task":
        tasks.append(name)
    else:
        done[name] = int(attempt[0])


def _goes_on(path: Path, done: dict[str, int]) -> None:
    """What the killed processes had taken can be taken again and ends."""
    registry = direct(path)
    registry.register(hello("n", 10**6), 0.0, LEASE)
    while sessions := registry.claim("n", 10**6, 1000, 0.0, LEASE).sessions:
        assert all(session.session_id not in done for session in sessions)
        assert {registry.complete(completion(session)).outcome for session in sessions} == {Outcome.ACCEPTED}
    assert (registry.counts().queued, registry.counts().leased) == (0, 0)
    assert all(task.ended for task in registry.tasks(limit=10**6))
    registry.close()

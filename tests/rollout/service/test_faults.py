"""What dies, freezes or comes back: no acknowledged task lost, no result counted twice. With processes of their own, and signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from polynya.client import AsyncClient, Group
from polynya.config import DispatchSettings
from polynya.rollout.registry.base import TokenKind
from polynya.schema import Stage

pytestmark = pytest.mark.faults
LEASES = DispatchSettings(lease_seconds=3.0, heartbeat_seconds=0.3, fence_seconds=2.5, suspect_seconds=0.6)


class Program:
    """A `polynya` of its own process, whose first line is JSON."""

    def __init__(self, process: asyncio.subprocess.Process, said: dict[str, Any], log: Path) -> None:
        self.process = process
        self.said = said
        self.log = log

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


@contextlib.asynccontextmanager
async def program(folder: Path, *arguments: str, **env: str) -> AsyncIterator[Program]:
    folder.mkdir(exist_ok=True)
    log = folder / "stderr"
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "polynya.cli.main", *arguments,
            stdout=asyncio.subprocess.PIPE, stderr=stderr, env={**os.environ, **env}, cwd=folder,
        )  # fmt: skip
    assert process.stdout is not None
    line = await process.stdout.readline()
    try:
        assert line, log.read_text()[-2000:]
        yield Program(process, json.loads(line), log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def node(service: Any, name: str, *more: str) -> AsyncIterator[Program]:
    arguments = ["node", service.server.url, "-e", "scripted", "--name", name, "-c", "4", *more]
    folder = service.folder / f"process-{name}"
    async with program(
        folder, *arguments, "--archive", str(service.server.archive.root),
        POLYNYA_NODE_TOKEN=service.server.tokens[TokenKind.NODE], POLYNYA_CACHE=str(service.folder / "cache"),
    ) as made:  # fmt: skip
        yield made


async def until_leased(client: AsyncClient, name: str, least: int = 1) -> None:
    """The node has work. (The server says so to who asks; there is nothing that could be waited for.)"""
    while True:
        nodes = {found["node"]: found for found in (await client.status())["nodes"]}
        if name in nodes and nodes[name]["leased"] >= least:
            return
        await asyncio.sleep(0.05)


async def only_group(client: AsyncClient, task_id: str) -> Group:
    (group,) = [group async for group in client.groups([task_id])]
    return group


def slow(talk: Any, sessions: int, seconds: float = 1.0) -> Any:
    """Sessions that take their time, so that something can happen to them."""
    task, _ = talk(sessions, retries=3)
    command = f"sleep {seconds}; " + task.harness.settings["command"]
    return msgspec.structs.replace(task, harness=msgspec.structs.replace(task.harness, settings={"command": command}))


def whole(group: Group, sessions: int) -> None:
    assert [rollout.result.sample_index for rollout in group.rollouts] == list(range(sessions))
    assert {str(rollout.result.status) for rollout in group.rollouts} == {"completed"}
    for rollout in group.rollouts:
        assert sum(int(row.loss_mask.sum()) for row in rollout.rows) == rollout.result.ledger.trained > 0


async def test_work_of_a_killed_node_is_given_to_another_within_seconds(service: Any, talk: Any) -> None:
    """R5: its connection breaks, so nobody waits for its lease to run out."""
    await service.serve(LEASES)
    client = service.client()
    async with node(service, "doomed") as doomed:
        await client.submit(slow(talk, 8))
        await until_leased(client, "doomed", 4)
        doomed.signal(signal.SIGKILL)
        killed = time.monotonic()
        await doomed.process.wait()
        async with node(service, "other"):
            group = await only_group(client, "talk")
        print(f"\nkilled node: all done {time.monotonic() - killed:.1f} s after the kill")
    whole(group, 8)
    status = await client.status()
    assert status["metrics"]["expired"] >= 4
    assert status["metrics"]["completed"] == 8
    assert {found["node"]: found["state"] for found in status["nodes"]}["doomed"] == "gone"


async def test_a_frozen_node_loses_its_work_and_what_it_says_later_is_refused(service: Any, talk: Any) -> None:
    """R7: after it thaws it has killed its sessions itself, reports nothing of them, and works on as another epoch."""
    await service.serve(LEASES)
    client = service.client()
    async with node(service, "frozen") as frozen:
        await client.submit(slow(talk, 6, seconds=2.0))
        await until_leased(client, "frozen", 4)
        frozen.signal(signal.SIGSTOP)
        async with node(service, "other") as other:
            group = await only_group(client, "talk")
            other.signal(signal.SIGTERM)
            frozen.signal(signal.SIGCONT)
            await client.submit(msgspec.structs.replace(slow(talk, 2, seconds=0.1), task_id="after"))
            after = await only_group(client, "after")
    whole(group, 6)
    whole(after, 2)
    status = await client.status()
    assert status["metrics"]["completed"] == 8
    assert status["counts"]["done"] == 8


async def test_a_server_that_is_killed_again_and_again_loses_no_task(service: Any, talk: Any, tmp_path: Path) -> None:
    """R4 and 75: acknowledged tasks are there after each restart, each result once, under the same delivery id."""
    state = tmp_path / "served"
    arguments = ["serve", "--no-node", "--state", str(state)]
    port = 0
    async with contextlib.AsyncExitStack() as stack:
        groups: asyncio.Task[Group] | None = None
        for life in range(4):
            async with program(tmp_path / "server", *arguments, "--port", str(port)) as server:
                port = int(server.said["url"].rpartition(":")[2])
                client = AsyncClient(state=state)
                stack.push_async_callback(client.close)
                task = msgspec.structs.replace(slow(talk, 4, seconds=0.2), task_id=f"talk{life}")
                await client.submit(task)
                assert (await client.task(f"talk{life}")).num_samples == 4
                if life == 0:
                    token = (state / "node.token").read_text().strip()
                    await stack.enter_async_context(
                        program(
                            tmp_path / "worker", "node", server.said["url"], "-e", "scripted", "--name", "w", "-c", "4",
                            "--archive", str(state / "archive"), POLYNYA_NODE_TOKEN=token,
                            POLYNYA_CACHE=str(tmp_path / "cache"),
                        )
                    )  # fmt: skip
                if life < 3:
                    await until_leased(client, "w")
                    server.signal(signal.SIGKILL)
                    await server.process.wait()
                    continue
                for earlier in range(4):
                    whole(await only_group(client, f"talk{earlier}"), 4)
                every = [found async for found in client.deliveries(follow=False, acked=True)]
                assert len({found.delivery_id for found in every}) == len(every) == 4 * 5
        assert groups is None


async def test_cancelling_in_each_stage_leaves_nothing_behind(service: Any) -> None:
    """R20, small: the group ends, the node is empty, its scratch space too."""
    from ..conftest import shell_task

    await service.serve()
    agent = await service.node("one", running=1)
    client = service.client()
    for number, stage in enumerate((Stage.INIT, Stage.READY, Stage.RUNNING)):
        task_id = f"t{number}"
        prepare = ["sleep 30"] if stage == Stage.INIT else []
        runtime = {"name": "local", "prepare": prepare}
        await client.submit(shell_task("sleep 600", task_id=task_id, num_samples=3, runtime=runtime))
        await service.until(stage)
        await client.cancel(task_id)
        group = await only_group(client, task_id)
        assert {str(rollout.result.status) for rollout in group.rollouts} == {"cancelled"}
    assert agent.running == []
    assert list((service.folder / "one" / "work").iterdir()) == []

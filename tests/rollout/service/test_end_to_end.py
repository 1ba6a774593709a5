"""Tasks in over HTTP, sessions on real nodes, results out once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from polynya.client import AsyncClient, Client, Delivery
from polynya.errors import ServerRefused
from polynya.schema import Stage

from ..conftest import shell_task


@pytest.mark.parametrize("remote", [True, False], ids=["over HTTP", "in process"])
async def test_a_group_comes_back_with_its_rows_and_once(service: Any, talk: Any, remote: bool) -> None:
    task, script = talk(4)
    await service.serve()
    await service.node("one", script, remote=remote)
    client = service.client()
    submitted = await client.submit(task)
    assert (submitted.state, submitted.num_samples) == ("open", 4)
    groups = [group async for group in client.groups([task.task_id])]
    (group,) = groups
    assert (group.state, [rollout.result.sample_index for rollout in group.rollouts]) == ("completed", [0, 1, 2, 3])
    for rollout in group.rollouts:
        assert str(rollout.result.status) == "completed"
        assert sum(int(row.loss_mask.sum()) for row in rollout.rows) == rollout.result.ledger.trained > 0
    again = [delivery async for delivery in client.deliveries(follow=False)]
    assert again == []
    every = [delivery async for delivery in client.deliveries(follow=False, acked=True)]
    assert len({delivery.delivery_id for delivery in every}) == len(every) == 5


async def test_two_nodes_share_the_work(service: Any, talk: Any) -> None:
    task, script = talk(10)
    await service.serve()
    for name in ("one", "two"):
        await service.node(name, script, running=2)
    client = service.client()
    await client.submit(task)
    (group,) = [group async for group in client.groups([task.task_id])]
    assert len(group.rollouts) == 10
    status = await client.status()
    assert status["metrics"]["claimed"] == status["metrics"]["completed"] == 10
    assert {node["node"]: node["state"] for node in status["nodes"]} == {"one": "live", "two": "live"}


async def test_submitting_again_is_a_no_op_and_another_task_of_the_id_is_refused(service: Any, talk: Any) -> None:
    task, _ = talk(2)
    await service.serve()
    client = service.client()
    first, second = await client.submit(task), await client.submit(task)
    assert first == second
    with pytest.raises(ServerRefused, match="409 TaskConflict") as refused:
        await client.submit(talk(2, calls=3)[0])
    assert refused.value.status == 409


async def test_a_result_that_was_not_acknowledged_is_given_again_and_no_other(service: Any, talk: Any) -> None:
    task, script = talk(2)
    await service.serve()
    await service.node("one", script)
    client = service.client()
    await client.submit(task)

    async def page() -> list[Delivery]:
        return [delivery async for delivery in client.deliveries(follow=False)]

    async for delivery in client.deliveries(task.task_id):
        if delivery.result is not None:
            await client.ack(delivery.delivery_id)
    left = await page()
    assert [delivery.group is not None for delivery in left] == [True]
    assert left == await page()


async def test_a_cancelled_task_ends_with_one_event_and_its_queue_never_starts(service: Any) -> None:
    await service.serve()
    await service.node("one", running=1)
    client = service.client()
    await client.submit(shell_task("sleep 600", num_samples=6, budgets={"run": 700}))
    await service.until(Stage.RUNNING)
    await client.cancel("t")
    (group,) = [group async for group in client.groups(["t"])]
    assert group.state == "cancelled"
    assert {str(rollout.result.status) for rollout in group.rollouts} == {"cancelled"}
    assert all(rollout.result.reward is None for rollout in group.rollouts)


async def test_a_server_that_comes_back_has_every_task_and_its_nodes_go_on(service: Any, talk: Any) -> None:
    task, script = talk(6, calls=3)
    first = await service.serve()
    port = int(first.url.rpartition(":")[2])
    await service.node("one", script, running=2)
    client = service.client()
    await client.submit(task)
    groups = asyncio.create_task(anext(client.groups([task.task_id])))
    await service.until(Stage.RUNNING)
    await service.serve(port=port)
    group = await groups
    assert len(group.rollouts) == 6
    assert {str(rollout.result.status) for rollout in group.rollouts} == {"completed"}


async def test_a_node_that_drains_ends_what_it_has_and_leaves(service: Any, talk: Any) -> None:
    task, script = talk(3)
    await service.serve()
    agent = await service.node("one", script, running=3)
    client = service.client()
    await client.submit(task)
    await service.until(Stage.RUNNING)
    agent.drain()
    await asyncio.wait_for(service.agents["one"][1], 20)
    status = await client.status()
    assert [node["state"] for node in status["nodes"]] == ["gone"]
    assert status["metrics"]["requeued"] == 0
    assert status["counts"]["done"] + status["counts"]["queued"] == 3


async def test_the_blocking_client_gives_the_same_groups(service: Any, talk: Any) -> None:
    task, script = talk(2)
    server = await service.serve()
    await service.node("one", script)

    def trainer() -> list[int]:
        with Client(server.url, next(iter(server.tokens.values()))) as client:
            client.submit(task)
            return [len(group.scored) for group in client.groups([task.task_id])]

    assert len(await asyncio.to_thread(trainer)) == 1


async def test_the_client_finds_the_server_of_a_state_folder(service: Any) -> None:
    await service.serve()
    async with AsyncClient(state=service.folder / "state") as client:
        assert (await client.status())["counts"]["tasks"] == 0

"""A local Ray cluster of three machines under `polynya serve --cluster ray`: one is killed, one is frozen and thawed.

Run in an environment with `polynya[ray]`. Prints the figures; exits with 1 when a session was lost or counted twice.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from ray.cluster_utils import Cluster

from polynya.client import AsyncClient

COMMAND = (
    "curl -s $OPENAI_BASE_URL/chat/completions -H 'content-type: application/json' "
    '-d \'{"model":"m","messages":[{"role":"user","content":"hi"}]}\' > /dev/null; sleep %s'
)
HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}
AIM = 3.0
"""Seconds from the kill until its sessions wait again. Said, not judged: the machine may be busy."""


def tree(node: Any) -> list[psutil.Process]:
    """All processes of one machine of the cluster: its raylet and what hangs below it."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return [raylet, *raylet.children(recursive=True)]


def send(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


async def nodes_of(client: AsyncClient) -> dict[str, dict[str, Any]]:
    return {node["node"]: node for node in (await client.status())["nodes"]}


async def until(condition: Any, seconds: float, what: str) -> float:
    """Seconds that it took."""
    begun = time.monotonic()
    while not await condition():
        if time.monotonic() - begun > seconds:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        await asyncio.sleep(0.05)
    return time.monotonic() - begun


async def main(sessions: int, seconds: float) -> int:
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "_system_config": HEALTH}, shutdown_at_exit=True
    )
    machines = [cluster.head_node] + [cluster.add_node(num_cpus=1) for _ in range(2)]
    folder = Path(tempfile.mkdtemp(prefix="polynya-ray-"))
    log = (folder / "server.log").open("wb")
    argv = ["serve", "--cluster", "ray", "--ray-address", cluster.address, "-e", "scripted", "-c", "8"]
    server = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-m", "polynya.cli.main", *argv, "--state", str(folder / "state")],
        stdout=subprocess.PIPE, stderr=log, cwd=folder,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        print(json.loads(server.stdout.readline()), flush=True)
        async with AsyncClient(state=folder / "state") as client:
            return await scenario(client, machines, sessions, seconds)
    finally:
        print((folder / "server.log").read_text()[-3000:], file=sys.stderr)
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(30)
        server.kill()
        for machine in machines:
            with contextlib.suppress(Exception):
                send(tree(machine), signal.SIGCONT)
        cluster.shutdown()


async def scenario(client: AsyncClient, machines: list[Any], sessions: int, seconds: float) -> int:
    async def joined() -> bool:
        return sum(node["state"] == "live" for node in (await nodes_of(client)).values()) == 3

    took = await until(joined, 120, "three nodes")
    print(f"three machines have a node after {took:.1f} s", flush=True)
    await client.submit(
        {
            "task_id": "ray", "instruction": "talk", "num_samples": sessions, "retries": 5,
            "harness": {"name": "shell", "settings": {"command": COMMAND % seconds}}, "runtime": {"name": "local"},
        }
    )  # fmt: skip
    names = {machine: f"ray-{machine.node_id[:12]}" for machine in machines[1:]}
    doomed, frozen = machines[1:]

    async def busy() -> bool:
        found = await nodes_of(client)
        return all(found[names[machine]]["leased"] >= 8 for machine in (doomed, frozen))

    await until(busy, 60, "all machines busy")
    expired = (await client.status())["metrics"]["expired"]
    killed = tree(doomed)
    send(killed, signal.SIGKILL)

    async def given_again() -> bool:
        return int((await client.status())["metrics"]["expired"]) > expired

    again = await until(given_again, 30, "sessions of the killed machine given to others")
    print(f"killed machine: its sessions wait again after {again:.2f} s (aim: {AIM:g})", flush=True)
    stopped = tree(frozen)
    send(stopped, signal.SIGSTOP)

    async def gone() -> bool:
        return (await nodes_of(client))[names[frozen]]["state"] == "gone"

    lost = await until(gone, 30, "the frozen machine's lease taken")
    print(f"frozen machine: its lease is taken after {lost:.1f} s", flush=True)
    send(stopped, signal.SIGCONT)
    (group,) = [group async for group in client.groups(["ray"])]
    status = await client.status()
    metrics, counts = status["metrics"], status["counts"]
    results = [rollout.result for rollout in group.rollouts]
    distinct = len({result.session_id for result in results})
    completed = sum(str(result.status) == "completed" for result in results)
    print(
        f"{len(results)} results, {distinct} distinct, {completed} completed; given out {metrics['claimed']} times, "
        f"{metrics['expired']} taken back, {metrics['fenced']} late completions refused",
        flush=True,
    )
    whole = len(results) == distinct == completed == sessions == counts["done"] == metrics["completed"]
    return 0 if whole else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    sys.exit(asyncio.run(main(options.sessions, options.seconds)))

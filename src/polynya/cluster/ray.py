"""Ray places, watches and restarts one node of ours on each of its machines. It carries no sessions, no tokens, no trajectories.

Run as a process of its own (``python -m polynya.cluster.ray``), since losing Ray's head ends its driver and must not end the server.
Invariant: one actor a machine, detached, restarted without end; an actor is a child process that speaks HTTP with the server, and
dies with it. Whether a session lives is for leases to say, never for Ray. Refuses to start without a join token.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

NAMESPACE = "polynya"
TOKEN = "POLYNYA_NODE_TOKEN"
_PERIOD = 1.0
_PR_SET_PDEATHSIG = 1
_log = logging.getLogger("polynya.cluster")


class NodeActor:
    """On each machine: ``polynya node`` as a child. Ends when the child ends, so that Ray starts both again."""

    def __init__(self, argv: Sequence[str], token: str) -> None:
        env = {**os.environ, TOKEN: token}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "polynya.cli.main", *argv],
            env=env,
            stdout=subprocess.DEVNULL,
            preexec_fn=_die_with_parent,
        )
        threading.Thread(target=self._follow, name="polynya node", daemon=True).start()

    def pid(self) -> int:
        return self._child.pid

    def stop(self) -> None:
        """Drain: what runs is ended and reported."""
        self._child.send_signal(signal.SIGTERM)

    def _follow(self) -> None:
        self._child.wait()
        os._exit(1)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Placement:
    """Keeps an actor on every machine that Ray calls alive."""

    def __init__(self, ray: Any, argv: Sequence[str], token: str) -> None:
        self._ray = ray
        self._argv = list(argv)
        self._token = token
        self._actors: dict[str, Any] = {}

    def reconcile(self) -> list[str]:
        """The machines that got an actor now."""
        alive = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        for node_id in self._actors.keys() - alive.keys():
            _log.warning("machine %s is gone", node_id)
            del self._actors[node_id]
        added = [node_id for node_id in alive if node_id not in self._actors]
        for node_id in added:
            self._actors[node_id] = self._place(node_id)
        return added

    def _place(self, node_id: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        made = self._ray.remote(NodeActor).options(
            name=f"node-{node_id}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
        )
        return made.remote(
            [*self._argv, "--name", f"ray-{node_id[:12]}", "--state", f".polynya-node/{node_id[:12]}"], self._token
        )

    def stop(self) -> None:
        """All nodes drain; their actors end."""
        for actor in self._actors.values():
            with contextlib.suppress(Exception):
                self._ray.get(actor.stop.remote(), timeout=5)
        for actor in self._actors.values():
            with contextlib.suppress(Exception):
                self._ray.kill(actor, no_restart=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Until standard input ends, which it does when the server does."""
    parser = argparse.ArgumentParser(prog="polynya.cluster.ray", description=__doc__)
    parser.add_argument("--address", default="auto", help="of the Ray cluster")
    parser.add_argument("node", nargs=argparse.REMAINDER, help="arguments of `polynya node`")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    token = os.environ.pop(TOKEN, "")
    if not token:
        parser.error(f"{TOKEN} is not set")
    try:
        import ray
    except ImportError:
        parser.error("ray is not installed; fix: pip install 'polynya[ray]'")
    ray.init(address=options.address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    argv = options.node[1:] if options.node[:1] == ["--"] else options.node
    placement = Placement(ray, argv, token)
    while True:
        for node_id in placement.reconcile():
            _log.info("machine %s has a node", node_id)
        ready, _, _ = select.select([sys.stdin], [], [], _PERIOD)
        if ready and not os.read(sys.stdin.fileno(), 4096):
            return 0


if __name__ == "__main__":
    sys.exit(main())

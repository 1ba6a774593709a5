"""What tests of the registry share: a registry that answers at once, tasks and results of few words, sizes for CI and for soaks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polynya.config import DispatchSettings
from polynya.rollout.registry import InlineWorker, Registry, SqlRegistry, open_registry
from polynya.rollout.registry.base import Completion, NodeHello
from polynya.rollout.registry.database import Database
from polynya.rollout.simulation.events import drive
from polynya.schema import ErrorInfo, HarnessSpec, Ledger, Provenance, Session, SessionResult, Status, TaskSpec

LEASE = 10.0


def size(ci: int, soak: int) -> int:
    """How much of something: ``make soak`` sets POLYNYA_SOAK."""
    return soak if os.environ.get("POLYNYA_SOAK") else ci


class Direct:
    """A registry without event loop: ``direct.submit(task)`` is ``await registry.submit(task)``."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.registry, name)
        return lambda *args, **kwargs: drive(method(*args, **kwargs))


def direct(where: str | Path, *, now: float = 0.0, max_losses: int = 5) -> Direct:
    """Opened and started."""
    settings = DispatchSettings(max_losses=max_losses)
    found = Direct(open_registry(where, settings, workers=(InlineWorker(), InlineWorker())))
    found.start(now, LEASE)
    return found


def registry_over(connect: Callable[[bool], Database]) -> Direct:
    """Not started."""
    return Direct(SqlRegistry(connect, workers=(InlineWorker(), InlineWorker()), max_losses=2, wall=lambda: 0.0))


def task(task_id: str = "t", num_samples: int = 1, **fields: Any) -> TaskSpec:
    return TaskSpec(
        task_id=task_id, instruction="do it", harness=HarnessSpec(name="shell"), num_samples=num_samples, **fields
    )


def hello(node: str = "n", epoch: int = 1, **fields: Any) -> NodeHello:
    return NodeHello(node=node, epoch=epoch, capacity=8, **fields)


def result_of(session: Session, status: Status = Status.COMPLETED, **fields: Any) -> SessionResult:
    return result(session.session_id, session.attempt, status, **fields)


def result(session_id: str, attempt: int, status: Status = Status.COMPLETED, **fields: Any) -> SessionResult:
    task_id, _, index = session_id.rpartition(".")
    if status == Status.INFRA_ERROR:
        fields.setdefault(
            "error", ErrorInfo(kind="EngineUnavailable", boundary="engine", message="gone", retryable=True)
        )
    return SessionResult(
        session_id=session_id,
        task_id=task_id,
        group_id=task_id,
        sample_index=int(index),
        attempt=attempt,
        status=status,
        reward=fields.pop("reward", 1.0 if status == Status.COMPLETED else None),
        ledger=fields.pop("ledger", Ledger()),
        provenance=Provenance(polynya="test"),
        **fields,
    )


def completion(session: Session, node: str = "n", status: Status = Status.COMPLETED, **fields: Any) -> Completion:
    return Completion(node=node, result=result_of(session, status, **fields), retry=status == Status.INFRA_ERROR)

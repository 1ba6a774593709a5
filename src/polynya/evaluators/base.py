"""Graders behind one interface, run after the harness is dead.

Invariants: an evaluator runs in a runtime that the agent's processes never saw, on a copy of its workspace, with no
credential of the session in its environment. What the policy can cause is a score; a crash, a hang or a missing tool of
the evaluator itself is EvaluatorError, which makes the reward null.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from polynya.runtimes.base import Runtime
from polynya.schema import Score, Status


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How the run ended, for an evaluator that needs only that."""

    status: Status
    exit_code: int | None
    stdout_tail: bytes = b""


class EvalContext(msgspec.Struct, frozen=True, kw_only=True):
    outcome: Outcome
    fresh_runtime: Callable[[], Awaitable[Runtime]]
    """A new sandbox, without network, with a copy of the workspace as the agent left it. The caller destroys it."""
    timeout: float
    """Seconds left of the POSTRUN budget."""
    instruction: str
    metadata: dict[str, Any]


class Evaluator(Protocol):
    name: str

    def validate(self, settings: dict[str, Any]) -> None:
        """Raises TaskFileError naming the setting, its value and the fix."""
        ...

    async def evaluate(self, settings: dict[str, Any], context: EvalContext) -> Score:
        """A Score in [0, 1] (``label`` and ``weight`` are filled by the caller). Raises EvaluatorError."""
        ...

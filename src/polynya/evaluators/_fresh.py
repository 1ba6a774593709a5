"""A fresh runtime that cannot be left behind, and the clock of one grading program.

Invariant: whatever happens in the block, the runtime is destroyed. A program that spends its *own* time-out hung because
of the agent's code, which is a score; one that is cut by the POSTRUN budget gives no verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from polynya.errors import EvaluatorError
from polynya.evaluators.base import EvalContext
from polynya.runtimes.base import ExecResult, Runtime
from polynya.runtimes.files import write_files


@contextlib.asynccontextmanager
async def fresh(context: EvalContext, files: Mapping[str, str]) -> AsyncIterator[Runtime]:
    """The agent's workspace in a new sandbox, with the grader's files laid over it."""
    runtime = await context.fresh_runtime()
    try:
        await asyncio.to_thread(write_files, runtime.workspace, files, "evaluator.files")
        yield runtime
    finally:
        await runtime.destroy()


async def run(
    runtime: Runtime, argv: list[str], context: EvalContext, timeout: float, env: Mapping[str, str] | None = None
) -> ExecResult:
    """Run a grading program for at most ``timeout`` and at most what the budget has left."""
    result = await runtime.exec(argv, env=env, timeout=min(timeout, context.timeout))
    if result.timed_out and context.timeout < timeout:
        raise EvaluatorError(
            f"the POSTRUN budget ended {context.timeout:g} s into a grading program that may take {timeout:g} s",
            fix="raise budgets.postrun, or lower evaluator.timeout",
        )
    return result

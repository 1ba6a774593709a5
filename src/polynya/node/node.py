"""The node: sessions in, results out, each through its stages once.

Invariants: a stage runs under its own pool and budget; cancelling works in every stage and counts once; a session ends with
exactly one output, also when a stage fails in a way that nobody foresaw. An infrastructure failure gives ``reward: null``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec

from polynya.config import NodeLimits
from polynya.errors import HarnessError, HarnessFailed, PolynyaError, SessionCancelled, StageTimeout
from polynya.node.job import Job, JobDeps, error_info, session_result
from polynya.node.pools import Pools
from polynya.schema import ErrorInfo, Session, SessionResult, Stage, Status, Trajectory

NodeDeps = JobDeps
_log = logging.getLogger("polynya.node")


class SessionEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A session came to a stage."""

    session_id: str
    stage: Stage
    result: SessionResult | None = None
    """With DONE."""


class SessionOutput(msgspec.Struct, frozen=True, kw_only=True):
    result: SessionResult
    trajectory: Trajectory | None


class SessionHandle:
    """A submitted session: await ``output``, or ``cancel``."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.stage = Stage.QUEUED
        self.cancelled = asyncio.Event()
        self.job: Job | None = None
        self.task: asyncio.Task[SessionOutput] | None = None

    def cancel(self) -> None:
        """Once is enough, in any stage. What was captured is still built."""
        self.cancelled.set()

    async def output(self) -> SessionOutput:
        if self.task is None:
            raise RuntimeError("the session was not submitted to a node")
        return await asyncio.shield(self.task)


class Node:
    def __init__(self, deps: NodeDeps, limits: NodeLimits, on_event: Callable[[SessionEvent], None]) -> None:
        self._deps = deps
        self._pools = Pools(limits)
        self._on_event = on_event
        self.handles: dict[tuple[str, int], SessionHandle] = {}
        """By session id and attempt: an attempt may begin while an earlier one is still cleaned up."""

    @property
    def pools(self) -> Pools:
        return self._pools

    def submit(self, session: Session) -> SessionHandle:
        handle = SessionHandle(session)
        self.handles[session.session_id, session.attempt] = handle
        handle.task = asyncio.create_task(self._through(handle), name=f"session {session.session_id}")
        return handle

    async def stop(self) -> None:
        """Cancel what runs and wait until all of it is cleaned up."""
        tasks = [handle.task for handle in self.handles.values() if handle.task is not None]
        for handle in self.handles.values():
            handle.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _through(self, handle: SessionHandle) -> SessionOutput:
        way = _Way(handle, self._deps, self._pools, self._stage)
        try:
            async with self._deps.spawner:
                output = await way.go()
        finally:
            self.handles.pop((handle.session.session_id, handle.session.attempt), None)
        self._stage(handle, Stage.DONE, output.result)
        return output

    def _stage(self, handle: SessionHandle, stage: Stage, result: SessionResult | None = None) -> None:
        handle.stage = stage
        self._on_event(SessionEvent(session_id=handle.session.session_id, stage=stage, result=result))


class _Way:
    """One session's walk through the stages."""

    def __init__(
        self, handle: SessionHandle, deps: NodeDeps, pools: Pools, announce: Callable[[SessionHandle, Stage], None]
    ) -> None:
        self._handle = handle
        self._pools = pools
        self._announce = announce
        self._job = handle.job = Job(handle.session, deps)
        self._deps = deps
        self._timings: dict[str, float] = {}
        self._mark = self._begin = time.monotonic()
        self._started_at = deps.clock()
        self._error: ErrorInfo | None = None
        self._status = Status.COMPLETED

    async def go(self) -> SessionOutput:
        flags: dict[str, int] = {}
        try:
            await self._walk()
        except Exception as exc:  # whatever it is, this session ends with a result and the others go on
            _log.exception("session %s failed between its stages", self._handle.session.session_id)
            self._end(Status.INFRA_ERROR, exc)
            with contextlib.suppress(Exception):
                await self._job.build()
        finally:
            try:
                await self._job.cleanup()
            except Exception:
                _log.exception("session %s was not cleaned up", self._handle.session.session_id)
                flags["cleanup_failed"] = 1
        self._timings["total"] = time.monotonic() - self._begin
        flags |= self._flags()
        result = session_result(self._job, self._status, self._error, self._timings, self._started_at, flags)
        return SessionOutput(result=result, trajectory=self._job.trajectory)

    async def _walk(self) -> None:
        if await self._prepare_and_run():
            self._judge_run()
        await self._job.stop_agent()
        async with self._pools.slot(Stage.POSTRUN):
            self._lap("queued_postrun")
            self._announce(self._handle, Stage.POSTRUN)
            await self._postrun()
            self._lap("postrun")

    async def _prepare_and_run(self) -> bool:
        """INIT, READY, RUNNING. True when the harness was run to some end of its own or of its budget."""
        place = self._pools.place()
        if not await self._guarded(place.__aenter__(), None, "queued"):
            return False
        try:
            return await self._in_place()
        finally:
            await place.__aexit__(None, None, None)

    async def _in_place(self) -> bool:
        budgets = self._handle.session.task.budgets
        init = self._pools.slot(Stage.INIT)
        if not await self._guarded(init.__aenter__(), None, "queued"):
            return False
        self._lap("queued")
        self._announce(self._handle, Stage.INIT)
        try:
            prepared = await self._guarded(self._job.init(), budgets.init, "init")
        finally:
            await init.__aexit__(None, None, None)
            self._lap("init")
        if not prepared:
            return False
        self._announce(self._handle, Stage.READY)
        running = self._pools.slot(Stage.RUNNING)
        if not await self._guarded(running.__aenter__(), None, "ready"):
            return False
        self._lap("ready")
        self._announce(self._handle, Stage.RUNNING)
        try:
            return await self._guarded(self._job.run(), budgets.run, "run")
        finally:
            try:
                await self._job.stop_agent()
            finally:
                await running.__aexit__(None, None, None)
                self._lap("running")

    async def _guarded(self, work: Awaitable[object], seconds: float | None, stage: str) -> bool:
        """Do one step under a budget and the session's cancellation. False: it ended otherwise, status and error are set."""
        step = asyncio.ensure_future(_plain(work))
        stopped = asyncio.ensure_future(self._handle.cancelled.wait())
        interrupted = False
        try:
            await asyncio.wait([step, stopped], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            interrupted = not step.done()
        finally:
            stopped.cancel()
            if not step.done():
                step.cancel()
                await asyncio.wait([step])
        failure = None if step.cancelled() else step.exception()
        if interrupted and (step.cancelled() or failure is not None):
            if self._handle.cancelled.is_set():
                self._end(Status.CANCELLED, SessionCancelled(f"cancelled in stage {stage}"))
            else:
                self._end(Status.TIMEOUT if stage == "run" else Status.INFRA_ERROR, StageTimeout(stage, seconds or 0.0))
            return False
        if failure is None:
            return True
        if not isinstance(failure, PolynyaError):
            _log.error("session %s, stage %s", self._handle.session.session_id, stage, exc_info=failure)
        caused = isinstance(failure, PolynyaError) and failure.policy_can_cause
        self._end(Status.FAILED if caused else Status.INFRA_ERROR, failure)
        return False

    def _judge_run(self) -> None:
        """The harness ended by itself: completed, failed, or stopped by something that the policy cannot cause."""
        verdict = self._job.verdict
        if verdict is not None and not verdict.ok:
            if verdict.infra:
                self._end(
                    Status.INFRA_ERROR, HarnessError(verdict.reason, fix=f"see logs/{self._handle.session.session_id}")
                )
            else:
                self._end(Status.FAILED, HarnessFailed(verdict.reason))

    def _judge_capture(self) -> None:
        """What the gateway saw of this session outweighs how its harness ended."""
        session = self._job.gateway_session
        if session is None or self._status == Status.CANCELLED:
            return
        if self._status == Status.INFRA_ERROR and self._error is not None and self._error.boundary != "harness":
            return
        if session.capture_error:
            self._end_with(Status.INFRA_ERROR, "CaptureError", "capture", session.capture_error)
        elif session.engine_error:
            self._end_with(Status.INFRA_ERROR, "EngineUnavailable", "engine", session.engine_error)
        elif session.flags["budget_exhausted"] and self._status not in (Status.TIMEOUT, Status.INFRA_ERROR):
            self._end_with(
                Status.BUDGET_EXHAUSTED, "BudgetExhausted", "node", "the call or token budget was spent", True
            )

    async def _postrun(self) -> None:
        """Build and, where a score can mean something, evaluate. Neither failure takes the other's result away."""
        self._judge_capture()
        begin = time.monotonic()
        budget = self._handle.session.task.budgets.postrun
        try:
            async with asyncio.timeout(budget):
                await self._job.build()
        except TimeoutError:
            self._end(Status.INFRA_ERROR, StageTimeout("postrun", budget))
        except Exception as exc:
            _log.error("session %s cannot be built", self._handle.session.session_id, exc_info=exc)
            self._end(Status.INFRA_ERROR, exc)
        if self._status in (Status.INFRA_ERROR, Status.CANCELLED):
            return
        left = max(0.001, budget - (time.monotonic() - begin))
        if await self._guarded(self._job.evaluate(self._status, left), left, "postrun"):
            failed = [score.error for score in self._job.scores if score.error is not None]
            if failed and self._error is None:
                self._error = failed[0]

    def _end(self, status: Status, error: BaseException) -> None:
        self._status, self._error = status, error_info(error)

    def _end_with(self, status: Status, kind: str, boundary: str, message: str, policy_can_cause: bool = False) -> None:
        self._status = status
        self._error = ErrorInfo(kind=kind, boundary=boundary, message=message, policy_can_cause=policy_can_cause)

    def _lap(self, name: str) -> None:
        now = time.monotonic()
        self._timings[name] = self._timings.get(name, 0.0) + now - self._mark
        self._mark = now

    def _flags(self) -> dict[str, int]:
        session = self._job.gateway_session
        if session is None:
            return {}
        flags = dict(session.flags)
        if session.capture.late_writes:
            flags["late_write"] = session.capture.late_writes
        return flags


async def _plain(work: Awaitable[object]) -> None:
    await work

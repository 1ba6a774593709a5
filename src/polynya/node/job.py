"""One session's way through the stages: what is done in INIT, RUNNING and POSTRUN, and how each can end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from polynya.engines.base import Engine
from polynya.errors import PolynyaError, SessionCancelled
from polynya.evaluators import evaluate_all, grading_binds
from polynya.evaluators.base import EvalContext, Outcome
from polynya.gateway.server import Gateway
from polynya.gateway.sessions import GatewaySession, SessionGrant
from polynya.harnesses import harness
from polynya.harnesses.base import Endpoint, Harness, Installed, Progress, Verdict
from polynya.node.trajectory import trajectory_of
from polynya.runtimes import DEFAULT, Spawner, provider
from polynya.runtimes.base import ExecResult, Runtime, RuntimeProvider
from polynya.runtimes.files import remove_tree, write_files
from polynya.runtimes.workspace import copy_workspace, prepare_workspace
from polynya.schema import ErrorInfo, Ledger, Provenance, RuntimeSpec, Score, Session, SessionResult, Status, Trajectory

_TAIL_BYTES = 64 * 1024
_OUTPUT_LIMIT = 64 * 1024 * 1024
_DEFAULT_WINDOW = 32_768
_DEFAULT_MAX_TOKENS = 4_096


class JobDeps(msgspec.Struct, frozen=True, kw_only=True):
    engine: Engine
    gateway: Gateway
    cache: Path
    """Where harnesses are installed."""
    work: Path
    """Scratch space; each session has a folder of its own in it."""
    logs: Path
    label: str
    """Marks all processes and mounts of this node."""
    version: str
    progress: Progress
    clock: Callable[[], float] = time.time
    spawner: Spawner = msgspec.field(default_factory=Spawner)
    """Starts the programs of all sandboxes of the node, beside its event loop."""


class Job:
    """The state of one attempt. ``init`` → ``run`` → ``postrun``, then ``cleanup`` in every case."""

    def __init__(self, session: Session, deps: JobDeps) -> None:
        self.session = session
        self.deps = deps
        self.runtime: Runtime | None = None
        self.gateway_session: GatewaySession | None = None
        self.result: ExecResult | None = None
        self.verdict: Verdict | None = None
        self.trajectory: Trajectory | None = None
        self.scores: list[Score] = []
        self.reward: float | None = None
        self.installed: Installed | None = None
        self.runtime_name = ""
        self._provider: RuntimeProvider | None = None
        self._graders = 0
        self._key = ""
        self._origin: str | None = None
        self._root = deps.work / session.session_id / f"a{session.attempt}"
        self._logs = deps.logs / session.session_id

    @property
    def _harness(self) -> Harness:
        return harness(self.session.task.harness.name)

    async def init(self) -> None:
        """Runtime, workspace, harness, session key: all that the run needs."""
        task = self.session.task
        await asyncio.to_thread(self._logs.mkdir, parents=True, exist_ok=True)
        self.installed = await self._harness.install(task.harness, self.deps.cache, self.deps.progress)
        self._provider = await provider(task.runtime.name or DEFAULT, self.deps.spawner)
        self.runtime_name = self._provider.name
        label = f"{self.deps.label}.{self.session.session_id}.a{self.session.attempt}"
        self.runtime = await self._provider.create(
            task.runtime, label=label, root=self._root, binds=self.installed.binds
        )
        await prepare_workspace(task.runtime, self.runtime, self.deps.spawner)
        grant = SessionGrant(
            session_id=self.session.session_id,
            attempt=self.session.attempt,
            sampling=task.sampling,
            budgets=task.budgets,
        )
        self.gateway_session, self._key = await self.deps.gateway.open_session(grant)
        listener = await self.runtime.listen()
        if listener is not None:
            self._origin = await self.deps.gateway.serve_socket(self.gateway_session, listener)

    async def run(self) -> None:
        """The harness, until it ends. Cancelling kills all that it started."""
        if self.runtime is None or self.installed is None:
            raise RuntimeError("init first")
        task = self.session.task
        launch = self._harness.launch(
            task.harness,
            task.instruction,
            self._endpoint(),
            self.installed,
            workdir=self.runtime.workdir,
            home=self.runtime.home,
        )
        await asyncio.to_thread(write_files, self.runtime.home_path, launch.home_files, "home")
        self.result = await self.runtime.exec(
            launch.argv,
            env={**task.runtime.env, **launch.env},
            stdin=launch.stdin,
            stdout=self._logs / "harness.stdout",
            stderr=self._logs / "harness.stderr",
            max_output=_OUTPUT_LIMIT,
        )
        self.verdict = self._harness.verdict(self.result, await asyncio.to_thread(self._stdout_tail))

    async def stop_agent(self) -> None:
        """The agent's world ends: key revoked, capture sealed, sandbox destroyed. Its workspace stays for grading."""
        if self.gateway_session is not None:
            await self.deps.gateway.close_session(self.gateway_session)
        if self.runtime is not None:
            await self.runtime.destroy()

    async def build(self) -> None:
        if self.gateway_session is None:
            return
        capture = self.gateway_session.capture
        vocab_size = self.deps.engine.info.vocab_size
        self.trajectory = await asyncio.to_thread(
            trajectory_of, capture, builder=self.session.task.builder, vocab_size=vocab_size
        )

    async def evaluate(self, status: Status, timeout: float) -> None:
        task = self.session.task
        outcome = Outcome(
            status=status,
            exit_code=self.result.exit_code if self.result else None,
            stdout_tail=await asyncio.to_thread(self._stdout_tail),
        )
        context = EvalContext(
            outcome=outcome,
            fresh_runtime=self._fresh_runtime,
            timeout=timeout,
            instruction=task.instruction,
            metadata=task.metadata,
        )
        self.reward, self.scores = await evaluate_all(task.evaluator, context)

    async def cleanup(self) -> None:
        try:
            await self.stop_agent()
        finally:
            await asyncio.to_thread(remove_tree, self._root)
        with contextlib.suppress(OSError):
            self._root.parent.rmdir()

    async def _fresh_runtime(self) -> Runtime:
        """A sandbox for grading, without network, with a copy of the workspace. Only when the agent's is destroyed."""
        if self._provider is None or self.runtime is None:
            raise SessionCancelled("nothing to grade: the session never had a workspace")
        spec = self.session.task.runtime
        bare = msgspec.structs.replace(spec, files={}, repo=None, prepare=[], network="gateway-only")
        self._graders += 1
        label = f"{self.deps.label}.{self.session.session_id}.a{self.session.attempt}.grade{self._graders}"
        root = self._root / f"grade{self._graders}"
        runtime = await self._provider.create(
            RuntimeSpec() if bare is None else bare, label=label, root=root, binds=grading_binds()
        )
        try:
            await asyncio.to_thread(copy_workspace, self.runtime.workspace, runtime.workspace)
        except BaseException:
            await runtime.destroy()
            raise
        return runtime

    def _endpoint(self) -> Endpoint:
        info, sampling = self.deps.engine.info, self.session.task.sampling
        window = info.window or _DEFAULT_WINDOW
        return Endpoint(
            base_url=self.deps.gateway.base_url(self._key, self._origin),
            api_key=self._key,
            model=info.model,
            window=window,
            max_tokens=sampling.max_tokens or min(_DEFAULT_MAX_TOKENS, window // 2),
        )

    def _stdout_tail(self) -> bytes:
        try:
            with (self._logs / "harness.stdout").open("rb") as log:
                size = log.seek(0, 2)
                log.seek(max(0, size - _TAIL_BYTES))
                return log.read()
        except OSError:
            return b""

    def provenance(self) -> Provenance:
        info = self.deps.engine.info
        sampling: dict[str, Any] = {}
        if self.gateway_session and self.gateway_session.capture.committed:
            sampling = self.gateway_session.capture.committed[-1].sampling
        return Provenance(
            polynya=self.deps.version,
            engine=info.kind,
            engine_build=info.build,
            model=info.model,
            model_sha256=info.model_sha256,
            tokenizer_sha256=info.tokenizer_sha256,
            chat_template_sha256=info.chat_template_sha256,
            tool_parser=info.tool_parser,
            logprob_kind=info.logprob_kind,
            harness=self.session.task.harness.name,
            harness_version=self.installed.version if self.installed else None,
            runtime=self.runtime_name,
            sampling=sampling,
            continuation=self.deps.gateway.continuation_of(self.session.task.sampling),
        )

    def log_paths(self) -> dict[str, str]:
        names = ("harness.stdout", "harness.stderr")
        return {name: f"logs/{self.session.session_id}/{name}" for name in names if (self._logs / name).exists()}


def error_info(error: BaseException) -> ErrorInfo:
    """An error as data. What is not ours is a bug: infrastructure, never the policy's fault."""
    if isinstance(error, PolynyaError):
        return ErrorInfo(
            kind=error.kind,
            boundary=error.boundary,
            message=error.message,
            fix=error.fix,
            policy_can_cause=error.policy_can_cause,
            retryable=error.retryable,
        )
    return ErrorInfo(
        kind=type(error).__name__, boundary="polynya", message=str(error) or type(error).__name__, fix="report this"
    )


def session_result(
    job: Job,
    status: Status,
    error: ErrorInfo | None,
    timings: dict[str, float],
    started_at: float,
    flags: dict[str, int],
) -> SessionResult:
    session, trajectory = job.session, job.trajectory
    calls = trajectory.calls if trajectory else []
    return SessionResult(
        session_id=session.session_id,
        task_id=session.task.task_id,
        group_id=session.group_id,
        sample_index=session.sample_index,
        attempt=session.attempt,
        status=status,
        reward=job.reward if status not in (Status.INFRA_ERROR, Status.CANCELLED) else None,
        scores=job.scores,
        ledger=trajectory.ledger if trajectory else Ledger(),
        num_calls=len(calls),
        num_traces=len(trajectory.traces) if trajectory else 0,
        prompt_tokens=sum(call.prompt_len for call in calls),
        sampled_tokens=sum(call.sampled_len for call in calls),
        exit_code=job.result.exit_code if job.result else None,
        error=error,
        timings={name: round(seconds, 4) for name, seconds in timings.items()},
        started_at=started_at,
        flags=flags,
        provenance=job.provenance(),
        logs=job.log_paths(),
    )

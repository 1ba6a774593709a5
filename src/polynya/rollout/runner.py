"""The one-shot runner: tasks → sessions → one node in this process → a run directory.

Invariants: a session that the run directory holds as finished is not run again; an infrastructure failure is retried up to
the task's bound and ends with ``reward: null``; the tokens of a lost attempt stand in the ledger as ``attempt_lost``.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from polynya import __version__
from polynya.capture.journal import Journal, JournalScan, read_journal
from polynya.capture.store import CaptureStore, SessionCapture, replay
from polynya.config import Settings
from polynya.engines.base import Engine
from polynya.errors import EngineError, EngineNotTrainable, PolynyaError, RunDirError
from polynya.gateway.server import Gateway
from polynya.node import Node, NodeDeps, SessionEvent, SessionOutput
from polynya.node.lag import LagMonitor
from polynya.node.preflight import preflight, sweep
from polynya.node.trajectory import lost_calls
from polynya.rollout.retry import worth_a_retry
from polynya.rollout.rundir import RunDir
from polynya.rollout.summary import summarise
from polynya.rollout.tasks import refuse_served, spec_digest
from polynya.schema import Call, Session, SessionResult, Status, TaskSpec, session_id_of
from polynya.tokens.ledger import lost, total

FINISHED = frozenset(str(status) for status in Status if status not in (Status.INFRA_ERROR, Status.CANCELLED))
"""Statuses that ``--resume`` keeps; sessions with another one, or none, run."""


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    out: Path
    cache: Path
    settings: Settings = Settings()
    resume: bool = False
    text_only: bool = False
    """Go on with an engine that gives no ids: for evaluation, nothing is trainable."""
    command: str = ""


class RunHooks(msgspec.Struct, frozen=True, kw_only=True):
    """How somebody looks on. Called on the event loop; must not block."""

    on_event: Callable[[SessionEvent], None] = lambda event: None
    on_progress: Callable[[str], None] = lambda line: None
    on_start: Callable[[Sequence[Session], dict[str, SessionResult]], None] = lambda todo, done: None


class Runner:
    """Runs all sessions of some tasks once. ``stop`` may be called from a signal handler."""

    def __init__(
        self, tasks: Sequence[TaskSpec], engine: Engine, options: RunOptions, hooks: RunHooks | None = None
    ) -> None:
        self._tasks = tasks
        self._engine = engine
        self._options = options
        self._hooks = hooks or RunHooks()
        self._rundir = RunDir(options.out)
        self._node: Node | None = None
        self._stopping = asyncio.Event()
        self._commits = asyncio.Lock()
        self._token_ids: set[int] = set()
        self._failure: PolynyaError | None = None
        self.begun = False
        """The run directory says so: from here on ``stop`` ends the run and ``--resume`` goes on with it."""

    def stop(self) -> None:
        """End early: what runs is cancelled, built and written; the rest is left for ``--resume``."""
        self._stopping.set()

    @property
    def stopped(self) -> bool:
        return self._stopping.is_set()

    async def run(self) -> dict[str, Any]:
        """Returns the summary that also stands in ``run.json``. Raises PolynyaError when the run could not begin or go on."""
        refuse_served(self._tasks)
        await preflight(self._tasks, self._options.cache, self._hooks.on_progress)
        try:
            return await self._with_engine(await asyncio.to_thread(self._open))
        finally:
            await self._engine.close()
            if not self.begun and not self._options.resume:
                await asyncio.to_thread(self._rundir.discard)
            await asyncio.to_thread(self._rundir.close)

    async def _with_engine(self, record: dict[str, Any]) -> dict[str, Any]:
        self._hooks.on_progress("starting the engine")
        info = await self._engine.start()
        if not info.trainable and not self._options.text_only:
            missing = "token ids" if not info.token_ids else "logprobs"
            raise EngineNotTrainable(
                f"engine: {info.model} ({info.kind}) gives no {missing}, so nothing could be trained on",
                fix="start vLLM or SGLang themselves (a router may strip the fields), or pass --text-only for evaluation",
            )
        record["engine"] = msgspec.to_builtins(info)
        label = "polynya-" + hashlib.sha256(str(self._rundir.path.absolute()).encode()).hexdigest()[:12]
        if swept := await sweep(label, self._rundir.work.absolute()):
            self._hooks.on_progress(f"removed {len(swept)} leftovers of an earlier, killed run")
        journal = Journal(self._rundir.capture, self._options.settings.journal)
        await asyncio.to_thread(journal.start)
        try:
            store = CaptureStore(journal, time.time)
            gateway = Gateway(self._engine, store, self._options.settings.gateway)
            await gateway.start()
            try:
                return await self._with_gateway(record, gateway, label)
            finally:
                await gateway.close()
        finally:
            await journal.close()

    async def _with_gateway(self, record: dict[str, Any], gateway: Gateway, label: str) -> dict[str, Any]:
        deps = NodeDeps(
            engine=self._engine,
            gateway=gateway,
            cache=self._options.cache,
            work=self._rundir.work.absolute(),
            logs=self._rundir.logs.absolute(),
            label=label,
            version=__version__,
            progress=self._hooks.on_progress,
        )
        self._node = Node(deps, self._options.settings.node, self._hooks.on_event)
        todo, earlier = await asyncio.to_thread(self._plan)
        await asyncio.to_thread(self._rundir.write_json, "run.json", record)
        self.begun = True
        self._hooks.on_start(todo, self._rundir.results)
        lag = LagMonitor()
        lag.start()
        begun = time.monotonic()
        await self._drive(todo, earlier)
        record["loop_lag"] = msgspec.to_builtins(lag.stop())
        record["seconds"] = round(time.monotonic() - begun, 3)
        await self._finish(record)
        if self._failure is not None:
            raise self._failure
        return record

    async def _drive(self, todo: Sequence[Session], earlier: dict[str, list[SessionCapture]]) -> None:
        """All sessions at once; the node's pools hold them back. Ends when all ended, or on ``stop``."""
        workers = [asyncio.create_task(self._session(session, earlier.get(session.session_id, []))) for session in todo]
        stopper = asyncio.create_task(self._stop_node_when_told())
        try:
            outcomes = await asyncio.gather(*workers, return_exceptions=True)
        finally:
            stopper.cancel()
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and self._failure is None:
                raise outcome

    async def _stop_node_when_told(self) -> None:
        await self._stopping.wait()
        if self._node is not None:
            await self._node.stop()

    async def _session(self, session: Session, earlier: list[SessionCapture]) -> None:
        if self._node is None:
            raise RuntimeError("no node")
        tries = 0
        while not self._stopping.is_set():
            handle = self._node.submit(session)
            output = await handle.output()
            tries += 1
            if output.result.status == Status.INFRA_ERROR and await self._storage_failed():
                return
            if tries > session.task.retries or not worth_a_retry(output.result) or self._stopping.is_set():
                await self._commit(output, earlier)
                return
            if handle.job is not None and handle.job.gateway_session is not None:
                earlier.append(handle.job.gateway_session.capture)
            session = msgspec.structs.replace(session, attempt=session.attempt + 1)

    async def _storage_failed(self) -> bool:
        """Whatever failed, on a full disk no other session can do better: the run ends, and goes on when there is space."""
        try:
            await asyncio.to_thread(self._rundir.check_space)
        except PolynyaError as exc:
            self._failure = self._failure or exc
            self.stop()
            return True
        return False

    async def _commit(self, output: SessionOutput, earlier: Sequence[SessionCapture]) -> None:
        result = output.result
        if earlier:
            ledgers = [lost(capture.sampled_tokens, len(capture.calls)) for capture in earlier]
            result = msgspec.structs.replace(result, ledger=total([*ledgers, result.ledger]))
        self._token_ids |= await asyncio.to_thread(_ids_in, output)
        async with self._commits:
            try:
                rows = await asyncio.to_thread(_lost_rows, earlier)
                await asyncio.to_thread(self._rundir.commit, result, output.trajectory, rows)
            except PolynyaError as exc:
                self._failure = self._failure or exc
                self.stop()

    async def _finish(self, record: dict[str, Any]) -> None:
        try:
            await asyncio.to_thread(self._rundir.merge)
            texts = await self._token_texts()
            if texts:
                await asyncio.to_thread(
                    self._rundir.write_json, "vocab.json", {str(key): text for key, text in texts.items()}
                )
            record["summary"] = summarise(self._tasks, self._rundir.results.values())
            record["finished_at"] = time.time()
            await asyncio.to_thread(self._rundir.write_json, "run.json", record)
            await asyncio.to_thread(self._rundir.remove_work)
        except PolynyaError as exc:
            self._failure = self._failure or exc

    async def _token_texts(self) -> dict[int, str]:
        """For the viewer only: an engine that cannot say is no failure of the run."""
        try:
            return await self._engine.token_texts(sorted(self._token_ids))
        except EngineError as exc:
            self._hooks.on_progress(f"token texts are not available for the viewer: {exc.message}")
            return {}

    def _open(self) -> dict[str, Any]:
        tasks = [_task_entry(task) for task in self._tasks]
        record: dict[str, Any] = {}
        if self._options.resume:
            record = self._rundir.resume(FINISHED)
            self._same_tasks(record)
        else:
            self._rundir.create()
        return {
            "run_id": record.get("run_id") or f"run-{os.urandom(6).hex()}",
            "started_at": record.get("started_at") or time.time(),
            "finished_at": None,
            "resumed": int(record.get("resumed") or 0) + int(self._options.resume),
            "command": self._options.command,
            "polynya": __version__,
            "settings": msgspec.to_builtins(self._options.settings),
            "tasks": tasks,
        }

    def _same_tasks(self, record: dict[str, Any]) -> None:
        """A finished session counts only for the very task that it was run for."""
        digests = {task.task_id: spec_digest(task) for task in self._tasks}
        before = {entry.get("task_id"): entry.get("digest") for entry in record.get("tasks") or []}
        for task_id in dict.fromkeys(result.task_id for result in self._rundir.results.values()):
            if digests.get(task_id) != before.get(task_id):
                changed = "is not among the given tasks" if task_id not in digests else "was changed since"
                raise RunDirError(
                    f"task {task_id} has finished sessions in {self._rundir.path} and {changed}",
                    fix="give the same task files, or choose another --out",
                )

    def _plan(self) -> tuple[list[Session], dict[str, list[SessionCapture]]]:
        """The sessions to run, finished ones left out, and what earlier attempts of them had captured."""
        ids = [(task, i, session_id_of(task.task_id, i)) for task in self._tasks for i in range(task.num_samples)]
        todo = {session_id for _, _, session_id in ids if session_id not in self._rundir.results}
        earlier: dict[str, list[SessionCapture]] = {}
        scan = JournalScan()
        for (session_id, _), capture in replay(
            r for r in read_journal(self._rundir.capture, scan) if r.session_id in todo
        ).items():
            earlier.setdefault(session_id, []).append(capture)
        for name, damage in scan.damages:
            kind = "a torn tail" if damage.torn_tail else "DAMAGE"
            self._hooks.on_progress(f"journal {name}: {kind} of {damage.size} bytes at {damage.offset} was passed over")
        sessions = [
            Session(
                session_id=session_id,
                group_id=task.task_id,
                task=task,
                sample_index=i,
                attempt=1 + max((capture.attempt for capture in earlier.get(session_id, [])), default=0),
            )
            for task, i, session_id in ids
            if session_id in todo
        ]
        return sessions, earlier


def _lost_rows(captures: Sequence[SessionCapture]) -> list[Call]:
    return [row for capture in captures for row in lost_calls(capture)]


def _ids_in(output: SessionOutput) -> set[int]:
    traces = output.trajectory.traces if output.trajectory else []
    return {int(token) for trace in traces for token in np.unique(trace.input_ids)}


def _task_entry(task: TaskSpec) -> dict[str, Any]:
    return {
        "task_id": task.task_id,
        "instruction": task.instruction,
        "num_samples": task.num_samples,
        "harness": task.harness.name,
        "digest": spec_digest(task),
    }

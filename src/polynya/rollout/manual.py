"""One session of an agent that somebody starts by hand: the gateway alone, and a run directory at the end.

Invariant: what the agent was answered before the end is in the run directory, also when its last call was cut off.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from polynya import __version__
from polynya.capture.journal import Journal
from polynya.capture.store import CaptureStore
from polynya.config import Settings
from polynya.engines.base import Engine
from polynya.errors import CaptureError, EngineError, EngineNotTrainable
from polynya.gateway.server import Gateway
from polynya.gateway.sessions import GatewaySession, SessionGrant
from polynya.node import builders
from polynya.node.job import error_info
from polynya.node.trajectory import trajectory_of
from polynya.rollout.rundir import RunDir
from polynya.rollout.summary import summarise
from polynya.schema import BuilderSpec, Provenance, SamplingSpec, SessionResult, Status

_SESSION = "manual.0"


class ManualOptions(msgspec.Struct, frozen=True, kw_only=True):
    out: Path
    settings: Settings = Settings()
    sampling: SamplingSpec = SamplingSpec()
    builder: str = "prefix_merging"
    text_only: bool = False


class ManualEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    base_url: str
    api_key: str
    model: str


class ManualSession:
    """``open`` → the agent works → ``finish`` → ``close``. ``close`` alone leaves what was captured in the journal."""

    def __init__(self, engine: Engine, options: ManualOptions) -> None:
        builders.builder(options.builder)
        self._engine = engine
        self._options = options
        self._rundir = RunDir(options.out)
        self._journal: Journal | None = None
        self._gateway: Gateway | None = None
        self._session: GatewaySession | None = None
        self._record: dict[str, Any] = {}
        self._started = time.time()

    @property
    def path(self) -> Path:
        return self._rundir.path

    async def open(self) -> ManualEndpoint:
        """Raises PolynyaError; then call ``close``."""
        await asyncio.to_thread(self._rundir.create)
        info = await self._engine.start()
        if not info.trainable and not self._options.text_only:
            raise EngineNotTrainable(
                f"engine: {info.model} ({info.kind}) gives no token ids or logprobs",
                fix="pass --text-only to go on without traces",
            )
        self._journal = Journal(self._rundir.capture, self._options.settings.journal)
        await asyncio.to_thread(self._journal.start)
        self._gateway = Gateway(self._engine, CaptureStore(self._journal, time.time), self._options.settings.gateway)
        await self._gateway.start()
        grant = SessionGrant(session_id=_SESSION, sampling=self._options.sampling)
        self._session, key = await self._gateway.open_session(grant)
        self._record = {
            "run_id": f"run-{os.urandom(6).hex()}",
            "started_at": self._started,
            "finished_at": None,
            "command": "gateway",
            "polynya": __version__,
            "engine": msgspec.to_builtins(info),
            "tasks": [
                {"task_id": "manual", "instruction": "an agent started by hand", "num_samples": 1, "harness": "by hand"}
            ],
        }
        await asyncio.to_thread(self._rundir.write_json, "run.json", self._record)
        return ManualEndpoint(base_url=self._gateway.base_url(key), api_key=key, model=info.model)

    async def finish(self) -> SessionResult:
        """End the session, build and write it."""
        if self._gateway is None or self._session is None:
            raise RuntimeError("open first")
        await self._gateway.close_session(self._session)
        info = self._engine.info
        trajectory = await asyncio.to_thread(
            trajectory_of,
            self._session.capture,
            builder=BuilderSpec(name=self._options.builder),
            vocab_size=info.vocab_size,
        )
        failed = self._session.capture_error
        result = SessionResult(
            session_id=_SESSION,
            task_id="manual",
            group_id="manual",
            sample_index=0,
            attempt=1,
            status=Status.INFRA_ERROR if failed else Status.COMPLETED,
            reward=None,
            ledger=trajectory.ledger,
            num_calls=len(trajectory.calls),
            num_traces=len(trajectory.traces),
            prompt_tokens=sum(call.prompt_len for call in trajectory.calls),
            sampled_tokens=sum(call.sampled_len for call in trajectory.calls),
            error=error_info(CaptureError(failed)) if failed else None,
            timings={"total": round(time.time() - self._started, 3)},
            started_at=self._started,
            flags=dict(self._session.flags),
            provenance=Provenance(
                polynya=__version__,
                engine=info.kind,
                engine_build=info.build,
                model=info.model,
                model_sha256=info.model_sha256,
                tokenizer_sha256=info.tokenizer_sha256,
                chat_template_sha256=info.chat_template_sha256,
                tool_parser=info.tool_parser,
                logprob_kind=info.logprob_kind,
                continuation=self._gateway.continuation,
            ),
        )
        await asyncio.to_thread(self._rundir.commit, result, trajectory)
        await asyncio.to_thread(self._rundir.merge)
        ids = sorted({int(i) for trace in trajectory.traces for i in np.unique(trace.input_ids)})
        try:
            texts = await self._engine.token_texts(ids)
            await asyncio.to_thread(
                self._rundir.write_json, "vocab.json", {str(key): text for key, text in texts.items()}
            )
        except EngineError:
            self._record["vocab"] = "not available"
        self._record["summary"] = summarise([], [result])
        self._record["finished_at"] = time.time()
        await asyncio.to_thread(self._rundir.write_json, "run.json", self._record)
        await asyncio.to_thread(self._rundir.remove_work)
        return result

    async def close(self) -> None:
        if self._gateway is not None:
            await self._gateway.close()
        if self._journal is not None:
            await self._journal.close()
        await self._engine.close()
        if not self._record:
            await asyncio.to_thread(self._rundir.discard)
        await asyncio.to_thread(self._rundir.close)

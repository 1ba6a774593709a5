"""The scripted engine in process: the ``Engine`` protocol over a ``Script``, for tests, demos and load without a model.

Invariant: every reply is what ``Script.expected`` says, unless the step names a fault. It refuses to look like a model:
its kind is ``scripted`` wherever it shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import NoReturn

from polynya.dialects.neutral import ChatRequest
from polynya.engines.base import EngineInfo, EngineReply, EngineRequest
from polynya.engines.bridging import Bridger
from polynya.engines.scripted import tokens
from polynya.engines.scripted.desk import Desk, Planned, spoiled
from polynya.engines.scripted.script import WHOLE_CALL_FAULTS, Script
from polynya.engines.scripted.template import ScriptedTemplate
from polynya.errors import ContextOverflow, EngineProtocolError, EngineRejected, EngineUnavailable
from polynya.schema import Int32Array


class ScriptedEngine:
    """``desk`` holds what tests read: calls, counters, ``release()`` and ``until()``."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self.desk = Desk(self.script)
        self._info: EngineInfo | None = None
        self._token_route = "scripted" if self.script.token_in else ""
        self._bridger = Bridger(ScriptedTemplate(drop_reasoning=self.script.drop_reasoning))

    async def start(self) -> EngineInfo:
        script = self.script
        self._info = EngineInfo(
            kind="scripted",
            model=script.model,
            build="scripted",
            window=script.window,
            vocab_size=tokens.VOCAB_SIZE,
            token_ids=True,
            logprobs=True,
            token_in=script.token_in,
            images=script.images,
            logprob_kind=script.logprob_kind,
            tool_parser="scripted",
            stop_ids=[tokens.END],
        )
        return self._info

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise RuntimeError("the scripted engine was not started: await start() first")
        return self._info

    async def generate(self, request: EngineRequest) -> EngineReply:
        given = request.prompt.ids if request.prompt is not None and self.script.token_in else None
        prompt = await self.render_ids(request.chat) if given is None else given
        planned = self.desk.plan(
            request.affinity, prompt, request.chat.tools, request.sampling, token_in=given is not None
        )
        await self.desk.count("started")
        try:
            await self.desk.work(planned)
            if planned.fault is not None and planned.fault.kind in WHOLE_CALL_FAULTS:
                await _fail(planned)
        except asyncio.CancelledError:
            await self.desk.count("aborted")
            raise
        except BaseException:
            await self.desk.count("finished")
            raise
        await self.desk.count("finished")
        return spoiled(planned, self.desk.policy_version)

    async def render_ids(self, chat: ChatRequest) -> Int32Array:
        return tokens.render_chat(chat, drop_reasoning=self.script.drop_reasoning)

    async def count_tokens(self, chat: ChatRequest) -> int:
        return int((await self.render_ids(chat)).size)

    async def token_texts(self, ids: Iterable[int]) -> dict[int, str]:
        return {int(token): tokens.decode([int(token)]) for token in ids}

    async def bridger(self) -> Bridger | None:
        return self._bridger if self.script.token_in else None

    @property
    def token_route(self) -> str:
        return self._token_route

    async def step_down(self, route: str) -> str:
        """There is one route only."""
        self._token_route = ""
        return ""

    async def health(self) -> None:
        return None

    async def close(self) -> None:
        return None

    @property
    def in_flight(self) -> int:
        return self.desk.in_flight

    async def until(self, condition: Callable[[], bool]) -> None:
        await self.desk.until(condition)


async def _fail(planned: Planned) -> NoReturn:
    fault = planned.fault
    assert fault is not None
    match fault.kind:
        case "hang":
            await asyncio.Event().wait()
        case "http_error" if fault.status < 500 and fault.status != 429:
            raise EngineRejected(f"scripted HTTP {fault.status}", status=fault.status)
        case "http_error":
            after = float(fault.retry_after) if fault.retry_after is not None else 1.0
            raise EngineUnavailable(f"scripted HTTP {fault.status}", status=fault.status, retry_after=after)
        case "overflow":
            raise ContextOverflow("scripted context overflow", prompt_tokens=int(planned.record.prompt_ids.size))
        case "bad_json":
            raise EngineProtocolError("scripted unreadable answer")
    raise EngineUnavailable("scripted connection reset")

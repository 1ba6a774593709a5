"""What nodes ask, with a node's token: join, claim, heartbeat, result, leave.

Invariant: a token that names a node opens the requests of that node only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse

from polynya.rollout.dispatch import BeatAnswer, ClaimAnswer, Dispatcher, Welcome
from polynya.rollout.registry.base import Completed, Held, NodeHello
from polynya.rollout.service.access import ANY_NODE, NODES
from polynya.rollout.service.control import claim_or_wait
from polynya.rollout.service.http import Asked, Endpoint, Handler, refuse
from polynya.schema import SessionResult

_LONGEST_WAIT = 30.0
_ATTENDED = 2.0


class ClaimAsk(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    epoch: int
    slots: int
    wait: float = 0.0


class BeatAsk(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    epoch: int
    number: int
    held: list[Held]


class CompleteAsk(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    result: SessionResult
    trajectory: str | None = None


class LeaveAsk(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    epoch: int


class NodeApi:
    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def endpoints(self) -> list[Endpoint]:
        table: list[tuple[str, Handler, Any, Any, str]] = [
            ("join", self._join, NodeHello, Welcome, "A node joins, or comes back"),
            ("claim", self._claim, ClaimAsk, ClaimAnswer, "Sessions to run"),
            ("beat", self._beat, BeatAsk, BeatAnswer, "A heartbeat"),
            ("complete", self._complete, CompleteAsk, Completed, "How an attempt ended"),
            ("leave", self._leave, LeaveAsk, None, "A node ends"),
            ("attend", self._attend, LeaveAsk, None, "A node is there while this answer goes on"),
        ]
        return [
            Endpoint(
                method="POST",
                path=f"/v1/node/{name}",
                handler=_of_its_own(handler),
                summary=summary,
                kinds=NODES,
                body=body,
                answer=answer,
            )
            for name, handler, body, answer, summary in table
        ]

    async def _join(self, asked: Asked) -> Welcome:
        return await self._dispatcher.join(asked.body)

    async def _claim(self, asked: Asked) -> ClaimAnswer:
        ask: ClaimAsk = asked.body
        return await claim_or_wait(self._dispatcher, ask.node, ask.epoch, ask.slots, min(ask.wait, _LONGEST_WAIT))

    async def _beat(self, asked: Asked) -> BeatAnswer:
        ask: BeatAsk = asked.body
        return await self._dispatcher.beat(ask.node, ask.epoch, ask.number, ask.held)

    async def _complete(self, asked: Asked) -> Completed:
        ask: CompleteAsk = asked.body
        return await self._dispatcher.complete(ask.node, ask.result, ask.trajectory)

    async def _leave(self, asked: Asked) -> dict[str, bool]:
        await self._dispatcher.leave(asked.body.node, asked.body.epoch)
        return {"left": True}

    async def _attend(self, asked: Asked) -> Response:
        return StreamingResponse(self._present(asked.body), media_type="text/plain")

    async def _present(self, ask: LeaveAsk) -> AsyncIterator[bytes]:
        """A process that dies closes its connections: its node is under suspicion then, and has to renew soon."""
        try:
            while True:
                yield b"\n"
                await asyncio.sleep(_ATTENDED)
        finally:
            await asyncio.shield(self._dispatcher.suspect(ask.node))


def _of_its_own(handler: Handler) -> Handler:
    async def checked(asked: Asked) -> Any:
        if asked.who is None or asked.who.subject not in (ANY_NODE, asked.body.node):
            return refuse(403, "Forbidden", "this token is of another node")
        return await handler(asked)

    return checked

"""What a node asks of its server: one protocol, in process or over HTTP."""

from __future__ import annotations

import asyncio
from typing import Protocol

from polynya.rollout.dispatch import BeatAnswer, ClaimAnswer, Dispatcher, Welcome
from polynya.rollout.registry.base import Completed, Held, NodeHello
from polynya.schema import SessionResult


class Control(Protocol):
    """Each method raises ServerUnreachable or RegistryUnavailable when there was no answer, and may then be called again."""

    async def join(self, hello: NodeHello) -> Welcome: ...

    async def claim(self, node: str, epoch: int, slots: int, wait: float) -> ClaimAnswer:
        """With no work at hand the answer is held back for up to ``wait`` seconds."""
        ...

    async def beat(self, node: str, epoch: int, number: int, held: list[Held]) -> BeatAnswer: ...

    async def complete(self, node: str, result: SessionResult, trajectory: str | None) -> Completed: ...

    async def leave(self, node: str, epoch: int) -> None: ...

    async def attend(self, node: str, epoch: int) -> None:
        """Be there, until cancelled. When this ends in any other way than by ``leave``, the server looks for the node at once,
        and does not wait for its lease to run out. Raises ServerUnreachable when the server is gone."""
        ...

    async def close(self) -> None: ...


class LocalControl:
    """A node in the server's own process."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def join(self, hello: NodeHello) -> Welcome:
        return await self._dispatcher.join(hello)

    async def claim(self, node: str, epoch: int, slots: int, wait: float) -> ClaimAnswer:
        return await claim_or_wait(self._dispatcher, node, epoch, slots, wait)

    async def beat(self, node: str, epoch: int, number: int, held: list[Held]) -> BeatAnswer:
        return await self._dispatcher.beat(node, epoch, number, held)

    async def complete(self, node: str, result: SessionResult, trajectory: str | None) -> Completed:
        return await self._dispatcher.complete(node, result, trajectory)

    async def leave(self, node: str, epoch: int) -> None:
        await self._dispatcher.leave(node, epoch)

    async def attend(self, node: str, epoch: int) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        return None


async def claim_or_wait(dispatcher: Dispatcher, node: str, epoch: int, slots: int, wait: float) -> ClaimAnswer:
    """A claim; one that gives nothing is made once more when there may be work, at the latest after ``wait`` seconds."""
    seen = dispatcher.work.count
    answer = await dispatcher.claim(node, epoch, slots)
    if answer.sessions or not answer.known or wait <= 0:
        return answer
    if await dispatcher.work.wait(seen, min(wait, answer.wait_seconds or wait)):
        return await dispatcher.claim(node, epoch, slots)
    return answer

"""The pools of a node. A stage's slots are its own, so a slow stage never holds another's workers.

There is a place for each session that runs and for each that waits prepared. A place is taken before INIT begins and given
back when RUNNING ends: so a prepared runtime never waits while holding an INIT slot, and while all RUNNING slots are taken no
more runtimes are prepared, or being prepared, than the READY buffer holds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

from polynya.config import NodeLimits
from polynya.schema import Stage


class Pools:
    def __init__(self, limits: NodeLimits) -> None:
        self._places = asyncio.Semaphore(limits.ready + limits.running)
        self._slots = {
            Stage.INIT: asyncio.Semaphore(limits.init),
            Stage.RUNNING: asyncio.Semaphore(limits.running),
            Stage.POSTRUN: asyncio.Semaphore(limits.postrun),
        }
        self.in_stage: Counter[Stage] = Counter()
        self.peak: Counter[Stage] = Counter()

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Held from before INIT until RUNNING has ended."""
        async with self._places:
            yield

    @contextlib.asynccontextmanager
    async def slot(self, stage: Stage) -> AsyncIterator[None]:
        async with self._slots[stage]:
            self.in_stage[stage] += 1
            self.peak[stage] = max(self.peak[stage], self.in_stage[stage])
            try:
                yield
            finally:
                self.in_stage[stage] -= 1

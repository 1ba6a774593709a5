"""Virtual time: things happen in the order of their time, and at one time in the order in which they were planned."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Events:
    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0

    def clock(self) -> float:
        return self.now

    def at(self, when: float, what: Callable[[], None]) -> None:
        self._planned += 1
        heapq.heappush(self._heap, (max(when, self.now), self._planned, what))

    def after(self, delay: float, what: Callable[[], None]) -> None:
        self.at(self.now + delay, what)

    def run(self, until: float, over: Callable[[], bool]) -> None:
        """Until ``over()``, the time ``until``, or nothing is planned."""
        while self._heap and not over():
            when, _, what = heapq.heappop(self._heap)
            if when > until:
                return
            self.now = when
            what()


def drive(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits: over a registry whose workers are inline, none does."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    work.close()
    raise RuntimeError("it waited for something; give the registry inline workers")

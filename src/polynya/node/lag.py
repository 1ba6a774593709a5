"""How long the event loop was held: the one number that shows work in the wrong place.

A timer is due every 10 ms. By how much it comes late is what a waiting agent feels (``wall``); how much CPU the loop's own
thread used meanwhile is what the loop itself did (``cpu``): on a machine with more work than cores the kernel makes the
first one large on its own.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

_PERIOD = 0.01


class LagReport(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds."""

    wall_max_ms: float
    wall_p99_ms: float
    cpu_max_ms: float
    """The most CPU time that the loop's thread used between two ticks that were late."""
    samples: int


class LagMonitor:
    """Measures from ``start`` to ``stop``, on the loop that it is started on."""

    def __init__(self) -> None:
        self._late: list[float] = []
        self._cpu_max = 0.0
        self._due = 0.0
        self._cpu = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._due = time.monotonic() + _PERIOD
        self._cpu = time.thread_time()
        self._timer = asyncio.get_running_loop().call_later(_PERIOD, self._tick)

    def stop(self) -> LagReport:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        late = sorted(self._late) or [0.0]
        return LagReport(
            wall_max_ms=round(late[-1] * 1000, 2),
            wall_p99_ms=round(late[min(len(late) - 1, int(len(late) * 0.99))] * 1000, 2),
            cpu_max_ms=round(self._cpu_max * 1000, 2),
            samples=len(self._late),
        )

    def _tick(self) -> None:
        late = max(0.0, time.monotonic() - self._due)
        self._late.append(late)
        if late > _PERIOD:
            self._cpu_max = max(self._cpu_max, time.thread_time() - self._cpu)
        self.start()

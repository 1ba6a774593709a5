"""How long the event loop was held: the one number that shows work in the wrong place."""

from __future__ import annotations

import asyncio
import time

import msgspec

_PERIOD = 0.01


class LagReport(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds by which a 10 ms timer came late."""

    max_ms: float
    p99_ms: float
    samples: int


class LagMonitor:
    """Measures from ``start`` to ``stop``."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._due = time.monotonic() + _PERIOD
        self._timer = asyncio.get_running_loop().call_later(_PERIOD, self._tick)

    def stop(self) -> LagReport:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lags = sorted(self._lags) or [0.0]
        p99 = lags[min(len(lags) - 1, int(len(lags) * 0.99))]
        return LagReport(max_ms=round(lags[-1] * 1000, 2), p99_ms=round(p99 * 1000, 2), samples=len(self._lags))

    def _tick(self) -> None:
        self._lags.append(max(0.0, time.monotonic() - self._due))
        self.start()

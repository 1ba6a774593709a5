"""How long the event loop was held, and by whom.

A timer is due every 2 ms. A gap is how much later it came. Of it ``busy`` is at most the CPU time that the whole process used
meanwhile (the loop itself, or a thread that held the interpreter), less the garbage collector's: what is left of the wall
gap is the kernel giving the core to somebody else.
"""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

_PERIOD = 0.002


class StallMonitor:
    """Measures from ``start`` to ``stop``, on the loop that it is started on."""

    def __init__(self) -> None:
        self._wall: list[float] = []
        self._busy: list[float] = []
        self._collected = 0.0
        """Seconds of garbage collection since the last tick."""
        self._collecting = 0.0
        """When the collection that is under way began; 0: none, or the tick has counted it."""
        self._collecting_cpu = 0.0
        self._longest_collection = 0.0
        self._all_collections = 0.0
        self._begun = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        gc.callbacks.append(self._collector)
        self._begun = time.process_time()
        self._arm()

    def stop(self) -> dict[str, Any]:
        """Milliseconds."""
        if self._timer is not None:
            self._timer.cancel()
        gc.callbacks.remove(self._collector)
        wall, busy = sorted(self._wall) or [0.0], sorted(self._busy) or [0.0]
        return {
            "wall_max_ms": _ms(wall[-1]),
            "wall_p99_ms": _ms(wall[int(len(wall) * 0.99)]),
            "busy_max_ms": _ms(busy[-1]),
            "busy_p99_ms": _ms(busy[int(len(busy) * 0.99)]),
            "gc_max_ms": _ms(self._longest_collection),
            "gc_share_of_cpu": round(self._all_collections / max(1e-9, time.process_time() - self._begun), 4),
            "ticks": len(wall),
        }

    def _arm(self) -> None:
        self._collected = 0.0
        self._cpu = time.process_time()
        self._due = time.perf_counter() + _PERIOD
        self._timer = asyncio.get_running_loop().call_later(_PERIOD, self._tick)

    def _tick(self) -> None:
        # a thread that collected loses the interpreter before it can say that it is done
        self._collection_over()
        gap = max(0.0, time.perf_counter() - self._due)
        used = time.process_time() - self._cpu
        self._wall.append(max(0.0, gap - self._collected))
        self._busy.append(max(0.0, min(gap, used) - self._collected))
        self._arm()

    def _collector(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting, self._collecting_cpu = time.perf_counter(), time.process_time()
        else:
            self._collection_over()

    def _collection_over(self) -> None:
        if self._collecting:
            took = time.perf_counter() - self._collecting
            self._collecting = 0.0
            self._collected += took
            self._all_collections += min(took, time.process_time() - self._collecting_cpu)
            self._longest_collection = max(self._longest_collection, took)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)

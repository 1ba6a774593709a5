"""A held loop is seen, a garbage collection is told apart from it. How long is nobody's promise here."""

import asyncio
import gc
import time

from polynya.bench.stalls import StallMonitor


def _spin(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


async def test_a_loop_that_is_held_is_seen() -> None:
    monitor = StallMonitor()
    monitor.start()
    await asyncio.sleep(0.01)
    _spin(0.05)
    await asyncio.sleep(0.01)
    found = monitor.stop()
    assert found["busy_max_ms"] >= 40 and found["wall_max_ms"] >= found["busy_max_ms"]
    assert found["ticks"] > 1 and not [one for one in gc.callbacks if getattr(one, "__self__", None) is monitor]


async def test_a_collection_is_told_apart_also_when_its_thread_lost_the_interpreter() -> None:
    monitor = StallMonitor()
    monitor.start()
    await asyncio.sleep(0.01)
    monitor._collector("start", {})
    _spin(0.05)
    await asyncio.sleep(0.01)
    monitor._collector("stop", {})
    found = monitor.stop()
    assert found["gc_max_ms"] >= 50 and found["busy_max_ms"] < found["gc_max_ms"] / 2

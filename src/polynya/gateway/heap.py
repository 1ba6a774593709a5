"""Garbage collection and the allocator in a process that serves.

Calls make few cycles, and what was imported stays: with CPython's own thresholds the collector walks over both thousands of
times a minute, 2 to 3 % of the gateway's CPU under load. Here it runs seldom and passes over what was there at the start.

Bodies of half a megabyte come and go with every call. As glibc comes, it gives such memory back to the kernel each time, and
takes it again page by page, each of them cleared first: 4 % of the CPU. Here it keeps some for the next call, in one heap
for all threads: that of the journal's thread would be cut down again after each write.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator

_THRESHOLDS = (10_000, 20, 20)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT_BYTES = 64 * 1024 * 1024
_OWN_PAGES_BYTES = 4 * 1024 * 1024
"""Blocks from this size on still come from the kernel, cleared, and go back to it at once."""


@contextlib.contextmanager
def serving_heap() -> Iterator[None]:
    """For the whole process, until the block ends; the allocator's part stays."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    _keep_freed_memory()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _keep_freed_memory() -> None:
    """Nothing where the C library has no ``mallopt``."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _OWN_PAGES_BYTES)
        mallopt(_M_ARENA_MAX, 1)

"""What a contender is, and what it is given to start with.

A contender that is not there is no error: ``Missing`` says why and how to get it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from polynya.bench.load import Endpoint
from polynya.bench.processes import BenchFailed, Program
from polynya.bench.workload import Spec


class Missing(Exception):
    """Not here; the text says why, and what to do."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where and for whom a contender is started."""

    spec: Spec
    upstream: int
    folder: Path
    core: set[int]
    sessions: int


class Running(msgspec.Struct, frozen=True, kw_only=True):
    program: Program
    endpoint: Endpoint


class Contender(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    does: str
    """In a few words, for the table."""
    start: Callable[[Place], Awaitable[Running]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def listening(program: Program, port: int, patience: float = 60.0) -> None:
    """Wait until it accepts connections; BenchFailed when it ends before or takes too long."""
    for _ in range(int(patience / 0.05)):
        if program.process.returncode is not None:
            break
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
            continue
        writer.close()
        return
    raise BenchFailed(f"{program.log.stem} does not listen on its port{program.last_words()}")

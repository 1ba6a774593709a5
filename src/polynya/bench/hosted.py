"""polynya's gateway in a process of its own: the real gateway, store, journal (fsync) and engine adapter, nothing left out.

Prints ``{"port", "paths"}``, then answers commands, one JSON line each: ``monitor``, ``stalls``, ``rest`` (memory and disk when
nothing is going on) and ``check`` (all that was captured, compared with what the mock said).
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop

from polynya.bench.processes import own_rss
from polynya.bench.stalls import StallMonitor
from polynya.bench.workload import Spec, Workload, call_number
from polynya.capture.journal import Journal
from polynya.capture.store import CaptureStore, SessionCapture
from polynya.config import GatewaySettings, JournalSettings
from polynya.engines.compatible import CompatibleEngine
from polynya.gateway.heap import serving_heap
from polynya.gateway.server import Gateway
from polynya.gateway.sessions import GatewaySession, SessionGrant


class Hosting(msgspec.Struct, frozen=True, kw_only=True):
    spec: Spec
    upstream: int
    """The mock's port."""
    folder: str
    """Where the journal goes."""
    sessions: int
    durability: str = "fsync"


class Hosted:
    def __init__(self, hosting: Hosting) -> None:
        self._hosting = hosting
        self._folder = Path(hosting.folder)
        self._engine = CompatibleEngine(f"http://127.0.0.1:{hosting.upstream}")
        settings = msgspec.convert({"durability": hosting.durability}, JournalSettings)
        self._journal = Journal(self._folder, settings)
        self._gateway = Gateway(self._engine, CaptureStore(self._journal, time.time), GatewaySettings())
        self._sessions: list[GatewaySession] = []
        self._monitor = StallMonitor()

    async def start(self) -> dict[str, Any]:
        info = await self._engine.start()
        self._journal.start()
        await self._gateway.start()
        paths = []
        for number in range(self._hosting.sessions):
            session, key = await self._gateway.open_session(SessionGrant(session_id=f"bench.{number}"))
            self._sessions.append(session)
            paths.append(f"/s/{key}/v1/messages")
        port = int(self._gateway.url.rpartition(":")[2])
        return {"port": port, "paths": paths, "trainable": info.trainable}

    def answer(self, command: str) -> dict[str, Any]:
        does: dict[str, Callable[[], dict[str, Any]]] = {
            "monitor": self._watch,
            "stalls": lambda: self._monitor.stop(),
            "rest": self._rest,
            "check": self._check,
        }
        return does[command]()

    async def close(self) -> None:
        await self._gateway.close()
        await self._journal.close()
        await self._engine.close()

    def _watch(self) -> dict[str, Any]:
        self._monitor = StallMonitor()
        self._monitor.start()
        return {}

    def _rest(self) -> dict[str, Any]:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        disk = sum(path.stat().st_size for path in self._folder.glob("*.journal"))
        return {"rss": own_rss(), "disk": disk, "calls": sum(len(s.capture.committed) for s in self._sessions)}

    def _check(self) -> dict[str, Any]:
        found: Counter[str] = Counter()
        workload = Workload(self._hosting.spec)
        calls = 0
        for number, session in enumerate(self._sessions):
            calls += len(session.capture.committed)
            found["sessions_with_capture_error"] += bool(session.capture_error)
            found.update(differences(workload, number, session.capture))
        return {"calls": calls, "differences": {name: count for name, count in found.items() if count}}


def differences(workload: Workload, session: int, capture: SessionCapture) -> Counter[str]:
    """What is captured of one session against what the mock answered, call by call: empty when it is exact."""
    found: Counter[str] = Counter()
    for number, call in enumerate(sorted(capture.calls, key=lambda call: call.index)):
        expected = workload.variant(session).expected(call_number(workload.spec, session, number))
        found["index"] += call.index != number
        found["unfinished"] += call.outcome != "ok"
        found["excluded"] += call.exclusion is not None
        found["not_delivered"] += not call.delivered
        found["prompt_ids"] += not np.array_equal(call.prompt_ids, expected.prompt)
        found["sampled_ids"] += not np.array_equal(call.sampled_ids, expected.sampled)
        found["logprobs"] += not np.array_equal(call.logprobs, expected.logprobs)
    return +found


async def _serve(hosting: Hosting) -> None:
    hosted = Hosted(hosting)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    _say(await hosted.start())
    while line := await reader.readline():
        _say(hosted.answer(msgspec.json.decode(line, type=str)))
    await hosted.close()


def _say(value: Any) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    with serving_heap():
        uvloop.run(_serve(msgspec.json.decode(sys.argv[1], type=Hosting)))

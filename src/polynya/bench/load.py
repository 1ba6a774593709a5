"""The load generator: agents that replay sessions, each one's requests in order.

Reads one JSON command a line on stdin and answers each with one line. Bodies are made once and kept; where a session
stands is kept for each contender, so that rounds may be interleaved.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec
import uvloop

from polynya.bench.transcript import Requests
from polynya.bench.wire import Peer, status_of
from polynya.bench.workload import Call, Spec, Workload, call_number

_ANSWER_SECONDS = 120.0


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a contender is asked."""

    name: str
    port: int
    dialect: str = "chat"
    """``anthropic`` or ``chat``."""
    paths: tuple[str, ...] = ("/v1/chat/completions",)
    """By session; the last one serves those beyond."""
    authorizations: tuple[str, ...] = ()
    """By session."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    do: str
    """``closed`` or ``latency``."""
    endpoint: Endpoint
    first: int = 0
    """Session numbers from here on."""
    sessions: int = 1
    seconds: float = 0.0
    each: int = 0
    """Requests of each session; 0: as many as the seconds hold."""
    think: float = 0.0
    """Mean seconds that an agent waits before each request (exponential)."""
    direct: Endpoint | None = None
    """``latency`` asks it in turn with the contender."""


class Result(msgspec.Struct, kw_only=True):
    requests: int = 0
    seconds: float = 0.0
    failures: dict[str, int] = {}
    failure_text: str = ""
    bytes_sent: int = 0
    bytes_received: int = 0
    latencies_ms: list[float] = []
    direct_ms: list[float] = []


class ClientPeer(Peer):
    def __init__(self) -> None:
        super().__init__()
        self._answered: asyncio.Future[tuple[int, int]] | None = None
        self.failure_text = ""

    def ask(self, parts: list[bytes | memoryview]) -> asyncio.Future[tuple[int, int]]:
        """Status and size of the answer."""
        assert self.transport is not None
        self._answered = asyncio.get_running_loop().create_future()
        self.transport.writelines(parts)
        return self._answered

    def message(self, head: bytes, body_at: int, end: int) -> None:
        status = status_of(head)
        if status != 200:
            self.failure_text = bytes(self.buffer[body_at:end])[:500].decode("utf-8", "replace")
        if self._answered is not None and not self._answered.done():
            self._answered.set_result((status, end))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(exc or ConnectionResetError("closed"))


class Agent:
    """One session at one contender, on one connection."""

    def __init__(self, load: Load, endpoint: Endpoint, session: int) -> None:
        self._load = load
        self.endpoint = endpoint
        self.session = session
        self._peer: ClientPeer | None = None
        path = endpoint.paths[min(session, len(endpoint.paths) - 1)]
        headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
        if endpoint.authorizations:
            headers["authorization"] = endpoint.authorizations[session]
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{endpoint.port}\r\n{lines}content-length: ".encode()

    async def connect(self) -> ClientPeer:
        if self._peer is None or self._peer.transport is None or self._peer.transport.is_closing():
            loop = asyncio.get_running_loop()
            _, self._peer = await loop.create_connection(ClientPeer, "127.0.0.1", self.endpoint.port)
        return self._peer

    def close(self) -> None:
        if self._peer is not None and self._peer.transport is not None:
            self._peer.transport.close()

    async def ask(self, result: Result) -> float | None:
        """The session's next request. Seconds that it took, or None when it failed."""
        call = self._load.next_call(self.endpoint.name, self.session)
        parts = self._load.parts(self.endpoint.dialect, call)
        size = sum(map(len, parts))
        begun = time.perf_counter()
        try:
            peer = await self.connect()
            async with asyncio.timeout(_ANSWER_SECONDS):
                status, received = await peer.ask([self._head + b"%d\r\n\r\n" % size, *parts])
        except (OSError, TimeoutError) as exc:
            self._count(result, f"{type(exc).__name__}", str(exc))
            self.close()
            return None
        took = time.perf_counter() - begun
        if status != 200:
            self._count(result, f"HTTP {status}", peer.failure_text)
            return None
        result.requests += 1
        result.bytes_sent += size
        result.bytes_received += received
        return took

    def _count(self, result: Result, kind: str, text: str) -> None:
        result.failures[kind] = result.failures.get(kind, 0) + 1
        result.failure_text = result.failure_text or text


class Load:
    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._requests = Requests(Workload(spec))
        self._numbers: Counter[tuple[str, int]] = Counter()

    def next_call(self, contender: str, session: int) -> Call:
        number = self._numbers[contender, session]
        self._numbers[contender, session] += 1
        return call_number(self._spec, session, number)

    def parts(self, dialect: str, call: Call) -> list[bytes | memoryview]:
        return self._requests.parts(dialect, call)

    def prepare(self, dialect: str, sessions: range) -> None:
        for session in sessions:
            self.parts(dialect, Call(session, 0, 0))

    async def run(self, command: Command) -> Result:
        does: dict[str, Callable[[Command], Awaitable[Result]]] = {"closed": self._closed, "latency": self._latency}
        return await does[command.do](command)

    async def _closed(self, command: Command) -> Result:
        """As many agents as sessions, each with one request in flight until the time or its requests are over."""
        sessions = range(command.first, command.first + command.sessions)
        self.prepare(command.endpoint.dialect, sessions)
        result = Result()
        agents = [Agent(self, command.endpoint, session) for session in sessions]
        begun = time.perf_counter()
        until = begun + command.seconds if command.seconds else float("inf")

        async def work(agent: Agent) -> None:
            done = 0
            while (not command.each or done < command.each) and time.perf_counter() < until:
                if command.think:
                    await asyncio.sleep(random.expovariate(1 / command.think))
                took = await agent.ask(result)
                done += 1
                if took is not None:
                    result.latencies_ms.append(round(took * 1000, 3))
                elif sum(result.failures.values()) > 100:
                    return

        await asyncio.gather(*(work(agent) for agent in agents))
        result.seconds = time.perf_counter() - begun
        for agent in agents:
            agent.close()
        return result

    async def _latency(self, command: Command) -> Result:
        """One request at a time, the contender and the mock itself in turn."""
        assert command.direct is not None
        self.prepare(command.endpoint.dialect, range(command.first, command.first + 1))
        self.prepare(command.direct.dialect, range(command.first, command.first + 1))
        result, unused = Result(), Result()
        through, direct = Agent(self, command.endpoint, command.first), Agent(self, command.direct, command.first)
        for agent in (through, direct):
            await agent.ask(unused)
        begun = time.perf_counter()
        while time.perf_counter() < begun + command.seconds and not result.failures:
            for agent, into, times in ((through, result, result.latencies_ms), (direct, unused, result.direct_ms)):
                took = await agent.ask(into)
                if took is not None:
                    times.append(round(took * 1000, 3))
        result.seconds = time.perf_counter() - begun
        through.close()
        direct.close()
        return result


async def _serve(spec: Spec) -> None:
    load = Load(spec)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=64 * 1024 * 1024)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    with contextlib.suppress(KeyboardInterrupt):
        while line := await reader.readline():
            result = await load.run(msgspec.json.decode(line, type=Command))
            sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    uvloop.run(_serve(msgspec.json.decode(sys.argv[1], type=Spec)))

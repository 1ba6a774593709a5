"""The least that a Python hop can do: the whole message in, the same message out, pooled connections, nothing looked at.

Prints one line, ``{"port": …}``.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

from polynya.bench.wire import Peer


class _Upstream(Peer):
    """A connection to the engine; it serves one client at a time."""

    def __init__(self, pool: list[_Upstream]) -> None:
        super().__init__()
        self._pool = pool
        self.client: asyncio.Transport | None = None

    def message(self, head: bytes, body_at: int, end: int) -> None:
        if self.client is not None:
            self.client.write(bytes(memoryview(self.buffer)[:end]))
            self.client = None
        self._pool.append(self)


class _Client(Peer):
    def __init__(self, pool: list[_Upstream], upstream: int) -> None:
        super().__init__()
        self._pool = pool
        self._upstream = upstream
        self._tasks: set[asyncio.Task[None]] = set()

    def message(self, head: bytes, body_at: int, end: int) -> None:
        data = bytes(memoryview(self.buffer)[:end])
        if self._pool:
            self._forward(self._pool.pop(), data)
        else:
            task = asyncio.get_running_loop().create_task(self._connect(data))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        _, peer = await loop.create_connection(lambda: _Upstream(self._pool), "127.0.0.1", self._upstream)
        self._forward(peer, data)

    def _forward(self, peer: _Upstream, data: bytes) -> None:
        peer.client = self.transport
        assert peer.transport is not None
        peer.transport.write(data)


async def _serve(upstream: int) -> None:
    pool: list[_Upstream] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Client(pool, upstream), "127.0.0.1", 0, backlog=2048)
    sys.stdout.write(f'{{"port":{server.sockets[0].getsockname()[1]}}}\n')
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))

"""Run an ASGI app on a free loopback port for as long as an ``async with`` block lasts.

Uses uvicorn's HTTP protocol without its server object, so that starting and stopping take a millisecond and no signal
handler is touched. The app may cut a connection through the ``polynya.transport`` extension: so the reset faults are made.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from polynya.engines.scripted.app import TRANSPORT


class _Protocol(HttpToolsProtocol):
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {TRANSPORT: {"transport": self.transport}}


@asynccontextmanager
async def serve(app: Any) -> AsyncIterator[str]:
    """Base URL of ``app``. On exit open connections are cut, whatever they wait for."""
    config = uvicorn.Config(app, http=_Protocol, ws="none", lifespan="off", log_config=None, access_log=False)
    config.timeout_keep_alive = 600
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    server = await loop.create_server(
        lambda: _Protocol(config=config, server_state=state, app_state={}), sock=listener, backlog=2048
    )
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.close()
        for connection in list(state.connections):
            if isinstance(connection, HttpToolsProtocol):
                connection.transport.abort()
        tasks = list(state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()

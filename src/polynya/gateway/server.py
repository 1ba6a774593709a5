"""The gateway of one node: uvicorn in this process's event loop, its sessions and the sockets that it serves.

Invariant: a session is open from ``open_session`` to ``close_session``; closing revokes its key, ends its calls in flight
and seals its capture, in this order. Refuses to bind beyond loopback: agents share the host's network.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import uvicorn

from polynya.capture.store import CaptureStore
from polynya.config import GatewaySettings
from polynya.engines.base import Engine
from polynya.errors import CaptureError, ConfigError, PortInUse
from polynya.gateway.app import GatewayApp
from polynya.gateway.calls import Calls
from polynya.gateway.protocol import GatewayProtocol
from polynya.gateway.sessions import GatewaySession, Keyring, SessionGrant
from polynya.schema import SamplingSpec

_LAST_REPLIES_SECONDS = 5.0
_CLOSING_STEPS = 4
"""Turns of the event loop until a connection that was told to close is closed."""
_IDLE_SECONDS = 600
"""How long an idle client connection is kept: agents think and run tools for minutes between calls."""


class _Server(uvicorn.Server):
    """uvicorn without signal handlers and without polling: it is ready, and it ends, when an event says so."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self.stopping = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def main_loop(self) -> None:
        await self.stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Replies under way are finished, within ``_LAST_REPLIES_SECONDS``."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=_LAST_REPLIES_SECONDS)
        late = list(self.server_state.tasks)
        for task in late:
            task.cancel("the gateway ends")
        if late:
            await asyncio.wait(late)
        for _ in range(_CLOSING_STEPS):
            await asyncio.sleep(0)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Gateway:
    def __init__(
        self,
        engine: Engine,
        store: CaptureStore,
        settings: GatewaySettings | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings or GatewaySettings()
        self._engine = engine
        self._store = store
        self._clock = clock
        self._keyring = Keyring()
        self._sessions: set[GatewaySession] = set()
        self._extra: dict[GatewaySession, list[asyncio.Server]] = {}
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._calls: Calls | None = None
        self.app: GatewayApp | None = None
        self.url = ""

    async def start(self) -> None:
        """Bind and serve. Raises PortInUse or ConfigError. The engine is started already."""
        self._calls = Calls(self._engine, self._store, self.settings, self._clock)
        self.app = GatewayApp(self._calls, self._keyring, self.settings, [self._engine.info.model], self._clock)
        listener = _bind(self.settings.host, self.settings.port)
        config = uvicorn.Config(
            self.app,
            http=cast("type[asyncio.Protocol]", GatewayProtocol),
            ws="websockets-sansio",
            ws_max_size=self.settings.max_body_bytes,
            # A busy agent may not answer a ping for minutes, and on a loopback the kernel says when it is gone.
            ws_ping_interval=None,
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=_IDLE_SECONDS,
            server_header=False,
            date_header=False,
            proxy_headers=False,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="gateway")
        await self._server.ready.wait()
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def continuation(self) -> str:
        """``retain``, ``template`` or ``off``, as ``Provenance`` has it."""
        on = self._calls is not None and self._calls.continues
        return self.settings.thinking if on else "off"

    def continuation_of(self, sampling: SamplingSpec) -> str:
        """The same for the sessions of a task, which may ask for its own."""
        return self.continuation if self.continuation == "off" else sampling.thinking or self.continuation

    async def open_session(self, grant: SessionGrant) -> tuple[GatewaySession, str]:
        """A live session and its key. Raises CaptureError."""
        capture = await self._store.open_session(grant.session_id, grant.attempt)
        session = GatewaySession(grant, capture, self.settings.calls_in_flight_per_session)
        self._sessions.add(session)
        return session, self._keyring.issue(session)

    def base_url(self, key: str, origin: str | None = None) -> str:
        return f"{origin or self.url}/s/{key}"

    async def serve_socket(self, session: GatewaySession, listener: socket.socket) -> str:
        """Serve a listening socket that lies in a sandbox's own network; ends with the session. Gives its origin."""
        server = self._server
        if server is None:
            raise RuntimeError("the gateway is not started")
        config = server.config
        make: Any = config.http_protocol_class
        protocol = functools.partial(make, config=config, server_state=server.server_state, app_state={})
        extra = await asyncio.get_running_loop().create_server(protocol, sock=listener)
        self._extra.setdefault(session, []).append(extra)
        host, port = listener.getsockname()[:2]
        return f"http://{host}:{port}"

    async def close_session(self, session: GatewaySession) -> None:
        """Idempotent. Returns when all that the session captured is durable; a disk that refuses is in ``capture_error``."""
        if session.closed:
            return
        session.closed = True
        self._keyring.revoke(session)
        for extra in self._extra.pop(session, []):
            extra.close()
        running = list(session.tasks)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        self._sessions.discard(session)
        try:
            await self._store.seal(session.capture)
        except CaptureError as exc:
            session.capture_error = str(exc)

    async def close(self) -> None:
        for session in list(self._sessions):
            await self.close_session(session)
        if self._server is not None and self._serving is not None:
            self._server.stopping.set()
            await self._serving
            self._server = None


def _bind(host: str, port: int) -> socket.socket:
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback:
        raise ConfigError(
            f"gateway.host: {host!r} is not a loopback address", fix="use 127.0.0.1: agents share the host's network"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as exc:
        listener.close()
        if exc.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"gateway.port: {port} on {host} is taken",
                fix="leave --port out for any free one, or stop what holds it",
            ) from exc
        if exc.errno in (errno.EACCES, errno.EPERM):
            raise ConfigError(
                f"gateway.port: {port} may not be bound: {exc.strerror}", fix="use a port above 1023"
            ) from exc
        raise
    listener.listen(2048)
    listener.setblocking(False)
    return listener

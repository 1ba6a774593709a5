"""The rollout server: registry, dispatcher, HTTP, and the clock that takes leases back.

Invariant: a state folder has one server at a time; its tokens are in files that only the owner reads. Refuses to listen beyond
loopback unless that was asked for by name, since whoever reaches the port may try tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import uvicorn

from polynya.config import DispatchSettings
from polynya.errors import ConfigError, PolynyaError, PortInUse
from polynya.rollout.dispatch import Dispatcher
from polynya.rollout.lease import LeaseTerms
from polynya.rollout.registry import open_registry
from polynya.rollout.registry.base import TokenKind
from polynya.rollout.service.access import keep_tokens
from polynya.rollout.service.api import UserApi
from polynya.rollout.service.archive import Archive
from polynya.rollout.service.callbacks import Callbacks, keep_secret
from polynya.rollout.service.control import LocalControl
from polynya.rollout.service.http import application
from polynya.rollout.service.node_api import NodeApi
from polynya.schema import TaskSpec

_TICK = 0.2
_log = logging.getLogger("polynya.server")


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    state: Path
    host: str = "127.0.0.1"
    port: int = 0
    registry: str = ""
    """A ``postgresql://`` URL; empty: a SQLite file in ``state``."""
    archive: Path | None = None
    """Shared with the nodes; None: a folder in ``state``."""
    dispatch: DispatchSettings = DispatchSettings()
    public: bool = False
    """Listening beyond loopback is meant."""
    callback_hosts: frozenset[str] = frozenset()
    """Where callbacks of tasks may go; empty: they are off."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """What ``server.json`` in the state folder says, for the command line to find the server."""

    url: str
    pid: int
    archive: str


class RolloutServer:
    """``async with serving(options, validate) as server``. It runs no sessions itself: nodes do."""

    def __init__(self, dispatcher: Dispatcher, archive: Archive, tokens: dict[TokenKind, str], url: str) -> None:
        self.dispatcher = dispatcher
        self.archive = archive
        self.tokens = tokens
        self.url = url

    @property
    def terms(self) -> LeaseTerms:
        return self.dispatcher.terms

    def control(self) -> LocalControl:
        """For a node in this process."""
        return LocalControl(self.dispatcher)


@contextlib.asynccontextmanager
async def serving(
    options: ServerOptions, validate: Callable[[TaskSpec], None], *, clock: Callable[[], float]
) -> AsyncIterator[RolloutServer]:
    """``validate`` raises PolynyaError for a task that no node could run. Raises ConfigError, RegistryError, PortInUse."""
    _reachable(options)
    state = options.state.absolute()
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    archive = Archive((options.archive or state / "archive").absolute())
    await asyncio.to_thread(archive.root.mkdir, parents=True, exist_ok=True)
    registry = open_registry(options.registry or state / "registry.sqlite", options.dispatch)
    dispatcher = Dispatcher(registry, options.dispatch, clock)
    recovery = await dispatcher.start()
    if recovery.counts.tasks:
        _log.info("goes on with %s", recovery.counts)
    try:
        tokens = await keep_tokens(registry, state)
        callbacks = Callbacks(dispatcher, options.callback_hosts, keep_secret(state / "callback.secret"))

        def check(task: TaskSpec) -> None:
            if task.callback is not None:
                callbacks.validate(task.callback)
            validate(msgspec.structs.replace(task, callback=None))

        api = UserApi(dispatcher, archive, check)
        app = application([*api.endpoints(), *NodeApi(dispatcher).endpoints()], registry)
        listener = _listen(options.host, options.port)
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", server_header=False, timeout_graceful_shutdown=3
        )
        web = _Web(config)
        served = asyncio.create_task(web.serve(sockets=[listener]), name="rollout server")
        ticking = asyncio.create_task(_tick(dispatcher), name="leases")
        calling = asyncio.create_task(callbacks.run(), name="callbacks")
        address = state / "server.json"
        try:
            await web.ready.wait()
            found = Address(url=url, pid=os.getpid(), archive=str(archive.root))
            address.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
            yield RolloutServer(dispatcher, archive, tokens, url)
        finally:
            address.unlink(missing_ok=True)
            api.close()
            ticking.cancel()
            calling.cancel()
            web.should_exit = True
            await asyncio.gather(ticking, calling, served, return_exceptions=True)
    finally:
        await registry.close()


async def _tick(dispatcher: Dispatcher) -> None:
    while True:
        await asyncio.sleep(_TICK)
        try:
            expiry = await dispatcher.tick()
        except PolynyaError as exc:
            _log.error("leases could not be looked at: %s", exc.message)
            continue
        for node in expiry.gone:
            _log.warning("node %s did not renew its lease: its sessions wait again", node)


class _Web(uvicorn.Server):
    """Leaves signals to whoever runs it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


def _reachable(options: ServerOptions) -> None:
    try:
        loopback = ipaddress.ip_address(options.host).is_loopback
    except ValueError:
        loopback = options.host == "localhost"
    if not loopback and not options.public:
        raise ConfigError(
            f"host: {options.host} is reachable from other machines",
            fix="pass --public to mean it: every request needs a token, and there is no TLS",
        )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as exc:
        raise PortInUse(f"port {port} on {host}: {exc.strerror}", fix="choose another --port, or 0 for any") from exc

"""``polynya serve`` and ``polynya node``: the rollout server with a node in it, and a node on another machine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from polynya.cli.console import err, errors_said, print_json
from polynya.cli.engines import (
    ContinuationOption,
    EngineOption,
    ModelOption,
    Thinking,
    ThinkingOption,
    TokenRouteOption,
    continued,
    make_engine,
)
from polynya.config import NodeLimits, Settings, cache_dir
from polynya.errors import ConfigError
from polynya.gateway.heap import serving_heap
from polynya.node.preflight import validate
from polynya.rollout.registry.base import TokenKind
from polynya.rollout.service.agent import NodeAgent
from polynya.rollout.service.control import Control
from polynya.rollout.service.host import HostOptions, boot_clock, hosted
from polynya.rollout.service.http_control import HttpControl
from polynya.rollout.service.server import ServerOptions, serving
from polynya.rollout.service.supervised import supervise

_DEFAULT_CONCURRENCY = 16


class Cluster(StrEnum):
    LOCAL = "local"
    RAY = "ray"


StateOption = Annotated[
    Path, typer.Option("--state", help="Folder of the server: registry, tokens, trajectories.", envvar="POLYNYA_STATE")
]
ConcurrencyOption = Annotated[
    int | None, typer.Option("--concurrency", "-c", min=1, help="Sessions that run at a time on this node.")
]
NameOption = Annotated[str | None, typer.Option(help="Of the node; default: the machine's.", show_default=False)]
TextOnlyOption = Annotated[
    bool, typer.Option(help="Accept an engine without token ids: for evaluation, nothing is trainable.")
]


def serve(
    engine: EngineOption = "embedded",
    model: ModelOption = None,
    state: StateOption = Path(".polynya"),
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 0,
    public: Annotated[bool, typer.Option(help="Mean it when --host is reachable from other machines.")] = False,
    registry: Annotated[
        str, typer.Option(help="postgresql://… in place of the SQLite file in --state.", envvar="POLYNYA_REGISTRY")
    ] = "",
    archive: Annotated[
        Path | None, typer.Option(help="Folder of trajectories, shared with the nodes.", show_default=False)
    ] = None,
    callback_host: Annotated[
        list[str] | None,
        typer.Option(help="A host that tasks may name for callbacks; may be given again.", show_default=False),
    ] = None,
    cluster: Annotated[
        Cluster,
        typer.Option(help="ray: one node on each machine of a Ray cluster, in place of one here (needs polynya[ray])."),
    ] = Cluster.LOCAL,
    ray_address: Annotated[str, typer.Option(help="Of the Ray cluster.", envvar="RAY_ADDRESS")] = "auto",
    no_node: Annotated[bool, typer.Option("--no-node", help="Server only; nodes join with `polynya node`.")] = False,
    name: NameOption = None,
    concurrency: ConcurrencyOption = None,
    continuation: ContinuationOption = True,
    thinking: ThinkingOption = Thinking.RETAIN,
    token_route: TokenRouteOption = None,
    text_only: TextOnlyOption = False,
) -> None:
    """Serve rollouts over HTTP until SIGINT or SIGTERM: tasks in, sessions on nodes, results out. Goes on where it ended.

    The first line on stdout is JSON with [bold]url[/bold]. Tokens lie in --state, readable by you only; the other verbs find them there.
    A first signal drains: what runs is ended and reported. A second one ends at once; the sessions run again at the next start.
    """
    with errors_said(True):
        options = ServerOptions(
            state=state,
            host=host,
            port=port,
            registry=registry,
            archive=archive,
            public=public,
            callback_hosts=frozenset(callback_host or []),
        )
        node = _node_options(
            name, state / "node", archive or state / "archive", engine, concurrency, continuation, thinking, text_only
        )
        with serving_heap():
            ray = None
            if cluster is Cluster.RAY:
                ray = _ray_argv(ray_address, node, engine, model, continuation, thinking, token_route, text_only)
            here = None if no_node or ray is not None else node
            uvloop.run(_serve(options, here, engine, model, token_route, ray))


def node(
    server: Annotated[str, typer.Argument(help="URL of the rollout server.", envvar="POLYNYA_URL")],
    archive: Annotated[Path, typer.Option(help="The server's folder of trajectories, as it is mounted here.")],
    engine: EngineOption = "embedded",
    model: ModelOption = None,
    state: Annotated[Path, typer.Option(help="Folder of this node: journal, logs.")] = Path(".polynya-node"),
    name: NameOption = None,
    concurrency: ConcurrencyOption = None,
    continuation: ContinuationOption = True,
    thinking: ThinkingOption = Thinking.RETAIN,
    token_route: TokenRouteOption = None,
    text_only: TextOnlyOption = False,
) -> None:
    """Join a rollout server and work for it until SIGINT or SIGTERM. $POLYNYA_NODE_TOKEN holds its join token.

    A first signal drains, a second one ends at once. Any launcher will do: srun, kubectl, ssh.
    """
    with errors_said(True):
        token = os.environ.get("POLYNYA_NODE_TOKEN", "")
        if not token:
            raise ConfigError(
                "POLYNYA_NODE_TOKEN is not set", fix="set it to the text of node.token in the server's state folder"
            )
        options = _node_options(name, state, archive, engine, concurrency, continuation, thinking, text_only)
        with serving_heap():
            uvloop.run(_join(server, token, options, engine, model, token_route))


def _node_options(
    name: str | None,
    state: Path,
    archive: Path,
    engine: str,
    concurrency: int | None,
    continuation: bool,
    thinking: Thinking,
    text_only: bool,
) -> HostOptions:
    running = concurrency or (2 if engine == "embedded" else _DEFAULT_CONCURRENCY)
    limits = NodeLimits(
        running=running, ready=max(2, running // 2), init=min(8, max(2, running)), postrun=min(8, max(2, running))
    )
    return HostOptions(
        name=name or socket.gethostname(),
        state=state,
        archive=archive,
        cache=cache_dir(),
        settings=Settings(gateway=continued(continuation, thinking), node=limits),
        text_only=text_only,
    )


def _ray_argv(
    address: str,
    options: HostOptions,
    engine: str,
    model: str | None,
    continuation: bool,
    thinking: Thinking,
    token_route: str | None,
    text_only: bool,
) -> list[str]:
    """The driver's command line, up to the server's URL, which is not known yet."""
    given = ["--engine", engine, "--archive", str(options.archive.absolute()), "--thinking", str(thinking)]
    given += ["--concurrency", str(options.settings.node.running)]
    given += ["--model", model] if model is not None else []
    given += ["--token-route", token_route] if token_route is not None else []
    given += [] if continuation else ["--no-continuation"]
    given += ["--text-only"] if text_only else []
    return [sys.executable, "-m", "polynya.cluster.ray", "--address", address, "--", "node", *given]


async def _serve(
    options: ServerOptions,
    node_options: HostOptions | None,
    engine: str,
    model: str | None,
    token_route: str | None,
    ray: list[str] | None,
) -> None:
    _logs()
    stopping = _signals()
    async with serving(options, validate, clock=boot_clock) as server, contextlib.AsyncExitStack() as stack:
        agent = None
        if node_options is not None:
            agent = await stack.enter_async_context(_agent(server.control(), node_options, engine, model, token_route))
        if ray is not None:
            env = {**os.environ, "POLYNYA_NODE_TOKEN": server.tokens[TokenKind.NODE]}
            driver = asyncio.create_task(supervise([*ray, server.url], env), name="ray")
            stack.push_async_callback(_ended, driver)
        print_json({"url": server.url, "state": str(options.state), "pid": os.getpid()})
        await _until(stopping, agent)


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


async def _join(
    url: str, token: str, options: HostOptions, engine: str, model: str | None, token_route: str | None
) -> None:
    _logs()
    stopping = _signals()
    control = HttpControl(url, token)
    try:
        async with _agent(control, options, engine, model, token_route) as agent:
            print_json({"node": options.name, "server": url, "pid": os.getpid()})
            await _until(stopping, agent)
    finally:
        await control.close()


@contextlib.asynccontextmanager
async def _agent(
    control: Control, options: HostOptions, engine: str, model: str | None, token_route: str | None
) -> AsyncIterator[NodeAgent]:
    def progress(line: str) -> None:
        err.print(line, style="dim")

    made = make_engine(engine, model, progress, log=options.state / "logs" / "engine.log", token_route=token_route)
    async with hosted(control, made.engine, options, progress=progress) as agent:
        yield agent


async def _until(stopping: asyncio.Queue[None], agent: NodeAgent | None) -> None:
    """Until a signal; then until the node is empty, or a second one."""
    if agent is None:
        await stopping.get()
        return
    running = asyncio.create_task(agent.run(), name="node")
    try:
        for _ in range(2):
            signalled = asyncio.ensure_future(stopping.get())
            await asyncio.wait({running, signalled}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                signalled.cancel()
                await running
                return
            err.print(f"draining: {len(agent.running)} sessions are ended first; once more to end at once", style="dim")
            agent.drain()
    finally:
        running.cancel()
        await asyncio.wait({running})


def _signals() -> asyncio.Queue[None]:
    found: asyncio.Queue[None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, found.put_nowait, None)
    return found


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        import msgspec

        line: dict[str, Any] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def _logs() -> None:
    """One JSON object a line on stderr; ids of sessions and calls stand in the messages."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    logger = logging.getLogger("polynya")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)

"""``polynya gateway``: the proxy alone, for an agent that somebody starts by hand."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

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
from polynya.config import Settings
from polynya.gateway.heap import serving_heap
from polynya.rollout.manual import ManualOptions, ManualSession
from polynya.schema import SamplingSpec


def gateway(
    engine: EngineOption = "embedded",
    model: ModelOption = None,
    run: Annotated[Path, typer.Option("--run", "-o", help="Run directory to write.")] = Path("runs/gateway"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: any free one.")] = 0,
    temperature: Annotated[float | None, typer.Option(min=0, max=5, help="Where the agent names none.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="A cap on each reply.")] = None,
    builder: Annotated[str, typer.Option(help="per_request or prefix_merging.")] = "prefix_merging",
    continuation: ContinuationOption = True,
    thinking: ThinkingOption = Thinking.RETAIN,
    token_route: TokenRouteOption = None,
    text_only: Annotated[bool, typer.Option(help="Accept an engine without token ids; nothing is trainable.")] = False,
) -> None:
    """Serve one session's model endpoint until SIGINT or SIGTERM, then build its traces into the run directory.

    The first line on stdout is JSON with [bold]base_url[/bold] (session prefix included) and [bold]session_key[/bold]. Point any agent
    at it, e.g. OPENAI_BASE_URL=<base_url>/v1 OPENAI_API_KEY=<session_key>.
    """
    with errors_said(True):
        made = make_engine(
            engine,
            model,
            lambda line: err.print(line, style="dim"),
            log=run / "logs" / "engine.log",
            token_route=token_route,
        )
        options = ManualOptions(
            out=run,
            settings=Settings(gateway=continued(continuation, thinking, port=port)),
            sampling=SamplingSpec(temperature=temperature, max_tokens=max_tokens),
            builder=builder,
            text_only=text_only,
        )
        session = ManualSession(made.engine, options)
        with serving_heap():
            uvloop.run(_serve(session))


async def _serve(session: ManualSession) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        endpoint = await session.open()
        print_json({"base_url": endpoint.base_url, "session_key": endpoint.api_key, "model": endpoint.model})
        await stop.wait()
        result = await session.finish()
        ledger = result.ledger
        err.print(
            f"{result.num_calls} calls, {ledger.captured} tokens captured, {ledger.trained} trained, in {session.path}"
        )
    finally:
        await session.close()

"""``polynya run``: tasks in, a run directory out."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import uvloop

from polynya.cli.console import EXIT_INFRA, EXIT_INTERRUPTED, err, errors_said, out, print_json
from polynya.cli.display import Display, final_lines, final_table
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
from polynya.config import GatewaySettings, NodeLimits, Settings, cache_dir
from polynya.errors import SessionCancelled, TaskFileError
from polynya.gateway.heap import serving_heap
from polynya.rollout.rundir import read_results
from polynya.rollout.runner import RunHooks, Runner, RunOptions
from polynya.rollout.tasks import load_tasks
from polynya.schema import TaskSpec

_DEFAULT_CONCURRENCY = 16


def run(
    tasks: Annotated[list[Path], typer.Argument(help="Task files: YAML or JSONL (docs/tasks.md).", show_default=False)],
    engine: EngineOption = "embedded",
    model: ModelOption = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", "-o", help="Run directory; default runs/<date-time>.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on with --out: finished sessions are kept, the rest runs.")] = False,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "-c", min=1, help="Sessions that run at a time.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", "-n", min=1, help="Instead of each task's num_samples.")
    ] = None,
    continuation: ContinuationOption = True,
    thinking: ThinkingOption = Thinking.RETAIN,
    token_route: TokenRouteOption = None,
    text_only: Annotated[bool, typer.Option(help="Accept an engine without token ids; nothing is trainable.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print run.json as one object; progress goes to stderr.")
    ] = False,
) -> None:
    """Run every sample of every task once, and write trajectories, rewards and the ledger.

    [bold]Example[/bold]  polynya run examples/tasks.yaml --engine http://127.0.0.1:8000 -c 32 -o runs/first

    The run directory can be read while the run goes on. Ctrl-C ends it early and keeps what is done; --resume goes on.
    """
    with errors_said(as_json):
        specs = load_tasks(tasks)
        if samples is not None:
            specs = [msgspec.structs.replace(spec, num_samples=samples) for spec in specs]
        if resume and out_dir is None:
            raise TaskFileError("--resume: --out is missing", fix="name the run directory to go on with")
        path = out_dir or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
        code = execute(
            specs,
            engine,
            model,
            path,
            gateway=continued(continuation, thinking),
            token_route=token_route,
            resume=resume,
            concurrency=concurrency,
            text_only=text_only,
            as_json=as_json,
        )
    raise typer.Exit(code)


def execute(
    specs: list[TaskSpec],
    engine: str,
    model: str | None,
    path: Path,
    *,
    gateway: GatewaySettings | None = None,
    token_route: str | None = None,
    resume: bool = False,
    concurrency: int | None = None,
    text_only: bool = False,
    as_json: bool = False,
) -> int:
    """Run, show, and give the exit code. Raises PolynyaError."""
    live = err.is_terminal and not as_json
    with Display(err, live=live) as display:
        made = make_engine(
            engine, model, display.on_progress, log=path / "logs" / "engine.log", token_route=token_route
        )
        running = concurrency or made.concurrency or _DEFAULT_CONCURRENCY
        limits = NodeLimits(
            running=running, ready=max(2, running // 2), init=min(8, max(2, running)), postrun=min(8, max(2, running))
        )
        options = RunOptions(
            out=path,
            cache=cache_dir(),
            settings=Settings(gateway=gateway or GatewaySettings(), node=limits),
            resume=resume,
            text_only=text_only,
            command=" ".join(sys.argv[1:]),
        )
        hooks = RunHooks(on_event=display.on_event, on_progress=display.on_progress, on_start=display.on_start)
        runner = Runner(specs, made.engine, options, hooks)
        with serving_heap():
            record = uvloop.run(_with_signals(runner))
    if record is None:
        raise SessionCancelled("interrupted before any session began", fix="run it again")
    _show(record, path, as_json)
    if runner.stopped:
        err.print(f"interrupted; go on with --resume --out {path}")
        return EXIT_INTERRUPTED
    return EXIT_INFRA if record["summary"]["by_status"].get("infra_error") else 0


async def _with_signals(runner: Runner) -> dict[str, Any] | None:
    """None: a signal came while the parts were still being made ready, so there is nothing to keep."""
    loop = asyncio.get_running_loop()
    running = asyncio.ensure_future(runner.run())

    def stop() -> None:
        runner.stop()
        if not runner.begun:
            running.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        return await running
    except asyncio.CancelledError:
        return None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _show(record: dict[str, Any], path: Path, as_json: bool) -> None:
    if as_json:
        print_json(record)
        return
    out.print(final_table(list(read_results(path))))
    for line in final_lines(record["summary"], str(path)):
        out.print(line, highlight=False)

"""``polynya bench``: figures of this machine, as a table and as one object. Speed is measured here, never asserted in tests."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from rich.table import Table

from polynya.bench.contenders import CONTENDERS
from polynya.bench.gateway import EXTRAS, gateway_report
from polynya.bench.measure import Options
from polynya.bench.peers import ENVIRONMENTS
from polynya.bench.report import Grid, grids, markdown
from polynya.bench.tokens import tokens_report
from polynya.bench.workload import SIZES
from polynya.cli.console import EXIT_INFRA, err, errors_said, out, print_json
from polynya.config import cache_dir
from polynya.errors import UsageError
from polynya.rollout.ready import ready_report
from polynya.rollout.stress import stages_report

app = typer.Typer(
    help="Figures of this machine: [bold]stages[/bold] (whole sessions), [bold]gateway[/bold] (the proxy, beside others).",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
_JSON = typer.Option("--json", help="Print one object.")


@app.command()
def stages(
    sessions: Annotated[int, typer.Option(min=1, max=4096, help="Sessions, all at once.")] = 64,
    calls: Annotated[int, typer.Option(min=1, max=1000, help="Model calls of each.")] = 6,
    runtime: Annotated[str, typer.Option(help="bubblewrap or local.")] = "bubblewrap",
    ready: Annotated[
        bool, typer.Option("--ready", help="Instead: the RUNNING pool's utilisation with the READY buffer and without.")
    ] = False,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Run sessions of the `shell` harness on the scripted engine, compare every captured id with the script, and time it.

    The last lines say how long the event loop was held: by wall clock, and by the CPU time that the loop's own thread used.
    Exit code 1 when a captured id differs from the script.
    """
    folder = Path(tempfile.mkdtemp(prefix="polynya-bench-"))
    if ready:
        _ready(folder, as_json=as_json)
        return
    try:
        with errors_said(as_json):
            report = uvloop.run(
                stages_report(folder / "run", cache_dir(), sessions=sessions, calls=calls, runtime=runtime)
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        print_json(report)
    else:
        out.print(_stages_table(report))
    raise typer.Exit(0 if report["exact"] else EXIT_INFRA)


@app.command()
def gateway(
    sizes: Annotated[str, typer.Option(help=f"Some of {','.join(SIZES)}; '' for none.")] = ",".join(SIZES),
    beside: Annotated[
        str, typer.Option("--with", help=f"Beside polynya: some of {','.join(list(CONTENDERS)[1:])}, or all.")
    ] = "nginx,pass",
    extras: Annotated[str, typer.Option(help=f"Some of {','.join(EXTRAS)}; '' for none.")] = ",".join(EXTRAS),
    sampled: Annotated[int, typer.Option(min=16, max=32_000, help="Sampled tokens of each reply.")] = 1000,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="Of each round.")] = 3.0,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Over all contenders; medians are shown.")] = 3,
    connections: Annotated[int, typer.Option(min=1, max=1024, help="Agents in the closed loop.")] = 16,
    agents: Annotated[int, typer.Option(min=1, max=4096, help="Agents at once on a slow engine.")] = 512,
    upstream_seconds: Annotated[float, typer.Option(min=0.1, max=60, help="What the slow engine takes.")] = 2.0,
    held: Annotated[int, typer.Option(min=1, max=512, help="Long sessions held for memory and disk.")] = 32,
    install: Annotated[
        bool, typer.Option("--install", help="First make the environments of those that lack one.")
    ] = False,
    as_json: Annotated[bool, _JSON] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    keep: Annotated[Path | None, typer.Option(help="Also write the JSON object into this file.")] = None,
) -> None:
    """Replay coding agents' sessions against a mock of vLLM, through polynya's gateway and through others, on one core.

    polynya and fastapi-hop are asked for streamed Anthropic Messages, the others for OpenAI chat. CPU is that of the contender's whole
    process tree, latencies are over the mock asked directly. Exit code 1 when what was captured differs from what the mock said.
    """
    folder = Path(tempfile.mkdtemp(prefix="polynya-bench-"))
    try:
        with errors_said(as_json):
            others = list(CONTENDERS)[1:] if beside == "all" else _listed("--with", beside, CONTENDERS)
            options = Options(
                seconds=seconds,
                rounds=rounds,
                connections=connections,
                sampled=sampled,
                contenders=tuple(dict.fromkeys(("polynya", *others))),
                agents=agents,
                upstream_seconds=upstream_seconds,
                held=held,
            )
            work = _gateway(
                _listed("--sizes", sizes, SIZES), _listed("--extras", extras, EXTRAS), options, folder, install
            )
            report = uvloop.run(work)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if keep is not None:
        keep.write_text(json.dumps(report))
    if as_json:
        print_json(report)
    elif as_markdown:
        typer.echo(markdown(report), nl=False)
    else:
        for grid in grids(report):
            out.print(_table(grid))
    raise typer.Exit(0 if report["exact"] else EXIT_INFRA)


@app.command()
def tokens(as_json: Annotated[bool, _JSON] = False) -> None:
    """What matching, bridging, capturing and merging cost at 130k tokens, in CPU time of this process."""
    report = tokens_report()
    if as_json:
        print_json(report)
        return
    table = Table(title="bench tokens", header_style="bold")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in ({**report, **report["merge"]}).items():
        if not isinstance(value, dict):
            table.add_row(name, f"{value:,}")
    out.print(table)


async def _gateway(
    sizes: list[str], extras: list[str], options: Options, folder: Path, install: bool
) -> dict[str, Any]:
    def say(line: str) -> None:
        err.print(line, style="dim", markup=False)

    if install:
        for name in options.contenders:
            if name in ENVIRONMENTS:
                await ENVIRONMENTS[name].install(say)
    return await gateway_report(sizes, extras, options, folder, say)


def _listed(option: str, text: str, known: Iterable[str]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UsageError(f"{option}: {name!r} is unknown", fix=f"use some of {', '.join(known)}")
    return names


def _table(grid: Grid) -> Table:
    table = Table(title=grid.title, header_style="bold", caption="\n".join(grid.notes), caption_justify="left")
    for index, column in enumerate(grid.columns):
        table.add_column(column, justify="left" if index == 0 or column == "does" else "right")
    for row in grid.rows:
        table.add_row(*row)
    return table


_READY: dict[str, Any] = {"sessions": 24, "running": 4, "init_seconds": 2.0, "run_seconds": 5.0}


def _ready(folder: Path, *, as_json: bool) -> None:
    try:
        with errors_said(as_json):
            report = uvloop.run(ready_report(folder, cache_dir(), **_READY))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        print_json({**_READY, **report})
        return
    table = Table(title="24 sessions, 4 at a time, INIT 2 s, run 5 s", header_style="bold")
    for column in ("READY buffer", "utilisation of RUNNING", "seconds"):
        table.add_column(column, justify="right")
    for name in ("on", "off"):
        found = report[name]
        table.add_row(name, f"{found['utilisation']:.1%}", f"{found['seconds']:.1f}")
    out.print(table)


def _stages_table(report: dict[str, Any]) -> Table:
    table = Table(title="bench stages", header_style="bold")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in report.items():
        table.add_row(name, str(value))
    return table

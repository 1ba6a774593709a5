"""``polynya bench``: figures of this machine, as a table and as one object. Speed is measured here, never asserted in tests."""

from __future__ import annotations

import shutil
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from rich.table import Table

from polynya.cli.console import EXIT_INFRA, errors_said, out, print_json
from polynya.config import cache_dir
from polynya.rollout.stress import stages_report


class What(StrEnum):
    STAGES = "stages"


def bench(
    what: Annotated[
        What, typer.Argument(help="stages: many sessions at once through INIT, RUNNING, POSTRUN.")
    ] = What.STAGES,
    sessions: Annotated[int, typer.Option(min=1, max=4096, help="Sessions, all at once.")] = 64,
    calls: Annotated[int, typer.Option(min=1, max=1000, help="Model calls of each.")] = 6,
    runtime: Annotated[str, typer.Option(help="bubblewrap or local.")] = "bubblewrap",
    as_json: Annotated[bool, typer.Option("--json", help="Print one object.")] = False,
) -> None:
    """Run sessions of the `shell` harness on the scripted engine, compare every captured id with the script, and time it.

    The last lines say how long the event loop was held: by wall clock, and by the CPU time that the loop's own thread used.
    Exit code 1 when a captured id differs from the script.
    """
    folder = Path(tempfile.mkdtemp(prefix="polynya-bench-"))
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
        out.print(_table(what, report))
    raise typer.Exit(0 if report["exact"] else EXIT_INFRA)


def _table(what: str, report: dict[str, Any]) -> Table:
    table = Table(title=f"bench {what}", header_style="bold")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in report.items():
        table.add_row(name, str(value))
    return table

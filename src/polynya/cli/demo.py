"""``polynya demo``: the main job on real input, in one command."""

from __future__ import annotations

import shutil
import sys
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer

from polynya.cli.console import EXIT_STORAGE, errors_said, out
from polynya.cli.engines import EngineOption, ModelOption
from polynya.cli.run import execute
from polynya.errors import RunDirError
from polynya.rollout.check import check_run
from polynya.rollout.tasks import load_tasks
from polynya.viewer import render


def demo(
    engine: EngineOption = "embedded",
    model: ModelOption = None,
    out_dir: Annotated[
        Path, typer.Option("--out", "-o", help="Run directory; an earlier demo in it is replaced.")
    ] = Path("runs/demo"),
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "-c", min=1, help="Sessions that run at a time.")
    ] = None,
) -> None:
    """Let a real agent CLI (pi) work on small coding tasks with a real model on this CPU, and show what came of it.

    Takes care of everything: fetches the model (1.0 GB) and the CLI once into the cache, runs each task twice in a
    sandbox, captures every token, scores the work, writes the run directory, checks it, and writes a page to look at.
    """
    with errors_said(False):
        _replace_earlier(out_dir)
        with as_file(files("polynya.cli") / "tasks" / "demo.yaml") as path:
            tasks = load_tasks([path])
        code = execute(tasks, engine, model, out_dir, concurrency=concurrency)
        problems = check_run(out_dir)
        page = render(out_dir)
    for problem in problems:
        out.print(f"[red]check failed[/red]  {problem}")
    if not problems:
        out.print("checked  every row valid, every sampled token trained once or excluded for a reason")
    polynya = "polynya" if shutil.which("polynya") else sys.argv[0]
    out.print(
        f"\n[bold]Next[/bold]\n"
        f"  look at it      {polynya} view {out_dir}    (or open {page})\n"
        f"  load the rows   {sys.executable} -c \"import pyarrow.parquet as p; print(p.read_table('{out_dir}/traces.parquet'))\"\n"
        f"  your own tasks  {polynya} run TASKS.yaml --engine embedded|URL    (docs/tasks.md)\n"
        f"  your own agent  {polynya} gateway --engine embedded|URL",
        highlight=False,
    )
    raise typer.Exit(EXIT_STORAGE if problems else code)


def _replace_earlier(path: Path) -> None:
    """Only what a demo wrote is removed."""
    if not path.exists():
        return
    if not (path / "run.json").exists() and any(path.iterdir()):
        raise RunDirError(f"{path} exists and holds no run", fix="choose another --out")
    shutil.rmtree(path)

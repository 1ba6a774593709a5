"""``polynya doctor``: what works here, and why not."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from typing import Annotated

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from polynya.cli.console import EXIT_PART, errors_said, out, print_json
from polynya.cli.engines import ModelOption, make_engine
from polynya.config import cache_dir
from polynya.errors import PolynyaError
from polynya.node.preflight import Check, checks

_NEEDED_BYTES = 3 * 1024**3


def doctor(
    engine: Annotated[
        str | None, typer.Option(help="Also start or probe this engine: embedded, scripted or a base URL.")
    ] = None,
    model: ModelOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object.")] = False,
) -> None:
    """Say which runtimes, harnesses and engines work on this machine, and what to do about the others.

    Exit code 0 when a run can work (a runtime, a harness, and the engine if one is named), else 3.
    """
    with errors_said(as_json):
        found = asyncio.run(_all(engine, model))
    usable = all(any(check.ok for check in group) for group in found.values())
    if as_json:
        print_json({"usable": usable, "checks": msgspec.to_builtins(found)})
    else:
        out.print(_table(found))
    raise typer.Exit(0 if usable else EXIT_PART)


async def _all(engine: str | None, model: str | None) -> dict[str, list[Check]]:
    parts = await checks(cache_dir())
    groups = {"machine": [_python(), _disk()], **parts}
    if engine is not None:
        groups["engine"] = [await _engine(engine, model)]
    return groups


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check(name="python", ok=sys.version_info >= (3, 11), detail=f"{version}, {os.cpu_count()} cores")


def _disk() -> Check:
    cache = cache_dir()
    parent = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(parent).free
    fix = "set POLYNYA_CACHE to a folder with more room" if free < _NEEDED_BYTES else ""
    return Check(name="cache", ok=free >= _NEEDED_BYTES, detail=f"{cache}, {free / 1024**3:.1f} GiB free", fix=fix)


async def _engine(name: str, model: str | None) -> Check:
    made = make_engine(name, model, lambda line: None, log=None)
    try:
        info = await made.engine.start()
    except PolynyaError as exc:
        return Check(name=name, ok=False, detail=exc.message, fix=exc.fix)
    finally:
        await made.engine.close()
    ids = "token ids" if info.token_ids else "NO token ids"
    logprobs = f"{info.logprob_kind} logprobs" if info.logprobs else "NO logprobs"
    detail = f"{info.kind} {info.model}, build {info.build or 'unknown'}, window {info.window or 'unknown'}, {ids}, {logprobs}"
    return Check(name=name, ok=info.trainable, detail=detail, fix="" if info.trainable else "usable with --text-only")


def _table(found: dict[str, list[Check]]) -> Table:
    table = Table(header_style="bold")
    for name in ("part", "", "", "detail"):
        table.add_column(name)
    for group, parts in found.items():
        for check in parts:
            mark = Text("works", style="green") if check.ok else Text("no", style="red")
            detail = Text(check.detail)
            if check.fix:
                detail.append(f"\nfix: {check.fix}", style="bold")
            table.add_row(group, check.name, mark, detail)
    return table

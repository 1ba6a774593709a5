"""``polynya view``: one self-contained page for a run."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from polynya.cli.console import errors_said, out, print_json
from polynya.viewer import render


def view(
    run: Annotated[Path, typer.Argument(help="A run directory.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write the page; default RUN/view.html.")
    ] = None,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open it in the browser.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help='Print {"page": PATH}.')] = False,
) -> None:
    """Write a page with the run's sessions, calls, tokens and ledger, and open it. Works while the run goes on."""
    with errors_said(as_json):
        page = render(run, output).absolute()
    if as_json:
        print_json({"page": str(page)})
    else:
        out.print(str(page), highlight=False)
    if open_browser:
        webbrowser.open(page.as_uri())

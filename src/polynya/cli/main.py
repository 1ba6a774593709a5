"""The ``polynya`` command."""

from __future__ import annotations

from typing import Annotated

import typer

from polynya import __version__
from polynya.cli import bench, demo, doctor, gateway, run, serve, tasks_verbs, view

app = typer.Typer(
    name="polynya",
    help="Run reinforcement-learning rollouts over any unmodified agent harness, and get token-exact trajectories.\n\n"
    "Begin with [bold]polynya demo[/bold] (a real agent, a real model, on CPU), then [bold]polynya run TASKS[/bold].\n\n"
    "Exit codes: 0 all sessions finished, 1 some ended as infra_error, 2 bad input, 3 a part is missing or does not work, "
    "4 the engine gives no token ids or logprobs, 5 storage failed, 130 interrupted.",
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _version(show: bool) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of every verb."""


app.command("run")(run.run)
app.command("gateway")(gateway.gateway)
app.command("serve")(serve.serve)
app.command("node")(serve.node)
app.command("submit")(tasks_verbs.submit)
app.command("status")(tasks_verbs.status)
app.command("results")(tasks_verbs.results)
app.command("cancel")(tasks_verbs.cancel)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("view")(view.view)
app.add_typer(bench.app, name="bench")


def main() -> None:
    app()


if __name__ == "__main__":
    main()

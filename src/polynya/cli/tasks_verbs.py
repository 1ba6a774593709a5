"""``polynya submit``, ``status``, ``results`` and ``cancel``: what is asked of a rollout server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.live import Live
from rich.table import Table

from polynya.cli.console import EXIT_INFRA, err, errors_said, out, print_json
from polynya.cli.display import session_line
from polynya.client import Client, Delivery
from polynya.rollout.tasks import load_tasks
from polynya.schema import Status

StateOption = Annotated[
    Path | None,
    typer.Option("--state", help="Folder of the server on this machine; else $POLYNYA_URL and $POLYNYA_TOKEN."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]


def submit(
    tasks: Annotated[list[Path], typer.Argument(help="Task files: YAML or JSONL (docs/tasks.md).", show_default=False)],
    state: StateOption = None,
    samples: Annotated[
        int | None, typer.Option("--samples", "-n", min=1, help="Instead of each task's num_samples.")
    ] = None,
    priority: Annotated[int | None, typer.Option(help="Instead of each task's; higher goes first.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay, and say how each session ends.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Give tasks to the rollout server. The same task again is a no-op."""
    with errors_said(as_json):
        specs = load_tasks(tasks)
        changes = {"num_samples": samples, "priority": priority}
        given = {name: value for name, value in changes.items() if value is not None}
        with Client(state=state) as client:
            for spec in specs:
                found = client.submit(msgspec.structs.replace(spec, **given))
                if as_json:
                    print_json(msgspec.to_builtins(found))
                else:
                    out.print(f"{found.task_id}  {found.state}  {found.num_samples} sessions, {found.done} done")
            if follow:
                for spec in specs:
                    _follow(client, spec.task_id, as_json=as_json)


def results(
    task_id: Annotated[str | None, typer.Argument(help="Of this task; else of all.", show_default=False)] = None,
    state: StateOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay, and show what comes.")] = False,
    ack: Annotated[bool, typer.Option(help="Acknowledge what is shown: it is not given again.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Those that were acknowledged, too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show results in the order in which sessions ended."""
    with errors_said(as_json), Client(state=state) as client:
        for delivery in client.deliveries(task_id, follow=follow, acked=every):
            _show(delivery, as_json=as_json)
            if ack:
                client.ack(delivery.delivery_id)


def cancel(
    task_ids: Annotated[list[str], typer.Argument(help="Tasks to end.", show_default=False)],
    state: StateOption = None,
) -> None:
    """End tasks: what waits never starts, what runs is stopped and built."""
    with errors_said(False), Client(state=state) as client:
        for task_id in task_ids:
            client.cancel(task_id)
            out.print(f"{task_id}  cancelled")


def status(
    state: StateOption = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Redraw every second until Ctrl-C.")] = False,
    as_json: JsonOption = False,
) -> None:
    """What the rollout server is doing: queues, nodes, policy."""
    with errors_said(as_json), Client(state=state) as client:
        if as_json:
            print_json(client.status())
        elif not watch:
            out.print(_overview(client.status()))
        else:
            with Live(_overview(client.status()), console=err, refresh_per_second=2) as live:
                while True:
                    time.sleep(1.0)
                    live.update(_overview(client.status()))


def _follow(client: Client, task_id: str, *, as_json: bool) -> None:
    failed = False
    for delivery in client.deliveries(task_id, acked=True):
        _show(delivery, as_json=as_json)
        failed |= delivery.result is not None and delivery.result.status == Status.INFRA_ERROR
    if failed:
        raise typer.Exit(EXIT_INFRA)


def _show(delivery: Delivery, *, as_json: bool) -> None:
    if as_json:
        print_json(msgspec.to_builtins(delivery))
    elif delivery.result is not None:
        out.print(session_line(delivery.result))
    elif delivery.group is not None:
        ends = ", ".join(f"{count} {status}" for status, count in sorted(delivery.group.statuses.items()))
        out.print(f"[bold]{delivery.task_id}[/bold]  {delivery.group.state}: {ends}")


def _overview(found: dict[str, Any]) -> Table:
    counts, metrics = found["counts"], found["metrics"]
    table = Table(
        title=f"{counts['queued']} queued   {counts['leased']} with nodes   {counts['done']} done   "
        f"{metrics['requeued']} requeued   {metrics['fenced']} fenced",
        title_justify="left",
        box=SIMPLE_HEAD,
        header_style="bold",
    )
    for column in ("node", "state", "sessions", "of", "model"):
        table.add_column(column)
    for node in found["nodes"]:
        table.add_row(node["node"], node["state"], str(node["leased"]), str(node["capacity"]), node["model"])
    for policy in found["policies"]:
        paused = "paused" if policy["paused"] else "serving"
        table.add_row(f"policy {policy['model'] or '(the only one)'}", paused, "", "", policy["version"] or "–")
    return table

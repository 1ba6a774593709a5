"""The progress of a run: a live table on a terminal, plain lines elsewhere, and the table at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from polynya.node import SessionEvent
from polynya.schema import Session, SessionResult, Stage, Status

_ROWS = 12
_STAGE_STYLE = {Stage.INIT: "cyan", Stage.READY: "blue", Stage.RUNNING: "yellow", Stage.POSTRUN: "magenta"}
_STATUS_STYLE = {Status.COMPLETED: "green", Status.INFRA_ERROR: "red", Status.CANCELLED: "dim"}


class Display:
    """Follows a run through its hooks. ``live``: redraw in place; else one line an event."""

    def __init__(self, console: Console, *, live: bool) -> None:
        self._console = console
        self._live = (
            Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=True) if live else None
        )
        self._stages: dict[str, Stage] = {}
        self._since: dict[str, float] = {}
        self._done: list[SessionResult] = []
        self._planned = 0
        self._note = ""

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def on_progress(self, line: str) -> None:
        self._note = line
        if self._live is None:
            self._console.print(Text(line, style="dim"))

    def on_start(self, todo: Sequence[Session], done: dict[str, SessionResult]) -> None:
        self._planned = len(todo)
        self.on_progress(f"{len(todo)} sessions to run" + (f", {len(done)} finished before" if done else ""))

    def on_event(self, event: SessionEvent) -> None:
        self._stages[event.session_id] = event.stage
        self._since[event.session_id] = time.monotonic()
        if event.result is not None:
            self._stages.pop(event.session_id, None)
            self._done.append(event.result)
            if self._live is None:
                self._console.print(session_line(event.result))
        elif self._live is None and event.stage == Stage.RUNNING:
            self._console.print(Text(f"  running  {event.session_id}", style="dim"))

    def _render(self) -> RenderableType:
        counts = Counter(self._stages.values())
        stages = "  ".join(f"[{_STAGE_STYLE[stage]}]{stage} {counts[stage]}[/]" for stage in _STAGE_STYLE)
        tokens = sum(result.sampled_tokens for result in self._done)
        head = Text.from_markup(f"[bold]{len(self._done)}/{self._planned}[/bold] done   {stages}   sampled {tokens:,}")
        table = Table.grid(padding=(0, 2))
        now = time.monotonic()
        for session_id, stage in list(self._stages.items())[:_ROWS]:
            elapsed = f"{now - self._since[session_id]:5.0f} s"
            table.add_row(Text(session_id), Text(stage, style=_STAGE_STYLE.get(stage, "")), elapsed)
        recent = [session_line(result) for result in self._done[-_ROWS:]]
        return Group(head, table, *recent, Text(self._note, style="dim"))


def _reward(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def session_line(result: SessionResult) -> Text:
    """What is said when a session ends."""
    mark = Text("✓ " if result.reward else "· ", style="green" if result.reward else "dim")
    status = Text(f"{result.status:<10}", style=_STATUS_STYLE.get(result.status, "yellow"))
    tail = f" reward {_reward(result.reward):>4}  calls {result.num_calls:>2}  sampled {result.sampled_tokens:>5}"
    tail += f"  {result.timings.get('total', 0):6.1f} s"
    line = Text.assemble(mark, f"{result.session_id:<28} ", status, tail)
    if result.error is not None:
        line.append(f"  {result.error.kind}: {result.error.message}", style="dim")
    return line


def final_table(results: Sequence[SessionResult]) -> Table:
    """One row a session, and a last one with the sums."""
    total = {
        "calls": sum(result.ledger.calls for result in results),
        "captured": sum(result.ledger.captured for result in results),
        "trained": sum(result.ledger.trained for result in results),
        "rows": sum(result.num_traces for result in results),
    }
    rewards = [result.reward for result in results if result.reward is not None]
    mean = f"{sum(rewards) / len(rewards):.2f}" if rewards else "–"
    table = Table(
        header_style="bold",
        footer_style="bold",
        box=SIMPLE_HEAD,
        show_footer=True,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("session", footer=f"{len(results)} sessions", no_wrap=True, min_width=17)
    table.add_column("status", footer="mean", no_wrap=True, min_width=9)
    table.add_column("reward", footer=mean, justify="right", no_wrap=True)
    for name, footer in total.items():
        table.add_column(name, footer=f"{footer:,}", justify="right", no_wrap=True)
    table.add_column("s", justify="right", no_wrap=True)
    for result in sorted(results, key=lambda item: (item.task_id, item.sample_index)):
        seconds = sum(result.timings.get(stage, 0.0) for stage in ("init", "running", "postrun"))
        table.add_row(
            result.session_id,
            Text(str(result.status), style=_STATUS_STYLE.get(result.status, "yellow")),
            Text(_reward(result.reward), style="green" if result.reward else ""),
            str(result.ledger.calls),
            f"{result.ledger.captured:,}",
            f"{result.ledger.trained:,}",
            str(result.num_traces),
            f"{seconds:.1f}",
        )
    return table


def final_lines(summary: dict[str, Any], path: str) -> list[str]:
    ledger = summary["ledger"]
    excluded = ", ".join(f"{count} {reason}" for reason, count in ledger["excluded"].items()) or "nothing excluded"
    balance = "balanced" if summary["ledger_balanced"] else "NOT BALANCED"
    lines = [f"ledger   {ledger['captured']:,} captured = {ledger['trained']:,} trained + {excluded} ({balance})"]
    if summary["unscored"]:
        lines.append(
            f"reward   {summary['unscored']} sessions have none (infrastructure, cancelled, or no verdict): not counted"
        )
    lines.append(f"written  {path}/traces.parquet, calls.parquet, sessions.jsonl, ledger.json")
    return lines

"""The figures as tables: on a terminal, and as Markdown. What is not measured is a dash, never a zero."""

from __future__ import annotations

from typing import Any

import msgspec

from polynya.bench.contenders import CONTENDERS

_MIB = 1024 * 1024


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = []


def grids(report: dict[str, Any]) -> list[Grid]:
    return [_size_grid(size) for size in report["sizes"]]


def _size_grid(size: dict[str, Any]) -> Grid:
    contenders: dict[str, dict[str, Any]] = size["contenders"]
    rows, notes = [], []
    for name, row in contenders.items():
        does = CONTENDERS[name].does
        if "missing" in row:
            rows.append([name, does, *["–"] * 7])
            notes.append(f"{name}: {row['missing']}")
            continue
        rows.append(
            [
                name,
                does,
                f"{row['cpu_us']:,.0f}",
                _ratio(row, contenders.get("nginx")),
                _ratio(row, contenders.get("polynya")),
                f"{row['requests_per_core_second']:,}",
                f"{row['added_p50_ms']:+.2f}",
                f"{row['added_p99_ms']:+.1f}",
                f"{row['peak_rss'] / _MIB:,.0f}",
            ]
        )
        if row["failures"]:
            text = next(one["failure_text"] for one in row["rounds"] if one["failures"])
            notes.append(f"{name}: {row['failures']} requests failed: {text[:200]}")
    spec = size["spec"]
    title = f"{size['size']}: bodies of {spec['body_bytes'] // 1000} KB, {spec['prompt_ids']:,} prompt ids, {spec['sampled']:,} sampled"
    columns = ["", "does", "CPU µs/request", "× nginx", "× polynya", "req/s/core", "+p50 ms", "+p99 ms", "RSS MB"]
    return Grid(title=title, columns=columns, rows=rows, notes=notes)


def _ratio(row: dict[str, Any], base: dict[str, Any] | None) -> str:
    if base is None or not base.get("cpu_us"):
        return "–"
    return f"{row['cpu_us'] / base['cpu_us']:.2f}"


def markdown(report: dict[str, Any]) -> str:
    parts = []
    for grid in grids(report):
        lines = [f"**{grid.title}**", "", "| " + " | ".join(grid.columns) + " |"]
        lines.append("|" + "|".join("---" if index < 2 else "--:" for index in range(len(grid.columns))) + "|")
        lines += ["| " + " | ".join(row) + " |" for row in grid.rows]
        lines += ["", *grid.notes]
        parts.append("\n".join(lines).rstrip())
    return "\n\n".join(parts) + "\n"

"""The figures as tables: on a terminal, and as Markdown. What was not measured is a dash, never a zero."""

from __future__ import annotations

from typing import Any

import msgspec

from polynya.bench.contenders import CONTENDERS
from polynya.bench.peers import ROUTERS

_MB = 1e6
_NONE = "–"


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = []


def grids(report: dict[str, Any]) -> list[Grid]:
    extras = report["extras"]
    found = [_size_grid(size) for size in report["sizes"]]
    if "agents" in extras:
        found.append(_agents_grid(extras["agents"]))
    return [*found, _targets_grid(report)]


def _size_grid(size: dict[str, Any]) -> Grid:
    contenders: dict[str, dict[str, Any]] = size["contenders"]
    rows, notes = [], []
    for name, row in contenders.items():
        does = CONTENDERS[name].does
        if "missing" in row:
            rows.append([name, does, *[_NONE] * 7])
            notes.append(f"{name}: {row['missing']}")
            continue
        rows.append(
            [
                name,
                does,
                f"{row['cpu_us']:,.0f}",
                _ratio(row, contenders.get("nginx")),
                _ratio(row, contenders.get("polynya")),
                f"{row['requests_per_core_second'] or 0:,}",
                f"{row['added_p50_ms']:+.2f}",
                f"{row['added_p99_ms']:+.1f}",
                f"{row['peak_rss'] / _MB:,.0f}",
            ]
        )
        if row["failures"]:
            text = next(one["failure_text"] for one in row["rounds"] if one["failures"])
            notes.append(f"{name}: {row['failures']} requests failed: {text[:200]}")
    spec = size["spec"]
    title = f"{spec['body_bytes'] // 1000} KB bodies, {spec['prompt_ids']:,} prompt ids, {spec['sampled']:,} sampled"
    columns = ["", "does", "CPU µs/request", "× nginx", "× polynya", "req/s/core", "+p50 ms", "+p99 ms", "RSS MB"]
    return Grid(title=title, columns=columns, rows=rows, notes=notes)


def _agents_grid(extra: dict[str, Any]) -> Grid:
    rows, notes = [], []
    for name, row in extra["contenders"].items():
        if "missing" in row:
            rows.append([name, *[_NONE] * 5])
            continue
        numbers = [f"{row['makespan']:.2f}", f"{row['ratio']:.2f}", f"{row['most_in_flight']}"]
        numbers += [f"{row['upstream_calls_per_request']:.2f}", f"{row['cpu_seconds']:.2f}"]
        rows.append([name, *numbers])
        if row["failures"]:
            notes.append(f"{name}: {row['failures']} {row['failure_text'][:200]}")
    title = f"{extra['agents']} agents at once, an engine that takes {extra['upstream_seconds']:g} s"
    columns = ["", "makespan s", "× ideal", "most in flight", "upstream calls/request", "CPU s"]
    return Grid(title=title, columns=columns, rows=rows, notes=notes)


def _targets_grid(report: dict[str, Any]) -> Grid:
    rows = [[what, _said(value, unit), said, _met(value, limit)] for what, value, unit, limit, said in _targets(report)]
    notes = []
    for where, wrong in report["differences"].items():
        notes.append(f"NOT EXACT: {where}: {wrong}")
    at = report["machine"]
    said = f"{at['cpu']}, {at['cores']} cores, Python {at['python']}, {at['date']}, load {at['load'][0]} at the start"
    notes.append(f"{said}, fdatasync of 20 KB {at['fdatasync_ms']} ms")
    return Grid(
        title="polynya and its targets", columns=["figure", "measured", "target", "met"], rows=rows, notes=notes
    )


def _targets(report: dict[str, Any]) -> list[tuple[str, float | None, str, float | None, str]]:
    """What, how much, its unit, the most that it may be (negative: the least; None: no target), and the target in words."""
    by_size = {size["size"]: size["contenders"] for size in report["sizes"]}
    large, extras = by_size.get("577k", {}), report["extras"]
    ours = large.get("polynya", {})
    routers = [large[name]["cpu_us"] for name in ROUTERS if "cpu_us" in large.get(name, {})]
    router = {"cpu_us": min(routers)} if routers else None
    agents = extras.get("agents", {}).get("contenders", {}).get("polynya", {})
    held, exact, window = extras.get("held", {}), extras.get("exact", {}), extras.get("window", {})
    paced, saturated = ours.get("stalls_paced", {}), ours.get("stalls_saturated", {})
    found: list[tuple[str, float | None, str, float | None, str]] = [
        ("CPU at 577 KB, × nginx", _over(ours, large.get("nginx")), "", 3.0, "≤ 3"),
        ("CPU at 577 KB, × nginx with its own buffer sizes", _over(ours, large.get("nginx-disk")), "", 3.0, "≤ 3"),
        ("CPU at 577 KB, × the cheaper Rust router", _over(ours, router), "", 1.0, "≤ 1.0"),
        (
            "CPU of FastAPI + httpx + json at 577 KB, × polynya",
            _over(large.get("fastapi-hop"), ours),
            "",
            -10.0,
            "≥ 10",
        ),
        ("added p50 at 577 KB, one connection", ours.get("added_p50_ms"), " ms", 1.5, "≤ 1.5 ms"),
        ("  the same without fsync", large.get("polynya-write", {}).get("added_p50_ms"), " ms", 1.5, "≤ 1.5 ms"),
        (
            "longest stall of the loop at 577 KB, 20 requests/s, without GC",
            paced.get("busy_max_ms"),
            " ms",
            10.0,
            "≤ 10 ms",
        ),
        ("  the same by wall clock", paced.get("wall_max_ms"), " ms", None, ""),
        ("  the same, saturated", saturated.get("busy_max_ms"), " ms", None, ""),
        ("longest garbage collection, saturated", saturated.get("gc_max_ms"), " ms", None, ""),
        ("garbage collection, share of CPU, saturated", saturated.get("gc_share_of_cpu"), "", None, ""),
        ("agents at once: makespan, × ideal", agents.get("ratio"), "", 1.3, "≤ 1.3"),
        ("agents at once: upstream calls per request", agents.get("upstream_calls_per_request"), "", 1.0, "1"),
        (
            "577 KB and a window of 262,144: upstream calls per request",
            window.get("upstream_calls_per_request"),
            "",
            1.0,
            "1",
        ),
        (
            "memory of a live 60-turn session of 130k ids",
            _mb(held.get("memory_bytes_per_session")),
            " MB",
            1.5,
            "≤ 1.5 MB",
        ),
        ("journal of the same", _mb(held.get("disk_bytes_per_session")), " MB", 2.2, "≤ 2.2 MB"),
    ]
    if exact:
        wrong = sum(exact["check"]["differences"].values())
        label = f"calls captured otherwise than said, of {exact['check']['calls']:,}, {exact['agents']} at once"
        found.append((label, wrong, "", 0, "0"))
    return found


def _over(row: dict[str, Any] | None, base: dict[str, Any] | None) -> float | None:
    if not row or not base or not row.get("cpu_us") or not base.get("cpu_us"):
        return None
    return float(row["cpu_us"]) / float(base["cpu_us"])


def _ratio(row: dict[str, Any], base: dict[str, Any] | None) -> str:
    value = _over(row, base)
    return _NONE if value is None else f"{value:.2f}"


def _mb(value: int | None) -> float | None:
    return None if value is None else value / _MB


def _said(value: float | None, unit: str) -> str:
    return _NONE if value is None else f"{value:.2f}".removesuffix(".00") + unit


def _met(value: float | None, limit: float | None) -> str:
    if value is None or limit is None:
        return _NONE
    return "yes" if (value <= limit if limit >= 0 else value >= -limit) else "NO"


def markdown(report: dict[str, Any]) -> str:
    parts = []
    for grid in grids(report):
        lines = [f"**{grid.title}**", "", "| " + " | ".join(grid.columns) + " |"]
        lines.append("|" + "|".join("---" if _is_text(column) else "--:" for column in grid.columns) + "|")
        lines += ["| " + " | ".join(row) + " |" for row in grid.rows]
        lines += [line for note in grid.notes for line in ("", note)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _is_text(column: str) -> bool:
    return column in ("", "does", "figure")

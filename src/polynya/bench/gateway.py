"""``polynya bench gateway``: everything, in one report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from polynya.bench.extras import agents_at_once, exact_at_once, held_sessions, with_a_window
from polynya.bench.measure import Options, machine, measure_size
from polynya.bench.workload import spec_of

_EXTRAS = {
    "agents": agents_at_once,
    "exact": exact_at_once,
    "held": held_sessions,
    "window": with_a_window,
}
EXTRAS = tuple(_EXTRAS)


async def gateway_report(
    sizes: list[str], extras: list[str], options: Options, folder: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """``exact`` is False when a captured id or logprob is not what the mock said, or polynya failed a request.

    Raises BenchFailed when polynya itself does not start.
    """
    report: dict[str, Any] = {"machine": machine(), "options": msgspec.to_builtins(options), "sizes": [], "extras": {}}
    for name in sizes:
        say(f"{name}: {', '.join(options.contenders)}; {options.rounds} rounds of {options.seconds:g} s each")
        report["sizes"].append(await measure_size(spec_of(name, options.sampled), options, folder / name))
    for name in extras:
        say(name)
        report["extras"][name] = await _EXTRAS[name](options, folder / name)
    report["differences"] = differences(report)
    report["exact"] = not report["differences"]
    return report


def differences(report: dict[str, Any]) -> dict[str, Any]:
    """By measurement: what was captured otherwise than the mock said it, and what polynya did not answer."""
    found: dict[str, Any] = {}
    for size in report["sizes"]:
        row = size["contenders"]["polynya"]
        if "missing" in row:
            found[size["size"]] = row["missing"]
        elif row["check"]["differences"] or row["failures"]:
            found[size["size"]] = row["check"]["differences"] | {"failed_requests": row["failures"]}
    for name, extra in report["extras"].items():
        ours = extra["contenders"]["polynya"] if "contenders" in extra else extra
        wrong = (extra.get("check") or {}).get("differences", {})
        if "missing" in ours or wrong or ours.get("failures"):
            found[name] = wrong | {"failed_requests": ours.get("failures"), "missing": ours.get("missing", "")}
    return found

"""The server's counters in the text form that Prometheus reads."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polynya.rollout.service.api import Status


def exposition(status: Status) -> str:
    """Names begin with ``polynya_``; counters are of this life of the server."""
    counts = status.counts
    lines = _family("polynya_sessions", "gauge", "Sessions by state.")
    lines += [f'polynya_sessions{{state="{state}"}} {getattr(counts, state)}' for state in ("queued", "leased", "done")]
    lines += [*_family("polynya_tasks", "gauge", "Tasks in the registry."), f"polynya_tasks {counts.tasks}"]
    lines += _family("polynya_nodes", "gauge", "Nodes by state.")
    nodes = Counter(str(node.state) for node in status.nodes)
    lines += [f'polynya_nodes{{state="{state}"}} {count}' for state, count in sorted(nodes.items())]
    for name, value in status.metrics.items():
        lines += [
            *_family(f"polynya_{name}_total", "counter", f"{name}, since the start."),
            f"polynya_{name}_total {value}",
        ]
    lines += _family("polynya_policy_paused", "gauge", "1 while nothing is given out for a model.")
    for policy in status.policies:
        labels = f'model="{_quoted(policy.model)}",version="{_quoted(policy.version or "")}"'
        lines.append(f"polynya_policy_paused{{{labels}}} {int(policy.paused)}")
    return "\n".join(lines) + "\n"


def _family(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

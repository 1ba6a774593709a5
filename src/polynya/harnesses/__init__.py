"""The harnesses, found by name. A third party registers one under the entry point group ``polynya.harnesses``."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from polynya.errors import HarnessMissing
from polynya.harnesses.base import Harness
from polynya.harnesses.claude_code import ClaudeCode
from polynya.harnesses.codex import Codex
from polynya.harnesses.gemini_cli import GeminiCli
from polynya.harnesses.mini_swe_agent import MiniSweAgent
from polynya.harnesses.opencode import Opencode
from polynya.harnesses.openhands import OpenHands
from polynya.harnesses.pi import Pi
from polynya.harnesses.qwen_code import QwenCode
from polynya.harnesses.shell import Shell

BUILT_IN: dict[str, Callable[[], Harness]] = {
    "claude_code": ClaudeCode,
    "codex": Codex,
    "gemini_cli": GeminiCli,
    "mini_swe_agent": MiniSweAgent,
    "opencode": Opencode,
    "openhands": OpenHands,
    "pi": Pi,
    "qwen_code": QwenCode,
    "shell": Shell,
}
GROUP = "polynya.harnesses"


def names() -> list[str]:
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


def harness(name: str) -> Harness:
    """The harness of that name. Raises HarnessMissing that lists the known ones."""
    if name in BUILT_IN:
        return BUILT_IN[name]()
    for point in entry_points(group=GROUP, name=name):
        made: Harness = point.load()()
        return made
    raise HarnessMissing(f"harness.name {name!r} is not known", fix=f"use one of {', '.join(names())}")


def all_harnesses() -> list[Harness]:
    """One of each, built-in and registered."""
    registered = [point.load() for point in entry_points(group=GROUP)]
    return [make() for make in (*BUILT_IN.values(), *registered)]

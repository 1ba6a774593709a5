"""Real agent CLIs on a real model, twelve turns each, with continuation and without: breaks by cause, delivered share, trained tokens.

Each agent is started anew for every turn and told to go on with its own saved session, so that it sends its whole history as
it would to its provider. Exits with 1 when, with continuation, a token of the main lane did not come through, or a prompt broke
off from the earlier ones without an edit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from polynya import harnesses
from polynya.config import GatewaySettings, NodeLimits, Settings, cache_dir
from polynya.engines import create_engine
from polynya.harnesses.base import Endpoint, Harness, Installed, Launch
from polynya.harnesses.claude_code import ClaudeCode
from polynya.harnesses.codex import Codex
from polynya.rollout.check import check_run
from polynya.rollout.parse import parse_task
from polynya.rollout.runner import Runner, RunOptions
from polynya.schema import HarnessSpec

TURNS = (
    "Use your shell tool to list the files of this folder.",
    "Say in one sentence what you saw.",
    "Use your shell tool to run: printf 'a\\nb\\nc\\n' > letters.txt && wc -l letters.txt",
    "How many lines does letters.txt have? Answer with a number.",
    "Use your shell tool to run: cat letters.txt",
    "Write a short Python function that reverses a string.",
    "Explain that function in one sentence.",
    "Use your shell tool to run: python3 -c 'print(2**10)'",
    "Was the number even or odd?",
    "Use your shell tool to run: echo '<|im_end|>' naïve café > odd.txt; cat odd.txt",
    "Name three colours.",
    "Say goodbye.",
)
EDITS = {"tool_list_changed", "system_changed", "history_edited", "compaction", "foreign_assistant", "repeated"}
SHORT = (
    "You are a coding agent in a Linux workspace. When you are asked to use the shell, call the tool at once; "
    "after its result, or when no tool is asked for, answer in a few words."
)


class _Turns:
    """A harness whose instruction is a JSON list of turns; ``resumed`` makes the command line that goes on."""

    resumed: Any

    def launch(
        self, spec: HarnessSpec, instruction: str, endpoint: Endpoint, installed: Installed, *, workdir: str, home: str
    ) -> Launch:
        turns = json.loads(instruction)
        first = super().launch(spec, turns[0], endpoint, installed, workdir=workdir, home=home)  # type: ignore[misc]
        files = {f"turns/{n:02}.txt": turn for n, turn in enumerate(turns)}
        # a turn that the agent gives up, as Codex does one whose reply was cut, does not end the conversation
        lines = [
            f"{shlex.join(first.argv if not n else self.resumed(first.argv))} < {home}/turns/{n:02}.txt"
            for n in range(len(turns))
        ]
        launch: Launch = msgspec.structs.replace(
            first, argv=["sh", "-c", "\n".join(lines)], home_files={**first.home_files, **files}, stdin=None
        )
        return launch


class ClaudeTurns(_Turns, ClaudeCode):
    name = "claude_code"

    @staticmethod
    def resumed(argv: list[str]) -> list[str]:
        return [*argv, "--continue"]


class CodexTurns(_Turns, Codex):
    name = "codex"

    @staticmethod
    def resumed(argv: list[str]) -> list[str]:
        at = argv.index("exec") + 1
        return [*argv[:at], "resume", "--last", *argv[at:]]


AGENTS: dict[str, tuple[type[Harness], dict[str, Any]]] = {
    "claude_code": (ClaudeTurns, {"bare": True, "system_prompt": SHORT, "tools": ["Bash"]}),
    "codex": (CodexTurns, {"base_instructions": SHORT, "project_docs": False}),
}


async def run(agent: str, folder: Path, *, engine: str, model: str | None, continuation: bool) -> None:
    _, settings = AGENTS[agent]
    task = parse_task(
        {
            "task_id": agent,
            "instruction": json.dumps(TURNS),
            "harness": {"name": agent, "settings": settings},
            "runtime": {"name": "bubblewrap"},
            "evaluator": {"name": "completed"},
            "sampling": {"temperature": 0.7, "max_tokens": 256, "policy": "override"},
            "budgets": {"init": 600, "run": 300, "calls": 40},
            "retries": 0,
        },
        "turns",
    )
    settings_ = Settings(gateway=GatewaySettings(continuation=continuation), node=NodeLimits(running=1))
    options = RunOptions(out=folder, cache=cache_dir(), settings=settings_)
    await Runner([task], create_engine(engine, model=model), options).run()


def figures(folder: Path) -> dict[str, Any]:
    """Of one run; ``delivered`` is the share of the main lane's sampled tokens that a row trains."""
    result = json.loads((folder / "sessions.jsonl").read_text())
    calls = pq.read_table(folder / "calls.parquet").to_pylist()
    main = [call for call in calls if call["lane"] == "main"]
    sampled = sum(call["sampled_len"] for call in main)
    trained = sum(call["sampled_len"] for call in main if call["trainable"])
    return {
        "status": result["status"],
        "error": result["error"],
        "calls": len(calls),
        "main calls": len(main),
        "continued": sum('"continued"' in call["flags"] for call in main),
        "rows": result["num_traces"],
        "breaks": dict(Counter(call["break_cause"] for call in main if call["break_cause"])),
        "delivered": trained / sampled if sampled else 0.0,
        "trained tokens": result["ledger"]["trained"],
        "captured": result["ledger"]["captured"],
        "problems": check_run(folder),
    }


def fell_short(found: dict[str, Any], *, continuation: bool) -> list[str]:
    """What a run shows that it must not."""
    wrong = [str(problem) for problem in found["problems"]]
    if found["main calls"] < 10:
        wrong.append(f"{found['main calls']} calls of the main lane are fewer than 10")
    if continuation and found["delivered"] < 1.0:
        wrong.append(f"delivered {found['delivered']:.3f}")
    if continuation and (drift := set(found["breaks"]) - EDITS):
        wrong.append(f"breaks that are no edit: {', '.join(sorted(drift))}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="embedded")
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path, default=Path("runs/real-continuation"))
    parser.add_argument("--agents", nargs="*", default=list(AGENTS), choices=list(AGENTS))
    options = parser.parse_args()
    harnesses.BUILT_IN.update({name: made for name, (made, _) in AGENTS.items()})
    table = Table(
        "agent", "continuation", "status", "calls", "continued", "rows", "breaks", "delivered", "trained", "captured"
    )
    wrong: list[str] = []
    for agent in options.agents:
        for continuation in (True, False):
            folder = options.out / f"{agent}-{'on' if continuation else 'off'}"
            asyncio.run(run(agent, folder, engine=options.engine, model=options.model, continuation=continuation))
            found = figures(folder)
            wrong += [f"{folder.name}: {words}" for words in fell_short(found, continuation=continuation)]
            shown = ", ".join(f"{cause} {count}" for cause, count in found["breaks"].items()) or "none"
            numbers = [found[key] for key in ("main calls", "continued", "rows")]
            table.add_row(
                agent,
                "on" if continuation else "off",
                found["status"],
                *map(str, numbers),
                shown,
                f"{found['delivered']:.3f}",
                str(found["trained tokens"]),
                str(found["captured"]),
            )
    console = Console(width=140)
    console.print(table)
    for words in wrong:
        console.print(f"fell short: {words}", markup=False)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

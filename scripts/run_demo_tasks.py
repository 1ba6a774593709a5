"""Run the demo's tasks on some engine and check the run directory as a trainer would read it."""

from __future__ import annotations

import argparse
import sys
from importlib.resources import as_file, files
from pathlib import Path

from polynya.cli.console import errors_said, out
from polynya.cli.run import execute
from polynya.rollout.check import check_run
from polynya.rollout.rundir import read_results
from polynya.rollout.tasks import load_tasks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, default=2)
    options = parser.parse_args()
    with errors_said(False):
        with as_file(files("polynya.cli") / "tasks" / "demo.yaml") as path:
            tasks = load_tasks([path])
        code = execute(tasks, options.engine, options.model, options.out, concurrency=options.concurrency)
        problems = check_run(options.out)
    results = list(read_results(options.out))
    trained = [result.ledger.trained for result in results]
    if code or problems or min(trained) == 0 or max(trained) < 20:
        out.print(f"exit code {code}; problems: {problems or 'none'}; trained tokens a session: {trained}")
        return 1
    out.print(f"{len(results)} sessions on {options.engine}: every row valid, ledger balanced")
    return 0


if __name__ == "__main__":
    sys.exit(main())

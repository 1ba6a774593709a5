"""Simulated clusters on a virtual clock, with the real dispatcher and registry. `make soak` runs it.

python scripts/simulate.py rough --seeds 1000 --hours 1     # R3: five nodes, everything goes wrong
python scripts/simulate.py rough --seed 417 --hours 1       # one of them again, its report in full
python scripts/simulate.py large --nodes 1000 --slots 16 --sessions 100000
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import msgspec

from polynya.rollout.simulation import Plan, Report, large, rough, simulate


def run(plan: Plan, seed: int) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        return simulate(plan, seed, Path(folder) / "registry.db")


def show(report: Report) -> None:
    print(msgspec.json.format(msgspec.json.encode(report)).decode(), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", choices=["rough", "large"])
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--sessions", type=int, default=100_000)
    asked = parser.parse_args()
    plan = rough(asked.hours) if asked.plan == "rough" else large(asked.nodes, asked.slots, asked.sessions)
    seeds = range(asked.seeds) if asked.seed is None else [asked.seed]
    reports = []
    for seed in seeds:
        report = run(plan, seed)
        reports.append(report)
        if not report.sound or len(seeds) == 1:
            show(report)
    unsound = [report.seed for report in reports if not report.sound]
    print(
        f"{len(reports)} seeds, {sum(report.sessions for report in reports)} sessions, "
        f"{sum(report.attempts for report in reports)} attempts: {sum(report.lost for report in reports)} lost, "
        f"{sum(report.doubled for report in reports)} doubled, {sum(report.overlaps for report in reports)} overlaps"
        + (f"; unsound seeds: {unsound}" if unsound else "")
    )
    return bool(unsound)


if __name__ == "__main__":
    sys.exit(main())

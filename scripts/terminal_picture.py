"""The end of a run as a terminal shows it, as SVG, from the run directory itself.

python scripts/terminal_picture.py runs/demo docs/images/terminal.svg
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import msgspec
from rich.console import Console

from polynya.cli.display import final_lines, final_table, session_line
from polynya.rollout.check import check_run
from polynya.rollout.rundir import read_results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    record = msgspec.json.decode((options.run / "run.json").read_bytes())
    results = list(read_results(options.run))
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=100, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print("[bold]$ make demo[/bold]")
        for result in results:
            console.print(session_line(result))
        console.print(final_table(results))
        for line in final_lines(record["summary"], str(options.run)):
            console.print(line, highlight=False)
        if not check_run(options.run):
            console.print("checked  every row valid, every sampled token trained once or excluded for a reason")
        svg = console.export_svg(title="polynya demo")
    # rich names a font on a public host; the page must not fetch anything.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code", "DejaVu Sans Mono")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(svg)


if __name__ == "__main__":
    main()

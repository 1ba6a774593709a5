"""Wait until an URL answers 200, as long as a process lives."""

from __future__ import annotations

import argparse
import os
import sys
import time
import urllib.error
import urllib.request


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--pid", type=int, required=True, help="give up when this process is gone")
    parser.add_argument("--seconds", type=float, default=600)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(options.url, timeout=5) as answer:
                if answer.status == 200:
                    return 0
        except (urllib.error.URLError, OSError):
            pass
        try:
            os.kill(options.pid, 0)
        except ProcessLookupError:
            print(f"process {options.pid} is gone before {options.url} answered", file=sys.stderr)
            return 1
        time.sleep(1)
    print(f"{options.url} did not answer within {options.seconds:g} s", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

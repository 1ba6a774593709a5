"""Runs pytest on chosen tests and writes what happened, one JSON object a line. A script of its own.

Run as ``python -I _pytest_runner.py CONFIG.json`` inside the grading sandbox. Isolated mode keeps the workspace off the
import path until pytest and its plugins are loaded, so a ``pytest.py``, a ``sitecustomize.py`` or an entry point that an
agent left there is not what runs. Lines are written as tests end: a process that dies leaves what it had.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


class Recorder:
    def __init__(self, fd: int, wanted: set[str], import_path: list[str]) -> None:
        self.fd = fd
        self.wanted = wanted
        self.import_path = import_path

    def write(self, **entry: Any) -> None:
        os.write(self.fd, json.dumps(entry).encode() + b"\n")

    def pytest_configure(self) -> None:
        sys.path[:0] = self.import_path

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        others = [item for item in items if item.nodeid not in self.wanted]
        items[:] = [item for item in items if item.nodeid in self.wanted]
        config.hook.pytest_deselected(items=others)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.write(event="collect", id=report.nodeid, text=str(report.longrepr)[-2000:])

    def pytest_runtest_logreport(self, report: Any) -> None:
        outcome = "passed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
        self.write(event="test", id=report.nodeid, when=report.when, outcome=outcome)

    def pytest_internalerror(self, excrepr: Any) -> None:
        self.write(event="internal", text=str(excrepr)[-4000:])


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_bytes())
    fd = os.open(config["results"], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    recorder = Recorder(fd, set(config["wanted"]), config["import_path"])
    try:
        import pytest
    except ImportError as exc:
        recorder.write(event="no_pytest", text=str(exc))
        return
    recorder.write(event="started", version=pytest.__version__)
    code = pytest.main(config["args"], plugins=[recorder])
    recorder.write(event="ended", code=int(code))


main()

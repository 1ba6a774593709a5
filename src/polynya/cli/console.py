"""What every verb shares: where text goes, how an error is said, which exit code it has."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from polynya.errors import CaptureError, EngineNotTrainable, PolynyaError, SessionCancelled, UsageError

EXIT_INFRA = 1
EXIT_USAGE = 2
EXIT_PART = 3
EXIT_NOT_TRAINABLE = 4
EXIT_STORAGE = 5
EXIT_INTERRUPTED = 130

out = Console(soft_wrap=True)
"""Results."""
err = Console(stderr=True, soft_wrap=True)
"""Progress and errors: stdout stays clean for results and ``--json``."""


def exit_code_of(error: PolynyaError) -> int:
    match error:
        case UsageError():
            return EXIT_USAGE
        case EngineNotTrainable():
            return EXIT_NOT_TRAINABLE
        case CaptureError():
            return EXIT_STORAGE
        case SessionCancelled():
            return EXIT_INTERRUPTED
        case _:
            return EXIT_PART


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, ensure_ascii=False, default=str) + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def errors_said(as_json: bool) -> Iterator[None]:
    """One clear message for an error that polynya raised on purpose, and its exit code."""
    try:
        yield
    except PolynyaError as exc:
        if as_json:
            print_json({"error": {"kind": exc.kind, "boundary": exc.boundary, "message": exc.message, "fix": exc.fix}})
        text = Text.assemble(("error: ", "bold red"), exc.message)
        err.print(text)
        if exc.fix:
            err.print(Text.assemble(("  fix: ", "bold"), exc.fix))
        raise typer.Exit(exit_code_of(exc)) from exc

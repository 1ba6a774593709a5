"""The requests that real harnesses and SDKs sent, as ``scripts/trim_recordings.py`` keeps them."""

from __future__ import annotations

import functools
import json
import lzma
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "fixtures" / "recordings" / "requests.jsonl.xz"


@functools.cache
def _lines() -> tuple[str, ...]:
    with lzma.open(FILE, "rt") as lines:
        return tuple(lines)


def rows() -> list[dict[str, Any]]:
    """All distinct requests, each a fresh object."""
    return [json.loads(line) for line in _lines()]

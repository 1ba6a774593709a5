"""Which experts of a mixture each token went through, as the engine reports it, in its place beside the ids.

Invariant: row ``i`` is of the forward pass over id ``i``; the last sampled id had none. A report whose length fits neither
the ids nor the ids without the last one is refused whole, never shifted or cut to fit. Pure.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np

from polynya.schema import Int16Array

_report = msgspec.json.Decoder(list[list[list[int]]] | str | None)


class Routing(msgspec.Struct, frozen=True):
    """A report, not placed yet."""

    values: Int16Array
    """Flat."""
    rows: int
    """0: the engine does not say how many (SGLang's flat bytes)."""
    shape: list[int]
    """Of one row: ``[layers, experts a token]``; ``[]`` when the engine does not say."""


def read_routing(raw: bytes) -> Routing | None:
    """Of ``routed_experts``: nested lists (vLLM) or base64 of int32 (SGLang). None when it is neither."""
    try:
        value = _report.decode(raw)
        if value is None:
            return None
        if isinstance(value, str):
            values = np.frombuffer(base64.b64decode(value, validate=True), dtype="<i4")
            return Routing(_narrow(values), 0, []) if values.size else None
        array = np.array(value, dtype=np.int64)
        if array.ndim != 3 or not array.size:
            return None
        return Routing(_narrow(array.reshape(-1)), len(array), list(array.shape[1:]))
    except (ValueError, OverflowError, msgspec.DecodeError):
        return None


def aligned(routing: Routing, total: int) -> Int16Array | None:
    """``(total - 1, width)``: a row for every id of ``total`` but the last. None: it fits no such reading."""
    wanted = total - 1
    if wanted < 1:
        return None
    rows = routing.rows or (wanted if routing.values.size % wanted == 0 else total)
    if rows not in (wanted, total) or routing.values.size % rows:
        return None
    return routing.values.reshape(rows, -1)[:wanted]


def _narrow(values: np.ndarray[Any, Any]) -> Int16Array:
    if values.size and not 0 <= values.min() <= values.max() < 2**15:
        raise ValueError("an expert's number is negative or too large")
    return values.astype(np.int16)

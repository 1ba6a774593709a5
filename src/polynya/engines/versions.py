"""Which weights sampled a reply, where only the server as a whole says which it has: asked before and after each call.

Invariant: a version is told only when both answers are the same; a reply that straddles a change says ``before..after`` for
all of its tokens, since nobody knows which token was the first of the new. Refuses to guess: no answer is no version.
"""

from __future__ import annotations

import msgspec

from polynya.engines.http import EngineHttp
from polynya.errors import EngineError
from polynya.schema import PolicySpan


class _Weights(msgspec.Struct):
    weight_version: str | int | None = None


async def weight_version(http: EngineHttp) -> str | None:
    """Of vLLM's ``/weight_info``."""
    try:
        found = msgspec.json.decode((await http.get("/weight_info")).body, type=_Weights).weight_version
    except (EngineError, msgspec.DecodeError):
        return None
    return None if found is None else str(found)


def bracketed(before: str | None, after: str | None, sampled: int) -> list[PolicySpan]:
    """One span over all sampled ids; none when either is unknown."""
    if before is None or after is None or not sampled:
        return []
    return [PolicySpan(before if before == after else f"{before}..{after}", 0, sampled)]

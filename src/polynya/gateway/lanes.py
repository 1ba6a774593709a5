"""Who made a call inside its harness, read from the harness's own headers and the request; never from the User-Agent."""

from __future__ import annotations

from collections.abc import Mapping

from polynya.dialects.neutral import ChatRequest
from polynya.schema import Lane

SUBAGENT_HEADERS = ("x-claude-code-agent-id", "x-openai-subagent", "x-parent-session-id", "x-codex-parent-thread-id")


def lane_of(headers: Mapping[str, str], request: ChatRequest) -> Lane:
    if request.compaction:
        return Lane.COMPACTION
    return Lane.SUBAGENT if any(headers.get(name) for name in SUBAGENT_HEADERS) else Lane.MAIN

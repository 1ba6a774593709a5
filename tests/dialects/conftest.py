"""Replies, and the recorded requests of real harnesses (long texts cut)."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from polynya.dialects.neutral import ChatReply, ReplyHead, ToolCall, Usage

from ..recordings import rows

HEAD = ReplyHead(reply_id="r1", created=1_700_000_000, model="asked-for")


def recorded(path_part: str) -> list[dict[str, Any]]:
    """The model calls that were POSTed to such a path; ``from`` says by whom."""
    found = [row for row in rows() if path_part in row["path"] and row["method"] == "POST"]
    return [row | {"from": f"{row['harness']}/{row['case']}"} for row in found]


TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=600)
CALLS = st.builds(
    ToolCall,
    id=st.text("abc0", min_size=1, max_size=8),
    name=st.text("abc_", min_size=1, max_size=8),
    arguments=st.one_of(TEXT, st.dictionaries(TEXT, st.integers() | TEXT | st.booleans(), max_size=3).map(json.dumps)),
)
REPLIES = st.builds(
    ChatReply,
    text=TEXT,
    reasoning=TEXT,
    tool_calls=st.lists(CALLS, max_size=3),
    finish_reason=st.sampled_from(["stop", "length"]),
    usage=st.builds(Usage, prompt_tokens=st.integers(0, 99), completion_tokens=st.integers(0, 99)),
)


def sse(events: list[bytes]) -> list[dict[str, Any]]:
    """The payloads of a stream's events."""
    lines = b"".join(events).replace(b"\r\n", b"\n").decode().split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]

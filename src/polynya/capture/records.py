"""What the journal holds. One msgpack map a record, tagged by ``k``; unknown fields are skipped, unknown tags refused.

Ids are little-endian int32 bytes, logprobs little-endian float32 bytes. A call's prompt is stored as the part that an
earlier call of the session does not already hold: ``base``'s ``(prompt + sampled)[:keep]`` followed by ``context``, which
stands as the engine printed it (``context_text``) where that is long.
Messages are stored the same way: the first ``keep_messages`` raw messages of ``base``, followed by ``messages``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from polynya.schema import PolicySpan


class SessionOpened(msgspec.Struct, frozen=True, kw_only=True, tag_field="k", tag="session"):
    session_id: str
    attempt: int
    at: float
    """Unix seconds, for people."""
    meta: dict[str, Any] = {}


class CallIntent(msgspec.Struct, frozen=True, kw_only=True, tag_field="k", tag="intent", omit_defaults=True):
    session_id: str
    attempt: int
    call_id: str
    index: int
    at: float
    dialect: str
    lane: str
    model: str
    body_digest: bytes = b""
    base: str = ""
    keep_messages: int = 0
    messages: list[bytes] = []
    """Raw JSON, one a message."""
    tools: bytes | None = None
    """Raw JSON list; None: the same as ``base``'s."""
    sampling: dict[str, Any] = {}
    continues: str = ""
    """Id of the call that the prompt goes on from; the prompt went as ids."""
    lane_rule: str = ""
    """The rule that gave a lane other than ``main``."""
    agent: str = ""
    """The harness's own name of the agent that asked; lineage, never identity."""
    parent_agent: str = ""


class CallOutcome(msgspec.Struct, frozen=True, kw_only=True, tag_field="k", tag="outcome", omit_defaults=True):
    session_id: str
    attempt: int
    call_id: str
    at: float
    outcome: str
    """``ok``, ``cancelled`` or ``failed``."""
    finish_reason: str = ""
    base: str = ""
    keep: int = 0
    context: bytes = b""
    context_text: bytes = b""
    """In place of ``context``, of a long one: the ids in decimal, with commas between them and nothing else."""
    sampled: bytes = b""
    logprobs: bytes = b""
    routing: bytes = b""
    """Little-endian int16: a row for each id from ``routing_from`` on, the last sampled one has none."""
    routing_from: int = 0
    routing_shape: list[int] = []
    has_ids: bool = False
    usage: tuple[int, int] = (0, 0)
    """Prompt and completion tokens as the engine counts them."""
    policy_spans: list[PolicySpan] = []
    exclusion: str = ""
    exclusion_at: int | None = None
    exclusion_detail: str = ""
    reply: bytes = b""
    """JSON of the assistant message, in OpenAI Chat shape."""
    upstream_id: str = ""
    flags: dict[str, int] = {}
    error: str = ""


class CallDelivered(msgspec.Struct, frozen=True, kw_only=True, tag_field="k", tag="delivered"):
    session_id: str
    attempt: int
    call_id: str
    at: float


class SessionSealed(msgspec.Struct, frozen=True, kw_only=True, tag_field="k", tag="sealed"):
    session_id: str
    attempt: int
    at: float


Record = SessionOpened | CallIntent | CallOutcome | CallDelivered | SessionSealed

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Record).decode

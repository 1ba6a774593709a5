"""Continuation: the prompt of a call that goes on from a captured one is that call's own ids and the tokens of what is new.

Invariants: nothing here fails a harness call: what cannot be continued goes upstream as messages, and the session's flags say
why. An engine that does not condition on the ids it was given is noticed by its echo, and is not given any in that way again. Trust is
not needed: the builder proves each chain on the ids that the engine echoed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec
import numpy as np

from polynya.capture.calls import StoredCall
from polynya.capture.prompts import Placed
from polynya.capture.store import SessionCapture
from polynya.config import GatewaySettings
from polynya.dialects.neutral import ChatMessage, ChatRequest
from polynya.engines.base import Engine
from polynya.gateway.sessions import GatewaySession
from polynya.schema import Exclusion
from polynya.tokens.bridge import Bridge
from polynya.tokens.canonical import root_digest
from polynya.tokens.matching import Chain, Found
from polynya.tokens.printed import GivenIds, print_ids

_log = logging.getLogger("polynya.gateway")
_OFF_LOOP_BYTES = 1024 * 1024
_REFUSALS = 3
"""Of ids, in a row, for calls that went through as messages; or times that the engine could not say what a bridge needs."""


class Continued(msgspec.Struct, frozen=True):
    """What a call goes on from, and by which ids."""

    parent: StoredCall
    bridge: Bridge

    @property
    def length(self) -> int:
        """Of the prompt."""
        return self.parent.total_len + len(self.bridge.ids)

    def given(self, capture: SessionCapture) -> GivenIds:
        """The prompt as it goes upstream: in the prints that the session holds, where it holds them."""
        for leaf in capture.leaves():
            if leaf.call is self.parent and leaf.pieces and leaf.sampled_text:
                return GivenIds(pieces=[*leaf.pieces, leaf.sampled_text, print_ids(self.bridge.ids)])
        return GivenIds(np.concatenate([self.parent.full_ids, self.bridge.ids]))

    def is_prompt(self, echoed: Placed) -> bool:
        """Whether the engine conditioned on these ids, id by id."""
        if echoed.length != self.length:
            return False
        if echoed.base is self.parent and echoed.keep == self.parent.total_len:
            return np.array_equal(echoed.context, self.bridge.ids)
        before = echoed.context[:0] if echoed.base is None else echoed.base.full_ids[: echoed.keep]
        sent = np.concatenate([self.parent.full_ids, self.bridge.ids])
        return np.array_equal(np.concatenate([before, echoed.context]), sent)


class Place(msgspec.Struct):
    """Where a request stands in its session."""

    chain: Chain | None
    """None: continuation is off."""
    continued: Continued | None = None
    found: Found[StoredCall] | None = None
    """What ``continued`` goes on from, in the matcher's words."""

    def commit(self, session: GatewaySession, replies: Sequence[bytes], call: StoredCall, *, thought: bool) -> None:
        """Later requests may go on from this call. One without ids cannot be gone on from."""
        if self.chain is None or not call.total_len or call.exclusion == Exclusion.ID_OUT_OF_RANGE:
            return
        session.matcher.commit(self.chain, replies, call, self.found if self.continued is not None else None)
        if thought or (self.continued is not None and self.continued.parent.call_id in session.thoughtful):
            session.thoughtful.add(call.call_id)


class Continuation:
    """Of one gateway."""

    def __init__(self, engine: Engine, settings: GatewaySettings) -> None:
        self._engine = engine
        self._settings = settings
        self._unbridged = 0
        self._refusals = 0
        self.off = "" if settings.continuation else "switched off"
        """Why no call is continued any more; empty: they are."""

    @property
    def on(self) -> bool:
        return not self.off and bool(self._engine.token_route)

    async def refused(self, why: str, route: str) -> None:
        """The engine refused ids and took the same call as messages."""
        self._refusals += 1
        if self._refusals >= _REFUSALS:
            await self.step_down(f"the engine refuses prompts of ids: {why}", route)

    async def step_down(self, why: str, route: str) -> None:
        """Ids are given in another way from here on; where there is none, not at all."""
        left = await self._engine.step_down(route)
        self._refusals = 0
        if left:
            _log.warning("prompts of ids go by %s from here on, by %s no more: %s", left, route, why)
        else:
            self.switch_off(why)

    @property
    def route(self) -> str:
        return self._engine.token_route

    def taken(self) -> None:
        self._refusals = 0

    def switch_off(self, why: str) -> None:
        if not self.off:
            _log.warning("continuation is off: %s; from here on the engine renders every prompt itself", why)
            self.off = why

    async def place(
        self, session: GatewaySession, request: ChatRequest, messages: Sequence[bytes], tools: bytes
    ) -> Place:
        """Find the captured call that this request goes on from. Raises nothing but CancelledError."""
        if not self.on:
            return Place(None)
        try:
            return await self._place(session, request, messages, tools)
        except Exception:  # A bug in matching or bridging may cost a row, never a harness call.
            _log.exception("session %s: a call could not be continued", session.session_id)
            session.flags["continuation_failed"] += 1
            return Place(None)

    async def _place(
        self, session: GatewaySession, request: ChatRequest, messages: Sequence[bytes], tools: bytes
    ) -> Place:
        kwargs = bytes(request.template_kwargs) if request.template_kwargs is not None else b""
        root = root_digest(model=request.model, tools=tools, template_kwargs=kwargs)
        if sum(map(len, messages)) > _OFF_LOOP_BYTES:
            chain = await asyncio.to_thread(session.matcher.chain, root, messages)
        else:
            chain = session.matcher.chain(root, messages)
        place = Place(chain)
        found = session.matcher.find(chain)
        if found is None:
            return place
        refused = _refused(request.messages, found.tail_start, foreign=found.foreign)
        thinking = session.grant.sampling.thinking or self._settings.thinking
        if not refused and thinking == "template" and found.call.call_id in session.thoughtful:
            # A user message makes the template leave out what the model thought before it.
            asks = any(message.role == "user" for message in request.messages[found.tail_start :])
            refused = "thinking_dropped" if asks else ""
        if not refused and sum(map(len, messages[found.tail_start :])) > _OFF_LOOP_BYTES:
            refused = "size"
        if refused:
            session.flags[f"continuation_refused_{refused}"] += 1
            return place
        bridge = await self._bridge(found.call, request, messages, found.tail_start, tools, kwargs)
        if bridge is None:
            session.flags["continuation_refused_bridge"] += 1
            return place
        continued = Continued(found.call, bridge)
        window = self._engine.info.window
        if window is not None and continued.length >= window:
            session.flags["continuation_refused_window"] += 1
            return place
        place.continued, place.found = continued, found
        return place

    async def _bridge(
        self,
        parent: StoredCall,
        request: ChatRequest,
        messages: Sequence[bytes],
        tail_start: int,
        tools: bytes,
        kwargs: bytes,
    ) -> Bridge | None:
        bridger = await self._engine.bridger()
        if bridger is None:
            self._unbridged += 1
            if self._unbridged == _REFUSALS:
                self.switch_off(f"the chat template of {self._engine.info.model} cannot be bridged")
            return None
        # The tail answers the calls by the ids that the client echoed, which may be its own.
        echoed = request.messages[tail_start - 1].tool_calls
        return await bridger.bridge(
            parent_ids=np.concatenate([parent.context_ids, parent.sampled_ids]),
            parent_calls=[(call.id, call.name) for call in echoed],
            tail=messages[tail_start:],
            tools=tools if request.tools_raw is not None else None,
            template_kwargs=kwargs or None,
        )


def _refused(messages: Sequence[ChatMessage], tail_start: int, *, foreign: bool) -> str:
    """Why a request is not continued although its history was captured; empty: it may be."""
    if foreign:
        return "foreign_assistant"
    if tail_start == len(messages):
        return "nothing_new"
    if any(message.media for message in messages):
        return "media"
    return ""

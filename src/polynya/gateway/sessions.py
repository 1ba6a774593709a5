"""Session keys and what the gateway knows of each live session.

Invariants: only a digest of a key is kept; a key opens its own attempt's model endpoint and nothing else; it ends with the
attempt and then says so (410), for as long as the node lives.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import secrets
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import msgspec

from polynya.capture.calls import StoredCall
from polynya.capture.store import SessionCapture
from polynya.dialects.base import Fault, WireError
from polynya.dialects.history import History
from polynya.dialects.neutral import ChatMessage, ChatReply, ChatRequest, ReplyHead
from polynya.dialects.openai_responses import regrouped
from polynya.dialects.wire import chat_message
from polynya.gateway.lanes import CompactionWatch
from polynya.schema import Budgets, SamplingSpec
from polynya.tokens.matching import Matcher

if TYPE_CHECKING:
    from polynya.gateway.calls import Answer, CallRun

_REPLAYS = 8
"""Replies of a session that a retry can still get."""
_BRANCHES = 4
"""Responses that the next one is looked at beside: a session rarely has more threads alive."""
_ENDED_KEYS = 100_000
FREE_FINAL_ANSWERS = 4
"""Calls after the budget is spent that get a well-formed final answer, before they are refused."""


class SessionGrant(msgspec.Struct, frozen=True, kw_only=True):
    """What a session is opened with."""

    session_id: str
    attempt: int = 1
    sampling: SamplingSpec = SamplingSpec()
    budgets: Budgets = Budgets()


class GatewaySession:
    """A live session attempt. Used from the event loop only."""

    def __init__(self, grant: SessionGrant, capture: SessionCapture, calls_in_flight: int) -> None:
        self.grant = grant
        self.capture = capture
        self.slots = asyncio.Semaphore(calls_in_flight)
        self.in_flight: dict[bytes, CallRun] = {}
        self.replies: OrderedDict[bytes, Answer] = OrderedDict()
        self._histories: dict[str, History[Any]] = {}
        self._responses: dict[str, list[ChatMessage]] = {}
        self._reply_of_call: dict[str, int] = {}
        self.stored: dict[str, tuple[ChatRequest, Answer]] = {}
        """Replies that the client may ask for again by id."""
        self.matcher: Matcher[StoredCall] = Matcher()
        """Which captured call a request goes on from."""
        self.thoughtful: set[str] = set()
        """Calls whose prompt or reply holds sampled thinking, by id."""
        self.flags: Counter[str] = Counter()
        self.compactions = CompactionWatch()
        self.ignored_fields: set[str] = set()
        """Fields of its requests that polynya has no use for, each logged once."""
        self.streams = 0
        """Streams begun, for the ids of those that wait."""
        self.calls_begun = 0
        self.refused_after_budget = 0
        self.capture_error = ""
        """Not empty: a record could not be written, so the session is an infrastructure failure."""
        self.engine_failures: list[tuple[int, list[bytes], str]] = []
        """Index, messages and words of each engine failure that the policy cannot cause and nothing has made good."""
        self.tasks: set[asyncio.Task[Answer]] = set()
        """All calls under way, abandoned ones that are still being closed too."""
        self.closed = False

    def history(self, dialect: str) -> History[Any]:
        """What the session sent in this dialect."""
        if dialect not in self._histories:
            self._histories[dialect] = History(secrets.randbits(64))
        return self._histories[dialect]

    @property
    def session_id(self) -> str:
        return self.grant.session_id

    @property
    def budget_spent(self) -> bool:
        budgets = self.grant.budgets
        calls = budgets.calls is not None and self.calls_begun >= budgets.calls
        return calls or (budgets.tokens is not None and self.capture.sampled_tokens >= budgets.tokens)

    @property
    def engine_error(self) -> str:
        """The last outage that still stands, or ``""``."""
        return self.engine_failures[-1][2] if self.engine_failures else ""

    def made_good(self, call: StoredCall, messages: list[bytes]) -> None:
        """A call succeeded. It makes an outage good only if it asked again: begun later, with the same messages or more."""
        self.engine_failures = [
            failure
            for failure in self.engine_failures
            if call.index < failure[0] or messages[: len(failure[1])] != failure[1]
        ]

    def with_history(self, request: ChatRequest) -> ChatRequest | WireError:
        """The request with the messages that ``previous_response_id`` stands for. Unknown ids are an error, never lost history.

        ``store: false`` does not make an id unknown: on a WebSocket the provider continues such replies too, and the
        session has captured them anyway. It only keeps ``GET /v1/responses/{id}`` from showing them.
        """
        previous = request.previous_response_id
        if not previous:
            return request
        history = self._responses.get(previous)
        if history is None:
            message = f"previous_response_id: {previous!r} is not known in this session"
            return WireError(fault=Fault.NOT_FOUND, message=message, field="previous_response_id")
        own = int(request.instructions)
        messages = [*request.messages[:own], *history, *request.messages[own:]]
        return msgspec.structs.replace(request, messages=messages)

    def regrouped(self, request: ChatRequest) -> ChatRequest:
        """Responses items do not say where a reply ends; the session knows which reply gave a call."""
        if request.dialect != "openai_responses":
            return request
        return msgspec.structs.replace(request, messages=regrouped(request.messages, self._reply_of_call))

    def remember_calls(self, call: StoredCall, reply: ChatReply) -> None:
        self._reply_of_call.update(dict.fromkeys((made.id for made in reply.tool_calls), call.index))

    def remember_response(self, request: ChatRequest, answer: Answer) -> None:
        """What a later request may name as its history (instructions are not carried over, as with the provider)."""
        if request.dialect == "openai_responses":
            reply, response_id = answer.reply, f"resp_{answer.head.reply_id}"
            said = chat_message("assistant", text=reply.text, reasoning=reply.reasoning, tool_calls=reply.tool_calls)
            self._responses[response_id] = [*self._history(request), said]
            if request.stored:
                # Showing it again takes what names its tools, not what it answered to.
                bare = msgspec.structs.replace(request, messages=[], tools=[], tools_raw=None, leftovers={})
                self.stored[response_id] = (bare, answer)

    def remember_input(self, request: ChatRequest, reply_id: str) -> None:
        """The history of a response that was asked for without generation: its input, nothing said."""
        self._responses[f"resp_{reply_id}"] = self._history(request)

    def _history(self, request: ChatRequest) -> list[ChatMessage]:
        """Its messages; those that a recent response begins with too are that one's, so that a long session is held once."""
        messages = request.messages[int(request.instructions) :]
        best: list[ChatMessage] = []
        for response_id in list(self._responses)[-_BRANCHES:]:
            known = self._responses[response_id]
            pairs = zip(known, messages, strict=False)
            shared = [ours for ours, _ in itertools.takewhile(lambda pair: pair[0].raw == pair[1].raw, pairs)]
            best = shared if len(shared) > len(best) else best
        return [*best, *messages[len(best) :]]

    def forget_response(self, response_id: str) -> bool:
        """The client deletes it: nothing continues it any more. What was captured stays. False: not known."""
        self._responses.pop(response_id, None)
        return self.stored.pop(response_id, None) is not None

    def also_respond_as(self, head: ReplyHead, answer: Answer) -> None:
        """The answer went out under another id; it is known by both."""
        history = self._responses.get(f"resp_{answer.head.reply_id}")
        if history is not None:
            self._responses[f"resp_{head.reply_id}"] = history
        if (kept := self.stored.get(f"resp_{answer.head.reply_id}")) is not None:
            self.stored[f"resp_{head.reply_id}"] = (kept[0], msgspec.structs.replace(answer, head=head))

    def keep_reply(self, digest: bytes, answer: Answer) -> None:
        self.replies[digest] = answer
        self.replies.move_to_end(digest)
        while len(self.replies) > _REPLAYS:
            self.replies.popitem(last=False)


class Keyring:
    """Session keys of one gateway: ``ply_session_<kid>_<secret>``."""

    def __init__(self) -> None:
        self._live: dict[str, tuple[bytes, GatewaySession]] = {}
        self._ended: OrderedDict[str, bytes] = OrderedDict()

    def issue(self, session: GatewaySession) -> str:
        kid, secret = secrets.token_hex(8), secrets.token_hex(32)
        self._live[kid] = (_digest(secret), session)
        return f"ply_session_{kid}_{secret}"

    def revoke(self, session: GatewaySession) -> None:
        for kid in [kid for kid, (_, owner) in self._live.items() if owner is session]:
            self._ended[kid] = self._live.pop(kid)[0]
        while len(self._ended) > _ENDED_KEYS:
            self._ended.popitem(last=False)

    def find(self, key: str) -> GatewaySession | Fault:
        """The key's session, or UNAUTHORISED (never issued), or GONE (ended)."""
        kid, _, secret = key.removeprefix("ply_session_").partition("_")
        digest = _digest(secret)
        stored, session = self._live.get(kid, (self._ended.get(kid, b"\0" * 32), None))
        if not hmac.compare_digest(stored, digest):
            return Fault.UNAUTHORISED
        return session if session is not None else Fault.GONE


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()

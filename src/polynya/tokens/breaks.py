"""Why a prompt did not extend an earlier call: the history was really edited, or the same history became other tokens.

Invariant: what is named an edit differs in what the messages say (as ``canonical`` has it); what is named drift does not.
Refuses to guess at texts: where the messages say the same, the place where the ids part decides.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from polynya.schema import Break, Lane
from polynya.tokens.calls import CapturedCall
from polynya.tokens.canonical import reasoning_of
from polynya.tokens.forest import Node, full_ids
from polynya.tokens.matching import Matcher
from polynya.tokens.validate import common_prefix

_LOOK_BACK = 16
"""Earlier calls of the agent, the latest, that a root is compared with: each comparison takes the ids of both."""


class _Said(msgspec.Struct):
    role: str = ""
    tool_calls: msgspec.Raw = msgspec.Raw(b"null")


_said = msgspec.json.Decoder(_Said)


class Parting(msgspec.Struct, frozen=True):
    """A call that does not extend the one that its history goes on from."""

    cause: Break
    nearest: int
    """Order of that one; where there is none, of the call of the same agent whose ``prompt + sampled`` shares most ids."""


def partings(nodes: Sequence[Node], calls: Sequence[CapturedCall]) -> dict[int, Parting]:
    """By order of the call. ``calls``: all of the session in commit order, excluded ones too."""
    latest: dict[tuple[Lane, str], int] = {}
    suspects = []
    for node in nodes:
        own = (node.call.lane, node.call.agent)
        if own in latest and node.parent != latest[own]:
            suspects.append(node)
        latest[own] = node.order
    if not suspects:
        return {}
    places = {call.call_id: place for place, call in enumerate(calls)}
    breaks, history = Breaks(), _history(nodes)
    found: dict[int, Parting] = {}
    for node in suspects:
        nearest, shared = _nearest(node, nodes, history[node.order])
        if nearest is None or (node.parent is not None and nodes[node.parent].total_len >= nearest.total_len):
            if (left := _left_behind(node, nodes)) is not None:
                found[node.order] = Parting(Break.HISTORY_EDITED, left)
            continue
        between = calls[places[nearest.call.call_id] + 1 : places[node.call.call_id]]
        found[node.order] = Parting(breaks.cause(node.call, nearest.call, shared, between), nearest.order)
    return found


def _left_behind(node: Node, nodes: Sequence[Node]) -> int | None:
    """The latest call that went on from the same one before, with other messages; None: there is none, so nothing was edited."""
    assert node.parent is not None
    before = [order for order in nodes[node.parent].children if order < node.order]
    others = [order for order in before if nodes[order].call.messages != node.call.messages]
    return max(others, default=None)


def _history(nodes: Sequence[Node]) -> list[int | None]:
    """For each call the order of the earlier one whose reply is the last that its history holds."""
    matcher: Matcher[int] = Matcher()
    found = []
    for node in nodes:
        chain = matcher.chain(node.call.tools_json.encode(), node.call.messages)
        hit = matcher.find(chain)
        found.append(None if hit is None else hit.call)
        extends = hit is not None and hit.call == node.parent
        matcher.commit(chain, [node.call.reply], node.order, hit if extends else None)
    return found


def _nearest(node: Node, nodes: Sequence[Node], goes_on_from: int | None) -> tuple[Node | None, int]:
    prompt = node.call.prompt_ids
    if goes_on_from is not None:
        nearest = nodes[goes_on_from]
        return nearest, common_prefix(prompt, full_ids(nearest.call))
    if node.parent is not None:
        return None, 0
    own = (node.call.lane, node.call.agent)
    before = [other for other in nodes[: node.order] if (other.call.lane, other.call.agent) == own]
    shared, order = max((common_prefix(prompt, full_ids(other.call)), other.order) for other in before[-_LOOK_BACK:])
    return nodes[order], shared


class Breaks:
    """Compares the calls of one session."""

    def __init__(self) -> None:
        self._matcher: Matcher[None] = Matcher()

    def cause(
        self, call: CapturedCall, nearest: CapturedCall, shared_ids: int, between: Sequence[CapturedCall]
    ) -> Break:
        """``nearest``: the earlier call whose ``prompt + sampled`` shares most ids, ``shared_ids``, with this prompt.

        ``between``: what was committed after ``nearest``, excluded calls too.
        """
        if call.tools_json != nearest.tools_json:
            return Break.TOOL_LIST_CHANGED
        now, before = call.messages, nearest.messages
        if _system(now) != _system(before):
            return Break.SYSTEM_CHANGED
        shared, rethought = self._shared(now, [*before, nearest.reply])
        if shared > len(before):
            return Break.HISTORY_EDITED if rethought else self._drift(now, nearest, shared, shared_ids)
        if shared == len(now) == len(before):
            return Break.REPEATED
        if any(other.lane == Lane.COMPACTION and other.agent == call.agent for other in between):
            return Break.COMPACTION
        if shared == len(before) and shared < len(now) and _said.decode(now[shared]).role == "assistant":
            return Break.FOREIGN_ASSISTANT
        return Break.HISTORY_EDITED

    def _shared(self, now: Sequence[bytes], before: Sequence[bytes]) -> tuple[int, bool]:
        """Leading messages that say the same, and whether thinking that both have in one of them differs."""
        ours, theirs = self._matcher.chain(b"", now), self._matcher.chain(b"", before)
        shared = sum(a == b for a, b in zip(ours.hashes, theirs.hashes, strict=False)) - 1
        thoughts = [(a.reasoning, b.reasoning) for a, b in zip(ours.said[:shared], theirs.said[:shared], strict=True)]
        return shared, any(a and b and a != b for a, b in thoughts)

    def _drift(self, now: Sequence[bytes], nearest: CapturedCall, shared: int, shared_ids: int) -> Break:
        """The history holds the earlier call's reply, and its ids came back as others."""
        if any(_said.decode(message).role == "assistant" for message in now[shared:]):
            return Break.FOREIGN_ASSISTANT
        echoed = now[shared - 1]
        at_its_start = abs(shared_ids - nearest.prompt_len) <= 1
        if reasoning_of(nearest.reply).strip() and (at_its_start or not reasoning_of(echoed).strip()):
            return Break.REASONING_STRIPPED
        if shared_ids < nearest.prompt_len:
            return Break.TEMPLATE
        if _said.decode(echoed).tool_calls != _said.decode(nearest.reply).tool_calls:
            return Break.ARGUMENTS_RESERIALISED
        return Break.RETOKENISED if shared_ids < nearest.prompt_len + nearest.sampled_count else Break.TEMPLATE


def _system(messages: Sequence[bytes]) -> list[bytes]:
    """The leading system messages."""
    leading = []
    for message in messages:
        if _said.decode(message).role not in ("system", "developer"):
            break
        leading.append(message)
    return leading

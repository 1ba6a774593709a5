"""The call forest: which call's prompt strictly extends which earlier call, proved on the ids.

Invariant: ``parent`` of a call is the call with the longest ``prompt + sampled`` that is a prefix of this call's
prompt, compared id by id. Siblings share a parent (retries, samples, abandoned branches); a prompt that extends nothing is a root.
The proof does not trust hashes: they find candidates, the bytes decide. Nothing is joined across a difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import xxhash

from polynya.schema import Int32Array
from polynya.tokens.calls import CapturedCall


class Node(msgspec.Struct, kw_only=True):
    """One call in the forest. Positions are in its own ``prompt + sampled``."""

    order: int
    call: CapturedCall
    parent: int | None
    """Order of the parent."""
    prompt_len: int
    total_len: int
    children: list[int] = []


def grow(calls: Sequence[CapturedCall]) -> list[Node]:
    """Place sound calls, in commit order, in a forest. Cost: linear in the ids, whatever their number of calls.

    Whoever extends a call is longer than it, so the forest is the same in whatever order the calls came.
    """
    nodes = [
        Node(
            order=order,
            call=call,
            parent=None,
            prompt_len=call.prompt_len,
            total_len=call.prompt_len + call.sampled_count,
        )
        for order, call in enumerate(calls)
    ]
    proved = _proved(calls)
    for order, parent in proved.items():
        nodes[order].parent = parent
    unproved = [node for node in nodes if node.order not in proved]
    if len(unproved) > 1:
        _search(nodes, unproved)
    for node in nodes:
        if node.parent is not None:
            nodes[node.parent].children.append(node.order)
    return nodes


def _proved(calls: Sequence[CapturedCall]) -> dict[int, int]:
    """Parents that capture proved when it stored the call; through calls that are not in the forest, to the next that is."""
    orders = {call.call_id: order for order, call in enumerate(calls)}
    found: dict[int, int] = {}
    for order, call in enumerate(calls):
        base = call.extends
        while base is not None and base.call_id not in orders:
            base = base.extends
        if base is not None:
            found[order] = orders[base.call_id]
    return found


def _search(nodes: list[Node], wanted: Sequence[Node]) -> None:
    """Find by their ids the parents of calls of which capture knows none."""
    orders = {node.order for node in wanted}
    ends: dict[int, dict[bytes, list[int]]] = {}
    for node in sorted(nodes, key=lambda node: node.prompt_len):
        full = full_ids(node.call)
        if node.order in orders:
            node.parent = _longest_extended(node.order, full[: node.prompt_len], ends, nodes)
        ends.setdefault(len(full), {}).setdefault(xxhash.xxh3_128_digest(full.tobytes()), []).append(node.order)


def full_ids(call: CapturedCall) -> Int32Array:
    return call.full_ids.astype(np.int32, copy=False)


def path_to(nodes: Sequence[Node], leaf: int) -> list[Node]:
    """Root → leaf."""
    path = [nodes[leaf]]
    while (parent := path[-1].parent) is not None:
        path.append(nodes[parent])
    return path[::-1]


def _longest_extended(
    order: int, prompt: Int32Array, ends: dict[int, dict[bytes, list[int]]], nodes: list[Node]
) -> int | None:
    """Of equal ones the latest that came before, else the latest."""
    hasher = xxhash.xxh3_128()
    at = 0
    candidates: list[int] = []
    for length in sorted(length for length in ends if length <= len(prompt)):
        hasher.update(prompt[at:length].tobytes())
        at = length
        candidates += sorted(ends[length].get(hasher.digest(), []), key=lambda other: (other < order, other))
    for candidate in reversed(candidates):
        if np.array_equal(full_ids(nodes[candidate].call), prompt[: nodes[candidate].total_len]):
            return candidate
    return None

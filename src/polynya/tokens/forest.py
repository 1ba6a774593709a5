"""The call forest: which call's prompt strictly extends which earlier call, proved on the ids.

Invariant: ``parent`` of a call is the earlier call with the longest ``prompt + sampled`` that is a prefix of this call's
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
from polynya.tokens.validate import common_prefix


class Node(msgspec.Struct, kw_only=True):
    """One call in the forest. Positions are in its own ``prompt + sampled``."""

    order: int
    call: CapturedCall
    parent: int | None
    """Order of the parent."""
    prompt_len: int
    total_len: int
    children: list[int] = []
    break_cause: str = ""
    """For a root that is not the first call: how its prompt leaves the nearest earlier call."""


def grow(calls: Sequence[CapturedCall]) -> list[Node]:
    """Place sound calls, in commit order, in a forest. Cost: linear in the ids, whatever their number of calls."""
    nodes: list[Node] = []
    ends: dict[int, dict[bytes, list[int]]] = {}
    for order, call in enumerate(calls):
        prompt = np.ascontiguousarray(call.prompt_ids, dtype=np.int32)
        full = np.concatenate([prompt, call.sampled_ids])
        parent = _longest_extended(prompt, ends, nodes)
        node = Node(order=order, call=call, parent=parent, prompt_len=len(prompt), total_len=len(full))
        if parent is not None:
            nodes[parent].children.append(order)
        elif nodes:
            node.break_cause = _cause(prompt, nodes)
        nodes.append(node)
        ends.setdefault(len(full), {}).setdefault(xxhash.xxh3_128_digest(full.tobytes()), []).append(order)
    return nodes


def full_ids(call: CapturedCall) -> Int32Array:
    return np.concatenate([call.prompt_ids, call.sampled_ids]).astype(np.int32, copy=False)


def path_to(nodes: Sequence[Node], leaf: int) -> list[Node]:
    """Root → leaf."""
    path = [nodes[leaf]]
    while (parent := path[-1].parent) is not None:
        path.append(nodes[parent])
    return path[::-1]


def _longest_extended(prompt: Int32Array, ends: dict[int, dict[bytes, list[int]]], nodes: list[Node]) -> int | None:
    hasher = xxhash.xxh3_128()
    at = 0
    candidates: list[int] = []
    for length in sorted(length for length in ends if length <= len(prompt)):
        hasher.update(prompt[at:length].tobytes())
        at = length
        candidates += ends[length].get(hasher.digest(), [])
    for order in reversed(candidates):
        if np.array_equal(full_ids(nodes[order].call), prompt[: nodes[order].total_len]):
            return order
    return None


def _cause(prompt: Int32Array, nodes: Sequence[Node]) -> str:
    """Where the prompt leaves the earlier call that it shares most with. Token-level facts only."""
    nearest, shared = max(
        ((node, common_prefix(prompt, full_ids(node.call))) for node in nodes), key=lambda pair: pair[1]
    )
    if shared == len(prompt):
        return "prompt_repeated_or_cut"
    if shared >= nearest.prompt_len:
        return "sampled_not_echoed"
    return "history_changed" if shared else "unrelated_prompt"

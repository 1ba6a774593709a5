"""Is what the engine reported fit to be trained on? Asked at ingest of each call, and of each row before export.

Refuses to correct anything: a wrong length is not cut, a NaN is not zeroed, a sentinel is not a logprob.
"""

from __future__ import annotations

import msgspec
import numpy as np

from polynya.schema import Exclusion, Float32Array, Int32Array, Trace

SENTINEL = -9000.0
"""Engines that lack a logprob report -9999; no real one comes near (a 32-bit softmax ends at about -104)."""


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    exclusion: Exclusion | None = None
    position: int | None = None
    """Index of the first bad entry among the sampled (or prompt) ids."""
    detail: str = ""


SOUND = Judgement()


def judge(
    *,
    prompt_ids: Int32Array | None,
    sampled_ids: Int32Array | None,
    logprobs: Float32Array | None,
    known: int = 0,
    vocab_size: int | None = None,
    guided: bool = False,
) -> Judgement:
    """Judge one reply. ``known``: so many ids stand before ``prompt_ids`` and were judged with an earlier call."""
    if prompt_ids is None and sampled_ids is None:
        return Judgement(exclusion=Exclusion.TEXT_ONLY, detail="the engine gave no token ids")
    if prompt_ids is None or sampled_ids is None or len(prompt_ids) + known == 0:
        missing = "sampled_ids" if sampled_ids is None else "prompt_ids"
        return Judgement(exclusion=Exclusion.INCOMPLETE_IDS, detail=f"{missing} missing or empty")
    # ids before all else: what extends this prompt takes them for judged
    for name, ids in (("prompt_ids", prompt_ids), ("sampled_ids", sampled_ids)):
        at = None if _all_in_range(ids, vocab_size) else _first(_out_of_range(ids, vocab_size))
        if at is not None:
            place = at + known if name == "prompt_ids" else at
            return Judgement(exclusion=Exclusion.ID_OUT_OF_RANGE, position=place, detail=f"{name}[{place}] = {ids[at]}")
    given = 0 if logprobs is None else len(logprobs)
    if logprobs is None or given != len(sampled_ids):
        return Judgement(
            exclusion=Exclusion.LENGTH_MISMATCH, detail=f"{len(sampled_ids)} sampled ids, {given} logprobs"
        )
    at = None if _all_logprobs(logprobs) else _first(~_is_logprob(logprobs))
    if at is not None:
        return Judgement(exclusion=Exclusion.NONFINITE_LOGPROB, position=at, detail=f"logprobs[{at}] = {logprobs[at]}")
    if guided:
        return Judgement(exclusion=Exclusion.GRAMMAR_MASKED, detail="guided decoding masks the distribution")
    return SOUND


def row_problem(trace: Trace, vocab_size: int | None = None) -> str:
    """What is wrong with a row, or ``""``. The last gate before anything is written."""
    n = len(trace.input_ids)
    if not (n == len(trace.loss_mask) == len(trace.logprobs)):
        return f"lengths differ: {n} ids, {len(trace.loss_mask)} mask, {len(trace.logprobs)} logprobs"
    if n == 0:
        return "empty row"
    trained = trace.loss_mask == 1
    if not np.array_equal(trained, trace.loss_mask != 0):
        return "loss_mask holds other values than 0 and 1"
    if not _is_logprob(trace.logprobs).all():
        return f"logprobs[{_first(~_is_logprob(trace.logprobs))}] is not a finite number at or below zero"
    if trace.logprobs[~trained].any():
        return f"logprobs[{_first((trace.logprobs != 0) & ~trained)}] is not 0.0 where the mask is 0"
    if bool((trace.input_ids < 0).any()) or (vocab_size is not None and bool((trace.input_ids >= vocab_size).any())):
        return "an id is outside the vocabulary"
    if not (0 < trace.prompt_len <= n) or trained[: trace.prompt_len].any():
        return f"prompt_len {trace.prompt_len} does not fit the mask of {n} tokens"
    return ""


def common_prefix(a: Int32Array, b: Int32Array) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    differs = _first(a[:n] != b[:n])
    return n if differs is None else differs


def _is_logprob(values: Float32Array) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.isfinite(values) & (values <= 0.0) & (values > SENTINEL)


def _all_logprobs(values: Float32Array) -> bool:
    """(A NaN makes both extremes NaN, which compares as false.)"""
    return not values.size or bool(values.max() <= 0.0 and values.min() > SENTINEL)


def _all_in_range(ids: Int32Array, vocab_size: int | None) -> bool:
    return not ids.size or bool(ids.min() >= 0 and (vocab_size is None or ids.max() < vocab_size))


def _out_of_range(ids: Int32Array, vocab_size: int | None) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    return ids < 0 if vocab_size is None else (ids < 0) | (ids >= vocab_size)


def _first(wrong: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> int | None:
    return int(wrong.argmax()) if wrong.any() else None

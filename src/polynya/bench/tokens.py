"""``bench tokens``: what finding, bridging, placing and merging cost, beside the way of lists of Python integers.

Invariant: both ways of merging give the same rows, which is checked in the run. All figures are CPU microseconds of this
process; the comparison is made in one run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from polynya.capture.calls import StoredCall
from polynya.capture.prompts import Leaf, place
from polynya.capture.records import CallIntent, CallOutcome
from polynya.schema import Int32Array
from polynya.tokens import build
from polynya.tokens.bridge import SENTINEL, Vocabulary, closes, dummy_conversation, split, suffix_of
from polynya.tokens.matching import Matcher
from polynya.tokens.printed import PrintedIds, print_ids

_STOP, _OPEN = 151_645, 151_644
_VOCABULARY = Vocabulary(special={"<|im_end|>": _STOP, "<|im_start|>": _OPEN}, stop_ids=frozenset({_STOP}))


def tokens_report(
    *, ids: int = 130_000, messages: int = 172, body: int = 660_000, sessions: int = 100, calls: int = 60
) -> dict[str, Any]:
    """Figures in microseconds, medians; ``merge`` in CPU seconds."""
    rng = np.random.default_rng(11)
    history = _messages(messages, body)
    report: dict[str, Any] = {"prompt_ids": ids, "messages": messages, "body_bytes": body}
    report["match_cold_us"] = _median(5, lambda: Matcher[int]().chain(b"root", history))
    report["match_warm_us"] = _warm(history)
    report["bridge_us"] = _bridge(rng, ids)
    report["capture_us"] = _capture(rng, ids)
    report["merge"] = _merge(rng, sessions, calls, ids)
    return report


def _median(times: int, work: Callable[[], object]) -> float:
    taken = []
    for _ in range(times):
        start = time.process_time_ns()
        work()
        taken.append((time.process_time_ns() - start) / 1000)
    return round(float(np.median(taken)), 1)


def _messages(count: int, size: int) -> list[bytes]:
    text = "def f(x):\n    return x  # a line of source\n" * (size // count // 42 + 1)
    made: list[dict[str, Any]] = [{"role": "system", "content": "be good"}]
    for turn in range(count - 1):
        if turn % 2:
            call = {"id": f"c{turn}", "type": "function", "function": {"name": "edit", "arguments": '{"path": "a.py"}'}}
            made.append({"role": "assistant", "content": None, "tool_calls": [call]})
        else:
            made.append({"role": "tool" if turn else "user", "content": text, "tool_call_id": f"c{turn - 1}"})
    return [msgspec.json.encode(message) for message in made]


def _warm(history: Sequence[bytes]) -> float:
    """Each request has two messages more than the one before; the bytes of the others are other objects, as from a new body."""
    matcher: Matcher[int] = Matcher()
    matcher.chain(b"root", history[:-40])
    taken = []
    for end in range(len(history) - 38, len(history) + 1, 2):
        now = [bytes(bytearray(raw)) for raw in history[:end]]
        start = time.process_time_ns()
        chain = matcher.chain(b"root", now)
        matcher.find(chain)
        taken.append((time.process_time_ns() - start) / 1000)
    return round(float(np.median(taken)), 1)


def _bridge(rng: np.random.Generator, ids: int) -> float:
    """All but the template and the tokenizer, which are the engine's; 8 KB of tool output."""
    parent = rng.integers(0, 150_000, ids).astype(np.int32)
    tail = [msgspec.json.encode({"role": "tool", "tool_call_id": "c", "content": "a line of <output>\n" * 430})]

    def work() -> None:
        made, mask = dummy_conversation(tail, [("c", "run")], _VOCABULARY.special)
        content = msgspec.json.decode(made[-1])["content"]
        text = f"<|im_start|>assistant\n{SENTINEL}<|im_end|>\n<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
        suffix = suffix_of(text, _VOCABULARY)
        assert suffix is not None
        split(suffix.text, _VOCABULARY.special, mask)
        closes(parent, _VOCABULARY, suffix.close)

    return _median(20, work)


def _stored(number: int, base: StoredCall | None, context: Int32Array, sampled: Int32Array) -> StoredCall:
    intent = CallIntent(
        session_id="s", attempt=1, call_id=f"s.{number}", index=number, at=0.0, dialect="d", lane="main", model="m"
    )
    call = StoredCall(intent, base)
    record = CallOutcome(
        session_id="s",
        attempt=1,
        call_id=intent.call_id,
        at=0.0,
        outcome="ok",
        keep=base.total_len if base else 0,
        context=context.tobytes(),
        sampled=sampled.tobytes(),
        logprobs=np.full(sampled.size, -0.5, dtype=np.float32).tobytes(),
        has_ids=True,
    )
    call.complete(record, base)
    call.delivered = True
    return call


def _capture(rng: np.random.Generator, ids: int) -> float:
    """The place of a printed prompt that extends the latest call by a thousand ids."""
    first = rng.integers(0, 150_000, ids - 2000).astype(np.int32)
    sampled, rest = (rng.integers(0, 150_000, 1000).astype(np.int32) for _ in range(2))
    call = _stored(0, None, first, sampled)
    leaf = Leaf(call, [print_ids(first)], print_ids(sampled))
    whole = print_ids(np.concatenate([first, sampled, rest]))

    def work() -> None:
        placed = place(PrintedIds(whole, 0, len(whole)), [leaf])
        assert placed is not None and placed.keep == ids - 1000

    return _median(20, work)


def _merge(rng: np.random.Generator, sessions: int, calls: int, ids: int) -> dict[str, Any]:
    """Sessions whose last prompt holds ``ids`` ids, one row each."""
    growth = ids // calls
    parts = [rng.integers(0, 150_000, growth).astype(np.int32) for _ in range(2 * calls)]
    chain: list[StoredCall] = []
    for number in range(calls):
        context, sampled = parts[2 * number][: growth // 2], parts[2 * number + 1][: growth - growth // 2]
        chain.append(_stored(number, chain[-1] if chain else None, context, sampled))
    lists = [(call.prompt_ids.tolist(), call.sampled_ids.tolist()) for call in chain]
    ours_rows, theirs_rows = _rows_of(chain), _sliced(lists)
    assert [row.tolist() for row in ours_rows] == theirs_rows, "the two ways of merging give other rows"
    ours = _seconds(sessions, lambda: build(chain, session_id="s", builder="prefix_merging"))
    theirs = _seconds(max(1, sessions // 20), lambda: _sliced(lists)) * sessions / max(1, sessions // 20)
    return {
        "sessions": sessions,
        "calls": calls,
        "build_s": round(ours, 4),
        "lists_s": round(theirs, 3),
        "times_cheaper": round(theirs / ours, 1),
    }


def _seconds(times: int, work: Callable[[], object]) -> float:
    start = time.process_time()
    for _ in range(times):
        work()
    return time.process_time() - start


def _rows_of(chain: Sequence[StoredCall]) -> list[Int32Array]:
    return [trace.input_ids for trace in build(chain, session_id="s", builder="prefix_merging").traces]


def _sliced(calls: Sequence[tuple[list[int], list[int]]]) -> list[list[int]]:
    """Prefix merging as it is usually written: whole lists a call, a slice for each comparison, a new list for each row."""
    rows: list[dict[str, Any]] = []
    for prompt, sampled in calls:
        for row in rows:
            held = row["ids"]
            if len(prompt) >= len(held) and prompt[: len(held)] == held:
                added = prompt[len(held) :]
                row["ids"] = held + added + sampled
                row["mask"] = row["mask"] + [0] * len(added) + [1] * len(sampled)
                row["logprobs"] = row["logprobs"] + [0.0] * len(added) + [-0.5] * len(sampled)
                break
        else:
            rows.append(
                {
                    "ids": prompt + sampled,
                    "mask": [0] * len(prompt) + [1] * len(sampled),
                    "logprobs": [0.0] * len(prompt) + [-0.5] * len(sampled),
                }
            )
    return [row["ids"] for row in rows]

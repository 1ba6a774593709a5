"""Our rows against those of TRL and tinker-cookbook, by their own functions, on random histories. Run by ``differential.sh``.

Each history is what an engine saw of one conversation: prompts and sampled ids, turn by turn, with appended turns, edits,
drift, compactions, retries, and (in every third history) two conversations that take turns. For each of them is checked:

* the tokens that are trained are the same, each behind the same tokens and with the same logprob, in all three;
* where each turn goes on from the last one or from none, the rows are the same, id by id and mask by mask.

Where policies differ it is counted and printed. TRL and tinker hold one row at a time: a turn that comes back to an earlier
conversation begins a new row there, and goes on with the old one here. Our forest does not depend on the order of arrival:
a turn whose ids an earlier prompt happens to hold already shares that row here. TRL as it is set by default overwrites up to
1,024 drifted tokens at the end of a row as context, and so leaves sampled tokens out without a word.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import tinker
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.types import Trajectory, Transition
from trl.experimental.async_grpo.async_rollout_worker import TurnRecord, _chain_to_sequences

from polynya.schema import Lane
from polynya.tokens import build

TRL_DEFAULT_THRESHOLD = 1024
Row = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""Ids, mask, logprobs (0.0 where the mask is 0)."""


class Turn(msgspec.Struct):
    """What a builder reads of a call."""

    call_id: str
    prompt_ids: Any
    sampled_ids: Any
    logprobs: Any
    agent: str = ""
    lane: Lane = Lane.MAIN
    outcome: str = "ok"
    exclusion: None = None
    delivered: bool = True
    finish_reason: str = "stop"
    policy_spans: list[Any] = []
    extends: None = None
    messages: list[bytes] = []
    reply: bytes = b"{}"
    routed_experts: None = None
    routed_experts_shape: list[int] = []
    messages_json: str = "[]"
    tools_json: str = "[]"

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def full_ids(self) -> Any:
        return np.concatenate([self.prompt_ids, self.sampled_ids])

    @property
    def sampled_count(self) -> int:
        return len(self.sampled_ids)


def history(draw: random.Random, *, interleaved: bool) -> list[Turn]:
    """Random turns; ids of new text are drawn from few, so that chance agreements happen."""
    held: list[list[int]] = [[]]
    turns: list[Turn] = []
    for number in range(draw.randint(1, 12)):
        which = draw.randrange(2) if interleaved else 0
        while len(held) <= which:
            held.append([])
        prompt = _prompt(draw, held[which])
        sampled = [draw.randint(1, 9) for _ in range(draw.randint(1, 6))]
        logprobs = [-draw.randint(1, 1000) / 256 for _ in sampled]
        turns.append(
            Turn(
                call_id=f"c{number}",
                prompt_ids=np.array(prompt, dtype=np.int32),
                sampled_ids=np.array(sampled, dtype=np.int32),
                logprobs=np.array(logprobs, dtype=np.float32),
            )
        )
        held[which] = prompt + sampled
    return turns


def _prompt(draw: random.Random, held: list[int]) -> list[int]:
    new = [draw.randint(1, 9) for _ in range(draw.randint(0 if held else 1, 6))]
    if not held:
        return new
    kind = draw.choices(("append", "drift", "edit", "cut", "fresh", "same"), (70, 8, 8, 5, 4, 5))[0]
    if kind == "drift":
        at = draw.randrange(max(0, len(held) - 6), len(held))
        return [*held[:at], held[at] + 10, *held[at + 1 :], *new]
    if kind == "edit":
        at = draw.randrange(len(held))
        return [*held[:at], held[at] + 10, *held[at + 1 :], *new]
    if kind == "cut":
        return held[: draw.randint(1, len(held))]
    if kind == "fresh":
        return [draw.randint(10, 19), *new]
    return [*held] if kind == "same" else [*held, *new]


def ours(turns: Sequence[Turn]) -> list[Row]:
    built = build(turns, session_id="s", builder="prefix_merging")  # type: ignore[arg-type]
    return [
        (tuple(row.input_ids.tolist()), tuple(row.loss_mask.tolist()), tuple(row.logprobs.tolist()))
        for row in built.traces
    ]


def of_trl(turns: Sequence[Turn], threshold: int) -> list[Row]:
    records = [
        TurnRecord(turn.prompt_ids.tolist(), turn.sampled_ids.tolist(), turn.logprobs.tolist()) for turn in turns
    ]
    rows, _ = _chain_to_sequences(records, None, threshold)
    return [
        _row(vars(row) if hasattr(row, "__dict__") else {name: getattr(row, name) for name in row.__slots__})
        for row in rows
    ]


def _row(fields: dict[str, Any]) -> Row:
    ids, mask, logprobs = list(fields.values())[:3]
    return tuple(ids), tuple(mask), tuple(logprobs)


def of_tinker(turns: Sequence[Turn]) -> list[Row]:
    transitions = [
        Transition(
            ob=tinker.ModelInput.from_ints(turn.prompt_ids.tolist()),
            ac=TokensWithLogprobs(tokens=turn.sampled_ids.tolist(), maybe_logprobs=turn.logprobs.tolist()),
            reward=0.0,
            episode_done=False,
        )
        for turn in turns
    ]
    trajectory = Trajectory(transitions=transitions, final_ob=tinker.ModelInput.empty())
    return [_of_datum(datum) for datum in trajectory_to_data(trajectory, 1.0)]


def _of_datum(datum: tinker.Datum) -> Row:
    """A datum is shifted by one: its first token is no target."""
    inputs = datum.model_input.to_ints()
    targets, mask, logprobs = [
        datum.loss_fn_inputs[name].to_torch().tolist() for name in ("target_tokens", "mask", "logprobs")
    ]
    assert inputs[1:] == targets[:-1]
    return (inputs[0], *targets), (0, *map(int, mask)), (0.0, *logprobs)


def trained(rows: Sequence[Row]) -> Counter[Any]:
    """Every trained token with all that stands before it, and its logprob."""
    return Counter(
        (ids[: place + 1], logprobs[place])
        for ids, mask, logprobs in rows
        for place, wanted in enumerate(mask)
        if wanted
    )


def comes_back(turns: Sequence[Turn]) -> bool:
    """Some turn goes on from one that is not in the last one's row."""
    rows: list[tuple[int, ...]] = []
    for turn in turns:
        prompt, whole = _ids(turn)
        if any(prompt[: len(row)] == row for row in rows[:-1]):
            return True
        if rows and prompt[: len(rows[-1])] == rows[-1]:
            rows[-1] = whole
        else:
            rows.append(whole)
    return False


def foreseen(turns: Sequence[Turn]) -> bool:
    """Some prompt holds, by chance, what was sampled behind it only later."""
    both = [_ids(turn) for turn in turns]
    return any(both[i][0][: len(whole)] == whole for j, (_, whole) in enumerate(both) for i in range(j))


def _ids(turn: Turn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    prompt = tuple(turn.prompt_ids.tolist())
    return prompt, (*prompt, *turn.sampled_ids.tolist())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    count: Counter[str] = Counter()
    wrong: list[str] = []
    for number in range(options.histories):
        seed = options.seed * 1_000_003 + number
        turns = history(random.Random(seed), interleaved=number % 3 == 2)
        mine, trl, thinker = ours(turns), of_trl(turns, 0), of_tinker(turns)
        if not trained(mine) == trained(trl) == trained(thinker):
            wrong.append(f"seed {seed}: other tokens are trained, or behind other ones")
        count["trained tokens"] += sum(trained(mine).values())
        if foreseen(turns):
            count["histories where a prompt holds by chance what is sampled later"] += 1
        elif comes_back(turns):
            count["histories that come back to an earlier row"] += 1
            count["rows there, ours"] += len(mine)
            count["rows there, TRL and tinker"] += len(trl)
        else:
            count["histories where the policies agree"] += 1
            if not sorted(mine) == sorted(trl) == sorted(thinker):
                wrong.append(f"seed {seed}: other rows")
        realigned = of_trl(turns, TRL_DEFAULT_THRESHOLD)
        count["trained tokens that TRL's default leaves out"] += sum(trained(mine).values()) - sum(
            trained(realigned).values()
        )
    print(f"{options.histories} histories, seed {options.seed}")
    for name, value in count.items():
        print(f"{value:>10,}  {name}")
    for words in wrong[:20]:
        print(words)
    print("no difference" if not wrong else f"{len(wrong)} histories differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

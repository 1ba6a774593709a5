"""What is sent and what is answered: a session of a coding agent, and vLLM's replies to it, byte for byte.

Invariants: everything follows from the ``Spec`` (and this Python's own library, which is the source text), so the mock, the
load generator and the judge make the same ids without talking to each other; within an epoch of a session each prompt
strictly extends the prompt and the sampled ids of the turn before; a new epoch keeps the system prompt's ids and changes what follows,
as a compaction does.
"""

from __future__ import annotations

import functools
import re
import sysconfig
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from polynya.schema import Float32Array, Int32Array

_encode = msgspec.json.Encoder().encode
SESSION_MARK = b"[[session "
TURN_MARK = b"[[turn "
SESSION_TEXT = "[[session 00000 epoch 00000]]"
_MARK_IDS = 2
"""Ids of a prompt that name its session and its epoch."""
_MARK_BASE = 10_000
_VOCAB = 151_643


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """One size. ``body_bytes`` and ``prompt_ids`` are means over the turns of an epoch."""

    name: str
    body_bytes: int
    prompt_ids: int
    sampled: int = 1000
    turns: int = 20
    """Turns of an epoch."""
    growth_ids: int = 0
    """Ids that a turn adds to the prompt, the sampled ones among them; 0: every request is a conversation of its own."""
    variants: int = 16
    """Different texts; sessions beyond share them. Ids of sessions differ all the same."""
    stream: bool = True
    """Whether Anthropic clients ask for a stream, as Claude Code does."""
    window: int = 1_000_000

    @property
    def first_ids(self) -> int:
        return self.prompt_ids - self.growth_ids * (self.turns - 1) // 2

    @property
    def growth_bytes(self) -> int:
        return self.body_bytes * self.growth_ids // self.prompt_ids

    def prompt_length(self, turn: int) -> int:
        return self.first_ids + self.growth_ids * turn


SIZES = {"2k": (2_000, 500), "106k": (106_000, 23_000), "577k": (577_000, 130_000)}


def spec_of(size: str, sampled: int = 1000, **fields: Any) -> Spec:
    body, ids = SIZES[size]
    growth = sampled + 950
    turns = min(20, int(0.6 * ids / growth))
    if turns < 2:
        return Spec(name=size, body_bytes=body, prompt_ids=ids, sampled=sampled, turns=16, **fields)
    return Spec(name=size, body_bytes=body, prompt_ids=ids, sampled=sampled, turns=turns, growth_ids=growth, **fields)


def long_session(**fields: Any) -> Spec:
    """60 turns from 52 to 577 KB and from 13k to 130k prompt ids: what a live session costs in memory and on the disk."""
    return Spec(name="60 turns", body_bytes=314_000, prompt_ids=71_500, turns=60, growth_ids=1983, **fields)


class Call(msgspec.Struct, frozen=True):
    """Which request of which session."""

    session: int
    epoch: int
    turn: int


def call_number(spec: Spec, session: int, number: int) -> Call:
    return Call(session, number // spec.turns, number % spec.turns)


class Expected(msgspec.Struct, frozen=True):
    prompt: Int32Array
    sampled: Int32Array
    logprobs: Float32Array


def tool_call_id(turn: int) -> str:
    return f"chatcmpl-tool-{turn:016x}"


class _Pieces:
    """Token texts, with the JSON of a logprobs entry for each, made once."""

    def __init__(self) -> None:
        rng = np.random.default_rng(7)
        found = re.findall(r" ?\w+|[^\w\s]+|\s+", _source()[:400_000])
        texts = sorted(set(found))
        weights = np.array([found.count(text) if len(text) < 3 else 1 for text in texts], dtype=np.float64)
        chosen = rng.choice(len(texts), size=8192, p=weights / weights.sum())
        self.texts = [texts[index] for index in chosen]
        self.logprobs = -rng.exponential(0.4, size=8192)
        self.entries = [
            _encode({"token": text, "logprob": float(lp), "bytes": list(text.encode()), "top_logprobs": []})
            for text, lp in zip(self.texts, self.logprobs, strict=True)
        ]


class Variant:
    """One text: ids, replies and bodies."""

    def __init__(self, spec: Spec, number: int) -> None:
        self.spec = spec
        self.number = number
        rng = np.random.default_rng([11, number])
        total = spec.prompt_length(spec.turns) + spec.sampled * (1 if spec.growth_ids else spec.turns)
        self.ids = np.exp(rng.uniform(np.log(8), np.log(_VOCAB), size=total)).astype(np.int32)
        self.mark_at = max(1, spec.first_ids // 8)
        self.picks = rng.integers(0, 8192, size=(spec.turns, spec.sampled))
        texts = [str(token) for token in self.ids.tolist()]
        self._ends = np.cumsum([len(text) + 1 for text in texts]) - 1
        self._ids_text = ",".join(texts).encode()
        self._choices: dict[int, bytes] = {}

    def expected(self, call: Call) -> Expected:
        prompt = self.ids[: self.spec.prompt_length(call.turn)].copy()
        prompt[self.mark_at : self.mark_at + _MARK_IDS] = self._mark(call)
        logprobs = pieces().logprobs[self.picks[call.turn]].astype(np.float32)
        return Expected(prompt, self._sampled(call.turn), logprobs)

    def _mark(self, call: Call) -> tuple[int, int]:
        """The ids that tell prompts apart. A turn has a mark of its own only where it does not extend the one before."""
        later = call.epoch if self.spec.growth_ids else call.epoch * self.spec.turns + call.turn
        return _MARK_BASE + call.session, _MARK_BASE + later

    def _sampled(self, turn: int) -> Int32Array:
        start = self.spec.prompt_length(turn) + (0 if self.spec.growth_ids else turn * self.spec.sampled)
        return self.ids[start : start + self.spec.sampled]

    def reply_texts(self, turn: int) -> tuple[str, str]:
        """Content, and the arguments of the one tool call."""
        texts = [pieces().texts[pick] for pick in self.picks[turn]]
        said = len(texts) * 6 // 10
        arguments = {"file_path": f"/repo/src/module_{turn}.py", "content": "".join(texts[said:])}
        return "".join(texts[:said]), _encode(arguments).decode()

    def answer(self, call: Call, number: int) -> list[bytes | memoryview]:
        """vLLM's whole HTTP answer; ``number`` makes its id."""
        end = self.spec.prompt_length(call.turn)
        text = memoryview(self._ids_text)
        before, after = int(self._ends[self.mark_at - 1]) + 1, int(self._ends[self.mark_at + _MARK_IDS - 1])
        prompt = (
            text[:before],
            b"%d,%d" % self._mark(call),
            text[after : int(self._ends[end - 1])],
        )
        identity = b'{"id":"chatcmpl-%016x",' % number
        tail = b'],"prompt_text":null,"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}'
        body: list[bytes | memoryview] = [identity, self._choice(call.turn), *prompt, tail]
        head = (
            b"HTTP/1.1 200 OK\r\ndate: Tue, 01 Dec 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
            b"content-length: %d\r\ncontent-type: application/json\r\n\r\n" % sum(map(len, body))
        )
        return [head, *body]

    def _choice(self, turn: int) -> bytes:
        """From after the id to the first prompt id."""
        made = self._choices.get(turn)
        if made is not None:
            return made
        end, sampled = self.spec.prompt_length(turn), self.spec.sampled
        content, arguments = self.reply_texts(turn)
        call = {"id": tool_call_id(turn), "type": "function"}
        call_json = _encode({**call, "function": {"name": "Write", "arguments": arguments}})
        entries = pieces().entries
        made = b"".join(
            [
                b'"object":"chat.completion","created":1796079855,"model":"bench","choices":[{"index":0,"message":'
                b'{"role":"assistant","content":%b,"refusal":null,"annotations":null,"audio":null,"function_call":null,'
                b'"tool_calls":[%b],"reasoning":null},"logprobs":{"content":[' % (_encode(content), call_json),
                b",".join([entries[pick] for pick in self.picks[turn]]),
                b']},"finish_reason":"tool_calls","stop_reason":null,"token_ids":[',
                ",".join(map(str, self._sampled(turn).tolist())).encode(),
                b'],"routed_experts":null}],"service_tier":null,"system_fingerprint":"vllm-0.32.0-4610055f","usage":'
                b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":null,'
                b'"completion_tokens_details":null},"prompt_logprobs":null,"prompt_token_ids":['
                % (end, end + sampled, sampled),
            ]
        )
        self._choices[turn] = made
        return made


class Workload:
    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._variants: dict[int, Variant] = {}

    def variant(self, session: int) -> Variant:
        number = session % self.spec.variants
        made = self._variants.get(number)
        if made is None:
            made = self._variants[number] = Variant(self.spec, number)
        return made


@functools.cache
def pieces() -> _Pieces:
    return _Pieces()


@functools.cache
def _source() -> str:
    """Real source text: this Python's own library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path for path in library.glob("*.py") if path.stat().st_size > 20_000)
    return "".join(path.read_text("utf-8", "replace") for path in names[:60])


def source_text(rng: np.random.Generator, encoded_bytes: int) -> str:
    """Source text whose JSON string is about that long."""
    source = _source()
    start = int(rng.integers(0, len(source) - 2 * encoded_bytes - 1))
    text = source[start : start + encoded_bytes]
    spare = len(_encode(text)) - encoded_bytes
    return text[: max(1, len(text) - spare)]

"""What the scripted engine answers: a pure function of seed, session affinity, turn and offered tools.

Two runs of one script give the same ids and the same logprobs, so a test can say beforehand what a capture must hold
(``Script.expected``). Faults are part of the script too: they name a misbehaviour and for how many attempts it lasts.
Nothing here is a language model; replies are chosen, not sampled. Pure: no I/O, no clock, no state.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
import xxhash

from polynya.dialects.neutral import ChatReply, ToolCall, ToolSpec, Usage
from polynya.engines.scripted import tokens
from polynya.schema import Float32Array, Int32Array

FaultKind = Literal[
    "http_error",
    "overflow",
    "hang",
    "reset",
    "reset_midway",
    "truncated",
    "bad_json",
    "short_logprobs",
    "nan_logprob",
    "null_logprob",
    "sentinel_logprob",
    "no_logprobs",
    "no_ids",
    "no_prompt_ids",
    "echo_mismatch",
    "id_out_of_range",
    "abort",
    "token_id_strings",
    "bad_token_id_string",
]
WHOLE_CALL_FAULTS: frozenset[str] = frozenset(
    {"http_error", "overflow", "hang", "reset", "reset_midway", "truncated", "bad_json"}
)
"""Faults that leave no readable reply; the others spoil one. ``reset_midway``: a connection reset inside the body;
``truncated``: a body that is closed short of its announced length; ``bad_json``: JSON cut in a body that is whole.
``abort`` is none of them: half of the reply is sampled and the engine breaks off; a prompt that ends with the half gets the rest."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    kind: FaultKind
    times: int | None = None
    """The first ``times`` attempts of the call fail so; None: all."""
    status: int = 503
    """Of ``http_error``."""
    retry_after: str | None = None

    def strikes(self, attempt: int) -> bool:
        return self.times is None or attempt < self.times


class ScriptedCall(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: str = "{}"
    id: str = ""
    """Empty: made from affinity, turn and position."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One reply."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ScriptedCall] = []
    finish_reason: Literal["stop", "length"] = "stop"
    """``length``: no end token is sampled."""
    delay: float = 0.0
    """Seconds that the engine seems to work."""
    hold: bool = False
    """Do not answer before ``release()`` of the engine or app."""
    fault: Fault | None = None


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What a correct capture of one call holds."""

    step: Step
    sampled_ids: Int32Array
    logprobs: Float32Array
    reply: ChatReply


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """``sessions[affinity]`` or ``steps``, one step a turn, the last one repeated.

    With neither, the built-in agent: ``act_turns`` times it calls a tool that runs ``command`` (or writes
    ``notes.txt``), when one is offered, then it ends with ``closing``.
    """

    seed: int = 0
    steps: list[Step] = []
    sessions: dict[str, list[Step]] = {}
    act_turns: int = 1
    command: str = "printf 'hello world' > notes.txt"
    closing: str = "Done."
    delay: float = 0.0
    """Added to every step's own."""
    model: str = "scripted"
    window: int = 131_072
    token_in: bool = True
    """False: prompt ids in a request are ignored in silence, as older servers do."""
    images: bool = True
    """False: image parts are refused, as by a model without eyes."""
    noncanonical: float = 0.0
    """Share of sampled bytes that are ids which ``encode`` never gives."""
    drop_reasoning: bool = False
    logprob_kind: Literal["raw", "processed"] = "raw"
    policy_version: str | None = None

    def step(self, affinity: str, turn: int, tools: list[ToolSpec]) -> Step:
        steps = self.sessions.get(affinity, self.steps)
        if steps:
            return steps[min(turn, len(steps) - 1)]
        act = action(tools, self.command) if turn < self.act_turns else None
        if act is None:
            return Step(text=self.closing)
        return Step(text="I will do it now." if turn == 0 else "", tool_calls=[act])

    def expected(
        self,
        affinity: str,
        turn: int,
        *,
        tools: list[ToolSpec] | None = None,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        prompt_tokens: int = 0,
    ) -> Expected:
        """The reply of one call. ``prompt_tokens`` only fills the usage."""
        step = self.step(affinity, turn, tools or [])
        calls = [(call.name, call.arguments) for call in step.tool_calls]
        ids = tokens.encode_reply(step.text, step.reasoning, calls, ended=step.finish_reason == "stop")
        finish = step.finish_reason
        if max_tokens is not None and ids.size > max_tokens:
            ids, finish = ids[:max_tokens], "length"
        draws = self._draws(affinity, turn, ids.size)
        if self.noncanonical > 0:
            swap = (ids < 256) & (draws[0] < self.noncanonical)
            ids = np.where(swap, ids + tokens.ALTERNATE, ids).astype(np.int32)
        scale = temperature if self.logprob_kind == "processed" and temperature > 0 else 1.0
        logprobs = (-4.0 * draws[1] ** 3 / scale).astype(np.float32)
        reply = self._reply(affinity, turn, step, ids, finish, prompt_tokens)
        return Expected(step=step, sampled_ids=ids, logprobs=logprobs, reply=reply)

    def part(self, whole: Expected, start: int, end: int, affinity: str, turn: int) -> Expected:
        """The same, of the ids from ``start`` to ``end``."""
        ids = whole.sampled_ids[start:end]
        finish = whole.reply.finish_reason if end == whole.sampled_ids.size else "abort"
        reply = self._reply(affinity, turn, whole.step, ids, finish, whole.reply.usage.prompt_tokens)
        return Expected(step=whole.step, sampled_ids=ids, logprobs=whole.logprobs[start:end], reply=reply)

    def _reply(self, affinity: str, turn: int, step: Step, ids: Int32Array, finish: str, prompt: int) -> ChatReply:
        text, reasoning, calls = tokens.parse_reply(ids)
        named: list[ToolCall] = []
        for index, call in enumerate(calls):
            given = step.tool_calls[index].id if index < len(step.tool_calls) else ""
            made = xxhash.xxh3_128_hexdigest(f"{self.seed}|{affinity}|{turn}|{index}".encode())[:24]
            named.append(ToolCall(id=given or f"call_{made}", name=call.name, arguments=call.arguments))
        return ChatReply(
            text=text,
            reasoning=reasoning,
            tool_calls=named,
            finish_reason="tool_calls" if named and finish == "stop" else finish,
            usage=Usage(prompt_tokens=prompt, completion_tokens=int(ids.size)),
        )

    def _draws(self, affinity: str, turn: int, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        seed = xxhash.xxh3_64_intdigest(f"{self.seed}|{affinity}|{turn}".encode())
        return np.random.Generator(np.random.PCG64(seed)).random((2, count))


def action(tools: list[ToolSpec], command: str) -> ScriptedCall | None:
    """A call of the first offered tool that runs a command, else of the first that writes a file.

    Knows tools by the parameters in their schema, not by name, since every harness names them otherwise.
    """
    schemas = [(tool, _schema(tool)) for tool in tools]
    for key in ("command", "cmd"):
        for tool, schema in schemas:
            if (kind := schema.get(key)) is not None:
                value: Any = ["bash", "-lc", command] if kind.get("type") == "array" else command
                return _call(tool, {key: value}, schema)
    for tool, schema in schemas:
        path = next((key for key in ("file_path", "path", "filePath", "absolute_path") if key in schema), None)
        if path is not None and "content" in schema:
            return _call(tool, {path: "notes.txt", "content": "hello world"}, schema)
    return None


def _schema(tool: ToolSpec) -> dict[str, dict[str, Any]]:
    found = msgspec.json.decode(bytes(tool.parameters))
    properties = found.get("properties") if isinstance(found, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {key: value for key, value in properties.items() if isinstance(value, dict)}


def _call(tool: ToolSpec, arguments: dict[str, Any], schema: dict[str, dict[str, Any]]) -> ScriptedCall:
    if schema.get("description", {}).get("type") == "string":
        arguments = {**arguments, "description": "Create notes.txt"}
    return ScriptedCall(name=tool.name, arguments=msgspec.json.encode(arguments).decode())

"""Public records. Everything that leaves polynya, or is handed from room to room, is one of these.

Invariants: a record is immutable once built; a missing number is ``None``, never ``0``; token arrays are numpy arrays
(``int32`` ids, ``float32`` logprobs in nats, ``uint8`` masks) and never enter ``SessionResult``.
This module refuses unknown fields: a typing error in a task file is an error with the field's path, not a silent default.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

Int16Array = npt.NDArray[np.int16]
Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,119}$(?!\n)"
Identifier = Annotated[str, msgspec.Meta(pattern=ID_PATTERN)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
"""Finite: no timer takes infinity."""
ProgramText = Annotated[str, msgspec.Meta(pattern=r"^[^\x00]*$")]
"""What is given to a program: no argument and no variable can hold a NUL."""
VariableName = Annotated[str, msgspec.Meta(pattern=r"^[^=\x00]+$")]


class Stage(StrEnum):
    """Where a session is in its node."""

    QUEUED = "queued"
    INIT = "init"
    READY = "ready"
    RUNNING = "running"
    POSTRUN = "postrun"
    DONE = "done"


class Status(StrEnum):
    """How a session ended. ``infra_error`` and ``cancelled`` never carry a reward."""

    COMPLETED = "completed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    BUDGET_EXHAUSTED = "budget_exhausted"
    INFRA_ERROR = "infra_error"
    CANCELLED = "cancelled"


class Lane(StrEnum):
    """Who made a call inside the harness."""

    MAIN = "main"
    SUBAGENT = "subagent"
    AUXILIARY = "auxiliary"
    COMPACTION = "compaction"


class Exclusion(StrEnum):
    """Why sampled tokens are not trained: a closed list. ``captured = trained + sum(excluded.values())``."""

    TEXT_ONLY = "text_only"
    """The engine gave no token ids; counted by its own usage number."""
    INCOMPLETE_IDS = "incomplete_ids"
    """Sampled ids without prompt ids, or the other way round."""
    LENGTH_MISMATCH = "length_mismatch"
    """As many logprobs as sampled ids were not given."""
    NONFINITE_LOGPROB = "nonfinite_logprob"
    """A logprob is NaN, infinite, null or above zero."""
    ID_OUT_OF_RANGE = "id_out_of_range"
    GRAMMAR_MASKED = "grammar_masked"
    """Guided decoding: the logprobs are those of a masked distribution."""
    NOT_DELIVERED = "not_delivered"
    """The client was gone before the reply; the harness never acted on it."""
    CANCELLED = "cancelled"
    """The call was cancelled while the engine worked; its tokens are unknown and counted as zero."""
    SUPERSEDED_RETRY = "superseded_retry"
    """A compaction that the harness rejected: the next call of the same agent asks for it again."""
    AUXILIARY_LANE = "auxiliary_lane"
    COMPACTION_LANE = "compaction_lane"
    ATTEMPT_LOST = "attempt_lost"
    """Sampled in an attempt that died with its node; the session ran again."""
    LATE_WRITE = "late_write"
    """Finished after the session was sealed."""
    LEFT_OUT = "left_out"
    """A third party's builder put it into no row."""


class Break(StrEnum):
    """Why a prompt does not extend an earlier call of its agent. The first six are edits, the others drift."""

    TOOL_LIST_CHANGED = "tool_list_changed"
    SYSTEM_CHANGED = "system_changed"
    HISTORY_EDITED = "history_edited"
    """Cleared, rewritten or rewound."""
    COMPACTION = "compaction"
    FOREIGN_ASSISTANT = "foreign_assistant"
    """The history holds an assistant turn that no call of the session gave."""
    REPEATED = "repeated"
    """The same history again: a retry, or another sample of the first turn."""
    REASONING_STRIPPED = "reasoning_stripped"
    """By the harness, or by the chat template."""
    ARGUMENTS_RESERIALISED = "arguments_reserialised"
    RETOKENISED = "retokenised"
    """The same reply came back as other ids."""
    TEMPLATE = "template"
    """The chat template renders the same history otherwise than before."""


# --- what is asked -----------------------------------------------------------------------------------------------


class McpServer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Model Context Protocol server that the agent starts inside its sandbox and talks to over stdio."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$(?!\n)")]
    command: Annotated[str, msgspec.Meta(min_length=1, pattern=r"^[^\x00]*$")]
    """A program of the runtime, not a line for a shell; relative to the workspace when it holds a slash."""
    args: list[ProgramText] = []
    env: dict[VariableName, ProgramText] = {}


class HarnessSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The agent program. ``settings`` belong to the harness and are checked by it."""

    name: str
    version: str | None = None
    """None: the version that polynya pins."""
    settings: dict[str, Any] = {}
    env: dict[VariableName, ProgramText] = {}
    mcp_servers: list[McpServer] = []
    """Handed to the agent in its own configuration; refused by a harness that has no MCP client."""


class RepoSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A git repository that becomes the workspace: one commit, no remote, nothing newer than ``ref`` in it."""

    url: str
    """A path or an URL that ``git clone`` takes."""
    ref: str = "HEAD"


class RuntimeSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sandbox and what lies in its workspace."""

    name: str | None = None
    """None: ``bubblewrap`` where it works."""
    image: str | None = None
    workdir: Annotated[str, msgspec.Meta(pattern=r"^/[A-Za-z0-9._/-]+$(?!\n)")] = "/workspace"
    files: dict[str, str] = {}
    """Relative POSIX path → text content. A text that starts with ``#!`` is made executable."""
    repo: RepoSpec | None = None
    prepare: list[ProgramText] = []
    """Shell commands, run inside the runtime before the harness."""
    env: dict[VariableName, ProgramText] = {}
    cpus: PositiveFloat | None = None
    memory_mb: PositiveInt | None = None
    pids: PositiveInt | None = None
    network: Literal["gateway-only", "open"] = "gateway-only"


class EvaluatorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One grader. In a task file its settings stand beside ``name``; each evaluator checks its own."""

    name: str
    label: str = ""
    weight: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 1.0
    settings: dict[str, Any] = {}


class BuilderSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = "prefix_merging"
    extra_lanes: list[Literal["auxiliary", "compaction"]] = []
    """Lanes that are trained too, beside the main agent and its sub-agents."""


class SamplingSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the task asks of the sampler. None: not asked.

    ``policy: harness`` lets the harness's own values win, ``override`` lets these win. What neither names is sent as
    the neutral value (temperature 1, top_p 1, top_k off, min_p 0, no penalties), so that the distribution is known.
    """

    policy: Literal["harness", "override"] = "harness"
    temperature: Annotated[float, msgspec.Meta(ge=0, le=5)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    max_tokens: PositiveInt | None = None
    """A cap on each call: the smaller of this and the harness's own."""
    seed: int | None = None
    thinking: Literal["retain", "template"] | None = None
    """What is done where a user message makes a template leave out earlier thinking: keep it, as sampled, or split there.
    None: as the gateway is set."""


class Budgets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds per stage; calls and sampled tokens per session (None: no bound). READY time is charged to nobody."""

    init: PositiveFloat = 300.0
    run: PositiveFloat = 900.0
    postrun: PositiveFloat = 300.0
    calls: PositiveInt | None = None
    tokens: PositiveInt | None = None


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One task; its ``num_samples`` sessions are a group."""

    task_id: Identifier
    instruction: Annotated[str, msgspec.Meta(min_length=1, pattern=r"^[^\x00]*$")]
    harness: HarnessSpec
    num_samples: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    runtime: RuntimeSpec = RuntimeSpec()
    evaluator: list[EvaluatorSpec] = msgspec.field(default_factory=lambda: [EvaluatorSpec(name="completed")])
    builder: BuilderSpec = BuilderSpec()
    sampling: SamplingSpec = SamplingSpec()
    budgets: Budgets = Budgets()
    retries: Annotated[int, msgspec.Meta(ge=0, le=10)] = 1
    """How often a session is run again after an infrastructure failure."""
    priority: Annotated[int, msgspec.Meta(ge=-1_000_000, le=1_000_000)] = 0
    """Sessions of a higher one are given out first."""
    max_concurrent: PositiveInt | None = None
    """How many sessions of this task may be with nodes at a time. None: no bound of its own."""
    early_stop: PositiveInt | None = None
    """When so many sessions of the group ended with a result (infrastructure failures do not count), the rest is cancelled."""
    callback: Annotated[str, msgspec.Meta(pattern=r"^https?://[^\s\x00-\x20]+$(?!\n)", max_length=2048)] | None = None
    """Told each result and the end of the group, where the server allows its host."""
    metadata: dict[str, Any] = {}


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout to be done."""

    session_id: str
    group_id: str
    task: TaskSpec
    sample_index: int
    attempt: int = 1


def session_id_of(task_id: str, sample_index: int) -> str:
    """The one id that a sample has in every attempt and after every restart."""
    return f"{task_id}.{sample_index}"


# --- what came out -----------------------------------------------------------------------------------------------


class PolicySpan(msgspec.Struct, frozen=True):
    """``version`` sampled the tokens ``start:end`` (of the row, or of the call's sampled ids). None: unknown."""

    version: str | None
    start: int
    end: int


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An error as data."""

    kind: str
    boundary: str
    message: str
    fix: str = ""
    policy_can_cause: bool = False
    retryable: bool = False


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluator's verdict. ``value`` is None when it could not give one; then ``error`` says why."""

    name: str
    label: str = ""
    value: float | None = None
    weight: float = 1.0
    passed: list[str] = []
    failed: list[str] = []
    detail: str = ""
    """At most a few kilobytes of the evaluator's own output, its end."""
    seconds: float = 0.0
    error: ErrorInfo | None = None


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Where every sampled token went. ``captured == trained + sum(excluded.values())``, always."""

    captured: int = 0
    trained: int = 0
    excluded: dict[str, int] = {}
    """Exclusion → sampled tokens."""
    calls: int = 0
    calls_by_outcome: dict[str, int] = {}
    """``ok``, ``cancelled``, ``failed``, ``unfinished`` → calls."""
    chain_breaks: dict[str, int] = {}
    """``Break`` → transitions at which a prompt did not extend an earlier call of its agent."""

    def balanced(self) -> bool:
        return self.captured == self.trained + sum(self.excluded.values())


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """One trainable row: what the engine conditioned on and sampled, ids, mask and logprobs of one length."""

    trace_id: str
    session_id: str
    lane: str
    segment: int
    compacted_from: str | None = None
    """The row whose history this one's was condensed from."""
    input_ids: Int32Array
    loss_mask: UInt8Array
    logprobs: Float32Array
    """Nats, as the engine gave them; 0.0 where the mask is 0."""
    routed_experts: Int16Array | None = None
    """``(len(input_ids) - 1, width)``: of a mixture of experts, those that each id went through; None: not known."""
    routed_experts_shape: list[int] = []
    """Of one row: ``[layers, experts a token]``; ``[]`` where the engine does not say."""
    prompt_len: int
    """Ids before the first sampled one."""
    policy_spans: list[PolicySpan]
    call_ids: list[str]
    call_starts: list[int]
    """Where each call's sampled ids start in the row."""
    call_lens: list[int]
    finish_reason: str
    truncated: bool
    num_turns: int
    messages: str
    """JSON of the last call's messages and its reply."""
    tools: str
    """JSON list of tool definitions, ``[]`` when none."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One model call: a row of ``calls.parquet``. The prompt is ``base``'s ``(prompt + sampled)[:base_keep]`` + ``context_ids``."""

    call_id: str
    session_id: str
    attempt: int
    index: int
    """Order of begin in its attempt."""
    dialect: str
    lane: str
    lane_rule: str
    """The rule that gave a lane other than ``main``; empty: none applied."""
    agent: str
    """The harness's own name of the agent that asked; empty when it gives none."""
    parent_agent: str
    model: str
    outcome: str
    """``ok``, ``cancelled``, ``failed``, ``unfinished``."""
    error: str
    t_start: float
    t_end: float | None
    finish_reason: str
    prompt_len: int
    sampled_len: int
    parent_call_id: str | None
    """The call whose prompt and sampled ids this prompt strictly extends."""
    break_cause: str | None = None
    """``Break``: why it extends none although its agent called before."""
    base_call_id: str | None
    base_keep: int
    context_ids: Int32Array
    completion_ids: Int32Array
    logprobs: Float32Array
    policy_spans: list[PolicySpan]
    trainable: bool
    exclusion: str | None
    exclusion_detail: str
    delivered: bool
    sampling: str
    """JSON of the values sent upstream."""
    request: str
    """JSON list of the messages that the base call's request does not hold."""
    reply: str
    """JSON of the assistant message."""
    flags: str
    """JSON object of counted oddities."""


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """All that one session attempt gives a trainer."""

    traces: list[Trace]
    calls: list[Call]
    ledger: Ledger


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """What made the tokens. None: the engine does not say."""

    polynya: str
    engine: str = ""
    engine_build: str | None = None
    model: str = ""
    model_sha256: str | None = None
    tokenizer_sha256: str | None = None
    chat_template_sha256: str | None = None
    tool_parser: str | None = None
    logprob_kind: str = "unknown"
    """``raw`` (temperature 1, no truncation), ``processed`` (the distribution that was sampled) or ``unknown``."""
    harness: str = ""
    harness_version: str | None = None
    runtime: str = ""
    sampling: dict[str, Any] = {}
    """The values actually sent to the engine in the session's last call."""
    continuation: str = "off"
    """How later turns were prompted: ``retain`` (ids of the captured turns, their thinking kept), ``template`` (the same, split
    where the template drops thinking) or ``off`` (the engine rendered the messages)."""


class SessionResult(msgspec.Struct, frozen=True, kw_only=True):
    """One line of ``sessions.jsonl``. Holds no token arrays: those are in the Parquet files under ``session_id``."""

    session_id: str
    task_id: str
    group_id: str
    sample_index: int
    attempt: int
    status: Status
    reward: float | None
    scores: list[Score] = []
    ledger: Ledger = Ledger()
    num_calls: int = 0
    num_traces: int = 0
    prompt_tokens: int = 0
    """Sum over calls of the ids that the engine conditioned on."""
    sampled_tokens: int = 0
    exit_code: int | None = None
    """Of the harness; None when it did not end by itself."""
    error: ErrorInfo | None = None
    timings: dict[str, float] = {}
    """Seconds: queued, init, ready, running, postrun, total."""
    started_at: float = 0.0
    """Unix seconds, for people; nothing is ordered by it."""
    flags: dict[str, int] = {}
    """Counted oddities, e.g. ``late_write``, ``unparsed_tool_markup``."""
    provenance: Provenance
    logs: dict[str, str] = {}
    """Name → path below the run directory."""

"""Who made a call inside its harness: lane and agent, read from the harness's own headers and the shape of its request.

Invariants: a lane other than ``main`` has the name of the rule that gave it, kept with the call; the first rule that
applies decides. No rule reads the User-Agent (several clients send each other's), and none reads what a tool printed.
A rule goes by a header where the harness sends one, else by words that its program puts into its own prompts.
The words are plain ASCII, which stands in JSON as it is: most messages are told apart without being decoded.
Known to have no mark, so that their calls are ``main``: sub-agents of gemini_cli and qwen_code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from polynya.dialects.neutral import ChatRequest
from polynya.schema import Lane

Headers = Mapping[str, str]
_NAME_LIMIT = 200


class Maker(msgspec.Struct, frozen=True, kw_only=True):
    """Lineage, never identity: harnesses make these names up."""

    lane: Lane = Lane.MAIN
    rule: str = ""
    """The rule that gave the lane; empty: none applied."""
    agent: str = ""
    """The harness's own name of the agent or thread that asks; empty: it gives none."""
    parent_agent: str = ""
    """Of the agent that started this one."""


class Rule(msgspec.Struct, frozen=True):
    name: str
    lane: Lane
    applies: Callable[[Headers, ChatRequest], bool]


class _TurnMetadata(msgspec.Struct):
    request_kind: str = ""


_turn_metadata = msgspec.json.Decoder(_TurnMetadata)


def maker_of(headers: Headers, request: ChatRequest) -> Maker:
    agent, parent = _agents(headers)
    for rule in RULES:
        if rule.applies(headers, request):
            return Maker(lane=rule.lane, rule=rule.name, agent=agent, parent_agent=parent)
    return Maker(agent=agent, parent_agent=parent)


def _agents(headers: Headers) -> tuple[str, str]:
    """The agent and the one that started it. A main agent goes by its session's or thread's name."""
    session = headers.get("x-claude-code-session-id", "")
    if agent := headers.get("x-claude-code-agent-id", ""):
        pair = (agent, headers.get("x-claude-code-parent-agent-id") or session)
    elif thread := headers.get("thread-id", ""):
        pair = (thread, headers.get("x-codex-parent-thread-id", ""))
    else:
        own = session or headers.get("x-session-id") or headers.get("x-litellm-session-id", "")
        pair = (own, headers.get("x-parent-session-id", ""))
    return pair[0][:_NAME_LIMIT], pair[1][:_NAME_LIMIT]


def _header(name: str, *values: str) -> Callable[[Headers, ChatRequest], bool]:
    """The header has one of these values; without values: it is there."""
    return lambda headers, request: headers.get(name, "") in values if values else bool(headers.get(name))


def _system(words: str, *, tools: bool = False) -> Callable[[Headers, ChatRequest], bool]:
    """The system prompt starts with these words; ``tools``: the call has tools."""

    spelled = words.encode()

    def applies(headers: Headers, request: ChatRequest) -> bool:
        if bool(request.tools) != tools or not request.messages:
            return False
        first = request.messages[0]
        return first.role == "system" and spelled in first.raw and first.text.lstrip().startswith(words)

    return applies


def _asks(words: str, *, dialect: str = "", tools: bool | None = False) -> Callable[[Headers, ChatRequest], bool]:
    """The last message is the user's, and a text in it starts with these words. ``tools`` None: with or without."""

    spelled = words.encode()

    def applies(headers: Headers, request: ChatRequest) -> bool:
        if (tools is not None and bool(request.tools) != tools) or dialect not in ("", request.dialect):
            return False
        last = request.messages[-1]
        if last.role != "user" or spelled not in last.raw:
            return False
        return last.text.startswith(words) or f"\n{words}" in last.text

    return applies


def _codex_compacts(headers: Headers, request: ChatRequest) -> bool:
    try:
        return _turn_metadata.decode(headers.get("x-codex-turn-metadata", "{}")).request_kind == "compaction"
    except (msgspec.DecodeError, RecursionError):
        return False


_CLAUDE_CLASS = "x-claude-code-request-class"

RULES: tuple[Rule, ...] = (
    Rule("responses_compaction", Lane.COMPACTION, lambda headers, request: request.compaction),
    # claude_code: says the class itself with CLAUDE_CODE_GATEWAY_HINT_HEADERS=1, which the preset sets.
    Rule("claude_code_compaction", Lane.COMPACTION, _header(_CLAUDE_CLASS, "compaction")),
    Rule("claude_code_auxiliary", Lane.AUXILIARY, _header(_CLAUDE_CLASS, "auxiliary", "side_reply")),
    Rule(
        "claude_code_compaction_words",
        Lane.COMPACTION,
        _asks("CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.", dialect="anthropic_messages", tools=None),
    ),
    # codex
    Rule("codex_compaction", Lane.COMPACTION, _codex_compacts),
    Rule(
        "codex_compaction_words",
        Lane.COMPACTION,
        _asks("You are performing a CONTEXT CHECKPOINT COMPACTION.", dialect="openai_responses"),
    ),
    # gemini_cli
    Rule("gemini_cli_router", Lane.AUXILIARY, _system("You are a specialized Task Routing AI.")),
    Rule(
        "gemini_cli_loop_detection",
        Lane.AUXILIARY,
        _system("You are a diagnostic agent that determines whether a conversational AI assistant is stuck"),
    ),
    Rule(
        "gemini_cli_next_speaker",
        Lane.AUXILIARY,
        _asks("Analyze *only* the content and structure of your immediately preceding response"),
    ),
    Rule(
        "gemini_cli_edit_repair",
        Lane.AUXILIARY,
        _system("You are an expert code-editing assistant specializing in debugging and correcting failed search-and"),
    ),
    Rule(
        "gemini_cli_compaction",
        Lane.COMPACTION,
        _system("You are a specialized system component responsible for distilling chat history"),
    ),
    # qwen_code
    Rule(
        "qwen_code_memory",
        Lane.AUXILIARY,
        _system("You are now acting as the managed memory extraction subagent", tools=True),
    ),
    Rule(
        "qwen_code_compaction",
        Lane.COMPACTION,
        _system("You are the component that summarizes a conversation when its context window is about to overflow"),
    ),
    # opencode
    Rule("opencode_title", Lane.AUXILIARY, _system("You are a title generator. You output ONLY a thread title.")),
    Rule("opencode_summary", Lane.AUXILIARY, _system("Summarize what was done in this conversation.")),
    Rule("opencode_compaction", Lane.COMPACTION, _system("You are a context summarization agent.")),
    # pi
    Rule("pi_compaction", Lane.COMPACTION, _system("You are a context summarization assistant.")),
    # aider
    Rule(
        "aider_commit_message",
        Lane.AUXILIARY,
        _system("You are an expert software engineer that generates concise, one-line Git commit messages"),
    ),
    # openhands
    Rule(
        "openhands_compaction",
        Lane.COMPACTION,
        _asks("You are maintaining a context-aware state summary for an interactive agent."),
    ),
    # Sub-agents come last: a sub-agent's compaction is a compaction.
    Rule("claude_code_subagent", Lane.SUBAGENT, _header("x-claude-code-agent-id")),
    Rule("codex_subagent", Lane.SUBAGENT, _header("x-openai-subagent")),
    Rule("codex_subagent_thread", Lane.SUBAGENT, _header("x-codex-parent-thread-id")),
    Rule("opencode_subagent", Lane.SUBAGENT, _header("x-parent-session-id")),
)


class CompactionWatch:
    """Sees agents that compact for ever: what is left after it does not fit either, so each turn compacts again."""

    CALLS_BETWEEN = 2
    """As many other calls, or fewer, between two compactions are no progress."""
    IN_A_ROW = 8

    def __init__(self) -> None:
        self._row: Counter[str] = Counter()
        self._since: Counter[str] = Counter()

    def allows(self, maker: Maker) -> bool:
        """Count a call that is to begin. False: it is one compaction too many."""
        if maker.lane != Lane.COMPACTION:
            self._since[maker.agent] += 1
            if self._since[maker.agent] > self.CALLS_BETWEEN:
                self._row[maker.agent] = 0
            return True
        self._since[maker.agent] = 0
        self._row[maker.agent] += 1
        return self._row[maker.agent] <= self.IN_A_ROW

    def came_to_nothing(self, maker: Maker) -> None:
        """The call was cancelled, or the engine failed: the agent asks again, and that is no further compaction."""
        if maker.lane == Lane.COMPACTION and self._row[maker.agent]:
            self._row[maker.agent] -= 1

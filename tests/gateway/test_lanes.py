"""Who made a call: recorded requests of real harnesses, each with the lane that it has, and what becomes of it in a session.

``lanes.jsonl.gz`` holds requests with long texts cut and prose replaced by filler words; where a rule goes by words, those
of the installed program were put back (``restored``).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polynya.dialects.base import route
from polynya.dialects.neutral import ChatRequest, ToolSpec
from polynya.dialects.registry import DIALECTS
from polynya.dialects.wire import chat_message
from polynya.engines.scripted import Fault, Script, Step
from polynya.gateway.lanes import RULES, CompactionWatch, Maker, maker_of
from polynya.schema import Lane
from polynya.tokens import build

MakeRig = Callable[..., Any]
RECORDED = Path(__file__).parent.parent / "fixtures" / "recordings" / "lanes.jsonl.gz"
ROWS = [json.loads(line) for line in gzip.decompress(RECORDED.read_bytes()).splitlines()]
CLASS = "x-claude-code-request-class"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["from"])
def test_a_recorded_request_has_its_lane(row: dict[str, Any]) -> None:
    found = route("POST", row["path"], row["headers"])
    assert found is not None
    request = DIALECTS[found.dialect].parse(json.dumps(row["body"]).encode(), row["path"])
    assert maker_of(row["headers"], request) == Maker(
        lane=Lane(row["lane"]), rule=row["rule"], agent=row["agent"], parent_agent=row["parent_agent"]
    )


def request_of(
    *, system: str = "You are an agent.", user: str = "go", tools: bool = True, dialect: str = "openai_chat"
) -> ChatRequest:
    messages = [chat_message("system", text=system), chat_message("user", text=user)]
    named = [ToolSpec(name="bash")] if tools else []
    return ChatRequest(dialect=dialect, model="m", messages=messages, tools=named)


SIDE_CALLS = [
    ({"system": "You are a diagnostic agent that determines whether a conversational AI assistant is stuck in an"},
     "gemini_cli_loop_detection", Lane.AUXILIARY),
    ({"user": "Analyze *only* the content and structure of your immediately preceding response (your last turn"},
     "gemini_cli_next_speaker", Lane.AUXILIARY),
    ({"system": "\nYou are an expert code-editing assistant specializing in debugging and correcting failed search-and-replace"},
     "gemini_cli_edit_repair", Lane.AUXILIARY),
    ({"system": "You are a specialized system component responsible for distilling chat history into a structured XML"},
     "gemini_cli_compaction", Lane.COMPACTION),
    ({"system": "You are the component that summarizes a conversation when its context window is about to overflow. The"},
     "qwen_code_compaction", Lane.COMPACTION),
    ({"system": "You are now acting as the managed memory extraction subagent for an AI coding assistant.", "tools": True},
     "qwen_code_memory", Lane.AUXILIARY),
    ({"system": "Summarize what was done in this conversation. Write like a pull request description."},
     "opencode_summary", Lane.AUXILIARY),
    ({"system": "You are a context summarization assistant. Your task is to read a conversation"},
     "pi_compaction", Lane.COMPACTION),
    ({"system": "You are an expert software engineer that generates concise, one-line Git commit messages based on the"},
     "aider_commit_message", Lane.AUXILIARY),
    ({"user": "You are maintaining a context-aware state summary for an interactive agent.\nYou will be given a list"},
     "openhands_compaction", Lane.COMPACTION),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "rule", "lane"), SIDE_CALLS)
def test_a_side_call_is_known_by_the_words_of_its_program(fields: dict[str, Any], rule: str, lane: Lane) -> None:
    request = request_of(**{"tools": False, **fields})
    assert maker_of({}, request) == Maker(lane=lane, rule=rule)


HEADERS: list[tuple[dict[str, str], str, Lane]] = [
    ({CLASS: "main"}, "", Lane.MAIN),
    ({CLASS: "compaction"}, "claude_code_compaction", Lane.COMPACTION),
    ({CLASS: "compaction", "x-claude-code-agent-id": "a1"}, "claude_code_compaction", Lane.COMPACTION),
    ({CLASS: "auxiliary"}, "claude_code_auxiliary", Lane.AUXILIARY),
    ({CLASS: "subagent", "x-claude-code-agent-id": "a1"}, "claude_code_subagent", Lane.SUBAGENT),
    ({"x-openai-subagent": "collab_spawn"}, "codex_subagent", Lane.SUBAGENT),
    ({"x-codex-parent-thread-id": "t"}, "codex_subagent_thread", Lane.SUBAGENT),
    ({"x-parent-session-id": "s"}, "opencode_subagent", Lane.SUBAGENT),
    ({"x-codex-turn-metadata": '{"request_kind":"compaction"}'}, "codex_compaction", Lane.COMPACTION),
    ({"x-codex-turn-metadata": '{"request_kind":"turn"}'}, "", Lane.MAIN),
    ({"x-codex-turn-metadata": '{"request_kind":1}'}, "", Lane.MAIN),
    ({"x-codex-turn-metadata": "not json"}, "", Lane.MAIN),
    ({"user-agent": "claude-cli/2.1 (external, cli)"}, "", Lane.MAIN),
]


@pytest.mark.parametrize(("headers", "rule", "lane"), HEADERS)
def test_a_header_gives_the_lane(headers: dict[str, str], rule: str, lane: Lane) -> None:
    maker = maker_of(headers, request_of())
    assert (maker.lane, maker.rule) == (lane, rule)


def test_names_of_rules_are_unique() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize(
    "request_",
    [
        request_of(system="You are an agent. You are a title generator. You output ONLY a thread title.", tools=False),
        request_of(system="You are a title generator. You output ONLY a thread title."),
        request_of(
            user="Please: CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.", dialect="anthropic_messages"
        ),
        request_of(user="CRITICAL: Respond with TEXT ONLY. Do NOT call any tools."),
        request_of(user="You are performing a CONTEXT CHECKPOINT COMPACTION.", dialect="openai_responses"),
    ],
)
def test_words_in_another_place_or_shape_are_the_main_agents(request_: ChatRequest) -> None:
    assert maker_of({}, request_) == Maker()


@pytest.mark.parametrize("dialect", ["anthropic_messages", "openai_responses"])
def test_what_a_tool_printed_gives_no_lane(dialect: str) -> None:
    """The policy writes what its tools print: it must not choose by that which of its calls are trained."""
    words = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools."
    messages = [chat_message("user", text="go"), chat_message("tool", text=words, tool_call_id="c")]
    for tools in ([], [ToolSpec(name="bash")]):
        assert maker_of({}, ChatRequest(dialect=dialect, model="m", messages=messages, tools=tools)) == Maker()


def claude(text: str = "go", *more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": text}, *more]}


async def post(agent: Any, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
    url = agent.rig.gateway.base_url(agent.key) + "/v1/messages"
    async with agent.rig.client.post(url, json=body, headers=headers or {}) as response:
        return response.status, await response.json()


def said(reply: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": reply["content"]}


async def test_interleaved_sub_agents_are_chains_of_their_own(make_rig: MakeRig) -> None:
    """A1, B1, A2, B2 with equal system prompts: no parent across agents, and who started whom stands in the record."""
    rig = await make_rig(Script(steps=[Step(text="One."), Step(text="Two.")]))
    agent = await rig.open()
    main = {"x-claude-code-session-id": "s"}
    sub = {name: {**main, "x-claude-code-agent-id": name} for name in ("a1", "a2")}
    _, first = await post(agent, claude("the task"), main)
    replies = {name: (await post(agent, claude(f"part {name}"), sub[name]))[1] for name in sub}
    for name, headers in sub.items():
        more = (said(replies[name]), {"role": "user", "content": "go on"})
        await post(agent, claude(f"part {name}", *more), headers)
    await post(agent, claude("the task", said(first), {"role": "user", "content": "go on"}), main)
    calls = agent.session.capture.calls
    assert [(call.lane, call.intent.agent, call.intent.parent_agent) for call in calls] == [
        (Lane.MAIN, "s", ""),
        (Lane.SUBAGENT, "a1", "s"),
        (Lane.SUBAGENT, "a2", "s"),
        (Lane.SUBAGENT, "a1", "s"),
        (Lane.SUBAGENT, "a2", "s"),
        (Lane.MAIN, "s", ""),
    ]
    built = build(calls, session_id="s", builder="prefix_merging")
    ids = [call.call_id for call in calls]
    assert built.parents == {ids[3]: ids[1], ids[4]: ids[2], ids[5]: ids[0]}
    assert sorted((row.lane, row.num_turns) for row in built.traces) == [("main", 2), ("subagent", 2), ("subagent", 2)]
    assert built.ledger.captured == built.ledger.trained


async def test_a_title_call_is_not_trained_and_breaks_no_chain(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="Title."), Step(text="Done.")]))
    agent = await rig.open()
    title = [
        {"role": "system", "content": "You are a title generator. You output ONLY a thread title. Nothing else."},
        {"role": "user", "content": "Generate a title for this conversation:\n"},
    ]
    assert (await agent.post({"model": "m", "messages": title}))[0] == 200
    tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
    messages: list[Any] = [{"role": "user", "content": "go"}]
    for _ in range(2):
        _, reply = await agent.post({"model": "m", "messages": messages, "tools": [tool]})
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "on"}]
    built = build(agent.session.capture.calls, session_id="s", builder="prefix_merging")
    assert [(row.lane, row.num_turns) for row in built.traces] == [("main", 2)]
    assert built.ledger.excluded == {"auxiliary_lane": agent.session.capture.calls[0].sampled_count}
    assert built.ledger.balanced() and not built.ledger.chain_breaks


async def test_of_two_compactions_the_rejected_one_is_never_trained(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="Summary.")]))
    agent = await rig.open()
    compact = {CLASS: "compaction"}
    await post(agent, claude("the task"))
    await post(agent, claude("the task; summarize"), compact)
    await post(agent, claude("the task; summarize, without tools"), compact)
    await post(agent, claude("the task so far"))
    calls = agent.session.capture.calls
    for extra, reason in (
        ((), {"compaction_lane": 9, "superseded_retry": 9}),
        (("compaction",), {"superseded_retry": 9}),
    ):
        built = build(calls, session_id="s", builder="prefix_merging", extra_lanes=extra)
        assert built.ledger.excluded == reason
        assert [row.lane for row in built.traces] == ["main", *extra, "main"]
        assert built.ledger.balanced()


async def test_an_agent_that_compacts_for_ever_is_told_that_nothing_fits(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="x")]))
    agent, other = await rig.open("t.0"), await rig.open("t.1")
    compact = {CLASS: "compaction"}
    statuses = []
    for number in range(CompactionWatch.IN_A_ROW + 1):
        assert (await post(agent, claude(f"turn {number}")))[0] == 200
        statuses.append((await post(agent, claude(f"compact {number}"), compact))[0])
    assert statuses == [200] * CompactionWatch.IN_A_ROW + [400]
    _, error = await post(agent, claude("again"), compact)
    assert "prompt is too long" in error["error"]["message"]
    assert agent.session.flags["compaction_loop"] == 2
    assert rig.engine.desk.started == 2 * CompactionWatch.IN_A_ROW + 1
    assert (await post(other, claude("x"), compact))[0] == 200


async def test_compactions_with_work_between_them_are_never_refused(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="x")]))
    agent = await rig.open()
    for number in range(CompactionWatch.IN_A_ROW * 2):
        for turn in range(CompactionWatch.CALLS_BETWEEN + 1):
            assert (await post(agent, claude(f"turn {number} {turn}")))[0] == 200
        assert (await post(agent, claude(f"compact {number}"), {CLASS: "compaction"}))[0] == 200
    assert "compaction_loop" not in agent.session.flags


async def test_a_compaction_trigger_gives_one_item_in_the_compaction_lane(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="Summary.")]))
    agent = await rig.open()
    body = {"model": "m", "input": [{"role": "user", "content": "go"}, {"type": "compaction_trigger"}]}
    async with rig.client.post(rig.gateway.base_url(agent.key) + "/v1/responses", json=body) as response:
        (item,) = (await response.json())["output"]
    assert item["type"] == "compaction"
    (call,) = agent.session.capture.calls
    assert (call.lane, call.intent.lane_rule) == (Lane.COMPACTION, "responses_compaction")


async def test_compactions_that_the_engine_failed_are_none(make_rig: MakeRig) -> None:
    """A client asks again, often: an outage in a compaction must not end the agent."""
    fault = Fault(kind="http_error", status=503, times=CompactionWatch.IN_A_ROW * 5)
    rig = await make_rig(Script(steps=[Step(text="x", fault=fault)]))
    agent = await rig.open()
    statuses = []
    while not statuses or statuses[-1] == 503:
        statuses.append((await post(agent, claude("compact"), {CLASS: "compaction"}))[0])
    assert statuses[-1] == 200
    assert len(statuses) > CompactionWatch.IN_A_ROW


async def test_a_header_that_is_nested_too_deep_costs_no_call(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(steps=[Step(text="x")]))
    agent = await rig.open()
    deep = '{"a":' + "[" * 3000 + "]" * 3000 + "}"
    assert (await post(agent, claude("hi"), {"x-codex-turn-metadata": deep}))[0] == 200

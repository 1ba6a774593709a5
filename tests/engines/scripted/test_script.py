"""The pure script: determined by seed, affinity, turn and tools."""

import json

import msgspec
import numpy as np
import pytest

from polynya.dialects.neutral import ToolSpec
from polynya.engines.scripted import Script, Step
from polynya.engines.scripted.script import action
from polynya.engines.scripted.tokens import ALTERNATE, END


def tool(name: str, **properties: object) -> ToolSpec:
    schema = msgspec.json.encode({"type": "object", "properties": properties})
    return ToolSpec(name=name, parameters=msgspec.Raw(schema))


BASH = tool("bash", command={"type": "string"})


def test_the_same_call_gives_the_same_ids_and_logprobs() -> None:
    one, two = (Script(seed=5).expected("s1", 0, tools=[BASH]) for _ in range(2))
    assert np.array_equal(one.sampled_ids, two.sampled_ids)
    assert np.array_equal(one.logprobs, two.logprobs)
    assert one.reply == two.reply


def test_another_session_gives_other_logprobs_and_call_ids() -> None:
    one, two = (Script().expected(name, 0, tools=[BASH]) for name in ("s1", "s2"))
    assert not np.array_equal(one.logprobs, two.logprobs)
    assert one.reply.tool_calls[0].id != two.reply.tool_calls[0].id


def test_logprobs_are_finite_not_positive_and_one_per_id() -> None:
    found = Script().expected("s", 0)
    assert found.logprobs.dtype == np.float32
    assert found.logprobs.size == found.sampled_ids.size
    assert np.isfinite(found.logprobs).all() and (found.logprobs <= 0).all()


def test_the_agent_acts_once_then_ends() -> None:
    script = Script()
    first, second = (script.expected("s", turn, tools=[BASH]).reply for turn in (0, 1))
    assert first.finish_reason == "tool_calls"
    assert json.loads(first.tool_calls[0].arguments) == {"command": script.command}
    assert (second.tool_calls, second.text, second.finish_reason) == ([], "Done.", "stop")


def test_the_agent_without_tools_only_ends() -> None:
    assert Script().expected("s", 0).reply.text == "Done."


@pytest.mark.parametrize(
    ("tools", "name", "arguments"),
    [
        ([tool("shell", command={"type": "array"})], "shell", {"command": ["bash", "-lc", "ls"]}),
        ([tool("exec_command", cmd={"type": "string"})], "exec_command", {"cmd": "ls"}),
        (
            [tool("Bash", command={"type": "string"}, description={"type": "string"})],
            "Bash",
            {"command": "ls", "description": "Create notes.txt"},
        ),
        (
            [tool("Write", file_path={"type": "string"}, content={"type": "string"})],
            "Write",
            {"file_path": "notes.txt", "content": "hello world"},
        ),
    ],
)
def test_a_tool_is_known_by_its_schema(tools: list[ToolSpec], name: str, arguments: dict[str, object]) -> None:
    call = action(tools, "ls")
    assert call is not None
    assert (call.name, json.loads(call.arguments)) == (name, arguments)


def test_no_usable_tool_gives_no_action() -> None:
    assert action([tool("search", query={"type": "string"}), ToolSpec(name="none")], "ls") is None


def test_a_cut_reply_has_no_end_token_and_says_length() -> None:
    found = Script(steps=[Step(text="abcdef")]).expected("s", 0, max_tokens=3)
    assert (found.sampled_ids.tolist(), found.reply.finish_reason) == ([97, 98, 99], "length")


def test_a_step_may_end_by_length() -> None:
    found = Script(steps=[Step(text="ab", finish_reason="length")]).expected("s", 0)
    assert END not in found.sampled_ids.tolist()
    assert found.reply.finish_reason == "length"


def test_noncanonical_sampling_keeps_the_text() -> None:
    found = Script(steps=[Step(text="same text")], noncanonical=0.5).expected("s", 0)
    assert (found.sampled_ids >= ALTERNATE).any()
    assert found.reply.text == "same text"


def test_processed_logprobs_depend_on_the_temperature() -> None:
    raw, processed = Script(), Script(logprob_kind="processed")
    assert np.array_equal(raw.expected("s", 0, temperature=0.5).logprobs, raw.expected("s", 0).logprobs)
    assert not np.array_equal(processed.expected("s", 0, temperature=0.5).logprobs, raw.expected("s", 0).logprobs)


def test_the_last_step_repeats_and_a_session_may_have_its_own() -> None:
    script = Script(steps=[Step(text="a"), Step(text="b")], sessions={"x": [Step(text="mine")]})
    assert [script.expected("s", turn).reply.text for turn in range(3)] == ["a", "b", "b"]
    assert script.expected("x", 0).reply.text == "mine"

"""The providers' own Python SDKs through the gateway: typed results, streaming and not, sync and async."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest
from google import genai
from google.genai import errors as genai_errors
from google.genai import types as genai_types

from polynya.engines.scripted import Fault, Script, ScriptedCall, Step

MakeRig = Callable[..., Any]
ARGUMENTS = '{"command":"ls","n":2}'
CALLS = [
    ScriptedCall(name="bash", arguments=ARGUMENTS, id="call_1"),
    ScriptedCall(name="bash", arguments="{}", id="call_2"),
]
TURNS = Script(steps=[Step(text="I look.", reasoning="because", tool_calls=CALLS), Step(text="Done é.")])
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"command": {"type": "string"}}}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
"""The SDKs' own."""


async def agent_of(make_rig: MakeRig, script: Script = TURNS) -> tuple[Any, str]:
    rig = await make_rig(script)
    agent = await rig.open()
    return agent, rig.gateway.base_url(agent.key)


async def test_openai_chat_whole_and_streamed(make_rig: MakeRig) -> None:
    agent, base = await agent_of(make_rig)
    tools: Any = [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}]
    messages: Any = [{"role": "user", "content": "go"}]
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=agent.key, max_retries=0) as client:
        first = await client.chat.completions.create(model="m", messages=messages, tools=tools)
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert [call.function.arguments for call in message.tool_calls or []] == [ARGUMENTS, "{}"]
        assert first.usage is not None and first.usage.total_tokens > 0
        results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "x"} for call in message.tool_calls or []]
        messages += [message.model_dump(exclude_none=True), *results]
        stream = await client.chat.completions.create(
            model="m", messages=messages, tools=tools, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Done é."
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 0
    assert len(agent.session.capture.calls) == 2


async def test_openai_responses_whole_streamed_and_continued(make_rig: MakeRig) -> None:
    agent, base = await agent_of(make_rig)
    tools: Any = [{"type": "function", "name": "bash", "parameters": SCHEMA}]
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=agent.key, max_retries=0) as client:
        first = await client.responses.create(model="m", input="go", tools=tools)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
        assert first.output_text == "I look."
        outputs: Any = [{"type": "function_call_output", "call_id": f"call_{n}", "output": "x"} for n in (1, 2)]
        stream = await client.responses.create(
            model="m", input=outputs, previous_response_id=first.id, tools=tools, stream=True
        )
        events = [event async for event in stream]
        assert events[-1].type == "response.completed"
        assert events[-1].response.output_text == "Done é."
        with pytest.raises(openai.NotFoundError) as caught:
            await client.responses.create(model="m", input="x", previous_response_id="resp_none")
    assert caught.value.code == "previous_response_not_found"


async def test_anthropic_messages_whole_streamed_and_counted(make_rig: MakeRig) -> None:
    agent, base = await agent_of(make_rig)
    tools: Any = [{"name": "bash", "input_schema": SCHEMA}]
    messages: Any = [{"role": "user", "content": "go"}]
    async with anthropic.AsyncAnthropic(base_url=base, api_key=agent.key, max_retries=0) as client:
        counted = await client.messages.count_tokens(model="m", messages=messages, tools=tools)
        first = await client.messages.create(model="m", max_tokens=500, messages=messages, tools=tools)
        assert counted.input_tokens == first.usage.input_tokens
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert first.stop_reason == "tool_use"
        results: Any = [{"type": "tool_result", "tool_use_id": f"call_{n}", "content": "x"} for n in (1, 2)]
        echoed = [block.model_dump(exclude_none=True) for block in first.content]
        messages += [{"role": "assistant", "content": echoed}, {"role": "user", "content": results}]
        async with client.messages.stream(model="m", max_tokens=500, messages=messages, tools=tools) as stream:
            final = await stream.get_final_message()
    assert [block.model_dump()["text"] for block in final.content] == ["Done é."]
    assert final.usage.output_tokens > 0
    calls = agent.session.capture.calls
    assert calls[1].keep == len(calls[0].full_ids), (
        "thinking came back with its signature, so the prompt extends the call"
    )


async def test_google_genai_whole_streamed_and_counted(make_rig: MakeRig) -> None:
    agent, base = await agent_of(make_rig)
    client = genai.Client(api_key=agent.key, http_options=genai_types.HttpOptions(base_url=base))
    declared = genai_types.FunctionDeclaration(name="bash", description="run", parameters_json_schema=SCHEMA)
    config = genai_types.GenerateContentConfig(
        tools=[genai_types.Tool(function_declarations=[declared])],
        automatic_function_calling=genai_types.AutomaticFunctionCallingConfig(disable=True),
    )
    contents: list[Any] = [genai_types.Content(role="user", parts=[genai_types.Part(text="go")])]
    first = await client.aio.models.generate_content(model="m", contents=contents, config=config)
    assert [call.args for call in first.function_calls or []] == [{"command": "ls", "n": 2}, {}]
    answers = [
        genai_types.Part(
            function_response=genai_types.FunctionResponse(id=f"call_{n}", name="bash", response={"output": "x"})
        )
        for n in (1, 2)
    ]
    contents += [first.candidates[0].content, genai_types.Content(role="user", parts=answers)]  # type: ignore[index]
    stream = await client.aio.models.generate_content_stream(model="m", contents=contents, config=config)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.text or "" for chunk in chunks) == "Done é."
    counted = await client.aio.models.count_tokens(model="m", contents="hello")
    assert (counted.total_tokens or 0) > 0
    await client.aio.aclose()
    assert len(agent.session.capture.calls) == 2


async def test_sync_clients_work_too(make_rig: MakeRig) -> None:
    agent, base = await agent_of(make_rig, Script(steps=[Step(text="hello")]))

    def ask() -> tuple[str | None, str]:
        with openai.OpenAI(base_url=f"{base}/v1", api_key=agent.key, max_retries=0) as client:
            chat = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])
        with anthropic.Anthropic(base_url=base, api_key=agent.key, max_retries=0) as other:
            message = other.messages.create(model="m", max_tokens=50, messages=[{"role": "user", "content": "go"}])
        return chat.choices[0].message.content, message.content[0].model_dump()["text"]

    assert await asyncio.to_thread(ask) == ("hello", "hello")


@pytest.mark.parametrize(
    ("fault", "openai_error", "anthropic_error", "google_code"),
    [
        (Fault(kind="overflow"), openai.BadRequestError, anthropic.BadRequestError, 400),
        (Fault(kind="http_error", status=503), openai.InternalServerError, anthropic.InternalServerError, 503),
    ],
)
async def test_errors_are_the_sdks_own(
    make_rig: MakeRig, fault: Fault, openai_error: type[Exception], anthropic_error: type[Exception], google_code: int
) -> None:
    agent, base = await agent_of(make_rig, Script(steps=[Step(fault=fault)]))
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=agent.key, max_retries=0) as client:
        with pytest.raises(openai_error):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])
        with pytest.raises(openai_error):
            await client.responses.create(model="m", input="go")
    async with anthropic.AsyncAnthropic(base_url=base, api_key=agent.key, max_retries=0) as other:
        with pytest.raises(anthropic_error):
            await other.messages.create(model="m", max_tokens=50, messages=[{"role": "user", "content": "go"}])
    google = genai.Client(api_key=agent.key, http_options=genai_types.HttpOptions(base_url=base))
    with pytest.raises(genai_errors.APIError) as caught:
        await google.aio.models.generate_content(model="m", contents="go")
    await google.aio.aclose()
    assert caught.value.code == google_code

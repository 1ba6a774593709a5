"""Reading replies that carry ids, from recorded answers of real engines."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from polynya.dialects.neutral import ChatMessage, ChatRequest
from polynya.engines.wire import chat_fields, cut_prompt, read_chat
from polynya.errors import EngineProtocolError

FIXTURES = Path(__file__).parents[1] / "fixtures" / "engines"


def fixture(name: str) -> bytes:
    return (FIXTURES / f"{name}.json").read_bytes()


def edited(name: str, **choice: object) -> bytes:
    document = json.loads(fixture(name))
    document["choices"][0].update(choice)
    return json.dumps(document, separators=(",", ":")).encode()


@pytest.mark.parametrize("name", ["vllm_chat_text", "vllm_chat_tool_call", "vllm_chat_prompt_logprobs"])
def test_vllm_ids_and_logprobs_are_read_exactly(name: str) -> None:
    document = json.loads(fixture(name))
    choice = document["choices"][0]
    reply = read_chat(fixture(name), name)
    assert reply.prompt_ids is not None and reply.prompt_ids.tolist() == document["prompt_token_ids"]
    assert reply.sampled_ids is not None and reply.sampled_ids.tolist() == choice["token_ids"]
    expected = np.array([entry["logprob"] for entry in choice["logprobs"]["content"]], dtype=np.float32)
    assert reply.logprobs is not None and np.array_equal(reply.logprobs, expected)
    assert reply.sampled_ids.dtype == np.int32 and reply.logprobs.dtype == np.float32
    assert (reply.upstream_id, reply.finish_reason) == (document["id"], choice["finish_reason"])


def test_a_tool_call_keeps_its_id_and_its_argument_text() -> None:
    call = json.loads(fixture("vllm_chat_tool_call"))["choices"][0]["message"]["tool_calls"][0]
    reply = read_chat(fixture("vllm_chat_tool_call"), "test").reply
    assert (reply.tool_calls[0].id, reply.tool_calls[0].arguments) == (call["id"], call["function"]["arguments"])
    assert reply.finish_reason == "tool_calls"


def test_a_stop_beside_tool_calls_is_shown_as_tool_calls_and_kept_as_said() -> None:
    reply = read_chat(edited("vllm_chat_tool_call", finish_reason="stop"), "test")
    assert (reply.reply.finish_reason, reply.finish_reason) == ("tool_calls", "stop")


def test_a_length_cut_beside_tool_calls_stays_length() -> None:
    assert read_chat(edited("vllm_chat_tool_call", finish_reason="length"), "t").reply.finish_reason == "length"


def test_malformed_argument_text_is_kept_as_it_is() -> None:
    message = {"tool_calls": [{"id": "functions.bash:0", "function": {"name": "bash", "arguments": '{"a":  '}}]}
    call = read_chat(edited("vllm_chat_tool_call", message=message), "t").reply.tool_calls[0]
    assert (call.id, call.arguments) == ("functions.bash:0", '{"a":  ')


def test_ids_spelled_as_strings_are_read() -> None:
    document = json.loads(fixture("vllm_chat_token_id_strings"))
    ids = document["choices"][0].get("token_ids")
    reply = read_chat(edited("vllm_chat_token_id_strings", token_ids=None), "test")
    assert reply.sampled_ids is not None and reply.sampled_ids.tolist() == ids


def test_one_unreadable_id_string_makes_all_unusable() -> None:
    content = [{"token": "token_id:42", "logprob": -1}, {"token": "token_id:x", "logprob": -1}]
    reply = read_chat(edited("vllm_chat_text", token_ids=None, logprobs={"content": content}), "test")
    assert reply.sampled_ids is None
    assert reply.logprobs is not None and reply.logprobs.size == 2


def test_plain_token_texts_are_no_ids() -> None:
    assert read_chat(edited("vllm_chat_text", token_ids=None), "test").sampled_ids is None


def test_sglang_ids_come_from_the_choice() -> None:
    reply = read_chat(fixture("sglang_chat"), "sglang")
    assert reply.prompt_ids is not None and reply.prompt_ids.tolist() == [1, 9690, 198]
    assert reply.sampled_ids is not None and reply.sampled_ids.tolist() == [3725, 30, 2]
    assert reply.logprobs is not None and reply.logprobs.tolist() == [-0.5, -0.25, -0.125]
    assert (reply.reply.reasoning, reply.reply.usage.cached_tokens) == ("short", 2)
    assert [(span.version, span.start, span.end) for span in reply.policy_spans] == [("step-3", 0, 3)]


def test_sglang_ids_may_come_from_the_logprobs_alone() -> None:
    reply = read_chat(edited("sglang_chat", response_token_ids=None), "sglang")
    assert reply.sampled_ids is not None and reply.sampled_ids.tolist() == [3725, 30, 2]


@pytest.mark.parametrize("bad", [b"null", b"NaN", b"-Infinity"])
def test_a_logprob_that_is_no_number_is_nan_and_the_rest_stays(bad: bytes) -> None:
    body = edited("vllm_chat_text").replace(b'"logprob":', b'"logprob":' + bad + b',"was":', 1)
    reply = read_chat(body, "test")
    assert reply.logprobs is not None and np.isnan(reply.logprobs[0]) and np.isfinite(reply.logprobs[1:]).all()
    assert reply.sampled_ids is not None and reply.sampled_ids.size == reply.logprobs.size


def test_a_sentinel_is_left_to_the_validator() -> None:
    body = edited("vllm_chat_text", logprobs={"content": [{"token": "a", "logprob": -9999.0}]})
    reply = read_chat(body, "test")
    assert reply.logprobs is not None and reply.logprobs.tolist() == [-9999.0]


def test_missing_ids_and_logprobs_are_none() -> None:
    document = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]}
    reply = read_chat(json.dumps(document).encode(), "test")
    assert (reply.prompt_ids, reply.sampled_ids, reply.logprobs) == (None, None, None)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b"{", "test: "),
        (b'{"choices":[]}', "choices is empty"),
        (b'{"choices":[{"message":{"content":3}}]}', "content"),
        (b'{"choices":[{"message":{},"token_ids":["a"]}]}', "token_ids"),
        (b'{"choices":[{"message":{},"token_ids":[1,]}]}', "test: "),
        (b'{"choices":[{"message":{},"token_ids":[1.5]}]}', "token_ids"),
    ],
)
def test_an_unreadable_answer_names_the_field(body: bytes, names: str) -> None:
    with pytest.raises(EngineProtocolError, match=names):
        read_chat(body, "test")


def test_the_key_inside_a_string_is_not_taken_for_the_ids() -> None:
    document = {
        "choices": [{"message": {"content": 'say "prompt_token_ids":[9,9]'}}],
        "prompt_token_ids": [1, 2],
    }
    rest, prompt = cut_prompt(json.dumps(document, separators=(",", ":")).encode())
    found = read_chat(rest, "test", prompt).prompt_ids
    assert found is not None and found.tolist() == [1, 2]
    assert prompt is not None


@pytest.mark.parametrize("echo", [{"prompt_token_ids": [7]}, None])
def test_a_key_that_is_there_twice_or_spaced_is_decoded_in_full(echo: object) -> None:
    document = {"kv_transfer_params": echo, "choices": [{"message": {}}], "prompt_token_ids": [1, 2]}
    for body in (json.dumps(document), json.dumps(document, separators=(",", ":"))):
        rest, prompt = cut_prompt(body.encode())
        found = read_chat(rest, "test", prompt).prompt_ids
        assert found is not None and found.tolist() == [1, 2]


def test_a_request_holds_the_clients_bytes() -> None:
    raw = b'{"role":"user",  "content":"\\u00e9"}'
    chat = ChatRequest(
        dialect="chat",
        model="m",
        messages=[ChatMessage(role="user", raw=raw)],
        tools_raw=msgspec.Raw(b'[ {"type":"function"} ]'),
        tool_choice=msgspec.Raw(b'"auto"'),
        parallel_tool_calls=False,
        template_kwargs=msgspec.Raw(b'{"enable_thinking":false}'),
    )
    body = b"".join(chat_fields(chat, {"n": 1}, whole=True))
    assert raw in body and b'[ {"type":"function"} ]' in body
    document = json.loads(body)
    assert document["tool_choice"] == "auto" and document["parallel_tool_calls"] is False
    assert document["chat_template_kwargs"] == {"enable_thinking": False} and document["n"] == 1
    assert "tool_choice" not in json.loads(b"".join(chat_fields(chat)))


@pytest.mark.parametrize("huge", [2**31, 2**63, 10**30])
@pytest.mark.parametrize(
    "where",
    [
        '{"choices":[{"message":{"content":"x"},"token_ids":[1]}],"prompt_token_ids": [%d]}',
        '{"choices":[{"message":{"content":"x"},"token_ids":[%d]}],"prompt_token_ids": [1]}',
        '{"choices":[{"message":{"content":"x"},"token_ids":[2, %d]}],"prompt_token_ids": [1]}',
        '{"choices":[{"message":{"content":"x"},"meta_info":{"output_token_logprobs":[[-1.0,%d,null]]}}]}',
    ],
)
def test_an_id_of_any_size_makes_ids_unusable_and_keeps_the_answer(where: str, huge: int) -> None:
    reply = read_chat((where % huge).encode(), "x")
    assert reply.reply.text == "x"
    assert reply.sampled_ids is None or reply.prompt is None

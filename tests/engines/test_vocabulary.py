"""Control tokens found by asking, and plain encoding by tokenizers that recognise some of them all the same."""

import json
from typing import Any

import msgspec
import pytest

from polynya.engines.compatible_template import CompatibleTemplate, compatible_bridger
from polynya.engines.flavours import SGLANG, VLLM
from polynya.engines.http import Answer
from polynya.engines.llamacpp_template import LlamaTemplate, llama_bridger
from polynya.engines.vocabulary import Fences, atomic, discover
from polynya.errors import EngineProtocolError, EngineRejected, EngineUnavailable

from .families import GPTOSS, QWEN3, SMOLLM2, FamilyDesk, tokenizers


async def test_only_atomic_spellings_are_control_tokens() -> None:
    desk = FamilyDesk(QWEN3)
    assert await atomic(desk.encode_special, "<think>") == desk.whole.token_to_id("<think>")
    assert await atomic(desk.encode_special, "<tools>") is None

    async def merges(text: str) -> list[int]:
        return [1, 7, 1, 8] if "\n" in text else [1]

    assert await atomic(merges, "<b>") is None


async def test_what_is_found_is_what_the_template_prints_and_what_ends_turns() -> None:
    found = (await FamilyDesk(GPTOSS).learn()).vocabulary
    whole = tokenizers()[1]
    assert {"<|channel|>", "<|message|>", "<|start|>"} <= found.special.keys()
    assert {whole.token_to_id(text) for text in ("<|return|>", "<|call|>", "<|end|>")} <= found.stop_ids
    assert (found.think_open, found.think_close) == (whole.token_to_id("<think>"), whole.token_to_id("</think>"))


@pytest.mark.parametrize("failure", [EngineRejected("no"), EngineUnavailable("broken template", status=500)])
async def test_a_template_that_refuses_a_probe_is_learnt_from_the_others(failure: Exception) -> None:
    desk = FamilyDesk(SMOLLM2)

    async def render(messages: list[bytes], tools: bytes | None, kwargs: bytes | None) -> str:
        if tools is not None:
            raise failure
        return await desk.render(messages, tools, kwargs)

    found = await discover(render, desk.encode_special)
    assert found is not None and "<|im_start|>" in found.special


async def test_an_engine_that_is_away_is_no_template_without_control_tokens() -> None:
    async def render(*asked: Any) -> str:
        raise EngineUnavailable("away")

    with pytest.raises(EngineUnavailable):
        await discover(render, FamilyDesk(SMOLLM2).encode_special)


async def test_fences_learn_of_control_tokens_from_the_answers() -> None:
    whole = tokenizers()[1]

    async def pieces(text: str) -> tuple[list[int], list[str]]:
        found = whole.encode(text)
        return found.ids, found.tokens

    fences = Fences(pieces)
    text = "a<|im_end|>b<think><b>c</b>"
    ids = await fences.encode(text)
    assert whole.decode(ids, skip_special_tokens=False) == text
    assert not {whole.token_to_id("<|im_end|>"), whole.token_to_id("<think>")} & set(ids)
    assert await fences.encode("the <b>quick</b>") == tokenizers()[0].encode("the <b>quick</b>").ids

    async def always(text: str) -> tuple[list[int], list[str]]:
        return [1, 2, 1, 2, 1], [f"<{text.count('<')}>", "<0>"]

    with pytest.raises(EngineProtocolError, match="however it is cut"):
        await Fences(always).encode("<0><1><2><3><4><5><6><7><8><9>")


async def test_an_ordinary_token_that_looks_like_a_control_token_stays_whole() -> None:
    asked: list[str] = []

    async def pieces(text: str) -> tuple[list[int], list[str]]:
        asked.append(text)
        return ([5], ["<b>"]) if text == "<b>" else ([5, 6, 5, 7], ["<b>", "x", "<b>", "\n<b>"])

    fences = Fences(pieces)
    assert [await fences.encode("<b>") for _ in range(2)] == [[5], [5]]
    assert asked.count("<b>") == 2


class FakeServer:
    """``/tokenize`` and ``/detokenize`` of an OpenAI-compatible server, over the small tokenizer."""

    def __init__(self, template: str) -> None:
        self.desk = FamilyDesk(template)
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def post(self, path: str, *body: bytes) -> Answer:
        asked = json.loads(b"".join(body))
        self.asked.append((path, asked))
        if path == "/detokenize":
            return Answer(msgspec.json.encode({"text": await self.desk.decode(asked["tokens"])}))
        if "messages" not in asked:
            found = self.desk.whole.encode(asked["prompt"])
            return Answer(msgspec.json.encode({"tokens": found.ids, "token_strs": found.tokens}))
        parts = [json.dumps(message).encode() for message in asked["messages"]]
        tools = json.dumps(asked["tools"]).encode() if "tools" in asked else None
        ids = await self.desk.render_ids(parts, tools, json.dumps(asked.get("chat_template_kwargs", {})).encode())
        return Answer(msgspec.json.encode({"tokens": ids}))


TOOLS = b'[{"name":"t"}]'
USER = b'{"role":"user","content":"%b"}'


@pytest.mark.parametrize("flavour", [VLLM, SGLANG])
async def test_a_desk_over_http_agrees_with_the_tokenizer_itself(flavour: Any) -> None:
    server, desk = FakeServer(QWEN3), await FamilyDesk(QWEN3).learn()
    bridger = await compatible_bridger(server, flavour, "m", [])  # type: ignore[arg-type]
    assert bridger is not None and isinstance(bridger.desk, CompatibleTemplate)
    assert bridger.desk.vocabulary == desk.vocabulary
    kwargs = b'{"enable_thinking":false}'
    text = await bridger.desk.render([USER % b"u"], TOOLS, kwargs)
    assert text == await desk.render([USER % b"u"], TOOLS, kwargs)
    path, asked = server.asked[-1]
    assert path == "/detokenize" and (asked.get("skip_special_tokens") is False) == (flavour is SGLANG)
    assert (await bridger.desk.encode(["<sop>a<think>"]))[0] != await bridger.desk.encode_special("<sop>a<think>")
    long = await bridger.desk.render(
        [USER % (b"word " * 20), USER % b"u"], json.dumps([{"x": "tool " * 4000}]).encode(), None
    )
    assert long.endswith("<|im_start|>assistant\n") and len(long) < 20_000


async def test_no_known_end_of_turn_means_no_bridger() -> None:
    endless = SMOLLM2.replace("<|im_end|>", "--")
    assert await compatible_bridger(FakeServer(endless), VLLM, "m", []) is None  # type: ignore[arg-type]
    desk = FamilyDesk(endless)

    async def send(path: str, body: bytes) -> bytes:
        asked = json.loads(body)
        if path == "/tokenize":
            return msgspec.json.encode({"tokens": desk.whole.encode(asked["content"]).ids})
        parts = [json.dumps(message).encode() for message in asked["messages"]]
        return msgspec.json.encode({"prompt": await desk.render(parts, None, None)})

    assert await llama_bridger(send, "", []) is None


async def test_llama_is_sent_tools_and_template_kwargs_as_they_are() -> None:
    sent: list[Any] = []

    async def send(path: str, body: bytes) -> bytes:
        sent.append((path, json.loads(body)))
        return b'{"prompt":"p"}'

    assert await LlamaTemplate(send).render([USER % b"u"], b'[{"t":1}]', b'{"k":2}') == "p"
    message = {"role": "user", "content": "u"}
    assert sent == [("/apply-template", {"messages": [message], "tools": [{"t": 1}], "chat_template_kwargs": {"k": 2}})]

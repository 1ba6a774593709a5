"""Integers that no engine takes are refused by name, in every dialect that reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polynya.dialects.base import BadRequest
from polynya.dialects.registry import DIALECTS

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
GOOGLE: dict[str, Any] = {"contents": [{"parts": [{"text": "x"}]}]}


@pytest.mark.parametrize("value", [2**70, -(2**70)])
@pytest.mark.parametrize(
    ("name", "body", "field"),
    [
        ("openai_chat", {**CHAT, "seed": "HERE"}, "seed"),
        ("openai_chat", {**CHAT, "top_k": "HERE"}, "top_k"),
        ("anthropic_messages", {**CHAT, "top_k": "HERE"}, "top_k"),
        ("google_generate", {**GOOGLE, "generationConfig": {"seed": "HERE"}}, "generationConfig.seed"),
        ("google_generate", {**GOOGLE, "generationConfig": {"topK": "HERE"}}, "generationConfig.topK"),
    ],
)
def test_integer_out_of_range_is_refused_by_name(name: str, body: Any, field: str, value: int) -> None:
    raw = json.dumps(body).replace('"HERE"', str(value)).encode()
    with pytest.raises(BadRequest) as caught:
        DIALECTS[name].parse(raw, "/v1beta/models/m:generateContent")
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "field"),
    [("openai_chat", "max_tokens"), ("anthropic_messages", "max_tokens"), ("openai_responses", "max_output_tokens")],
)
def test_length_out_of_range_is_refused_by_name(name: str, field: str) -> None:
    body = {**CHAT, "input": "x", field: 2**70}
    with pytest.raises(BadRequest) as caught:
        DIALECTS[name].parse(json.dumps(body).encode(), "/v1/x")
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("shape", "guided"),
    [
        ({"type": "text"}, False),
        ({"type": "json_object"}, True),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"default": {"type": "text"}}}}, True),
        ({}, True),
        ("text", True),
    ],
)
def test_only_a_formats_own_type_says_whether_it_is_free(shape: Any, guided: bool) -> None:
    raw = json.dumps({**CHAT, "response_format": shape}, separators=(",", ":")).encode()
    assert DIALECTS["openai_chat"].parse(raw, "/v1/chat/completions").guided is guided


@pytest.mark.parametrize(
    ("name", "body", "field"),
    [
        ("openai_responses", {"model": "m", "input": "x", "conversation": "conv_1"}, "conversation"),
        ("openai_responses", {"model": "m", "input": "x", "prompt": {"id": "pmpt_1"}}, "prompt"),
        ("openai_responses", {"model": "m", "input": "x", "background": True}, "background"),
        ("google_generate", {**GOOGLE, "cachedContent": "cachedContents/abc"}, "cachedContent"),
        ("anthropic_messages", {**CHAT, "container": "container_1"}, "container"),
        ("anthropic_messages", {**CHAT, "mcp_servers": [{"type": "url", "url": "https://x"}]}, "mcp_servers"),
    ],
)
def test_context_that_the_provider_keeps_is_refused_by_name_never_left_out(
    name: str, body: dict[str, Any], field: str
) -> None:
    path = "/v1beta/models/m:generateContent"
    with pytest.raises(BadRequest, match=field) as caught:
        DIALECTS[name].parse(json.dumps(body).encode(), path)
    assert caught.value.field == field
    for empty in (None, False, [], {}, ""):
        DIALECTS[name].parse(json.dumps({**body, field: empty}).encode(), path)

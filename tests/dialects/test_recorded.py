"""Requests that real harnesses sent, with long texts cut: each is understood, and nothing of it is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polynya.dialects.openai_chat import OpenAIChat

from .conftest import recorded


@pytest.mark.parametrize("row", recorded("/chat/completions"), ids=lambda row: row["from"])
def test_recorded_request_is_understood(row: dict[str, Any]) -> None:
    body = row["body"]
    request = OpenAIChat().parse(json.dumps(body).encode(), "/v1/chat/completions")
    assert [json.loads(bytes(message.raw)) for message in request.messages] == body["messages"]
    assert [message.role for message in request.messages] == [message["role"] for message in body["messages"]]
    assert [tool.name for tool in request.tools] == [tool["function"]["name"] for tool in body.get("tools", [])]
    assert json.loads(bytes(request.tools_raw or b"[]")) == body.get("tools", [])
    assert request.stream is body.get("stream", False)
    assert request.include_usage is body.get("stream_options", {}).get("include_usage", False)
    assert request.sampling.max_tokens == body.get("max_tokens", body.get("max_completion_tokens"))
    assert not request.guided
    for message, sent in zip(request.messages, body["messages"], strict=True):
        asked = [(call["id"], call["function"]["arguments"]) for call in sent.get("tool_calls", [])]
        assert [(call.id, call.arguments) for call in message.tool_calls] == asked
        assert message.tool_call_id == sent.get("tool_call_id", "")
        assert message.text or message.tool_calls or message.role == "tool"

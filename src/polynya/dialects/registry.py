"""The dialects that are served, by name. A new one is one file and one line here."""

from __future__ import annotations

from polynya.dialects.anthropic_messages import AnthropicMessages
from polynya.dialects.base import Dialect
from polynya.dialects.google_generate import GoogleGenerate
from polynya.dialects.neutral import ChatReply, ChatRequest
from polynya.dialects.openai_chat import OpenAIChat, assistant_message
from polynya.dialects.openai_responses import OpenAIResponses
from polynya.dialects.wire import kept

_ALL: tuple[Dialect, ...] = (AnthropicMessages(), GoogleGenerate(), OpenAIChat(), OpenAIResponses())
DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in _ALL}
"""Dialects hold no state, so one object of each serves all."""


def echoes(request: ChatRequest, reply: ChatReply) -> list[bytes]:
    """The messages as which a reply may come back: as the model said it, and as the dialect lets a client send it on."""
    echoed = DIALECTS[request.dialect].echoed(request, reply)
    forms = [reply] if echoed is reply else [reply, echoed]
    return [kept(assistant_message(form)) for form in forms]

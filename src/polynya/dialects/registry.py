"""The dialects that are served, by name. A new one is one file and one line here."""

from __future__ import annotations

from polynya.dialects.anthropic_messages import AnthropicMessages
from polynya.dialects.base import Dialect
from polynya.dialects.google_generate import GoogleGenerate
from polynya.dialects.openai_chat import OpenAIChat
from polynya.dialects.openai_responses import OpenAIResponses

_ALL: tuple[Dialect, ...] = (AnthropicMessages(), GoogleGenerate(), OpenAIChat(), OpenAIResponses())
DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in _ALL}
"""Dialects hold no state, so one object of each serves all."""

"""The dialects that are served, by name. A new one is one file and one line here."""

from __future__ import annotations

from polynya.dialects.base import Dialect
from polynya.dialects.openai_chat import OpenAIChat

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (OpenAIChat(),)}
"""Dialects hold no state, so one object of each serves all."""

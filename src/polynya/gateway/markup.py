"""Tool calls that the model wrote and the engine's parser did not read.

An engine that was started with another model's tool parser, or with none, gives replies that look like those of a model which
calls no tools. Invariant: what is counted is a reply without any call, to a request that offered tools, in whose text the
markup of a known family stands. Changes nothing of the reply.
"""

from __future__ import annotations

import msgspec

from polynya.dialects.neutral import ChatRequest
from polynya.engines.base import EngineReply

FLAG = "unparsed_tool_markup"
_MARKUP = (
    "<tool_call>",
    "<function=",
    "<function_call",
    "<|tool_call",
    "<|python_tag|>",
    "<|action_start|>",
    "<｜tool▁call",
    "[TOOL_CALLS]",
    "[TOOL_REQUEST]",
    "<invoke name=",
)


def with_unread_calls(request: ChatRequest, reply: EngineReply) -> EngineReply:
    """The reply, flagged. An engine that counts for itself is believed."""
    if not request.tools or reply.reply.tool_calls or FLAG in reply.flags:
        return reply
    found = sum(reply.reply.text.count(mark) for mark in _MARKUP)
    return msgspec.structs.replace(reply, flags={**reply.flags, FLAG: found}) if found else reply

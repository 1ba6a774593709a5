"""How engines say that a prompt does not fit: a table of patterns, each with the real text that it was taken from.

A bare mention of a context window is no overflow: only these forms are. Pure.
"""

from __future__ import annotations

import re

import msgspec

from polynya.errors import ContextOverflow


class Wording(msgspec.Struct, frozen=True):
    engine: str
    pattern: re.Pattern[str]
    """May have groups ``prompt`` and ``window``."""
    seen: str
    """Verbatim, from a live answer or from the engine's source."""


def _wording(engine: str, pattern: str, seen: str) -> Wording:
    return Wording(engine, re.compile(pattern, re.DOTALL), seen)


WORDINGS: tuple[Wording, ...] = (
    _wording(
        "vllm 0.32",
        r"maximum context length is (?P<window>\d+) tokens\. However, your prompt contains (?:at least )?(?P<prompt>\d+) input",
        "This model's maximum context length is 4096 tokens. However, your prompt contains at least 4097 input tokens, which "
        "exceeds this limit even without any output tokens. Please reduce the length of the input prompt.",
    ),
    _wording(
        "vllm 0.32, by characters",
        r"maximum context length is (?P<window>\d+) tokens\. However, your prompt contains \d+ characters",
        "This model's maximum context length is 4096 tokens. However, your prompt contains 900000 characters (more than 400000 "
        "characters, which is the upper bound for 4096 input tokens). Please reduce the length of the input prompt.",
    ),
    _wording(
        "openai, vllm before 0.11",
        r"maximum context length is (?P<window>\d+) tokens\. However, (?:you requested \d+ tokens \((?P<prompt>\d+) in the messages|"
        r"your messages resulted in (?P<prompt2>\d+) tokens)",
        "This model's maximum context length is 4096 tokens. However, you requested 5012 tokens (4012 in the messages, 1000 in "
        "the completion). Please reduce the length of the messages or completion.",
    ),
    _wording(
        "vllm, max_tokens",
        r"is too large: \d+\. This model's maximum context length is (?P<window>\d+) tokens and your request has (?P<prompt>\d+) input",
        "'max_tokens' or 'max_completion_tokens' is too large: 5000. This model's maximum context length is 4096 tokens and your "
        "request has 100 input tokens (5000 > 4096 - 100).",
    ),
    _wording(
        "sglang",
        r"input \((?P<prompt>\d+) tokens\) is longer than the model's context length \((?P<window>\d+) tokens\)",
        "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
    ),
    _wording(
        "sglang, with max_new_tokens",
        r"exceeds the model's maximum context length of (?P<window>\d+) tokens.*?(?P<prompt>\d+) tokens from the input",
        "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total of 5000 tokens: "
        "4000 tokens from the input messages and 1000 tokens for the completion.",
    ),
    _wording(
        "llama.cpp",
        r"request \((?P<prompt>\d+) tokens\) exceeds the available context size \((?P<window>\d+) tokens\)",
        "request (3000 tokens) exceeds the available context size (2048 tokens), try increasing it",
    ),
)
CODES = ("context_length_exceeded", "exceed_context_size_error")
"""Error types and codes that say it without words: OpenAI's and llama.cpp's."""


def context_overflow(words: str, kind: str = "") -> ContextOverflow | None:
    """The error when ``words`` (or the error's type or code) say that the prompt is too long, else None."""
    for wording in WORDINGS:
        if (found := wording.pattern.search(words)) is not None:
            numbers = {name: int(value) for name, value in found.groupdict().items() if value is not None}
            prompt = numbers.get("prompt", numbers.get("prompt2"))
            return ContextOverflow(words, prompt_tokens=prompt, window=numbers.get("window"))
    if any(code in kind or code in words for code in CODES):
        return ContextOverflow(words or kind)
    return None

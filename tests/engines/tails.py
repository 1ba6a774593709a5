"""New messages of many kinds, and a bridge asked for them."""

import json
import random
from typing import Any

import numpy as np

from polynya.engines.bridging import Bridger

from .asking import BASH

TOOLS = json.dumps([BASH]).encode()
PIECES = (
    *(
        "\n",
        "\n\n",
        " ",
        "  ",
        "\t",
        "<",
        "<|",
        "|>",
        "im_end",
        "im_start",
        "</",
        "think",
        ">",
        "[",
        "INST",
        "]",
        "tool_call",
    ),
    *(
        "é",
        "e\u0301",
        "<\u0338",
        "🙂",
        "\u200d",
        "漢字",
        "{",
        "}",
        '"',
        "'",
        "\\",
        "\\n",
        "\\ue000",
        "\ue000",
        "Q",
        "voxqelzar",
    ),
    *(
        "def f():\n",
        "    return",
        "0.50",
        "1e3",
        "user",
        "assistant",
        "the",
        "quick",
        "<b>",
        "&amp;",
        "%}",
        "{{",
        "\r\n",
    ),
)
PATTERNS = (
    ["user"],
    ["tool"],
    ["tool", "tool", "tool"],
    ["tool", "user"],
    ["tool", "tool", "user"],
    ["system"],
    ["user", "user"],
)


def message(role: str, content: Any, **rest: Any) -> bytes:
    return json.dumps({"role": role, "content": content, **rest}, ensure_ascii=False).encode()


def assistant(text: str, calls: list[tuple[str, str]]) -> bytes:
    made = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": '{"command":"ls","n":[1,2.50]}'}}
        for call_id, name in calls
    ]
    return message("assistant", text, **({"tool_calls": made} if made else {}))


def tail_of(roles: list[str], texts: list[str]) -> tuple[list[bytes], list[tuple[str, str]]]:
    calls = [(f"call_{n}", "bash") for n, role in enumerate(roles) if role == "tool"]
    tail = [
        message(role, text, **({"tool_call_id": f"call_{n}"} if role == "tool" else {}))
        for n, (role, text) in enumerate(zip(roles, texts, strict=True))
    ]
    return tail, calls


async def bridged(
    bridger: Bridger, parent: list[int], tail: list[bytes], calls: list[tuple[str, str]], **rest: Any
) -> Any:
    asked = {"tools": None, "template_kwargs": None} | rest
    return await bridger.bridge(parent_ids=np.array(parent, dtype=np.int32), parent_calls=calls, tail=tail, **asked)


def nasty(rng: random.Random, *more: str) -> str:
    return "".join(rng.choice((*PIECES, *more)) for _ in range(rng.randrange(12)))

"""Mutated requests: whatever comes in, a dialect understands it or refuses it in words, and its answer can be rendered.

``POLYNYA_FUZZ=10000`` runs that many mutations of each dialect instead of the few that every test run does.
"""

from __future__ import annotations

import copy
import json
import os
import random
from typing import Any

import pytest

from polynya.dialects.base import BadRequest, Fault, WireError
from polynya.dialects.neutral import ChatReply, ToolCall
from polynya.dialects.registry import DIALECTS

from .conftest import HEAD, recorded

ROUNDS = int(os.environ.get("POLYNYA_FUZZ", "400"))
SEEDS: dict[str, list[tuple[str, Any]]] = {
    "openai_chat": [(row["path"], row["body"]) for row in recorded("/chat/completions")],
    "anthropic_messages": [(row["path"], row["body"]) for row in recorded("/messages")],
    "openai_responses": [(row["path"], row["body"]) for row in recorded("/responses")],
    "google_generate": [(row["path"], row["body"]) for row in recorded("enerateContent")],
}
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1e308,
    2**70,
    "",
    "\ud800",
    "x" * 5000,
    [],
    {},
    [[]],
    {"type": "alien"},
    [None],
    "\x00",
    3.5,
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    entries: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in entries:
        found += places(item, (*path, key))
    return found


def mutate(body: Any, dice: random.Random) -> Any:
    body = json.loads(json.dumps(body))
    for _ in range(dice.randint(1, 4)):
        spots = places(body)
        if not spots:
            break
        *above, key = dice.choice(spots)
        parent = body
        for step in above:
            parent = parent[step]
        match dice.randint(0, 3):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, list):
                parent.insert(key, copy.deepcopy(dice.choice(parent)))
            case _:
                parent[key] = copy.deepcopy(dice.choice(ODD))
    return body


@pytest.mark.parametrize("name", sorted(SEEDS))
def test_mutated_requests_are_understood_or_refused_in_words(name: str) -> None:
    dialect, dice = DIALECTS[name], random.Random(f"{name}-7")
    reply = ChatReply(text="t", reasoning="r", tool_calls=[ToolCall(id="1", name="exec", arguments="[1")])
    outcomes = {"understood": 0, "refused": 0}
    for _ in range(ROUNDS):
        path, body = dice.choice(SEEDS[name])
        raw = json.dumps(mutate(body, dice)).encode()
        if dice.random() < 0.1:
            raw = raw[: dice.randrange(len(raw))]
        try:
            request = dialect.parse(raw, path)
        except BadRequest as exc:
            outcomes["refused"] += 1
            assert exc.message
            json.loads(dialect.error(WireError(fault=Fault.BAD_REQUEST, message=exc.message, field=exc.field)))
            continue
        outcomes["understood"] += 1
        json.loads(dialect.render(request, reply, HEAD))
        assert b"".join(dialect.stream(request, reply, HEAD))
        for message in request.messages:
            json.loads(bytes(message.raw))
    assert all(outcomes.values()), outcomes

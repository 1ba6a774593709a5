"""What is refused or put off, and what a bridge costs: a bridge that cannot be proven is not made."""

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from polynya.engines.bridging import Bridger, LazyBridger
from polynya.engines.vocabulary import discover
from polynya.errors import EngineProtocolError, EngineUnavailable

from .families import GLM, LLAMA31, MISTRAL, QWEN3, QWEN35, SMOLLM2, FamilyDesk
from .tails import TOOLS, bridged, message, tail_of


@pytest.mark.parametrize(
    ("template", "roles", "tools", "why"),
    [
        (MISTRAL, ["user"], TOOLS, "prints tools"),
        (LLAMA31, ["tool", "tool"], None, "single tool-calls"),
        (QWEN35, ["system"], None, "at the beginning"),
        (GLM, ["system"], None, "known stop token"),
        (QWEN3.replace("'\\n<tool_response>\\n' + said(m)", "'\\n' + said(m)[:3]"), ["tool"], None, "print the new messages once"),
        (SMOLLM2.replace("said(m) + '<", "said(m) + messages|length|string + '<"), ["user"], None, "behind other conversations"),
    ],
)  # fmt: skip
async def test_a_pattern_that_fails_its_self_test_is_refused(
    template: str, roles: list[str], tools: Any, why: str
) -> None:
    desk = await FamilyDesk(template).learn()
    bridger = Bridger(desk)
    tail, calls = tail_of(roles, ["x"] * len(roles))
    for _ in range(2):
        found = await bridged(bridger, [1, 2], tail, calls, tools=tools)
        assert found is None
    ((reason, count),) = bridger.refused.items()
    assert count == 2 and why in reason and "pattern" in reason


async def test_ids_that_the_engine_would_give_otherwise_are_refused() -> None:
    class Merging(FamilyDesk):
        async def render_ids(self, *asked: Any) -> list[int]:
            ids = await super().render_ids(*asked)
            return [*ids[:-2], ids[-1]]

    class Losing(FamilyDesk):
        async def decode(self, ids: list[int]) -> str:
            return (await super().decode(ids)).replace("\n\n", "\n")

    for kind, why in ((Merging, "other ids"), (Losing, "do not decode")):
        bridger = Bridger(await kind(SMOLLM2).learn())
        assert await bridged(bridger, [1], [message("user", "x")], []) is None
        assert why in next(iter(bridger.refused))


async def test_an_encoder_that_makes_control_tokens_of_text_is_refused() -> None:
    class Careless(FamilyDesk):
        async def encode(self, texts: list[str]) -> list[list[int]]:
            return [self.whole.encode(text).ids for text in texts]

    bridger = Bridger(await Careless(SMOLLM2).learn())
    assert await bridged(bridger, [1], [message("user", "fine")], []) is not None
    assert await bridged(bridger, [1], [message("user", "a<|im_end|>")], []) is None
    assert dict(bridger.refused) == {"the engine makes control tokens of plain text": 1}


@pytest.mark.parametrize(
    ("parent", "tail", "reason"),
    [
        ([], [message("user", "x")], "nothing to continue"),
        ([1], [], "nothing to continue"),
        ([1], [message("assistant", "x")], "an assistant's message among the new ones"),
        ([1], [b"{"], "unreadable message"),
        ([1], [message("a+b", "x")], "unreadable message"),
        ([1], [message(role, "x") for role in ("user", "system") * 5], "too many turns among the new messages"),
        ([1], [message("user", [{"type": "image_url"}])], "media"),
    ],
)
async def test_what_is_no_tail_is_refused(parent: list[int], tail: list[bytes], reason: str) -> None:
    bridger = Bridger(await FamilyDesk(SMOLLM2).learn())
    assert await bridged(bridger, parent, tail, []) is None
    assert dict(bridger.refused) == {reason: 1}


async def test_an_engine_that_is_away_decides_nothing() -> None:
    class Away(FamilyDesk):
        status: int | None = None
        away = False

        async def render(self, *asked: Any) -> str:
            if self.away:
                raise EngineUnavailable("away", status=self.status)
            return await super().render(*asked)

    desk = Away(SMOLLM2)
    await desk.learn()
    bridger, tail = Bridger(desk), [message("user", "x")]
    desk.away = True
    assert await bridged(bridger, [1], tail, []) is None
    assert dict(bridger.refused) == {"engine: EngineUnavailable": 1}
    desk.away = False
    assert await bridged(bridger, [1], tail, []) is not None
    desk.away, desk.status = True, 500
    assert await bridged(bridger, [1], [message("system", "x")], []) is None
    desk.away = False
    assert await bridged(bridger, [1], [message("system", "x")], []) is None, "a template's own error is remembered"


async def test_one_render_and_one_encoding_each_and_one_self_test_for_all() -> None:
    desk = await FamilyDesk(QWEN3).learn()
    bridger = Bridger(desk)
    await asyncio.gather(*(bridged(bridger, [1], [message("user", f"n{n}")], []) for n in range(8)))
    asked = desk.renders, desk.encodes
    found = await bridged(bridger, [1], [message("user", "another"), message("user", "two")][:1], [])
    assert found is not None and (desk.renders - asked[0], desk.encodes - asked[1]) == (1, 1)
    again = Bridger(desk)
    before = desk.renders
    await bridged(again, [1], [message("user", "x")], [])
    single = desk.renders - before
    assert asked[0] <= 3 + single + 8


async def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polynya.engines.bridging._KEPT", 2)
    bridger = Bridger(await FamilyDesk(QWEN3).learn())
    for n in range(6):
        found = await bridged(bridger, [1], [message("user", f"n{n}")], [], template_kwargs=b'{"k":%d}' % n)
        assert found is not None
    assert len(bridger._tested) <= 2 and len(bridger._encoded) < 12


async def test_an_engine_that_goes_away_in_a_self_test_decides_nothing() -> None:
    class Leaving(FamilyDesk):
        left = 0

        async def render(self, *asked: Any) -> str:
            self.left -= 1
            if self.left == 0:
                raise EngineUnavailable("away")
            return await super().render(*asked)

    desk = Leaving(SMOLLM2)
    await desk.learn()
    bridger = Bridger(desk)
    for at in range(1, 5):
        desk.left = at
        assert await bridged(bridger, [1], [message("user", "x")], []) is None
    assert dict(bridger.refused) == {"engine: EngineUnavailable": 4}
    assert await bridged(bridger, [1], [message("user", "x")], []) is not None


async def test_a_template_without_a_system_role_is_tested_without_one() -> None:
    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    bridger = Bridger(await FamilyDesk(no_system + SMOLLM2).learn())
    assert await bridged(bridger, [1], [message("user", "x")], []) is not None


async def test_a_template_that_allows_no_two_assistants_has_no_opener_unless_its_token_is_known() -> None:
    strict = (
        "{% for m in messages %}{% if not loop.first and m.role == messages[loop.index0 - 1].role %}"
        "{{ raise_exception('alternate') }}{% endif %}{% endfor %}"
    )
    opened = {"other_close": 1, "synthetic_close": 1}
    last = "<|endoftext|>"
    for template, flags in ((SMOLLM2, {"other_close": 1}), (GLM, opened)):
        desk = await FamilyDesk(strict + template).learn()
        found = await bridged(Bridger(desk), [desk.whole.token_to_id(last)], [message("user", "x")], [])
        assert found is not None and found.flags == flags


async def test_a_long_parent_costs_nothing() -> None:
    desk = await FamilyDesk(QWEN3).learn()
    bridger = Bridger(desk)
    parent = np.full(130_000, 99, dtype=np.int32)
    parent[0] = desk.vocabulary.special["<think>"]
    tail, calls = tail_of(["tool"], ["out " * 50])
    await bridger.bridge(parent_ids=parent, parent_calls=calls, tail=tail, tools=TOOLS, template_kwargs=None)
    spent = []
    for _ in range(20):
        start = time.perf_counter()
        await bridger.bridge(parent_ids=parent, parent_calls=calls, tail=tail, tools=TOOLS, template_kwargs=None)
        spent.append(time.perf_counter() - start)
    assert sorted(spent)[2] < 0.010


async def test_a_bridger_is_made_once_and_given_up_after_three_failures() -> None:
    made = Bridger(await FamilyDesk(SMOLLM2).learn())
    answers: list[Any] = [EngineProtocolError("x"), made]

    async def make() -> Bridger | None:
        await asyncio.sleep(0)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    lazy = LazyBridger(make)
    assert await lazy.get() is None
    assert await asyncio.gather(lazy.get(), lazy.get()) == [made, made] and not answers
    answers += [EngineProtocolError("x")] * 3
    broken = LazyBridger(make)
    assert [await broken.get() for _ in range(5)] == [None] * 5 and not answers


async def test_a_model_whose_turns_end_with_nothing_known_has_no_vocabulary() -> None:
    desk = FamilyDesk(SMOLLM2.replace("<|im_end|>", "--"))
    assert await discover(desk.render, desk.encode_special, template=desk.template) is None

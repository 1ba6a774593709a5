"""The toy template and tokenizer as a ``TemplateDesk``: exact by construction, with no request to anyone."""

from __future__ import annotations

import msgspec

from polynya.engines.scripted import tokens
from polynya.schema import Int32Array
from polynya.tokens.bridge import Vocabulary, split

VOCABULARY = Vocabulary(
    special={text: token for token, text in tokens.CONTROL_TEXT.items()},
    stop_ids=frozenset({tokens.END}),
    think_open=tokens.THINK,
    think_close=tokens.UNTHINK,
)


class ScriptedTemplate:
    def __init__(self, *, drop_reasoning: bool = False) -> None:
        self._drop_reasoning = drop_reasoning

    @property
    def vocabulary(self) -> Vocabulary:
        return VOCABULARY

    async def render(self, messages: list[bytes], tools: bytes | None, template_kwargs: bytes | None) -> str:
        return tokens.decode(self._rendered(messages, tools))

    async def render_ids(self, messages: list[bytes], tools: bytes | None, template_kwargs: bytes | None) -> list[int]:
        return [int(token) for token in self._rendered(messages, tools)]

    def _rendered(self, messages: list[bytes], tools: bytes | None) -> Int32Array:
        said = [msgspec.json.decode(raw, type=tokens.WireMessage) for raw in messages]
        return tokens.render(said, tools, drop_reasoning=self._drop_reasoning)

    async def encode(self, texts: list[str]) -> list[list[int]]:
        return [tokens.encode(text).tolist() for text in texts]

    async def encode_special(self, text: str) -> list[int]:
        return encode_special(text)

    async def decode(self, ids: list[int]) -> str:
        return tokens.decode(ids)


def encode_special(text: str) -> list[int]:
    """As a server's tokenizer does it: control tokens that the text spells become their ids."""
    pieces = split(text, VOCABULARY.special, "")
    return [int(token) for piece in pieces for token in ([piece] if isinstance(piece, int) else tokens.encode(piece))]

"""``--engine`` and ``--model``, the same in every verb that takes them."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from polynya.config import GatewaySettings
from polynya.engines import create_engine
from polynya.engines.base import Engine


class Thinking(StrEnum):
    """``GatewaySettings.thinking``."""

    RETAIN = "retain"
    TEMPLATE = "template"


EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        "-e",
        help="embedded (a real model on this CPU), scripted (no model: tests and load), or the base URL of a vLLM, SGLang or "
        "other OpenAI-compatible server.",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="embedded: qwen2.5-coder-1.5b (default), smollm2-135m, a .gguf path, or hf:ORG/REPO/FILE.gguf. URL: the served name.",
        show_default=False,
    ),
]
ContinuationOption = Annotated[
    bool,
    typer.Option(
        "--continuation/--no-continuation",
        help="Prompt later turns with the captured ids of the earlier ones. Without, the engine renders every prompt anew.",
    ),
]
ThinkingOption = Annotated[
    Thinking,
    typer.Option(
        help="Where a user message makes the chat template drop earlier thinking: retain it as sampled, or split as the template does."
    ),
]
TokenRouteOption = Annotated[
    str | None,
    typer.Option(
        help="URL: how prompts of ids are given first: chat (beside the messages), generate (vLLM with --enable-scale-out; it "
        "also says which weights sampled which token) or completions. Default: the first that works.",
        show_default=False,
    ),
]
_EMBEDDED_SLOTS = 2
"""Sessions that decode together on CPU: more only wait for each other."""


class MadeEngine(msgspec.Struct, frozen=True):
    engine: Engine
    concurrency: int | None
    """Sessions that it serves well at a time; None: as many as asked."""


def continued(continuation: bool, thinking: Thinking, *, port: int = 0) -> GatewaySettings:
    return GatewaySettings(
        port=port, continuation=continuation, thinking="retain" if thinking == "retain" else "template"
    )


def make_engine(
    name: str,
    model: str | None,
    progress: Callable[[str], None],
    log: Path | None,
    token_route: str | None = None,
) -> MadeEngine:
    """Nothing is started yet. Raises ConfigError for a name that is none."""
    engine = create_engine(name, model=model, progress=_download_progress(progress), log=log, token_route=token_route)
    return MadeEngine(engine, _EMBEDDED_SLOTS if name == "embedded" else None)


def _download_progress(say: Callable[[str], None]) -> Callable[[int, int, str], None]:
    """One line every tenth of a download, and when what is done changes."""
    last: tuple[str, int] = ("", -1)

    def report(done: int, total: int, text: str) -> None:
        nonlocal last
        tenths = done * 10 // total if total else 0
        if (text, tenths) != last:
            last = (text, tenths)
            say(f"{text}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB" if total else text)

    return report

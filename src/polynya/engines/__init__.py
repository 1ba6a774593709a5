"""Engines, by name or address. The gateway gets one from ``create_engine`` and knows it by the protocol in ``base`` only.

Refuses a name that is none: the error lists those that are. Third parties add names by the entry-point group
``polynya.engines``; an entry is called with ``model=…`` and returns an ``Engine``.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from polynya.engines.base import Engine
from polynya.errors import ConfigError

ENTRY_POINT_GROUP = "polynya.engines"
BUILT_IN = ("embedded", "scripted")

__all__ = ["BUILT_IN", "ENTRY_POINT_GROUP", "Engine", "create_engine"]


def create_engine(
    name_or_url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    timeout: float | None = None,
    retries: int | None = None,
    token_route: str | None = None,
    log: Path | None = None,
    progress: Any = None,
) -> Engine:
    """An engine that is not started yet.

    ``embedded`` (llama.cpp; ``model`` is a known name, a .gguf path or ``hf:…``), ``scripted`` (no model: for tests and load),
    or the base URL of an OpenAI-compatible server, with or without ``/v1``. ``timeout`` is seconds without a byte,
    ``retries`` further tries of a call, ``token_route`` one of ``engines.routes.Route`` (for an address only), ``log`` and
    ``progress`` are for the embedded engine. Raises ConfigError.
    """
    from polynya.engines.http import HttpSettings

    defaults = HttpSettings()
    http = HttpSettings(
        read_timeout=defaults.read_timeout if timeout is None else timeout,
        retries=defaults.retries if retries is None else retries,
    )
    if name_or_url.startswith(("http://", "https://")):
        from polynya.engines.compatible import CompatibleEngine
        from polynya.engines.routes import Route

        try:
            route = None if token_route is None else Route(token_route)
        except ValueError as exc:
            raise ConfigError(f"token_route: {exc}", fix=f"use one of {', '.join(Route)}") from exc
        return CompatibleEngine(name_or_url, model=model, api_key=api_key, http=http, token_route=route)
    if token_route is not None:
        raise ConfigError(f"token_route: {name_or_url} has one route only", fix="leave it out")
    if name_or_url == "embedded":
        from polynya.engines.llamacpp import LlamaCppEngine

        return LlamaCppEngine(model, http=http, log=log, progress=progress)
    if name_or_url == "scripted":
        from polynya.engines.scripted import Script, ScriptedEngine

        return ScriptedEngine(Script(model=model) if model else None)
    return _third_party(name_or_url, model)


def _third_party(name: str, model: str | None) -> Engine:
    found: dict[str, EntryPoint] = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in found:
        raise ConfigError(
            f"engine: {name!r} is no engine",
            fix=f"use {', '.join((*BUILT_IN, *sorted(found)))}, or a base URL such as http://localhost:8000/v1",
        )
    try:
        made: Engine = found[name].load()(model=model)
    except ImportError as exc:
        raise ConfigError(f"engine: {name!r} ({found[name].value}) cannot be loaded: {exc}") from exc
    return made

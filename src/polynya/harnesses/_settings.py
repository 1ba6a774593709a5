"""Reads the settings of a harness strictly.

Invariant: a setting that is not declared, or has another type than declared, is TaskFileError with name, value and fix.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from polynya.errors import TaskFileError
from polynya.schema import HarnessSpec

T = TypeVar("T", bound=msgspec.Struct)


def read(spec: HarnessSpec, kind: type[T]) -> T:
    known = ", ".join(kind.__struct_fields__) or "none"
    for name in spec.settings:
        if name not in kind.__struct_fields__:
            raise TaskFileError(
                f"harness.settings.{name}: {spec.name} does not know it (value {spec.settings[name]!r:.120})",
                fix=f"known settings: {known}",
            )
    try:
        return msgspec.convert(spec.settings, kind, strict=True)
    except msgspec.ValidationError as exc:
        raise TaskFileError(
            f"harness.settings of {spec.name}: {exc} (value {spec.settings!r:.200})", fix=f"known settings: {known}"
        ) from exc


def refuse_mcp(spec: HarnessSpec) -> None:
    if spec.mcp_servers:
        named = ", ".join(server.name for server in spec.mcp_servers)
        raise TaskFileError(
            f"harness.mcp_servers: {spec.name} has no MCP client (value {named:.120})", fix="leave mcp_servers out"
        )


def check_mcp(spec: HarnessSpec) -> None:
    """Two servers whose names some harness takes for one are refused."""
    seen: dict[str, str] = {}
    for server in spec.mcp_servers:
        name = server.name.replace("-", "_").lower()
        if name in seen:
            raise TaskFileError(
                f"harness.mcp_servers: {server.name!r} and {seen[name]!r} are one name to {spec.name}",
                fix="give each server a name of its own, apart from case, - and _",
            )
        seen[name] = server.name


def mcp_object(spec: HarnessSpec, **more: Any) -> dict[str, Any]:
    """The ``mcpServers`` object that most clients read. ``more``: what one of them wants beside it."""
    return {
        server.name: {"command": server.command, "args": server.args, "env": server.env, **more}
        for server in spec.mcp_servers
    }

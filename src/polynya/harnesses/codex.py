"""Codex CLI (``@openai/codex``): its native binary from npm, over OpenAI Responses as a server-sent stream.

Invariant: the instruction goes in by stdin, the configuration file names the endpoint as the only provider, and everything
that would ask another host is off. Its verdict is the last turn event. It refuses settings that it has no key for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from polynya.harnesses import _settings
from polynya.harnesses._npm_cli import NpmCli, early_end, events, failed, message_of, start_of
from polynya.harnesses.base import Endpoint, Installed, Launch, Verdict
from polynya.runtimes.base import ExecResult
from polynya.schema import HarnessSpec, McpServer

PACKAGE = "@openai/codex"
KEY_VARIABLE = "POLYNYA_SESSION_KEY"
OFF = ("plugins", "apps", "remote_plugin", "shell_snapshot")
"""Features that ask hosts of the vendor, or run before the first turn."""

_STATUS = re.compile(r"unexpected status (\d{3})\b")
ENDS = ("turn.completed", "turn.failed", "error")


class CodexSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    multi_agent: bool = False
    """Tools that start sub-agents."""
    goals: bool = False
    reasoning_effort: Literal["minimal", "low", "medium", "high", "xhigh"] | None = None
    base_instructions: str | None = None
    """In place of Codex's own system prompt of 17 KB (``model_instructions_file``)."""
    developer_instructions: str | None = None
    project_docs: bool = True
    """False: AGENTS.md of the workspace is not read."""
    tool_output_tokens: Annotated[int, msgspec.Meta(ge=100)] | None = None
    """A longer tool output is cut in its middle."""
    websockets: bool = False
    """True: one WebSocket a thread, where each turn sends only what is new, in place of a POST of the whole."""


class Codex(NpmCli):
    name = "codex"
    default_version = "0.171.0"

    def validate(self, spec: HarnessSpec) -> None:
        _settings.read(spec, CodexSettings)
        _settings.check_mcp(spec)

    def packages(self, version: str) -> dict[str, str]:
        return {PACKAGE: version}

    def program(self, folder: Path) -> Path:
        scope = folder / "node_modules" / PACKAGE.partition("/")[0]
        return next(iter(sorted(scope.glob("codex-linux-*/vendor/*/bin/codex"))), scope / "codex-linux" / "codex")

    def launch(
        self, spec: HarnessSpec, instruction: str, endpoint: Endpoint, installed: Installed, *, workdir: str, home: str
    ) -> Launch:
        settings = _settings.read(spec, CodexSettings)
        files = {".codex/config.toml": config_toml(endpoint, settings, home, spec.mcp_servers)}
        if settings.base_instructions is not None:
            files[".codex/instructions.md"] = settings.base_instructions
        argv = [*start_of(installed, self.name), "exec", "--json", "--skip-git-repo-check"]
        argv += ["--dangerously-bypass-approvals-and-sandbox", "-"]
        env = {**spec.env, KEY_VARIABLE: endpoint.api_key, "CODEX_HOME": f"{home}/.codex"}
        return Launch(argv=argv, env=env, home_files=files, stdin=instruction.encode())

    def verdict(self, result: ExecResult, stdout_tail: bytes) -> Verdict:
        if (early := early_end(self.name, result, stdout_tail)) is not None:
            return early
        last: dict[str, Any] = next((event for event in events(stdout_tail) if event.get("type") in ENDS), {})
        kind = last.get("type")
        if kind == "turn.completed" and result.exit_code == 0:
            return Verdict(ok=True, reason=kind)
        if kind in ("turn.failed", "error"):
            words = message_of(last.get("error") or last)
            status = _STATUS.match(words)
            return failed(words, int(status[1]) if status else None)
        return Verdict(ok=False, reason=f"codex ended with {result.exit_code} without completing its turn")


def config_toml(endpoint: Endpoint, settings: CodexSettings, home: str, mcp_servers: Sequence[McpServer] = ()) -> str:
    """A JSON string is a TOML basic string."""
    top: dict[str, Any] = {
        "model": endpoint.model,
        "model_provider": "polynya",
        "model_context_window": endpoint.window,
        "check_for_update_on_startup": False,
        "web_search": "disabled",
    }
    if settings.reasoning_effort is not None:
        top["model_reasoning_effort"] = settings.reasoning_effort
    if settings.base_instructions is not None:
        top["model_instructions_file"] = f"{home}/.codex/instructions.md"
    if settings.developer_instructions is not None:
        top["developer_instructions"] = settings.developer_instructions
    if not settings.project_docs:
        top["project_doc_max_bytes"] = 0
    if settings.tool_output_tokens is not None:
        top["tool_output_token_limit"] = settings.tool_output_tokens
    tables: dict[str, dict[str, Any]] = {
        "model_providers.polynya": {
            "name": "polynya",
            "base_url": f"{endpoint.base_url}/v1",
            "env_key": KEY_VARIABLE,
            "wire_api": "responses",
            "supports_websockets": settings.websockets,
        },
        "agents": {"enabled": settings.multi_agent},
        "features": dict.fromkeys(OFF, False) | {"goals": settings.goals},
        "analytics": {"enabled": False},
        "feedback": {"enabled": False},
    }
    for server in mcp_servers:
        tables[f"mcp_servers.{server.name}"] = {"command": server.command, "args": server.args}
        tables[f"mcp_servers.{server.name}.env"] = {json.dumps(key): value for key, value in server.env.items()}
    lines = _entries(top)
    for name, table in tables.items():
        lines += ["", f"[{name}]", *_entries(table)]
    return "\n".join(lines) + "\n"


def _entries(table: dict[str, Any]) -> list[str]:
    return [f"{key} = {json.dumps(value)}" for key, value in table.items()]

"""Qwen Code (``@qwen-code/qwen-code``): installed with Node from npm, over any of the four dialects.

Invariant: the instruction goes in by stdin, and no sub-agent that keeps memories asks the policy after the run. Its verdict
is its ``result`` event. It refuses settings that it has no flag or key for.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from polynya.harnesses import _settings
from polynya.harnesses._npm_cli import NpmCli, early_end, events, failed, is_cut, message_of, start_of
from polynya.harnesses.base import Endpoint, Installed, Launch, Verdict
from polynya.runtimes.base import ExecResult
from polynya.schema import HarnessSpec

PACKAGE = "@qwen-code/qwen-code"
BUDGET_EXITS = (53, 55)
_STATUS = re.compile(r"\[API Error: (\d{3})\b")
AUTH_TYPES = {"chat": "openai", "responses": "openai-responses", "anthropic": "anthropic", "google": "gemini"}


class QwenCodeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    wire: Literal["chat", "responses", "anthropic", "google"] = "chat"
    """The dialect that it speaks to the gateway."""
    bare: bool = False
    """``--bare``: nothing of the workspace is discovered at the start."""
    max_turns: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_tool_calls: Annotated[int, msgspec.Meta(ge=0)] | None = None
    exclude_tools: list[str] = []
    system_prompt: str | None = None
    append_system_prompt: str | None = None
    memory: bool = False
    """True: after a run a sub-agent of some calls extracts memories."""


class QwenCode(NpmCli):
    name = "qwen_code"
    default_version = "0.24.4"
    needs_node = True

    def validate(self, spec: HarnessSpec) -> None:
        _settings.read(spec, QwenCodeSettings)
        _settings.check_mcp(spec)

    def packages(self, version: str) -> dict[str, str]:
        return {PACKAGE: version}

    def program(self, folder: Path) -> Path:
        return folder / "node_modules" / PACKAGE / "cli.js"

    def launch(
        self, spec: HarnessSpec, instruction: str, endpoint: Endpoint, installed: Installed, *, workdir: str, home: str
    ) -> Launch:
        settings = _settings.read(spec, QwenCodeSettings)
        argv = [*start_of(installed, self.name), "--yolo", "--output-format", "stream-json"]
        argv += ["--auth-type", AUTH_TYPES[settings.wire], "--model", endpoint.model, *_flags(settings)]
        env = {
            **spec.env,
            **_wire(settings.wire, endpoint),
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(endpoint.max_tokens),
            "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
            "QWEN_CODE_NO_RELAUNCH": "true",
        }
        return Launch(
            argv=argv,
            env=env,
            home_files={".qwen/settings.json": json.dumps(settings_json(settings, endpoint, spec), indent=1)},
            stdin=instruction.encode(),
        )

    def verdict(self, result: ExecResult, stdout_tail: bytes) -> Verdict:
        if (early := early_end(self.name, result, stdout_tail)) is not None:
            return early
        last: dict[str, Any] = next((event for event in events(stdout_tail) if event.get("type") == "result"), {})
        if result.exit_code == 0 and not last.get("is_error") and (last or is_cut(stdout_tail)):
            return Verdict(ok=True, reason=str(last.get("subtype", "")))
        if result.exit_code in BUDGET_EXITS:
            return Verdict(ok=False, reason="it reached its own limit of turns or tool calls")
        words = message_of(last.get("error") or f"qwen ended with {result.exit_code}")
        status = _STATUS.match(words)
        return failed(words, int(status[1]) if status else None)


def _wire(wire: str, endpoint: Endpoint) -> dict[str, str]:
    base, key, model = endpoint.base_url, endpoint.api_key, endpoint.model
    if wire == "anthropic":
        return {"ANTHROPIC_BASE_URL": base, "ANTHROPIC_API_KEY": key, "ANTHROPIC_MODEL": model}
    if wire == "google":
        return {"GOOGLE_GEMINI_BASE_URL": base, "GEMINI_API_KEY": key, "GEMINI_MODEL": model}
    return {"OPENAI_BASE_URL": f"{base}/v1", "OPENAI_API_KEY": key, "OPENAI_MODEL": model}


def _flags(settings: QwenCodeSettings) -> list[str]:
    flags = ["--bare"] if settings.bare else []
    if settings.max_turns is not None:
        flags += ["--max-session-turns", str(settings.max_turns)]
    if settings.max_tool_calls is not None:
        flags += ["--max-tool-calls", str(settings.max_tool_calls)]
    if settings.exclude_tools:
        flags += ["--exclude-tools", ",".join(settings.exclude_tools)]
    if settings.system_prompt is not None:
        flags += ["--system-prompt", settings.system_prompt]
    if settings.append_system_prompt is not None:
        flags += ["--append-system-prompt", settings.append_system_prompt]
    return flags


def settings_json(settings: QwenCodeSettings, endpoint: Endpoint, spec: HarnessSpec) -> dict[str, Any]:
    return {
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False},
        "mcpServers": _settings.mcp_object(spec, trust=True),
        "memory": {"enableManagedAutoMemory": settings.memory},
        "model": {"generationConfig": {"contextWindowSize": endpoint.window}},
    }

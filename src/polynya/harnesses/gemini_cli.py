"""Gemini CLI (``@google/gemini-cli``): installed with Node from npm, over Google generateContent.

Invariant: the instruction goes in by stdin, the workspace is trusted for this run only, and neither the model router nor
the loop detector makes calls of its own. Its exit code is an HTTP status modulo 256: its verdict is read from its last JSON
event. It refuses settings that it has no key for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec

from polynya.harnesses import _settings
from polynya.harnesses._npm_cli import NpmCli, early_end, events, failed, message_of, start_of
from polynya.harnesses.base import Endpoint, Installed, Launch, Verdict
from polynya.runtimes.base import ExecResult
from polynya.schema import HarnessSpec

PACKAGE = "@google/gemini-cli"
WEB_TOOLS = ("google_web_search", "web_fetch")
LEAST_STATUS_EXIT = 400 - 256
"""It ends with an HTTP status, of which the system keeps 8 bits. Its own codes are smaller."""


class GeminiCliSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_turns: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """``model.maxSessionTurns``."""
    tools: list[str] | None = None
    """Only these built-in tools (``tools.core``)."""
    exclude_tools: list[str] = []
    web_tools: bool = False
    """True: also the tools that ask a server of the vendor, by a model call of their own."""


class GeminiCli(NpmCli):
    name = "gemini_cli"
    default_version = "0.61.0"
    needs_node = True

    def validate(self, spec: HarnessSpec) -> None:
        _settings.read(spec, GeminiCliSettings)
        _settings.check_mcp(spec)

    def packages(self, version: str) -> dict[str, str]:
        return {PACKAGE: version}

    def program(self, folder: Path) -> Path:
        return folder / "node_modules" / PACKAGE / "bundle" / "gemini.js"

    def launch(
        self, spec: HarnessSpec, instruction: str, endpoint: Endpoint, installed: Installed, *, workdir: str, home: str
    ) -> Launch:
        settings = _settings.read(spec, GeminiCliSettings)
        env = {
            **spec.env,
            "GOOGLE_GEMINI_BASE_URL": endpoint.base_url,
            "GEMINI_API_KEY": endpoint.api_key,
            # Without it yolo is silently downgraded, and tools wait for an approval.
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
            # It starts itself again with a larger heap otherwise: twice the start-up time.
            "GEMINI_CLI_NO_RELAUNCH": "true",
        }
        return Launch(
            argv=[*start_of(installed, self.name), "--yolo", "-m", endpoint.model, "--output-format", "stream-json"],
            env=env,
            home_files={".gemini/settings.json": json.dumps(settings_json(settings, spec), indent=1)},
            stdin=instruction.encode(),
        )

    def verdict(self, result: ExecResult, stdout_tail: bytes) -> Verdict:
        if (early := early_end(self.name, result, stdout_tail)) is not None:
            return early
        last: dict[str, Any] = next((event for event in events(stdout_tail) if event.get("type") == "result"), {})
        if result.exit_code == 0 and last.get("status") == "success":
            return Verdict(ok=True, reason="success")
        words = message_of(last.get("error") or f"gemini ended with {result.exit_code}")
        return failed(words, result.exit_code + 256 if result.exit_code >= LEAST_STATUS_EXIT else None)


def settings_json(settings: GeminiCliSettings, spec: HarnessSpec) -> dict[str, Any]:
    model: dict[str, Any] = {"disableLoopDetection": True}
    if settings.max_turns is not None:
        model["maxSessionTurns"] = settings.max_turns
    tools: dict[str, Any] = {"exclude": [*settings.exclude_tools, *(() if settings.web_tools else WEB_TOOLS)]}
    if settings.tools is not None:
        tools["core"] = settings.tools
    return {
        # Left out, the base URL selects a way of signing in that it then refuses.
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
        "model": model,
        "tools": tools,
        "mcpServers": _settings.mcp_object(spec, trust=True),
    }

"""pi (``@earendil-works/pi-coding-agent``): installed with its own Node from npm, over any of the four dialects.

Invariant: the instruction goes in by stdin, so that no text can be taken for a flag or a file name. pi exits 0 after a
failed run as well: its verdict is read from its JSON events. It refuses settings that pi has no flag for.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from polynya.harnesses import _settings, npm
from polynya.harnesses.base import Endpoint, Installed, Launch, Progress, Verdict
from polynya.runtimes.base import Bind, Check, ExecResult
from polynya.schema import HarnessSpec

PACKAGE = "@earendil-works/pi-coding-agent"
PROVIDER = "polynya"
WIRES = {
    "chat": ("openai-completions", "/v1"),
    "responses": ("openai-responses", "/v1"),
    "anthropic": ("anthropic-messages", ""),
    "google": ("google-generative-ai", "/v1beta"),
}
RESERVE = 4096
"""pi keeps this many tokens of the window free, and asks for replies of 1 token when less is left. The gateway clamps replies
to the window exactly, so pi is told a window that is larger by its reserve."""
# One structural key of a JSON line; inside a string its quotes would be escaped. The last event that holds the message
# repeats the whole conversation and is often longer than the tail, so lines cannot be relied on.
_STOP = re.compile(rb'(?<!\\)"stopReason":"(\w+)"')
_ERROR = re.compile(rb'(?<!\\)"(?:errorMessage|finalError)":("(?:[^"\\]|\\.)*")')
_INFRA = re.compile(
    r"^(5\d\d|401|403|404|408|410|429)\b|connection|ECONN|EPIPE|ENETUNREACH|fetch failed|terminated|socket|time[d -]*out"
    r"|other side closed",
    re.IGNORECASE,
)


class PiSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    wire: Literal["chat", "responses", "anthropic", "google"] = "chat"
    """The dialect that it speaks to the gateway."""
    tools: list[str] | None = None
    """Only these tools (``--tools``); pi's default is read, bash, edit, write."""
    exclude_tools: list[str] | None = None
    system_prompt: str | None = None
    append_system_prompt: str | None = None
    thinking: Literal["off", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Any level but ``off`` declares the model a reasoning model, so that pi asks for the effort."""
    context_files: bool = True
    """False: AGENTS.md and CLAUDE.md of the workspace are not read."""


class Pi:
    name = "pi"
    default_version = "1.6.0"

    def validate(self, spec: HarnessSpec) -> None:
        _settings.read(spec, PiSettings)
        _settings.check_mcp(spec)

    def _packages(self, version: str) -> dict[str, str]:
        return {PACKAGE: version, npm.node_package(): npm.NODE_VERSION}

    async def check(self, cache: Path) -> Check:
        folder = npm.folder_of(cache, self.name, self.default_version)
        return npm.check_of(self.name, folder, self._packages(self.default_version))

    async def install(self, spec: HarnessSpec, cache: Path, progress: Progress) -> Installed:
        version = spec.version or self.default_version
        folder = npm.folder_of(cache, self.name, version)
        await npm.install(self.name, folder, self._packages(version), progress)
        return Installed(
            version=version,
            binds=[Bind(source=folder, target=str(folder))],
            programs={
                "node": str(npm.node_program(folder)),
                "pi": str(folder / "node_modules" / PACKAGE / "dist" / "bundle" / "cli.js"),
            },
        )

    def launch(
        self, spec: HarnessSpec, instruction: str, endpoint: Endpoint, installed: Installed, *, workdir: str, home: str
    ) -> Launch:
        settings = _settings.read(spec, PiSettings)
        argv = [installed.programs["node"], installed.programs["pi"], "-p", "--mode", "json"]
        argv += ["--provider", PROVIDER, "--model", endpoint.model]
        if settings.tools is not None:
            argv += ["--tools", ",".join(settings.tools)] if settings.tools else ["--no-tools"]
        if settings.exclude_tools:
            argv += ["--exclude-tools", ",".join(settings.exclude_tools)]
        if settings.system_prompt is not None:
            argv += ["--system-prompt", settings.system_prompt]
        if settings.append_system_prompt is not None:
            argv += ["--append-system-prompt", settings.append_system_prompt]
        if settings.thinking is not None:
            argv += ["--thinking", settings.thinking]
        if not settings.context_files:
            argv.append("--no-context-files")
        files = {".pi/agent/models.json": json.dumps(_models(endpoint, settings), indent=1)}
        if spec.mcp_servers:
            files[".pi/agent/mcp.json"] = json.dumps(
                {"mcpServers": _settings.mcp_object(spec, exposure="direct")}, indent=1
            )
        return Launch(
            argv=argv,
            env={**spec.env, "PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
            home_files=files,
            stdin=instruction.encode(),
        )

    def verdict(self, result: ExecResult, stdout_tail: bytes) -> Verdict:
        if result.timed_out:
            return Verdict(ok=False, reason="timed out")
        if result.exit_code in (126, 127) or (result.exit_code != 0 and not stdout_tail.strip()):
            return Verdict(ok=False, reason=f"pi did not start (exit {result.exit_code})", infra=True)
        if result.exit_code != 0:
            return Verdict(ok=False, reason=f"pi ended with {result.exit_code}")
        stops = _STOP.findall(stdout_tail)
        last = stops[-1].decode() if stops else ""
        if b'"type":"agent_end"' not in stdout_tail and b'"type":"agent_settled"' not in stdout_tail:
            return Verdict(ok=False, reason="pi ended without its last event")
        if last in ("error", "aborted"):
            errors = _ERROR.findall(stdout_tail)
            words = str(json.loads(errors[-1])) if errors else "no reason given"
            return Verdict(ok=False, reason=f"{last}: {words[:500]}", infra=bool(_INFRA.search(words)))
        return Verdict(ok=True, reason=last)


def _models(endpoint: Endpoint, settings: PiSettings) -> dict[str, Any]:
    model: dict[str, Any] = {
        "id": endpoint.model,
        "contextWindow": endpoint.window + RESERVE,
        "maxTokens": min(endpoint.max_tokens, endpoint.window),
    }
    if settings.thinking not in (None, "off"):
        model["reasoning"] = True
    api, path = WIRES[settings.wire]
    provider = {
        "baseUrl": f"{endpoint.base_url}{path}",
        "api": api,
        "apiKey": endpoint.api_key,
        "models": [model],
    }
    return {"providers": {PROVIDER: provider}}

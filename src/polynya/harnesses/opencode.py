"""opencode (``opencode-ai``): its native binary from npm, over any of the four dialects.

Invariant: the configuration goes in by one variable, names the endpoint as the only provider and its model for side calls
too; plugins, catalogues, language servers and updates are off. Its verdict is read from its JSON events. It refuses settings
that it has no key for.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any, Literal

import msgspec

from polynya.errors import HarnessMissing
from polynya.harnesses import _settings
from polynya.harnesses._npm_cli import NpmCli, early_end, events, failed, start_of
from polynya.harnesses.base import Endpoint, Installed, Launch, Verdict
from polynya.runtimes.base import ExecResult
from polynya.schema import HarnessSpec

# The package `opencode-ai` holds a launcher that picks one of two binaries of 180 MB each, and would install both. The
# one called baseline runs on every x86-64 processor.
_PACKAGES = {"x86_64": "opencode-linux-x64-baseline", "amd64": "opencode-linux-x64-baseline"}
_PACKAGES |= {"aarch64": "opencode-linux-arm64", "arm64": "opencode-linux-arm64"}
PROVIDER = "polynya"
WIRES = {
    "chat": ("@ai-sdk/openai-compatible", "/v1"),
    "responses": ("@ai-sdk/openai", "/v1"),
    "anthropic": ("@ai-sdk/anthropic", "/v1"),
    "google": ("@ai-sdk/google", "/v1beta"),
}
OFF = ("MODELS_FETCH", "AUTOUPDATE", "LSP_DOWNLOAD", "DEFAULT_PLUGINS", "SHARE")


class OpencodeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    wire: Literal["chat", "responses", "anthropic", "google"] = "chat"
    """The dialect that it speaks to the gateway."""
    agent: str | None = None
    """``build`` (its default), ``plan``, or one that the workspace's ``opencode.json`` defines."""
    exclude_tools: list[str] = []
    auto_compact: bool = True


class Opencode(NpmCli):
    name = "opencode"
    default_version = "1.18.33"

    def validate(self, spec: HarnessSpec) -> None:
        _settings.read(spec, OpencodeSettings)
        _settings.check_mcp(spec)

    def packages(self, version: str) -> dict[str, str]:
        return {package(): version}

    def program(self, folder: Path) -> Path:
        return folder / "node_modules" / package() / "bin" / "opencode"

    def launch(
        self, spec: HarnessSpec, instruction: str, endpoint: Endpoint, installed: Installed, *, workdir: str, home: str
    ) -> Launch:
        settings = _settings.read(spec, OpencodeSettings)
        argv = [*start_of(installed, self.name), "run", "--model", f"{PROVIDER}/{endpoint.model}", "--format", "json"]
        argv += ["--title", "task"]  # else a call names the session
        argv += ["--agent", settings.agent] if settings.agent is not None else []
        off = OFF if settings.auto_compact else (*OFF, "AUTOCOMPACT")
        env = {
            **spec.env,
            **{f"OPENCODE_DISABLE_{what}": "1" for what in off},
            "OPENCODE_CONFIG_CONTENT": json.dumps(config(endpoint, settings, spec)),
        }
        return Launch(argv=[*argv, "--auto"], env=env, stdin=instruction.encode())

    def verdict(self, result: ExecResult, stdout_tail: bytes) -> Verdict:
        if (early := early_end(self.name, result, stdout_tail)) is not None:
            return early
        last: dict[str, Any] = next(events(stdout_tail), {})
        if last.get("type") == "error":
            error = last.get("error") or {}
            data = error.get("data") or {}
            return failed(f"{error.get('name')}: {data.get('message')}", data.get("statusCode"))
        if result.exit_code != 0:
            return Verdict(ok=False, reason=f"opencode ended with {result.exit_code}")
        if last.get("type") != "step_finish":
            return Verdict(ok=False, reason="opencode ended in the middle of a step")
        return Verdict(ok=True, reason=str(last.get("part", {}).get("reason", "")))


def package() -> str:
    machine = platform.machine().lower()
    if machine not in _PACKAGES:
        raise HarnessMissing(f"opencode has no program for {machine!r}", fix="use an x86-64 or arm64 machine")
    return _PACKAGES[machine]


def config(endpoint: Endpoint, settings: OpencodeSettings, spec: HarnessSpec) -> dict[str, Any]:
    npm_package, path = WIRES[settings.wire]
    model = {
        "name": endpoint.model,
        "limit": {"context": endpoint.window, "output": min(endpoint.max_tokens, endpoint.window)},
        "tool_call": True,
    }
    provider = {
        "npm": npm_package,
        "name": PROVIDER,
        "options": {"baseURL": f"{endpoint.base_url}{path}", "apiKey": endpoint.api_key},
        "models": {endpoint.model: model},
    }
    made: dict[str, Any] = {
        "autoupdate": False,
        "share": "disabled",
        "small_model": f"{PROVIDER}/{endpoint.model}",
        "enabled_providers": [PROVIDER],
        "provider": {PROVIDER: provider},
    }
    if spec.mcp_servers:
        made["mcp"] = {
            server.name: {
                "type": "local",
                "command": [server.command, *server.args],
                "environment": server.env,
                "enabled": True,
            }
            for server in spec.mcp_servers
        }
    if settings.exclude_tools:
        made["tools"] = dict.fromkeys(settings.exclude_tools, False)
    return made

"""Claude Code (``@anthropic-ai/claude-code``): its native binary from npm, over Anthropic Messages.

Invariant: the instruction goes in by stdin, every model name that it can ask for is the endpoint's model, and it contacts
nothing but the endpoint. Its verdict is its ``result`` event. It refuses settings that it has no flag or variable for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from polynya.harnesses import _settings
from polynya.harnesses._npm_cli import NpmCli, early_end, events, failed, is_cut, message_of, start_of
from polynya.harnesses.base import Endpoint, Installed, Launch, Verdict
from polynya.runtimes.base import ExecResult
from polynya.schema import HarnessSpec

PACKAGE = "@anthropic-ai/claude-code"
MCP_CONFIG = ".config/polynya/mcp.json"
LEAST_COMPACT_WINDOW = 100_000
"""A smaller CLAUDE_CODE_AUTO_COMPACT_WINDOW is taken for this one."""
MODEL_VARIABLES = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_FABLE_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)


class ClaudeCodeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    bare: bool = False
    """``--bare``: 3 tools, a prompt of 4 KB instead of 50, no CLAUDE.md, no memory, no hooks."""
    max_turns: Annotated[int, msgspec.Meta(ge=1)] | None = None
    tools: list[str] | None = None
    """Only these built-in tools (``--tools``); an empty list: none."""
    disallowed_tools: list[str] = []
    system_prompt: str | None = None
    append_system_prompt: str | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    experimental_betas: bool = True
    """False: no context management, no tool search; all tools stand in the prompt."""


class ClaudeCode(NpmCli):
    name = "claude_code"
    default_version = "2.1.332"

    def validate(self, spec: HarnessSpec) -> None:
        _settings.read(spec, ClaudeCodeSettings)
        _settings.check_mcp(spec)

    def packages(self, version: str) -> dict[str, str]:
        return {PACKAGE: version}

    def program(self, folder: Path) -> Path:
        scope = folder / "node_modules" / PACKAGE.partition("/")[0]
        return next(iter(sorted(scope.glob("claude-code-linux-*/claude"))), scope / "claude-code-linux" / "claude")

    def launch(
        self, spec: HarnessSpec, instruction: str, endpoint: Endpoint, installed: Installed, *, workdir: str, home: str
    ) -> Launch:
        settings = _settings.read(spec, ClaudeCodeSettings)
        compacts = endpoint.window >= LEAST_COMPACT_WINDOW
        argv = [*start_of(installed, self.name), "-p", "--dangerously-skip-permissions"]
        argv += ["--output-format", "stream-json", "--verbose", *_flags(settings)]
        files = {}
        if spec.mcp_servers:
            servers = _settings.mcp_object(spec, type="stdio")
            files[MCP_CONFIG] = json.dumps({"mcpServers": servers}, indent=1)
            argv += ["--strict-mcp-config", "--mcp-config", f"{home}/{MCP_CONFIG}"]
        env = {
            # A first system block whose text is a hash of the first user message.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(endpoint.window),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(endpoint.max_tokens),
            **({"CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(endpoint.window)} if compacts else {}),
            **spec.env,
            "ANTHROPIC_BASE_URL": endpoint.base_url,
            "ANTHROPIC_API_KEY": endpoint.api_key,
            **dict.fromkeys(MODEL_VARIABLES, endpoint.model),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            # It says with each call whether it is the main agent, a sub-agent, a compaction or a side call.
            "CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1",
            # Root may skip permissions only where it says that it is in a sandbox.
            "IS_SANDBOX": "1",
        }
        if not settings.experimental_betas:
            env["CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS"] = "1"
        return Launch(argv=argv, env=env, home_files=files, stdin=instruction.encode())

    def verdict(self, result: ExecResult, stdout_tail: bytes) -> Verdict:
        if (early := early_end(self.name, result, stdout_tail)) is not None:
            return early
        end: dict[str, Any] = next((event for event in events(stdout_tail) if event.get("type") == "result"), {})
        if not end:
            return Verdict(
                ok=result.exit_code == 0 and is_cut(stdout_tail), reason=f"no result event (exit {result.exit_code})"
            )
        if not end.get("is_error"):
            return Verdict(ok=result.exit_code == 0, reason=str(end.get("subtype", "")))
        words = message_of(end.get("result") or end.get("errors") or end.get("subtype"))
        return failed(words, end.get("api_error_status"))


def _flags(settings: ClaudeCodeSettings) -> list[str]:
    flags = ["--bare"] if settings.bare else []
    if settings.max_turns is not None:
        flags += ["--max-turns", str(settings.max_turns)]
    if settings.tools is not None:
        flags += ["--tools", ",".join(settings.tools)]
    if settings.disallowed_tools:
        flags += ["--disallowed-tools", ",".join(settings.disallowed_tools)]
    if settings.system_prompt is not None:
        flags += ["--system-prompt", settings.system_prompt]
    if settings.append_system_prompt is not None:
        flags += ["--append-system-prompt", settings.append_system_prompt]
    if settings.effort is not None:
        flags += ["--effort", settings.effort]
    return flags

"""Any command as a harness: it finds the endpoint in the variables that the usual clients read.

Invariant: the command is run by ``sh -c`` in the workspace, unchanged, with the instruction on its stdin and in
``POLYNYA_INSTRUCTION``. Its exit code is its verdict. It refuses to run without a command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from polynya.harnesses import _settings
from polynya.harnesses.base import Endpoint, Installed, Launch, Progress, Verdict
from polynya.runtimes.base import Check, ExecResult
from polynya.schema import HarnessSpec

MAX_INSTRUCTION_IN_ENV = 100_000
"""Bytes. The kernel refuses a longer variable (128 KiB); stdin has it in full."""


class ShellSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    command: Annotated[str, msgspec.Meta(min_length=1)]


class Shell:
    name = "shell"
    default_version = "1"

    def validate(self, spec: HarnessSpec) -> None:
        _settings.read(spec, ShellSettings)
        _settings.refuse_mcp(spec)

    async def check(self, cache: Path) -> Check:
        return Check(name=self.name, ok=True, detail="needs nothing but sh in the runtime")

    async def install(self, spec: HarnessSpec, cache: Path, progress: Progress) -> Installed:
        return Installed(version=spec.version or self.default_version)

    def launch(
        self, spec: HarnessSpec, instruction: str, endpoint: Endpoint, installed: Installed, *, workdir: str, home: str
    ) -> Launch:
        settings = _settings.read(spec, ShellSettings)
        base, key = endpoint.base_url, endpoint.api_key
        env = {
            **spec.env,
            "OPENAI_BASE_URL": f"{base}/v1",
            "OPENAI_API_BASE": f"{base}/v1",
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": base,
            "ANTHROPIC_API_KEY": key,
            "GOOGLE_GEMINI_BASE_URL": base,
            "GEMINI_API_KEY": key,
            "POLYNYA_BASE_URL": base,
            "POLYNYA_API_KEY": key,
            "POLYNYA_MODEL": endpoint.model,
        }
        if len(instruction.encode()) <= MAX_INSTRUCTION_IN_ENV:
            env["POLYNYA_INSTRUCTION"] = instruction
        return Launch(argv=["/bin/sh", "-c", settings.command], env=env, stdin=instruction.encode())

    def verdict(self, result: ExecResult, stdout_tail: bytes) -> Verdict:
        if result.timed_out:
            return Verdict(ok=False, reason="timed out")
        if result.exit_code == 0:
            return Verdict(ok=True)
        return Verdict(ok=False, reason=f"the command ended with {result.exit_code}")

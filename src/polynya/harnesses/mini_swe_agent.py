"""mini-swe-agent: installed with pip into an environment of its own, one tool, over OpenAI Chat.

Invariant: no code of a package runs at its installation (wheels only), and the instruction goes in by the configuration
file. Its output is text: its verdict is the text after its last ``Exit:``. It refuses settings that it has no key for.
Pinned are it and the client that makes its calls; what these need is resolved when it is installed.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec

from polynya.harnesses import _cache, _python, _settings
from polynya.harnesses._npm_cli import early_end
from polynya.harnesses.base import Endpoint, Installed, Launch, Progress, Verdict
from polynya.runtimes.base import Bind, Check, ExecResult
from polynya.schema import HarnessSpec

CONFIG = ".config/polynya/mini.yaml"
_ERROR = re.compile(r"litellm\.(\w+)")
INFRA_ERRORS = frozenset(
    {
        "APIConnectionError", "APIError", "AuthenticationError", "BadGatewayError", "InternalServerError", "NotFoundError",
        "PermissionDeniedError", "RateLimitError", "ServiceUnavailableError", "Timeout",
    }
)  # fmt: skip
OWN_ENDS = ("LimitsExceeded", "TimeExceeded", "RepeatedFormatError")


class MiniSweAgentSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    step_limit: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Model calls; 0: no limit."""
    command_timeout: Annotated[int, msgspec.Meta(ge=1)] = 30
    """Seconds that one command may take."""
    max_format_errors: Annotated[int, msgspec.Meta(ge=0)] = 3
    """It ends after as many replies without a valid tool call in a row; 0: no limit."""
    system_template: str | None = None
    instance_template: str | None = None
    """The first user message; ``{{task}}`` is the instruction."""


class MiniSweAgent:
    name = "mini_swe_agent"
    default_version = "2.4.6"
    litellm_version = "1.110.2"

    def validate(self, spec: HarnessSpec) -> None:
        _settings.read(spec, MiniSweAgentSettings)
        _settings.refuse_mcp(spec)

    def _packages(self, version: str) -> dict[str, str]:
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        return {"mini-swe-agent": version, "litellm": self.litellm_version, "python": python}

    async def check(self, cache: Path) -> Check:
        folder = _cache.folder_of(cache, self.name, self.default_version)
        if _cache.is_installed(folder, self._packages(self.default_version)):
            return Check(name=self.name, ok=True, detail=f"installed in {folder}")
        return Check(
            name=self.name, ok=True, detail=f"not installed yet; the first run installs it with {sys.executable}"
        )

    async def install(self, spec: HarnessSpec, cache: Path, progress: Progress) -> Installed:
        version = spec.version or self.default_version
        folder = _cache.folder_of(cache, self.name, version)

        async def fill(staging: Path) -> None:
            wanted = [f"mini-swe-agent=={version}", f"litellm=={self.litellm_version}"]
            await _python.make_environment(self.name, staging, Path(sys.executable), wanted)

        await _cache.install(self.name, folder, self._packages(version), progress, fill)
        return Installed(
            version=version,
            binds=[Bind(source=path, target=str(path)) for path in _python.shown(folder, Path(sys.base_prefix))],
            programs={"python": str(folder / "bin" / "python")},
        )

    def launch(
        self, spec: HarnessSpec, instruction: str, endpoint: Endpoint, installed: Installed, *, workdir: str, home: str
    ) -> Launch:
        settings = _settings.read(spec, MiniSweAgentSettings)
        argv = [installed.programs["python"], "-m", "minisweagent.run.mini", "--yolo", "--exit-immediately"]
        argv += ["--model", f"openai/{endpoint.model}", "-c", "mini.yaml", "-c", f"{home}/{CONFIG}"]
        env = {
            # Of 10, its default, on every refusal too: 330 s. The gateway has retries of its own.
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "4",
            **spec.env,
            "OPENAI_API_BASE": f"{endpoint.base_url}/v1",
            "OPENAI_BASE_URL": f"{endpoint.base_url}/v1",
            "OPENAI_API_KEY": endpoint.api_key,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        # JSON is YAML.
        return Launch(argv=argv, env=env, home_files={CONFIG: json.dumps(config(settings, instruction), indent=1)})

    def verdict(self, result: ExecResult, stdout_tail: bytes) -> Verdict:
        if (early := early_end(self.name, result, stdout_tail)) is not None:
            return early
        text = stdout_tail.decode(errors="replace")
        _, exit_mark, end = text.rpartition("\nExit:\n")
        end = " ".join(end.split())
        if result.exit_code != 0:
            error = _ERROR.match(end)
            infra = error is not None and error[1] in INFRA_ERRORS
            return Verdict(ok=False, reason=(end or f"mini ended with {result.exit_code}")[:600], infra=infra)
        if not exit_mark:
            return Verdict(ok=False, reason="mini ended without its last message")
        if end.startswith(OWN_ENDS):
            return Verdict(ok=False, reason=end.split()[0])
        return Verdict(ok=True, reason="submitted")


def config(settings: MiniSweAgentSettings, instruction: str) -> dict[str, Any]:
    agent: dict[str, Any] = {
        "step_limit": settings.step_limit,
        "max_consecutive_format_errors": settings.max_format_errors,
        # A model that has no price costs nothing: the limit would never be reached, and asks for a new one if it were.
        "cost_limit": 0,
    }
    if settings.system_template is not None:
        agent["system_template"] = settings.system_template
    if settings.instance_template is not None:
        agent["instance_template"] = settings.instance_template
    return {"run": {"task": instruction}, "agent": agent, "environment": {"timeout": settings.command_timeout}}

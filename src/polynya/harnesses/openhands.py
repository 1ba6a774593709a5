"""OpenHands CLI: installed with pip into an environment of its own, with Python 3.12 only, over OpenAI Chat.

Invariant: the endpoint goes in by variables, and no other model is asked. An instruction goes in as the task; one that is
too long for a command line, or that the program would take for a command of its own (``/…``), goes in by a file, and then
stands in the first message between words that the program puts around files. Its verdict is its last JSON event, and a line
that it prints at a good end: it exits 0 after a failed run as well. It refuses settings that it has no key for. All but one of its
packages are installed from wheels; ``func-timeout`` has none, so its own setup program runs at the installation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from polynya.errors import HarnessMissing
from polynya.harnesses import _cache, _python, _settings
from polynya.harnesses._npm_cli import early_end, events
from polynya.harnesses.base import Endpoint, Installed, Launch, Progress, Verdict
from polynya.runtimes.base import Bind, Check, ExecResult
from polynya.schema import HarnessSpec

PYTHON = "3.12"
PYTHON_FIX = (
    f"install Python {PYTHON} with its venv module (apt-get install python{PYTHON}-venv, or pyenv install {PYTHON})"
)
LONGEST_ARGUMENT = 100_000
"""Bytes. The kernel refuses an argument of 128 KiB."""
TASK_FILE = ".openhands/task.md"
FINISHED = b"\nAgent finished\n"
"""Printed where a run ends without an error. What the model says stands in JSON, or in a frame."""
INFRA_CODES = frozenset(
    {
        "APIConnectionError", "InternalServerError", "LLMAuthenticationError", "LLMRateLimitError",
        "LLMServiceUnavailableError", "LLMTimeoutError", "NotFoundError",
    }
)  # fmt: skip


class OpenHandsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """None yet: what the program can be told in this mode is told by the endpoint."""


class OpenHands:
    name = "openhands"
    default_version = "1.16.0"
    litellm_version = "1.110.2"

    def validate(self, spec: HarnessSpec) -> None:
        _settings.read(spec, OpenHandsSettings)
        _settings.check_mcp(spec)

    def _packages(self, version: str) -> dict[str, str]:
        return {"openhands": version, "litellm": self.litellm_version, "python": PYTHON}

    async def check(self, cache: Path) -> Check:
        python = await _python.find(PYTHON)
        if python is None:
            return Check(name=self.name, ok=False, detail=f"needs Python {PYTHON}; there is none", fix=PYTHON_FIX)
        folder = _cache.folder_of(cache, self.name, self.default_version)
        if _cache.is_installed(folder, self._packages(self.default_version)):
            return Check(name=self.name, ok=True, detail=f"installed in {folder}")
        return Check(
            name=self.name, ok=True, detail=f"not installed yet; the first run installs it with {python.program}"
        )

    async def install(self, spec: HarnessSpec, cache: Path, progress: Progress) -> Installed:
        version = spec.version or self.default_version
        folder = _cache.folder_of(cache, self.name, version)
        python = await _python.find(PYTHON)
        if python is None:
            raise HarnessMissing(f"{self.name} needs Python {PYTHON}; there is none", fix=PYTHON_FIX)

        async def fill(staging: Path) -> None:
            wanted = [f"openhands=={version}", f"litellm=={self.litellm_version}"]
            await _python.make_environment(self.name, staging, python.program, wanted, built=["func-timeout"])

        await _cache.install(self.name, folder, self._packages(version), progress, fill)
        return Installed(
            version=version,
            binds=[Bind(source=path, target=str(path)) for path in _python.shown(folder, python.base)],
            programs={"python": str(folder / "bin" / "python")},
        )

    def launch(
        self, spec: HarnessSpec, instruction: str, endpoint: Endpoint, installed: Installed, *, workdir: str, home: str
    ) -> Launch:
        argv = [installed.programs["python"], "-c", "from openhands_cli.entrypoint import main; main()"]
        argv += ["--headless", "--json", "--override-with-envs"]
        files: dict[str, str] = {}
        if instruction.lstrip().startswith("/") or len(instruction.encode()) > LONGEST_ARGUMENT:
            files[TASK_FILE] = instruction
            argv.append(f"--file={home}/{TASK_FILE}")
        else:
            argv.append(f"--task={instruction}")
        if spec.mcp_servers:
            files[".openhands/mcp.json"] = json.dumps({"mcpServers": _settings.mcp_object(spec)}, indent=1)
        env = {
            **spec.env,
            "LLM_MODEL": f"openai/{endpoint.model}",
            "LLM_BASE_URL": f"{endpoint.base_url}/v1",
            "LLM_API_KEY": endpoint.api_key,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENHANDS_SUPPRESS_BANNER": "1",
        }
        return Launch(argv=argv, env=env, home_files=files)

    def verdict(self, result: ExecResult, stdout_tail: bytes) -> Verdict:
        if (early := early_end(self.name, result, stdout_tail)) is not None:
            return early
        last: dict[str, Any] = next(events(stdout_tail), {})
        if last.get("kind") == "ConversationErrorEvent":
            code, words = str(last.get("code")), str(last.get("detail"))
            return Verdict(ok=False, reason=f"{code}: {words}"[:600], infra=code in INFRA_CODES)
        if result.exit_code != 0:
            return Verdict(ok=False, reason=f"openhands ended with {result.exit_code}")
        if FINISHED not in stdout_tail:
            return Verdict(ok=False, reason="openhands ended without finishing its task")
        return Verdict(ok=True, reason="finished")

"""What the command-line agents from npm have in common: pinned packages in the cache, one Node for those that need it.

Invariant: what ``install`` names as a program is there and is what runs; a launcher that picks a binary, or looks for
updates, is left out. It refuses an installation without the binary for this machine, which npm treats as a success.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from polynya.errors import HarnessMissing
from polynya.harnesses import npm
from polynya.harnesses.base import Installed, Progress, Verdict
from polynya.runtimes.base import Bind, Check, ExecResult
from polynya.schema import HarnessSpec

INFRA = re.compile(
    r"connection (error|refused|reset|closed)|unable to connect|error sending request|stream disconnected|socket"
    r"|ECONN|EPIPE|ENETUNREACH|fetch failed|terminated|timed out|time-?out|other side closed",
    re.IGNORECASE,
)
"""A message without an HTTP status that names the way to the endpoint, not what was asked of it."""
INFRA_STATUS = frozenset({401, 403, 404, 408, 410, 429})


class NpmCli:
    name: str
    default_version: str
    needs_node: ClassVar[bool] = False

    def packages(self, version: str) -> dict[str, str]:
        """Package → exact version."""
        raise NotImplementedError

    def program(self, folder: Path) -> Path:
        """The file that is run, below a finished installation."""
        raise NotImplementedError

    async def check(self, cache: Path) -> Check:
        version = self.default_version
        return npm.check_of(self.name, npm.folder_of(cache, self.name, version), self.packages(version))

    async def install(self, spec: HarnessSpec, cache: Path, progress: Progress) -> Installed:
        version = spec.version or self.default_version
        folder = npm.folder_of(cache, self.name, version)
        await npm.install(self.name, folder, self.packages(version), progress)
        folders, programs = [folder], {self.name: str(self.program(folder))}
        if self.needs_node:
            folders.append(node := await npm.install_node(cache, progress, self.name))
            programs["node"] = str(npm.node_program(node))
        for program in programs.values():
            if not Path(program).is_file():
                raise HarnessMissing(
                    f"{self.name} {version}: npm installed no {program}",
                    fix=f"remove {folder} and see that npm installs optional dependencies for this machine",
                )
        return Installed(
            version=version, binds=[Bind(source=path, target=str(path)) for path in folders], programs=programs
        )


def start_of(installed: Installed, name: str) -> list[str]:
    """The first words of the command line."""
    node = installed.programs.get("node")
    return [installed.programs[name]] if node is None else [node, installed.programs[name]]


def early_end(name: str, result: ExecResult, stdout_tail: bytes) -> Verdict | None:
    """The verdict of a run of which the output cannot say more."""
    if result.timed_out:
        return Verdict(ok=False, reason="timed out")
    if result.exit_code in (126, 127) or (result.exit_code > 0 and not stdout_tail.strip()):
        words = result.stderr[-500:].decode(errors="replace").strip()
        return Verdict(ok=False, reason=f"{name} did not start (exit {result.exit_code}): {words}"[:600], infra=True)
    if result.exit_code < 0:
        return Verdict(ok=False, reason=f"{name} was killed by signal {-result.exit_code}")
    return None


def failed(reason: str, status: int | None = None) -> Verdict:
    """The verdict of a run that says itself why it failed: by the HTTP status that it got, else by its words."""
    if status is None:
        return Verdict(ok=False, reason=reason[:600], infra=bool(INFRA.search(reason)))
    return Verdict(ok=False, reason=f"{status}: {reason}"[:600], infra=status >= 500 or status in INFRA_STATUS)


def message_of(error: Any) -> str:
    """Of an event's error: an object with a message, a list of texts, or a text."""
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return "; ".join(map(str, error)) if isinstance(error, list) else str(error)


def events(stdout_tail: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects of the whole lines at the end of the output, the last one first."""
    for line in reversed(stdout_tail.splitlines()):
        if line.startswith(b"{"):
            try:
                event = json.loads(line)
            except ValueError:
                continue
            yield event


def is_cut(stdout_tail: bytes) -> bool:
    """The last line is longer than the tail: only its end is here, and the exit code has to say how it went."""
    last = stdout_tail.rstrip().rpartition(b"\n")[2]
    return last.endswith(b"}") and not last.startswith(b"{")

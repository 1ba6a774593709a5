"""One file a harness: how it is installed, configured and launched.

Invariants: the program is never modified, only configured; it is pinned, installed once into a cache and works offline
from there; its key and base URL are the session's, and no other credential of the machine reaches it.
A harness states how its own end is to be read: some exit 0 after a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from polynya.runtimes.base import Bind, Check, ExecResult
from polynya.schema import HarnessSpec

Progress = Callable[[str], None]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The model endpoint of one session, as a program inside the runtime reaches it."""

    base_url: str
    """With the session prefix, without ``/v1``: ``http://127.0.0.1:8123/s/<key>``."""
    api_key: str
    model: str
    window: int
    """Tokens of prompt and reply together, to be told to harnesses that manage their context."""
    max_tokens: int
    """Tokens that one reply may have."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, and what must lie in the home folder first."""

    argv: list[str]
    env: Mapping[str, str] = {}
    home_files: Mapping[str, str] = {}
    """Path below the home folder → content."""
    stdin: bytes | None = None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """How the harness's own end reads."""

    ok: bool
    reason: str = ""
    infra: bool = False
    """It failed because of something that the policy cannot cause (its gateway was gone, its binary did not start)."""


class Installed(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    binds: Sequence[Bind] = ()
    """What the runtime must show of it."""
    programs: Mapping[str, str] = {}
    """Program name → absolute path (the same inside and outside)."""


class Harness(Protocol):
    name: str
    default_version: str

    def validate(self, spec: HarnessSpec) -> None:
        """Raises TaskFileError for a setting that it does not know."""
        ...

    async def check(self, cache: Path) -> Check:
        """Is it installed, or can it be? Changes nothing."""
        ...

    async def install(self, spec: HarnessSpec, cache: Path, progress: Progress) -> Installed:
        """Install into ``cache`` unless it is there. Raises HarnessMissing with the fix."""
        ...

    def launch(
        self, spec: HarnessSpec, instruction: str, endpoint: Endpoint, installed: Installed, *, workdir: str, home: str
    ) -> Launch: ...

    def verdict(self, result: ExecResult, stdout_tail: bytes) -> Verdict:
        """Read the exit code and the end of the output (at most 64 KiB)."""
        ...

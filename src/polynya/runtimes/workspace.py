"""Lays out what an agent starts from: the task's files, or a repository of exactly one commit.

Invariant: with git at hand the workspace is a repository with one commit, made by a fixed author at a fixed time, and no
remote, reflog, tag, alternate or object beyond it: the future of the repository cannot be looked up. No hook, no
configuration of this user or machine and no prompt takes part. Submodules and LFS contents are not fetched.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from pathlib import Path

from polynya.errors import WorkspaceError
from polynya.runtimes._sandbox import Sandbox
from polynya.runtimes.base import Runtime
from polynya.runtimes.files import check_path, copy_workspace, write_files
from polynya.runtimes.spawner import Spawner
from polynya.schema import RepoSpec, RuntimeSpec

__all__ = ["copy_workspace", "lay_out", "prepare_workspace"]

_DATE = "2000-01-01T00:00:00+0000"
_QUIET = [
    "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "core.logAllRefUpdates=false",
    "-c", "commit.gpgsign=false", "-c", "gc.auto=0", "-c", "maintenance.auto=false", "-c", "core.autocrlf=false",
    "-c", "init.defaultBranch=main", "-c", "advice.detachedHead=false",
]  # fmt: skip
_KEPT = ("PATH", "HOME", "SSH_AUTH_SOCK", "SSL_CERT_FILE", "SSL_CERT_DIR", "GIT_SSL_CAINFO", "http_proxy", "https_proxy",
         "HTTP_PROXY", "HTTPS_PROXY", "no_proxy", "NO_PROXY", "ALL_PROXY", "all_proxy")  # fmt: skip


async def lay_out(spec: RuntimeSpec, workspace: Path, spawner: Spawner | None = None) -> None:
    """Fill the empty folder. Raises WorkspaceError naming the path or the URL, and the fix."""
    for name in spec.files:
        if check_path(name, "runtime.files").parts[0] == ".git":
            raise WorkspaceError(f"runtime.files: {name!r} is inside .git", fix="leave .git to polynya")
    path = shutil.which("git")
    if path is None:
        if spec.repo is not None:
            raise WorkspaceError(f"runtime.repo.url {spec.repo.url!r}: there is no git", fix="install git")
        await asyncio.to_thread(write_files, workspace, spec.files)
        return
    async with spawner or Spawner() as held:
        git = _Git(path, held)
        if spec.repo is not None:
            await _check_out(git, spec.repo, workspace)
        await asyncio.to_thread(write_files, workspace, spec.files)
        await _commit(git, workspace)


async def prepare_workspace(spec: RuntimeSpec, runtime: Runtime, spawner: Spawner | None = None) -> None:
    """Lay out the workspace, then run the ``prepare`` commands inside, one after another.

    ``spawner`` starts git; by default that of the runtime, if it is one of ours, or else one that is started for it.
    """
    own = runtime.spawner if isinstance(runtime, Sandbox) else None
    await lay_out(spec, runtime.workspace, spawner or own)
    for number, command in enumerate(spec.prepare):
        result = await runtime.exec(["/bin/sh", "-c", command])
        if result.exit_code != 0:
            words = (result.stderr or result.stdout)[-800:].decode(errors="replace").strip()
            raise WorkspaceError(
                f"runtime.prepare[{number}]: {command!r:.200} ended with {result.exit_code}: {words}",
                fix="try the command inside such a runtime; it has no network unless `network: open`",
            )


async def _check_out(git: _Git, repo: RepoSpec, workspace: Path) -> None:
    for field, value in (("url", repo.url), ("ref", repo.ref)):
        if not value or value.startswith("-") or "\0" in value:
            raise WorkspaceError(f"runtime.repo.{field}: {value!r} cannot be given to git", fix="write it out in full")
    clone = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix=".clone-", dir=workspace.parent))
    url = str(Path(repo.url).absolute()) if Path(repo.url).is_dir() else repo.url
    where = f"runtime.repo.url {repo.url!r}"
    try:
        await git.run(where, "clone", "--quiet", "--bare", "--template=", "--", url, str(clone), cwd=workspace)
        at = f"--git-dir={clone}"
        commit = await _resolve(git, repo, at, workspace)
        tree = ["--work-tree=" + str(workspace), "checkout", "--quiet", "--force", "--detach", commit]
        await git.run(where, at, *tree, cwd=workspace)
    finally:
        await asyncio.to_thread(shutil.rmtree, clone, ignore_errors=True)


async def _resolve(git: _Git, repo: RepoSpec, at: str, workspace: Path) -> str:
    fix = "name a branch, a tag or a full commit id of that repository"
    name = f"{repo.ref}^{{commit}}"
    out = await git.run(f"runtime.repo.ref {repo.ref!r} of {repo.url!r}", at, "rev-parse", "--verify", "--quiet",
                     "--end-of-options", name, cwd=workspace, fix=fix)  # fmt: skip
    return out.decode().split()[-1]


async def _commit(git: _Git, workspace: Path) -> None:
    where = f"workspace {workspace}"
    await git.run(where, "init", "--quiet", "--template=", str(workspace), cwd=workspace)
    await git.run(where, "add", "--all", "--force", ".", cwd=workspace)
    await git.run(where, "commit", "--quiet", "--allow-empty", "--no-verify", "--message=start", cwd=workspace)
    await asyncio.to_thread(shutil.rmtree, workspace / ".git" / "logs", ignore_errors=True)


def _environment() -> dict[str, str]:
    """What git needs to reach a repository (proxies, certificates, keys), and nothing that changes what it makes."""
    env = {name: os.environ[name] for name in _KEPT if name in os.environ}
    fixed = {
        "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", "GIT_TERMINAL_PROMPT": "0",
        "GIT_SSH_COMMAND": "ssh -oBatchMode=yes", "GIT_LFS_SKIP_SMUDGE": "1", "LC_ALL": "C",
        "GIT_AUTHOR_NAME": "polynya", "GIT_AUTHOR_EMAIL": "polynya@localhost", "GIT_AUTHOR_DATE": _DATE,
        "GIT_COMMITTER_NAME": "polynya", "GIT_COMMITTER_EMAIL": "polynya@localhost", "GIT_COMMITTER_DATE": _DATE,
    }  # fmt: skip
    return {**env, **fixed}


class _Git:
    def __init__(self, path: str, spawner: Spawner) -> None:
        self._path = path
        self._spawner = spawner

    async def run(self, where: str, *args: str, cwd: Path, fix: str = "") -> bytes:
        argv = [self._path, *_QUIET, *args]
        code, out, err = await self._spawner.run(argv, env=_environment(), cwd=str(cwd.absolute()))
        if code != 0:
            words = err[-800:].decode(errors="replace").strip() or f"exit {code}"
            raise WorkspaceError(f"{where}: git said: {words}", fix=fix or "try the same with git by hand")
        return out

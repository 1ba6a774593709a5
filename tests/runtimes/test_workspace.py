"""The repository that an agent starts from: one commit, nothing newer, nothing of this machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from polynya.errors import WorkspaceError
from polynya.runtimes.local import LocalProvider
from polynya.runtimes.workspace import lay_out, prepare_workspace
from polynya.schema import RepoSpec, RuntimeSpec

ENV = {
    "PATH": os.environ["PATH"],
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
    **{f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
}


def git(folder: Path, *args: str) -> str:
    done = subprocess.run(["git", *args], cwd=folder, env=ENV, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """Two commits and a tag; a file, a script, a link; the fix is in the second."""
    folder = tmp_path / "upstream"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "trunk")
    (folder / "code.py").write_text("bug\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("code.py")
    (folder / ".gitignore").write_text("*.log\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "before")
    git(folder, "tag", "v1")
    (folder / "code.py").write_text("the fix\n")
    git(folder, "commit", "-q", "-a", "-m", "fixed")
    return folder


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "s" / "workspace"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("ref", ["v1", "HEAD~1", "trunk~1", "<id>"])
async def test_a_repository_becomes_one_commit_with_no_way_to_the_future(
    upstream: Path, workspace: Path, ref: str
) -> None:
    ref = git(upstream, "rev-parse", "v1") if ref == "<id>" else ref
    await lay_out(RuntimeSpec(repo=RepoSpec(url=str(upstream), ref=ref)), workspace)
    assert (workspace / "code.py").read_text() == "bug\n"
    assert (workspace / "run.sh").stat().st_mode & 0o100
    assert os.readlink(workspace / "link") == "code.py"  # noqa: PTH115
    assert git(workspace, "status", "--porcelain") == ""
    assert git(workspace, "rev-list", "--all", "--reflog", "--count") == "1"
    assert git(workspace, "remote", "-v") == git(workspace, "tag") == git(workspace, "reflog") == ""
    objects = git(workspace, "cat-file", "--batch-all-objects", "--batch-check=%(objecttype)").splitlines()
    assert objects.count("commit") == 1
    assert not [path for path in workspace.rglob("*") if path.is_file() and b"the fix" in path.read_bytes()]
    assert not (workspace / ".git/objects/info/alternates").exists()
    assert [path.name for path in workspace.parent.iterdir()] == ["workspace"]


async def test_files_are_laid_over_the_repository_and_are_in_the_commit(upstream: Path, workspace: Path) -> None:
    spec = RuntimeSpec(repo=RepoSpec(url=str(upstream)), files={"code.py": "task\n", "new/a.log": "ignored\n"})
    await lay_out(spec, workspace)
    assert git(workspace, "show", "HEAD:code.py") == "task"
    assert git(workspace, "show", "HEAD:new/a.log") == "ignored"


async def test_the_commit_is_the_same_every_time(workspace: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for folder in (workspace, other):
        await lay_out(RuntimeSpec(files={"a": "1"}), folder)
    assert git(workspace, "rev-parse", "HEAD") == git(other, "rev-parse", "HEAD")


async def test_configuration_and_hooks_of_the_user_take_no_part(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "pre-commit").write_text("#!/bin/sh\nexit 1\n")
    (hooks / "pre-commit").chmod(0o755)
    (tmp_path / ".gitconfig").write_text(
        f"[core]\nhooksPath={hooks}\n[user]\nname=secret person\n[commit]\ngpgsign=true\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    await lay_out(RuntimeSpec(files={"a": "1"}), workspace)
    assert "secret" not in git(workspace, "log", "--format=%an %ae %cn %ce")


async def test_an_empty_task_still_gets_a_repository(workspace: Path) -> None:
    await lay_out(RuntimeSpec(), workspace)
    assert git(workspace, "rev-list", "--count", "HEAD") == "1"


async def test_a_link_in_the_repository_does_not_lead_a_file_out(
    upstream: Path, workspace: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (upstream / "docs").symlink_to(outside)
    git(upstream, "add", "-A")
    git(upstream, "commit", "-q", "-m", "link")
    await lay_out(RuntimeSpec(repo=RepoSpec(url=str(upstream)), files={"docs/a": "x"}), workspace)
    assert list(outside.iterdir()) == []
    assert (workspace / "docs" / "a").read_text() == "x"


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (RuntimeSpec(repo=RepoSpec(url="/no/such/repository")), "/no/such/repository"),
        (RuntimeSpec(repo=RepoSpec(url="--upload-pack=touch /tmp/x")), "repo.url"),
        (RuntimeSpec(repo=RepoSpec(url="x", ref="-x")), "repo.ref"),
        (RuntimeSpec(files={"../x": ""}), r"\.\./x"),
        (RuntimeSpec(files={".git/config": ""}), r"\.git"),
    ],
)
async def test_what_cannot_be_laid_out_is_named(workspace: Path, spec: RuntimeSpec, names: str) -> None:
    with pytest.raises(WorkspaceError, match=names):
        await lay_out(spec, workspace)


async def test_an_unknown_ref_is_named_with_the_way_out(upstream: Path, workspace: Path) -> None:
    with pytest.raises(WorkspaceError, match=r"'v9'.*name a branch"):
        await lay_out(RuntimeSpec(repo=RepoSpec(url=str(upstream), ref="v9")), workspace)
    assert [path.name for path in workspace.parent.iterdir()] == ["workspace"]


async def test_prepare_commands_run_in_order_inside_and_the_failing_one_is_named(tmp_path: Path) -> None:
    spec = RuntimeSpec(files={"a": "1"}, prepare=["cat a > b", "cat b >> c", "echo why >&2; exit 4"])
    runtime = await LocalProvider().create(spec, label=f"test-prepare-{tmp_path.name}", root=tmp_path / "r")
    try:
        with pytest.raises(WorkspaceError, match=r"prepare\[2\].*ended with 4: why"):
            await prepare_workspace(spec, runtime)
        assert (runtime.workspace / "c").read_text() == "1"
    finally:
        await runtime.destroy()

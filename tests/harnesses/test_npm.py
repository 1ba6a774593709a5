"""The installation in the cache, with an ``npm`` that is a script of ours."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

from polynya.errors import HarnessMissing
from polynya.harnesses import _cache, harness, npm
from polynya.harnesses._npm_cli import NpmCli, start_of
from polynya.schema import HarnessSpec

PACKAGES = {"tool": "1.2.3"}
NPM = """#!/bin/sh
echo "$@" >> "$NPM_LOG"
while [ "$1" != --prefix ]; do shift; done
mkdir -p "$2/node_modules/tool"
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    put_npm(tmp_path, NPM)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("NPM_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def put_npm(tmp_path: Path, text: str) -> None:
    (tmp_path / "bin").mkdir(exist_ok=True)
    (tmp_path / "bin" / "npm").write_text(text)
    (tmp_path / "bin" / "npm").chmod(0o755)


async def test_it_is_installed_once_at_exact_versions_without_install_scripts(tmp_path: Path, log: Path) -> None:
    folder, told = npm.folder_of(tmp_path, "tool", "1.2.3"), list[str]()
    await npm.install("tool", folder, PACKAGES, told.append)
    await npm.install("tool", folder, PACKAGES, told.append)
    lines = log.read_text().splitlines()
    assert len(lines) == 1
    assert "--ignore-scripts" in lines[0]
    assert lines[0].endswith(" tool@1.2.3")
    assert (folder / "node_modules" / "tool").is_dir()
    assert npm.is_installed(folder, PACKAGES)
    assert len(told) == 2
    assert npm.check_of("tool", folder, PACKAGES).detail.startswith("installed")


async def test_two_at_once_install_once(tmp_path: Path, log: Path) -> None:
    put_npm(tmp_path, NPM + "sleep 0.3\n")
    folder = npm.folder_of(tmp_path, "tool", "1.2.3")
    await asyncio.gather(*(npm.install("tool", folder, PACKAGES, lambda _: None) for _ in range(3)))
    assert len(log.read_text().splitlines()) == 1


async def test_other_packages_in_the_folder_are_replaced(tmp_path: Path, log: Path) -> None:
    folder = npm.folder_of(tmp_path, "tool", "1.2.3")
    await npm.install("tool", folder, {"tool": "1.0.0"}, lambda _: None)
    await npm.install("tool", folder, PACKAGES, lambda _: None)
    assert npm.is_installed(folder, PACKAGES)


async def test_a_failure_shows_the_last_lines_and_leaves_nothing(tmp_path: Path, log: Path) -> None:
    put_npm(tmp_path, "#!/bin/sh\nseq 100\necho 'E404 not there' >&2\nexit 7\n")
    folder = npm.folder_of(tmp_path, "tool", "1.2.3")
    with pytest.raises(HarnessMissing, match=r"npm ended with 7(.|\n)*E404 not there.*install npm"):
        await npm.install("tool", folder, PACKAGES, lambda _: None)
    assert [path.name for path in folder.parent.iterdir()] == [".tool-1.2.3.lock"]


async def test_cancelling_kills_npm_and_leaves_nothing(tmp_path: Path, log: Path) -> None:
    put_npm(tmp_path, "#!/bin/sh\necho $$ > $NPM_LOG\nexec sleep 1000\n")
    folder = npm.folder_of(tmp_path, "tool", "1.2.3")
    task = asyncio.ensure_future(npm.install("tool", folder, PACKAGES, lambda _: None))
    async with asyncio.timeout(30):
        while not (log.exists() and log.read_text().endswith("\n")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)
    assert [path.name for path in folder.parent.iterdir()] == [".tool-1.2.3.lock"]


def alive(mark: Path) -> list[str]:
    """Processes with ``mark`` in their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(mark).encode() in (entry / "cmdline").read_bytes():
                found.append(entry.name)
    return found


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6, 8, 12, 20])
async def test_cancelling_at_any_moment_leaves_no_npm(tmp_path: Path, log: Path, steps: int) -> None:
    """Also between the fork and the moment at which the event loop knows of it."""
    put_npm(tmp_path, "#!/bin/sh\nwhile :; do :; done\n")
    task = asyncio.ensure_future(_cache.run([str(tmp_path / "bin" / "npm"), str(tmp_path)], "tool", "fix"))
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert alive(tmp_path) == []


async def test_what_a_killed_installation_left_is_removed(tmp_path: Path, log: Path) -> None:
    folder = npm.folder_of(tmp_path, "tool", "1.2.3")
    (folder.parent / ".tool-1.2.3.new-abc" / "half").mkdir(parents=True)
    await npm.install("tool", folder, PACKAGES, lambda _: None)
    assert sorted(path.name for path in folder.parent.iterdir()) == [".tool-1.2.3.lock", "tool-1.2.3"]


async def test_without_npm_the_fix_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = npm.folder_of(tmp_path, "tool", "1.2.3")
    assert not npm.check_of("tool", folder, PACKAGES).ok
    with pytest.raises(HarnessMissing, match="apt-get install npm"):
        await npm.install("tool", folder, PACKAGES, lambda _: None)


async def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, log: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HarnessMissing, match="POLYNYA_CACHE"):
        await npm.install("tool", npm.folder_of(tmp_path / "file", "tool", "1"), PACKAGES, lambda _: None)


class Tool(NpmCli):
    name = "tool"
    default_version = "1.2.3"
    needs_node = True

    def packages(self, version: str) -> dict[str, str]:
        return {"tool": version}

    def program(self, folder: Path) -> Path:
        return folder / "node_modules" / "tool" / "run"


class TestNpmCli:
    """What the presets share."""

    async def test_node_is_shared_and_both_folders_are_shown(self, tmp_path: Path, log: Path) -> None:
        program = f'touch "$2/node_modules/tool/run"; n="$2/node_modules/{npm.node_package()}/bin"\n'
        put_npm(tmp_path, f'{NPM}{program}mkdir -p "$n"; touch "$n/node"\n')
        for _ in range(2):
            installed = await Tool().install(HarnessSpec(name="tool"), tmp_path, lambda _: None)
        assert [line.rsplit(" ", 1)[1] for line in log.read_text().splitlines()] == [
            "tool@1.2.3",
            f"{npm.node_package()}@{npm.NODE_VERSION}",
        ]
        assert [Path(bind.target).name for bind in installed.binds] == ["tool-1.2.3", f"node-{npm.NODE_VERSION}"]
        assert all(Path(program).is_file() for program in installed.programs.values())
        assert start_of(installed, "tool") == [installed.programs["node"], installed.programs["tool"]]
        assert (await Tool().check(tmp_path)).detail.startswith("installed")

    async def test_another_version_has_a_folder_of_its_own(self, tmp_path: Path, log: Path) -> None:
        put_npm(tmp_path, f'{NPM}touch "$2/node_modules/tool/run"\n')
        with pytest.raises(HarnessMissing, match="node"):
            await Tool().install(HarnessSpec(name="tool", version="2.0.0"), tmp_path, lambda _: None)
        assert (tmp_path / "harnesses" / "tool-2.0.0" / "node_modules" / "tool" / "run").is_file()

    async def test_an_installation_without_its_binary_is_refused(self, tmp_path: Path, log: Path) -> None:
        with pytest.raises(HarnessMissing, match=r"npm installed no .*tool/run(.|\n)*optional dependencies"):
            await Tool().install(HarnessSpec(name="tool"), tmp_path, lambda _: None)


@pytest.mark.parametrize("name", ["claude_code", "codex", "gemini_cli", "opencode", "qwen_code"])
async def test_a_preset_without_its_binary_names_what_is_missing(name: str, tmp_path: Path, log: Path) -> None:
    with pytest.raises(HarnessMissing, match=f"{name}.*npm installed no"):
        await harness(name).install(HarnessSpec(name=name), tmp_path, lambda _: None)
    assert (await harness(name).check(tmp_path)).ok

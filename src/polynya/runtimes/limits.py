"""Memory, CPU and process limits by control groups, where this user may write them.

Invariant: ``enforced`` names exactly the limits that the kernel holds; one that was asked for and is not in it is not
held, and the session's record says so. It refuses to touch a group that it did not make (all are named ``polynya-…``).
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from polynya.schema import RuntimeSpec

PREFIX = "polynya-"
CONTROLLER = {"memory_mb": "memory", "cpus": "cpu", "pids": "pids"}
CPU_PERIOD = 100_000
REMOVE_SECONDS = 5.0


def group_name(label: str) -> str:
    return PREFIX + re.sub(r"[^A-Za-z0-9._-]", "_", label)


class Limits:
    """The control groups of one sandbox."""

    def __init__(self) -> None:
        self.enforced: frozenset[str] = frozenset()
        self.folders: list[Path] = []

    @property
    def groups(self) -> list[Path]:
        """The files into which a process writes ``0`` to put itself under the limits."""
        return [folder / "cgroup.procs" for folder in self.folders]

    def remove(self) -> None:
        """After all processes are dead. A group stays busy for a moment after its last one; the kernel gives no event."""
        deadline = time.monotonic() + REMOVE_SECONDS
        for folder in self.folders:
            while folder.exists():
                try:
                    folder.rmdir()
                except OSError:
                    if time.monotonic() > deadline:
                        return
                    time.sleep(0.01)
        self.folders = []


def apply(spec: RuntimeSpec, label: str, own: Path = Path("/proc/self/cgroup")) -> Limits:
    """Make the groups for what ``spec`` asks. What cannot be held is left out of ``enforced``."""
    wanted = {name: getattr(spec, name) for name in CONTROLLER if getattr(spec, name) is not None}
    limits = Limits()
    if not wanted:
        return limits
    homes = dict(_homes(own))
    for name, value in wanted.items():
        home = homes.get(CONTROLLER[name])
        if home is None:
            continue
        folder, version = home
        group = folder / group_name(label)
        with contextlib.suppress(OSError):
            if version == 2:
                _delegate(folder, CONTROLLER[name])
            group.mkdir(exist_ok=True)
            if group not in limits.folders:
                limits.folders.append(group)
            for file, text in _values(name, value, version):
                if file != "memory.memsw.limit_in_bytes" or (group / file).exists():
                    (group / file).write_text(text)
            limits.enforced |= {name}
    return limits


def sweep(prefix: str, mounts: Path = Path("/proc/self/mountinfo")) -> list[str]:
    """Remove the groups of labels with this prefix, wherever an earlier process made them."""
    removed = []
    for mount, _ in _mounts(mounts):
        for folder, names, _files in os.walk(mount):
            for name in [name for name in names if name.startswith(group_name(prefix))]:
                with contextlib.suppress(OSError):
                    (Path(folder) / name).rmdir()
                    removed.append(name)
    return removed


def _values(name: str, value: float, version: int) -> list[tuple[str, str]]:
    if name == "memory_mb":
        size = str(int(value) << 20)
        if version == 2:
            return [("memory.max", size)]
        return [("memory.limit_in_bytes", size), ("memory.memsw.limit_in_bytes", size)]
    if name == "pids":
        return [("pids.max", str(int(value)))]
    quota = str(int(value * CPU_PERIOD))
    if version == 2:
        return [("cpu.max", f"{quota} {CPU_PERIOD}")]
    return [("cpu.cfs_period_us", str(CPU_PERIOD)), ("cpu.cfs_quota_us", quota)]


def _delegate(folder: Path, controller: str) -> None:
    """Let children of a v2 group have the controller. Refused (EBUSY) when the group itself holds processes."""
    if controller not in (folder / "cgroup.subtree_control").read_text().split():
        (folder / "cgroup.subtree_control").write_text(f"+{controller}")


def _mounts(mountinfo: Path = Path("/proc/self/mountinfo")) -> Iterator[tuple[Path, set[str]]]:
    """Mount point and controllers of each hierarchy; v2 lists its own in ``cgroup.controllers``."""
    for line in mountinfo.read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.partition(" ")
        point = Path(before.split()[4])
        if kind == "cgroup":
            yield point, set(options.rsplit(" ", 1)[-1].split(","))
        elif kind == "cgroup2":
            with contextlib.suppress(OSError):
                yield point, {"", *(point / "cgroup.controllers").read_text().split()}


def _homes(own: Path) -> Iterator[tuple[str, tuple[Path, int]]]:
    """Controller → the folder below which this process may make groups, and the version of its hierarchy."""
    paths: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                paths[controller] = path.lstrip("/")
    for mount, offered in _mounts():
        version = 2 if "" in offered else 1
        for controller in set(CONTROLLER.values()) & offered:
            below = paths.get("" if version == 2 else controller, "")
            # Inside a container the path may be the host's and lead nowhere here: then the mount point is our group.
            folder = mount / below if (mount / below).is_dir() else mount
            if os.access(folder, os.W_OK):
                yield controller, (folder, version)

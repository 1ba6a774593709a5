"""What a program inside the sandbox can see and do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from polynya.errors import RuntimeFailure, RuntimeUnavailable
from polynya.runtimes import BUILT_IN, all_providers, bubblewrap, limits, marks, provider
from polynya.runtimes.base import Bind
from polynya.runtimes.files import remove_tree
from polynya.runtimes.local import LocalProvider
from polynya.schema import RuntimeSpec

pytestmark = pytest.mark.sandbox
Make = Callable[..., Awaitable[Any]]


async def sh(runtime: Any, command: str) -> tuple[int, str]:
    result = await runtime.exec(["sh", "-c", command], timeout=60)
    return result.exit_code, (result.stdout + result.stderr).decode()


async def test_check_makes_a_real_sandbox() -> None:
    check = await bubblewrap.BubblewrapProvider().check()
    assert check.ok, check


async def test_files_of_the_host_are_not_there(make: Make, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    runtime = await make("bubblewrap")
    _, listed = await sh(runtime, "ls -A / /home /etc /root /work /var; cat /etc/shadow " + str(secret))
    assert "hunter2" not in listed
    assert "shadow" not in listed.replace("/etc/shadow", "")
    tops = (await sh(runtime, "ls -A /"))[1].split()
    assert set(tops) <= {
        "bin",
        "dev",
        "etc",
        "home",
        "lib",
        "lib32",
        "lib64",
        "proc",
        "run",
        "sbin",
        "tmp",
        "usr",
        "var",
        "workspace",
    }


async def test_nothing_of_the_host_can_be_written(make: Make) -> None:
    runtime = await make("bubblewrap")
    for place in ("/x", "/usr/x", "/etc/x", "/proc/sys/kernel/domainname", "/proc/sys/kernel/core_pattern", "/bin/x"):
        code, text = await sh(runtime, f"echo x > {place}")
        assert code != 0, place
        assert "read-only" in text.lower() or "denied" in text.lower() or "permission" in text.lower(), text
    for place in ("/workspace/x", "/home/agent/x", "/tmp/x", "/var/tmp/x", "/dev/shm/x"):
        assert (await sh(runtime, f"echo x > {place}"))[0] == 0, place


async def test_no_capability_is_left_and_none_can_be_gained(make: Make) -> None:
    runtime = await make("bubblewrap")
    _, status = await sh(runtime, "cat /proc/self/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {fields[name].strip("0") for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {""}
    assert fields["NoNewPrivs"].strip() == "1"
    for command in (
        "mount -t tmpfs none /tmp",
        "mknod /tmp/d b 1 1",
        "umount /usr",
        "hostname other",
        "nsenter -t 1 -m true",
    ):
        assert (await sh(runtime, command))[0] != 0, command


async def test_only_its_own_processes_are_seen_and_the_supervisor_is_closed(make: Make) -> None:
    runtime = await make("bubblewrap")
    _, listed = await sh(
        runtime,
        "ls -d /proc/[0-9]* | wc -l; cat /proc/$PPID/environ; cat /proc/$PPID/fd/0; cat /proc/$PPID/mem; cat /proc/keys /proc/kallsyms",
    )
    assert int(listed.split()[0]) < 10
    assert listed.lower().count("permission denied") == 5


async def test_process_1_cannot_be_killed_from_inside(make: Make) -> None:
    runtime = await make("bubblewrap")
    await sh(runtime, "kill -9 1; kill -TERM 1")
    assert (await sh(runtime, "echo alive")) == (0, "alive\n")


async def test_orphans_become_no_zombies(make: Make) -> None:
    runtime = await make("bubblewrap")
    await sh(runtime, "for i in 1 2 3 4 5; do (setsid sh -c 'sleep 0.01' &) ; done")
    await runtime.kill_all()
    _, states = await sh(runtime, "cat /proc/[0-9]*/stat | sed 's/.*) //' | cut -c1")
    assert "Z" not in states


CONNECT = """
import errno, json, socket, sys
found = {}
for family, address in [(socket.AF_INET, ("1.1.1.1", 53)), (socket.AF_INET, ("169.254.169.254", 80)),
                        (socket.AF_INET, ("127.0.0.1", int(sys.argv[1])))]:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        s = socket.socket(family, kind)
        try:
            s.connect(address)
            s.send(b"x")
            found[f"{address[0]} {kind}"] = "connected"
        except OSError as exc:
            found[f"{address[0]} {kind}"] = errno.errorcode[exc.errno]
print(json.dumps(found))
"""


async def test_gateway_only_reaches_no_network_but_what_listens_inside(make: Make) -> None:
    runtime = await make("bubblewrap")
    with socket.create_server(("127.0.0.1", 0)) as of_host:
        port = of_host.getsockname()[1]
        result = await runtime.exec(["/usr/bin/python3", "-c", CONNECT, str(port)], timeout=60)
    found = json.loads(result.stdout)
    assert {found[key] for key in found if not key.startswith("127")} == {"ENETUNREACH"}
    assert found["127.0.0.1 1"] == "ECONNREFUSED"


async def test_the_listening_socket_is_served_from_outside(make: Make) -> None:
    runtime = await make("bubblewrap")
    listener = await runtime.listen()
    host, port = listener.getsockname()
    assert host == "127.0.0.1"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"you said " + await reader.readline())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, sock=listener):
        ask = f"import socket; s = socket.create_connection(('127.0.0.1', {port})); s.send(b'hi\\n'); print(s.recv(99))"
        result = await runtime.exec(["/usr/bin/python3", "-c", ask], timeout=60)
    assert result.stdout == b"b'you said hi\\n'\n", result.stderr


async def test_two_sandboxes_do_not_share_a_loopback(make: Make) -> None:
    first, second = await make("bubblewrap"), await make("bubblewrap")
    with await first.listen() as listener:
        port = listener.getsockname()[1]
        ask = f"import socket; socket.create_connection(('127.0.0.1', {port}))"
        result = await second.exec(["/usr/bin/python3", "-c", ask], timeout=60)
    assert b"ConnectionRefusedError" in result.stderr


async def test_open_shares_the_hosts_network(make: Make) -> None:
    runtime = await make("bubblewrap", network="open")
    assert await runtime.listen() is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        ask = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]})); print('in')"
        result = await runtime.exec(["/usr/bin/python3", "-c", ask], timeout=60)
    assert result.stdout == b"in\n", result.stderr


async def test_binds_are_read_only_unless_said(make: Make, tmp_path: Path) -> None:
    shown, open_ = tmp_path / "shown", tmp_path / "open"
    for folder in (shown, open_):
        folder.mkdir()
        (folder / "file").write_text("content")
    binds = [Bind(source=shown, target="/opt/deep/shown"), Bind(source=open_, target="/opt/open", writable=True)]
    runtime = await make("bubblewrap", binds=binds)
    assert (await sh(runtime, "cat /opt/deep/shown/file")) == (0, "content")
    assert (await sh(runtime, "echo x > /opt/deep/shown/file"))[0] != 0
    assert (await sh(runtime, "echo -n x > /opt/open/file"))[0] == 0
    assert (open_ / "file").read_text() == "x"


async def test_a_bind_that_does_not_exist_is_named(make: Make, tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure, match="nowhere"):
        await make("bubblewrap", binds=[Bind(source=tmp_path / "nowhere", target="/opt/x")])


async def test_local_refuses_a_bind_under_another_path(make: Make, tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure, match="only where they are"):
        await make("local", binds=[Bind(source=tmp_path, target="/opt/x")])


async def test_a_workdir_of_choice(make: Make) -> None:
    runtime = await make("bubblewrap", workdir="/testbed/deep")
    assert (await sh(runtime, "pwd; touch here")) == (0, "/testbed/deep\n")
    assert (runtime.workspace / "here").exists()


OWNER = """
import asyncio, sys
from pathlib import Path
from polynya.runtimes import BUILT_IN
from polynya.schema import RuntimeSpec

async def main():
    name, label, root, nap = sys.argv[1:]
    runtime = await BUILT_IN[name]().create(RuntimeSpec(pids=100), label=label, root=Path(root))
    await runtime.exec(["sh", "-c", f"env -i setsid sleep {nap} >/dev/null 2>&1 & sleep {nap} & true"])
    run = asyncio.create_task(runtime.exec(["sh", "-c", f"touch ready; sleep {nap}"]))
    while not (runtime.workspace / "ready").exists():
        await asyncio.sleep(0.01)
    print("up", flush=True)
    await run

asyncio.run(main())
"""


def own_and_die(args: list[str]) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *args], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    with owner.stdout:
        assert owner.stdout.readline() == b"up\n"
        threads = Path(f"/proc/{owner.pid}/task").iterdir()
        handles = [os.pidfd_open(int(pid)) for thread in threads for pid in (thread / "children").read_text().split()]
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert len(handles) == 1  # The fork server, and it goes by itself.
    for handle in handles:
        assert select.select([handle], [], [], 30)[0]
        os.close(handle)


def running(*argv: str) -> list[int]:
    wanted = b"".join(arg.encode() + b"\0" for arg in argv)
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "cmdline").read_bytes() == wanted:
                found.append(int(path.name))
    return found


@pytest.mark.parametrize("name", ["bubblewrap", "local"])
async def test_nothing_survives_a_killed_owner_and_the_sweep(name: str, label: str, tmp_path: Path) -> None:
    nap = f"4243.{os.getpid()}"
    await asyncio.to_thread(own_and_die, [name, label, str(tmp_path / "root"), nap])
    await BUILT_IN[name]().sweep(label)
    assert not [pid for pid, found in marks.labels().items() if found == label]
    assert running("sleep", nap) == []
    assert limits.sweep(label) == []


async def test_the_sweep_spares_other_labels(make: Make, label: str) -> None:
    runtime = await make("bubblewrap")
    assert await LocalProvider().sweep(f"{label}.other") == []
    assert (await sh(runtime, "echo alive")) == (0, "alive\n")
    with pytest.raises(RuntimeFailure, match="every sandbox"):
        await LocalProvider().sweep("")


async def test_the_sweep_kills_by_label(make: Make, label: str) -> None:
    runtime = await make("bubblewrap")
    assert f"{label}.0" in await LocalProvider().sweep(label)
    with pytest.raises(RuntimeFailure):
        await runtime.exec(["true"])


async def test_a_cancelled_creation_leaves_nothing(make: Make, label: str) -> None:
    task = asyncio.ensure_future(make("bubblewrap"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not [pid for pid, found in marks.labels().items() if found.startswith(label)]


async def test_deep_trees_and_locked_folders_are_removed(make: Make) -> None:
    runtime = await make("bubblewrap")
    deep = "import os\nos.chdir('/home/agent')\nfor _ in range(3000):\n    os.mkdir('d' * 9)\n    os.chdir('d' * 9)\n"
    try:
        assert (await runtime.exec(["/usr/bin/python3", "-c", deep])).exit_code == 0
        await sh(runtime, "mkdir -p ~/a/b; touch ~/a/b/c; chmod 0 ~/a/b ~/a")
        await runtime.destroy()
        assert not runtime.home_path.exists()
    finally:  # Left behind, it would break pytest's own removal of old folders.
        remove_tree(runtime.home_path)


async def test_no_file_descriptor_is_left(make: Make) -> None:
    async def cycle() -> None:
        runtime = await make("bubblewrap")
        await runtime.exec(["true"], stdin=b"x")
        (await runtime.listen()).close()
        await runtime.destroy()

    await cycle()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        await cycle()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert threading.active_count() < 50


async def test_no_name_is_bubblewrap_and_never_silently_less(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await provider()).name == "bubblewrap"
    assert (await provider("local")).name == "local"
    monkeypatch.setattr(bubblewrap, "find_bwrap", lambda: None)
    with pytest.raises(RuntimeUnavailable, match="runtime: local"):
        await provider()


async def test_a_bwrap_that_fails_is_reported_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch, make: Make, tmp_path: Path, label: str
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(bubblewrap, "find_bwrap", lambda: str(broken))
    with pytest.raises(RuntimeUnavailable, match="No permissions to create new namespace"):
        await make("bubblewrap")
    check = await bubblewrap.BubblewrapProvider().check()
    assert not check.ok
    assert "runtime: local" in check.fix


async def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(RuntimeUnavailable, match="bubblewrap, local"):
        await provider("nowhere")
    assert {item.name for item in all_providers()} >= {"bubblewrap", "local"}


def test_the_sandbox_is_asked_for_no_more_than_it_should_be(tmp_path: Path) -> None:
    args = bubblewrap._arguments(RuntimeSpec(), "l", tmp_path, tmp_path, [])
    assert "--unshare-net" in args
    assert "--clearenv" in args
    assert not [
        arg
        for arg in args
        if arg in ("/", "/home", "/root", "/etc", "/var") and args[args.index(arg) - 1] == "--ro-bind"
    ]

"""Polynya starts programs without forking itself, and nothing of that outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from polynya.errors import RuntimeFailure
from polynya.runtimes import BUILT_IN, Spawner, all_providers, marks, provider, spawner
from polynya.runtimes.spawner import settled
from polynya.runtimes.workspace import lay_out, prepare_workspace
from polynya.schema import RuntimeSpec

BOTH = [pytest.param("bubblewrap", marks=pytest.mark.sandbox), "local"]
both = pytest.mark.parametrize("name", BOTH)
SH = "/bin/sh"
ENV = {"PATH": os.environ["PATH"]}


def status(pid: int, field: str) -> str:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return line.split(":", 1)[1].strip()
    raise AssertionError(field)


def children(pid: int) -> dict[int, str]:
    """Pid → state."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, AssertionError):
            if int(status(int(path.name), "PPid")) == pid:
                found[int(path.name)] = status(int(path.name), "State")[0]
    return found


def servers() -> list[int]:
    """The fork servers of this process."""
    return [pid for pid in children(os.getpid()) if status(pid, "Name") == "polynya-fork"]


async def eventually(condition: Any) -> None:
    """Poll for what another process does: there is no event for it."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Call it, and this process cannot fork any more."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError("polynya forks")

    def forbid() -> None:
        for module, name in ((subprocess, "Popen"), (os, "fork"), (os, "posix_spawn")):
            monkeypatch.setattr(module, name, refuse)

    yield forbid


@both
async def test_with_a_spawner_held_no_part_of_a_sandboxs_life_forks_polynya(
    name: str, tmp_path: Path, label: str, forbidden: Any
) -> None:
    async with Spawner() as held:
        await held.run([SH, "-c", "true"], env={}, cwd="/")
        forbidden()
        runtime = await (await provider(name, held)).create(RuntimeSpec(), label=label, root=tmp_path / "root")
        try:
            await prepare_workspace(
                RuntimeSpec(files={"a": "1"}, prepare=["mkdir -p deep/er; touch deep/er/f"]), runtime
            )
            if listener := await runtime.listen():
                listener.close()
            assert (await runtime.exec(["cat", "a"])).stdout == b"1"
        finally:
            await runtime.destroy()


async def test_one_fork_server_serves_all_who_share_it_and_goes_with_the_last(tmp_path: Path, label: str) -> None:
    held = Spawner()
    local = BUILT_IN["local"](held)
    assert servers() == []
    first = await local.create(RuntimeSpec(), label=f"{label}.1", root=tmp_path / "1")
    second = await local.create(RuntimeSpec(), label=f"{label}.2", root=tmp_path / "2")
    await first.exec(["true"])
    [server] = servers()
    await second.exec(["true"])
    assert servers() == [server]
    await first.destroy()
    assert servers() == [server]
    await second.destroy()
    await second.destroy()
    assert servers() == []
    async with held:
        await lay_out(RuntimeSpec(), tmp_path, held)
        assert len(servers()) == 1
    assert servers() == []


async def test_a_spawner_that_nobody_holds_starts_nothing() -> None:
    with pytest.raises(RuntimeError, match="hold the spawner"):
        await Spawner().run([SH], env={}, cwd="/")
    assert servers() == []


async def test_many_at_once_keep_their_outputs_apart_and_leave_no_zombie() -> None:
    async with Spawner() as held:
        done = await asyncio.gather(
            *(held.run([SH, "-c", f"echo {n}; echo e{n} >&2; exit {n}"], env={}, cwd="/") for n in range(64))
        )
        assert done == [(n, f"{n}\n".encode(), f"e{n}\n".encode()) for n in range(64)]
        [server] = servers()
        assert children(server) == {}


async def test_what_cannot_be_started_says_why(tmp_path: Path) -> None:
    async with Spawner() as held:
        code, _, words = await held.run(["/no/such/program"], env={}, cwd="/")
        assert (code, b"'/no/such/program'" in words) == (127, True)
        code, _, words = await held.run([SH], env={}, cwd=str(tmp_path / "none"))
        assert (code, b"none" in words) == (127, True)
        assert (await held.run([SH, "-c", "kill -9 $$"], env={}, cwd="/"))[0] == -9


async def test_a_program_has_its_own_descriptors_group_environment_and_a_low_priority() -> None:
    async with Spawner() as held:
        script = "ls /proc/self/fd; cut -d' ' -f5 /proc/$$/stat; echo $$; nice; env"
        _, out, err = await held.run([SH, "-c", script], env={**ENV, "ONLY": "this"}, cwd="/")
    assert err == b""
    lines = out.decode().split()
    assert lines[:4] == ["0", "1", "2", "3"]  # 3 is the folder that ls reads.
    assert lines[4] == lines[5]
    assert int(lines[6]) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)
    assert {line.split("=")[0] for line in lines[7:]} <= {"ONLY", "PATH", "PWD", "SHLVL", "_", "OLDPWD"}


async def test_supervisors_carry_the_label_where_the_sweep_looks(tmp_path: Path, label: str) -> None:
    async with Spawner() as held:
        runtime = await BUILT_IN["local"](held).create(RuntimeSpec(), label=label, root=tmp_path / "root")
        run = asyncio.create_task(runtime.exec(["sh", "-c", "touch ready; sleep 1000"]))
        await eventually((runtime.workspace / "ready").exists)
        [server] = servers()
        [outer] = children(server)
        assert marks.labels()[outer] == label
        assert b"POLYNYA_ROOM" not in Path(f"/proc/{outer}/environ").read_bytes()
        assert server not in marks.labels()
        await runtime.destroy()
        assert (await run).exit_code == -9


async def test_a_label_without_room_is_refused(tmp_path: Path) -> None:
    runtime = await BUILT_IN["local"]().create(RuntimeSpec(), label="x" * 1001, root=tmp_path / "root")
    with pytest.raises(RuntimeFailure, match="longer than 1000 bytes"):
        await runtime.exec(["true"])
    await runtime.destroy()


async def test_a_cancelled_request_leaves_no_child() -> None:
    async with Spawner() as held:
        await held.run([SH, "-c", "true"], env={}, cwd="/")
        [server] = servers()
        os.kill(server, signal.SIGSTOP)
        run = asyncio.create_task(held.run([SH, "-c", "sleep 1000"], env=ENV, cwd="/"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        run.cancel()
        os.kill(server, signal.SIGCONT)
        with pytest.raises(asyncio.CancelledError):
            await run
        assert children(server) == {}


async def test_cancelling_a_run_kills_what_it_started(tmp_path: Path) -> None:
    async with Spawner() as held:
        run = asyncio.create_task(
            held.run([SH, "-c", "echo $$ > pid; mv pid group; sleep 1000; true"], env=ENV, cwd=str(tmp_path))
        )
        await eventually((tmp_path / "group").exists)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "group").read_text()), 0)


async def test_a_killed_fork_server_is_told_to_those_who_wait_and_replaced(tmp_path: Path) -> None:
    async with Spawner() as held:
        run = asyncio.create_task(held.run([SH, "-c", "touch ready; exec sleep 1000"], env=ENV, cwd=str(tmp_path)))
        await eventually((tmp_path / "ready").exists)
        [server] = servers()
        os.kill(server, signal.SIGKILL)
        with pytest.raises(RuntimeFailure, match=r"was killed.*dmesg"):
            await run
        assert (await held.run([SH, "-c", "echo again"], env={}, cwd="/"))[1] == b"again\n"
        assert len(servers()) == 1
    assert servers() == []


async def test_a_silent_fork_server_is_killed_so_that_no_request_waits_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Spawner() as held:
        await held.run([SH, "-c", "true"], env={}, cwd="/")
        os.kill(servers()[0], signal.SIGSTOP)
        monkeypatch.setattr(spawner, "ANSWER_SECONDS", 0.05)
        with pytest.raises(RuntimeFailure, match="was killed"):
            await held.run([SH, "-c", "true"], env={}, cwd="/")
        monkeypatch.undo()
        assert (await held.run([SH, "-c", "true"], env={}, cwd="/"))[0] == 0


async def test_a_fork_server_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawner, "END_SECONDS", 0.05)
    async with Spawner() as held:
        await held.run([SH, "-c", "true"], env={}, cwd="/")
        os.kill(servers()[0], signal.SIGSTOP)
    assert servers() == []


async def test_a_fork_server_that_cannot_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Spawner() as held:
        monkeypatch.setattr("sys.executable", "/no/such/python")
        with pytest.raises(RuntimeFailure, match="/no/such/python"):
            await held.run([SH, "-c", "true"], env={}, cwd="/")
        monkeypatch.undo()
        assert (await held.run([SH, "-c", "true"], env={}, cwd="/"))[0] == 0


@pytest.mark.sandbox
async def test_a_sandbox_that_died_with_the_fork_server_says_so_and_can_be_destroyed(
    tmp_path: Path, label: str
) -> None:
    async with Spawner() as held:
        runtime = await BUILT_IN["bubblewrap"](held).create(RuntimeSpec(), label=label, root=tmp_path / "root")
        run = asyncio.create_task(runtime.exec(["sh", "-c", "touch ready; sleep 1000"]))
        await eventually((runtime.workspace / "ready").exists)
        os.kill(servers()[0], signal.SIGKILL)
        for work in (run, runtime.exec(["true"])):
            with pytest.raises(RuntimeFailure, match="was killed"):
                await work
        await runtime.destroy()
        assert not [pid for pid, found in marks.labels().items() if found == label]


async def test_a_local_program_outlives_the_fork_server_and_is_still_ours(tmp_path: Path, label: str) -> None:
    async with Spawner() as held:
        runtime = await BUILT_IN["local"](held).create(RuntimeSpec(), label=label, root=tmp_path / "root")
        run = asyncio.create_task(runtime.exec(["sh", "-c", "touch ready; while [ ! -e go ]; do sleep 0.02; done"]))
        await eventually((runtime.workspace / "ready").exists)
        os.kill(servers()[0], signal.SIGKILL)
        (runtime.workspace / "go").touch()
        assert (await run).exit_code == 0
        assert (await runtime.exec(["echo", "alive"])).stdout == b"alive\n"
        await runtime.destroy()


async def test_without_its_outer_half_a_supervisor_still_kills_the_tree_of_a_program_that_ended(
    tmp_path: Path, label: str
) -> None:
    async with Spawner() as held:
        runtime = await BUILT_IN["local"](held).create(RuntimeSpec(), label=label, root=tmp_path / "root")
        script = "env -i setsid sh -c 'echo $$ > pid; mv pid ready; exec sleep 1000' & exec sleep 1000"
        run = asyncio.create_task(runtime.exec(["sh", "-c", script]))
        await eventually((runtime.workspace / "ready").exists)
        [outer] = children(servers()[0])
        [inner] = children(outer)
        escaped = int((runtime.workspace / "ready").read_text())
        program = next(pid for pid in children(inner) if pid != escaped)
        os.kill(inner, signal.SIGSTOP)
        os.kill(program, signal.SIGKILL)
        os.kill(outer, signal.SIGKILL)  # Its end makes the kernel wake the inner half.
        with pytest.raises(RuntimeFailure):
            await run
        await eventually(lambda: not Path(f"/proc/{escaped}").exists())
        await runtime.destroy()


def test_what_a_dead_polynya_still_asked_for_is_not_started(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    request = {"kind": "program", "id": 1, "fds": 0, "argv": ["/bin/touch", "made"], "env": {}, "cwd": str(tmp_path)}
    with ours, theirs:
        ours.send(json.dumps(request).encode())
        ours.close()
        argv = [sys.executable, "-I", "-S", str(spawner.SCRIPT), str(theirs.fileno()), "1"]
        assert subprocess.run(argv, pass_fds=[theirs.fileno()], check=False, timeout=60).returncode == 0
    assert list(tmp_path.iterdir()) == []


async def test_the_cancellation_comes_back_after_the_work() -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await may_end.wait()

    task = asyncio.create_task(settled(work()))
    await begun.wait()
    task.cancel()
    asyncio.get_running_loop().call_soon(may_end.set)
    assert isinstance(await task, asyncio.CancelledError)


async def test_providers_take_the_spawner_along(tmp_path: Path, label: str) -> None:
    async with Spawner() as held:
        assert {item.name for item in all_providers(held)} >= {"bubblewrap", "local"}
        runtime = await (await provider("local", held)).create(RuntimeSpec(), label=label, root=tmp_path / "root")
        await runtime.destroy()
        assert servers() == []


@both
async def test_all_programs_share_the_fork_servers_session_and_so_its_share_of_the_cpu(
    name: str, tmp_path: Path, label: str
) -> None:
    async with Spawner() as held:
        runtime = await BUILT_IN[name](held).create(RuntimeSpec(), label=label, root=tmp_path / "root")
        run = asyncio.create_task(runtime.exec(["sh", "-c", "touch ready; exec sleep 1000"]))
        await eventually((runtime.workspace / "ready").exists)
        [server] = servers()
        outer = next(pid for pid in children(server) if status(pid, "Name") == "polynya-outer")
        [inner] = children(outer)
        [program] = children(inner)
        assert {os.getsid(pid) for pid in (server, outer, inner, program)} == {server}
        assert len({os.getpgid(pid) for pid in (server, outer, inner, program)}) == 4
        await runtime.destroy()
        assert (await run).exit_code == -9

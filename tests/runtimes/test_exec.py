"""What every runtime owes to the programs in it, and to whoever started them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from polynya.errors import RuntimeFailure, RuntimeUnavailable
from polynya.runtimes import marks
from polynya.schema import RuntimeSpec

Make = Callable[..., Awaitable[Any]]
BOTH = [pytest.param("bubblewrap", marks=pytest.mark.sandbox), "local"]
both = pytest.mark.parametrize("name", BOTH)
# Leaves its session, forgets its environment and its parent: nothing but a reaper can find it.
NAP = f"4242.{os.getpid()}"  # Other runs of these tests have other processes.
ESCAPE = f"env -i setsid sh -c '(sleep {NAP} >/dev/null 2>&1 &)'; "


def sleepers() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "cmdline").read_bytes() == f"sleep\0{NAP}\0".encode():
                found.append(int(path.name))
    return found


async def eventually(condition: Callable[[], bool]) -> None:
    """Poll for what a program inside does to a file: the host gets no event for it."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def started(path: Path) -> None:
    await eventually(path.exists)


@both
async def test_a_program_runs_in_the_workspace_with_its_output_and_exit_code(make: Make, name: str) -> None:
    runtime = await make(name)
    result = await runtime.exec(["sh", "-c", "pwd; echo oops >&2; echo made > file; exit 3"])
    assert (result.exit_code, result.stdout.decode().strip(), result.stderr) == (3, runtime.workdir, b"oops\n")
    assert not result.timed_out
    assert (runtime.workspace / "file").read_text() == "made\n"


@both
async def test_stdin_cwd_and_environment_reach_the_program(make: Make, name: str) -> None:
    runtime = await make(name, env={"FROM_SPEC": "1", "BOTH": "spec"})
    data = b"x" * 300_000
    result = await runtime.exec(
        ["sh", "-c", "cat | wc -c; pwd; echo $FROM_SPEC $BOTH $FROM_CALL"],
        stdin=data,
        cwd="/usr",
        env={"FROM_CALL": "2", "BOTH": "call"},
    )
    assert result.stdout.decode().split() == ["300000", "/usr", "1", "call", "2"]


@both
async def test_without_stdin_a_reader_gets_the_end_at_once(make: Make, name: str) -> None:
    runtime = await make(name)
    assert (await runtime.exec(["cat"], timeout=60)).exit_code == 0


@both
async def test_no_variable_of_the_host_is_inherited(make: Make, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    runtime = await make(name)
    result = await runtime.exec(
        ["sh", "-c", "env; cat /proc/1/environ /proc/$PPID/environ 2>/dev/null | tr '\\0' '\\n'"]
    )
    assert b"hunter2" not in result.stdout
    assert f"HOME={runtime.home}\n".encode() in result.stdout
    listed = await runtime.exec(["ls", "-A", runtime.home])
    assert listed.stdout == b""


@both
@pytest.mark.parametrize(("argv", "code"), [(["no-such-program"], 127), (["/etc"], 126)])
async def test_what_cannot_be_started_is_an_exit_code_as_in_a_shell(
    make: Make, name: str, argv: list[str], code: int
) -> None:
    result = await (await make(name)).exec(argv)
    assert result.exit_code == code
    assert argv[0].encode() in result.stderr


@both
async def test_a_signal_is_a_negative_exit_code(make: Make, name: str) -> None:
    assert (await (await make(name)).exec(["sh", "-c", "kill -SEGV $$"])).exit_code == -11


@both
async def test_a_timeout_keeps_the_output_and_kills_what_escaped(make: Make, name: str) -> None:
    runtime = await make(name)
    result = await runtime.exec(["sh", "-c", ESCAPE + "echo before; sleep 1000"], timeout=0.7)
    assert (result.timed_out, result.exit_code, result.stdout) == (True, -9, b"before\n")
    assert sleepers() == []


@both
async def test_a_program_that_ignores_signals_is_killed_all_the_same(make: Make, name: str) -> None:
    runtime = await make(name)
    result = await runtime.exec(["sh", "-c", "trap '' TERM INT HUP; while :; do sleep 1; done"], timeout=0.3)
    assert result.timed_out


@both
async def test_cancelling_kills_what_escaped_before_it_raises(make: Make, name: str) -> None:
    runtime = await make(name)
    run = asyncio.create_task(runtime.exec(["sh", "-c", ESCAPE + "touch ready; sleep 1000"]))
    await started(runtime.workspace / "ready")
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert sleepers() == []


@both
async def test_cancelling_at_once_leaves_nothing(make: Make, name: str) -> None:
    runtime = await make(name)
    run = asyncio.create_task(runtime.exec(["sleep", NAP]))
    await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert sleepers() == []


@both
async def test_programs_of_one_sandbox_do_not_kill_each_other(make: Make, name: str) -> None:
    runtime = await make(name)
    longer = asyncio.create_task(
        runtime.exec(["sh", "-c", "touch ready; while [ ! -e go ]; do sleep 0.02; done; echo whole"])
    )
    await started(runtime.workspace / "ready")
    assert (await runtime.exec(["sh", "-c", ESCAPE + "sleep 1000"], timeout=0.3)).timed_out
    (runtime.workspace / "go").touch()
    assert (await longer).stdout == b"whole\n"


@both
async def test_many_programs_at_once(make: Make, name: str) -> None:
    runtime = await make(name)
    results = await asyncio.gather(*(runtime.exec(["sh", "-c", f"echo {n}; exit {n}"]) for n in range(12)))
    assert [(result.exit_code, result.stdout) for result in results] == [(n, f"{n}\n".encode()) for n in range(12)]


@both
async def test_a_background_child_that_holds_the_output_does_not_delay_the_return(make: Make, name: str) -> None:
    runtime = await make(name)
    result = await runtime.exec(["sh", "-c", f"sleep {NAP} & echo done"], timeout=60)
    assert (result.exit_code, result.stdout, result.timed_out) == (0, b"done\n", False)
    await eventually(lambda: len(sleepers()) == 1)
    assert (await runtime.exec(["true"])).exit_code == 0
    await runtime.kill_all()
    assert sleepers() == []
    assert (await runtime.exec(["echo", "alive"])).stdout == b"alive\n"


@both
async def test_kill_all_ends_a_running_program_and_its_caller_is_told(make: Make, name: str) -> None:
    runtime = await make(name)
    run = asyncio.create_task(runtime.exec(["sh", "-c", "touch ready; sleep 1000"]))
    await started(runtime.workspace / "ready")
    await runtime.kill_all()
    assert (await run).exit_code == -9


@both
async def test_a_program_that_kills_its_supervisor_gains_nothing(make: Make, name: str) -> None:
    runtime = await make(name)
    result = await runtime.exec(["sh", "-c", f"sleep {NAP} & kill -9 $PPID; sleep 1000"], timeout=60)
    assert (result.exit_code, result.timed_out) == (-9, False)
    assert sleepers() == []
    assert (await runtime.exec(["echo", "alive"])).stdout == b"alive\n"


@both
async def test_output_beyond_the_cap_is_drained_and_its_end_is_kept(make: Make, name: str) -> None:
    runtime = await make(name)
    result = await runtime.exec(["seq", "1000000"], max_output=10_000, timeout=120)
    assert (result.exit_code, result.truncated, len(result.stdout)) == (0, True, 10_000)
    assert result.stdout.endswith(b"\n999999\n1000000\n")


@both
async def test_a_file_gets_the_start_and_the_end_of_output_beyond_the_cap(
    make: Make, name: str, tmp_path: Path
) -> None:
    runtime = await make(name)
    out, err = tmp_path / "out", tmp_path / "err"
    command = "seq 1000000; echo problem >&2"
    result = await runtime.exec(["sh", "-c", command], stdout=out, stderr=err, max_output=200_000, timeout=120)
    text = out.read_bytes()
    assert result.truncated
    assert text.startswith(b"1\n2\n3\n")
    assert text.endswith(b"\n999999\n1000000\n")
    assert b"bytes left out]" in text
    assert len(text) < 200_100
    assert err.read_bytes() == b"problem\n"
    assert result.stdout == text[-65536:]


@both
async def test_a_file_gets_whole_output_below_the_cap_byte_for_byte(make: Make, name: str, tmp_path: Path) -> None:
    runtime = await make(name)
    out = tmp_path / "out"
    result = await runtime.exec(["seq", "30000"], stdout=out, max_output=200_000, timeout=120)
    assert not result.truncated
    assert out.read_bytes() == b"".join(b"%d\n" % n for n in range(1, 30001))


@both
async def test_a_file_grows_while_the_program_runs(make: Make, name: str, tmp_path: Path) -> None:
    runtime = await make(name)
    out = tmp_path / "out"
    run = asyncio.create_task(
        runtime.exec(["sh", "-c", "echo first; while [ ! -e go ]; do sleep 0.02; done"], stdout=out)
    )
    await started(out)
    await eventually(lambda: out.read_bytes() == b"first\n")
    (runtime.workspace / "go").touch()
    assert (await run).exit_code == 0


@both
async def test_destroy_kills_everything_keeps_the_workspace_and_may_be_called_twice(make: Make, name: str) -> None:
    runtime = await make(name)
    await runtime.exec(["sh", "-c", ESCAPE + f"sleep {NAP} & echo made > file"])
    run = asyncio.create_task(runtime.exec(["sh", "-c", "touch ready; sleep 1000"]))
    await started(runtime.workspace / "ready")
    await asyncio.gather(runtime.destroy(), runtime.destroy())
    await runtime.destroy()
    assert (await run).exit_code == -9
    assert sleepers() == []
    assert runtime.label not in marks.labels().values()
    assert (runtime.workspace / "file").read_text() == "made\n"
    assert not runtime.home_path.exists()
    with pytest.raises(RuntimeFailure, match="destroyed"):
        await runtime.exec(["true"])


@both
async def test_a_folder_in_use_is_refused(make: Make, name: str, tmp_path: Path) -> None:
    (tmp_path / "root0" / "workspace").mkdir(parents=True)
    (tmp_path / "root0" / "workspace" / "old").touch()
    with pytest.raises(RuntimeFailure, match="not empty"):
        await make(name)


@both
async def test_an_image_is_refused_with_the_way_out(make: Make, name: str) -> None:
    with pytest.raises(RuntimeUnavailable, match="podman/docker"):
        await make(name, image="debian:12")


@both
async def test_limits_are_held_or_said_not_to_be(make: Make, name: str) -> None:
    runtime = await make(name, memory_mb=64, pids=40, cpus=1.0)
    assert runtime.limits_enforced <= {"memory_mb", "pids", "cpus"}
    if "memory_mb" in runtime.limits_enforced:
        eat = await runtime.exec(["/usr/bin/python3", "-c", "x = bytearray(200 << 20); print(len(x))"], timeout=60)
        assert eat.exit_code == -9
    if "pids" in runtime.limits_enforced:
        forks = f"i=0; while [ $i -lt 60 ]; do sleep {NAP} & i=$((i+1)); done; echo all"
        assert b"all" not in (await runtime.exec(["sh", "-c", forks], timeout=60)).stdout
        await runtime.kill_all()
    assert (await runtime.exec(["echo", "alive"])).stdout == b"alive\n"


def test_a_spec_without_limits_makes_no_group() -> None:
    from polynya.runtimes import limits

    assert limits.apply(RuntimeSpec(), "x").folders == []

"""pi for real, in a sandbox whose only network is the fake chat server."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fake_chat import FakeChat, calls, says

from polynya.config import cache_dir
from polynya.errors import TaskFileError
from polynya.harnesses.base import Endpoint, Installed, Verdict
from polynya.harnesses.pi import Pi
from polynya.runtimes.base import ExecResult
from polynya.runtimes.bubblewrap import BubblewrapProvider, BubblewrapRuntime
from polynya.runtimes.files import write_files
from polynya.schema import HarnessSpec, RuntimeSpec

RECORDED = Path(__file__).parent / "recorded"
OK = ExecResult(exit_code=0)
real = [pytest.mark.harness, pytest.mark.sandbox]
needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="no npm")


@pytest.fixture
async def installed() -> Installed:
    return await Pi().install(HarnessSpec(name="pi"), cache_dir(), print)


@pytest.fixture
async def runtime(tmp_path: Path, installed: Installed) -> AsyncIterator[BubblewrapRuntime]:
    made = await BubblewrapProvider().create(
        RuntimeSpec(), label=f"test-pi-{tmp_path.name}", root=tmp_path / "s", binds=installed.binds
    )
    yield made
    await made.destroy()


async def run(
    runtime: BubblewrapRuntime, installed: Installed, script: list[Any], settings: dict[str, Any] | None = None
) -> tuple[FakeChat, ExecResult, Verdict]:
    spec = HarnessSpec(name="pi", settings=settings or {})
    listener = await runtime.listen()
    with FakeChat(script, listener) as chat:
        endpoint = Endpoint(
            base_url=f"http://127.0.0.1:{chat.port}/s/secret-key",
            api_key="secret-key",
            model="policy",
            window=9000,
            max_tokens=700,
        )
        instruction = "--help @nothing: write hello.txt"
        launch = Pi().launch(spec, instruction, endpoint, installed, workdir=runtime.workdir, home=runtime.home)
        write_files(runtime.home_path, launch.home_files)
        result = await runtime.exec(launch.argv, env=launch.env, stdin=launch.stdin, timeout=120)
    return chat, result, Pi().verdict(result, result.stdout[-65536:])


@needs_npm
class TestRealRun:
    pytestmark = real

    async def test_uses_its_tools_on_the_workspace_and_the_endpoint(
        self, runtime: BubblewrapRuntime, installed: Installed
    ) -> None:
        script = [
            calls("write", path="hello.txt", content="hi\n"),
            calls("bash", command="cat hello.txt"),
            says("Done."),
        ]
        chat, result, verdict = await run(runtime, installed, script)
        assert verdict == Verdict(ok=True, reason="stop"), result.stderr
        assert (runtime.workspace / "hello.txt").read_text() == "hi\n"
        assert [request["path"] for request in chat.requests] == ["/s/secret-key/v1/chat/completions"] * 3
        first = chat.requests[0]
        assert first["headers"]["authorization"] == "Bearer secret-key"
        assert first["body"]["max_completion_tokens"] == 700
        assert [tool["function"]["name"] for tool in first["body"]["tools"]] == ["read", "bash", "edit", "write"]
        assert "--help @nothing: write hello.txt" in json.dumps(first["body"]["messages"][-1])
        assert "hi" in json.dumps(chat.requests[2]["body"]["messages"][-1])

    async def test_settings_reach_it(self, runtime: BubblewrapRuntime, installed: Installed) -> None:
        settings = {
            "tools": ["read"],
            "system_prompt": "Be a polynya.",
            "append_system_prompt": "Open.",
            "thinking": "high",
        }
        chat, _, verdict = await run(runtime, installed, [says("Done.")], settings)
        body = chat.requests[0]["body"]
        assert verdict.ok
        assert [tool["function"]["name"] for tool in body["tools"]] == ["read"]
        assert "Be a polynya." in json.dumps(body["messages"][0])
        assert "Open." in json.dumps(body["messages"][0])
        assert body["reasoning_effort"] == "high"

    async def test_a_refused_request_is_a_failure_although_the_exit_code_is_0(
        self, runtime: BubblewrapRuntime, installed: Installed
    ) -> None:
        _, result, verdict = await run(runtime, installed, [400])
        assert result.exit_code == 0
        assert (verdict.ok, verdict.infra) == (False, False)
        assert "400" in verdict.reason

    async def test_an_endpoint_that_fails_is_infrastructure(
        self, runtime: BubblewrapRuntime, installed: Installed
    ) -> None:
        _, result, verdict = await run(runtime, installed, [401])
        assert result.exit_code == 0
        assert (verdict.ok, verdict.infra) == (False, True)


def tail(name: str) -> bytes:
    return (RECORDED / f"pi-1.6.0-{name}.jsonl").read_bytes()[-65536:]


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("ok", Verdict(ok=True, reason="stop")),
        ("length", Verdict(ok=True, reason="length")),
        ("400", Verdict(ok=False, reason='error: 400: {"message":"boom","code":"context_length_exceeded"}')),
        ("500", Verdict(ok=False, reason='error: 500: {"message":"boom","code":"e"}', infra=True)),
        (
            "refused",
            Verdict(ok=False, reason="error: Connection error.: connect ECONNREFUSED 127.0.0.1:18999", infra=True),
        ),
        ("content-filter", Verdict(ok=False, reason="error: Provider finish_reason: content_filter")),
    ],
)
def test_verdict_of_recorded_runs_which_all_exited_0(name: str, verdict: Verdict) -> None:
    assert Pi().verdict(OK, tail(name)) == verdict


def test_verdict_does_not_need_whole_lines() -> None:
    assert Pi().verdict(OK, tail("400")[-900:]).reason.startswith("error: 400")
    assert Pi().verdict(OK, tail("ok")[-400:]).ok


def test_text_of_the_model_cannot_pass_for_an_event() -> None:
    said = json.dumps({"type": "message_end", "text": '"stopReason":"error","errorMessage":"500: no"'}).encode()
    assert Pi().verdict(OK, tail("ok").replace(b'{"type":"agent_settled"', said + b'\n{"type":"agent_settled"')).ok


@pytest.mark.parametrize(
    ("result", "stdout", "infra"),
    [
        (ExecResult(exit_code=127), b"", True),
        (ExecResult(exit_code=1), b"", True),
        (ExecResult(exit_code=-9), b'{"type":"turn_start"}', False),
        (ExecResult(exit_code=0), b'{"type":"turn_start"}', False),
        (ExecResult(exit_code=-9, timed_out=True), b"", False),
    ],
)
def test_verdict_of_a_run_that_did_not_reach_its_end(result: ExecResult, stdout: bytes, infra: bool) -> None:
    verdict = Pi().verdict(result, stdout)
    assert (verdict.ok, verdict.infra) == (False, infra)


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (HarnessSpec(name="pi", settings={"temperature": 1}), "temperature"),
        (HarnessSpec(name="pi", settings={"thinking": "enormous"}), "thinking"),
        (HarnessSpec(name="pi", settings={"tools": "read"}), "tools"),
    ],
)
def test_settings_that_pi_has_no_flag_for_are_refused(spec: HarnessSpec, names: str) -> None:
    with pytest.raises(TaskFileError, match=names):
        Pi().validate(spec)


def test_small_window_leaves_room_for_replies_beside_pis_own_reserve(tmp_path: Path) -> None:
    endpoint = Endpoint(base_url="http://127.0.0.1:1/s/k", api_key="k", model="m", window=4096, max_tokens=512)
    installed = Installed(version="1", programs={"node": "/node", "pi": "/pi"})
    launch = Pi().launch(HarnessSpec(name="pi"), "hi", endpoint, installed, workdir="/workspace", home="/home/agent")
    (model,) = json.loads(launch.home_files[".pi/agent/models.json"])["providers"]["polynya"]["models"]
    assert (model["contextWindow"], model["maxTokens"]) == (4096 + 4096, 512)

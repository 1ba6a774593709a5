"""The routers and the peers' proxies, each in an environment of its own below the cache folder.

Versions are those that were run; a newer one is a change to measure, not to assume.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import aiohttp
import msgspec

from polynya.bench import programs
from polynya.bench.load import Endpoint
from polynya.bench.places import Contender, Missing, Place, Running, free_port, listening
from polynya.bench.processes import BenchFailed, Program
from polynya.config import cache_dir


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """A virtual environment that ``--install`` makes."""

    name: str
    packages: tuple[str, ...]
    least_python: tuple[int, int] = (3, 11)

    @property
    def folder(self) -> Path:
        return cache_dir() / "bench" / self.name

    def program(self, name: str) -> str:
        """The path of one of its programs; Missing when it was not installed."""
        path = self.folder / "bin" / name
        if not (self.folder / ".complete").exists() or not path.exists():
            raise Missing("not installed; polynya bench gateway --install")
        return str(path)

    async def install(self, say: Callable[[str], None]) -> None:
        """Idempotent. What cannot be installed is said and is a missing contender later."""
        if (self.folder / ".complete").exists():
            return
        python = await _python(self.least_python)
        if python is None:
            say(f"{self.name}: needs Python {'.'.join(map(str, self.least_python))} or later on PATH")
            return
        say(f"{self.name}: installing {' '.join(self.packages)}")
        shutil.rmtree(self.folder, ignore_errors=True)
        pip = [str(self.folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *self.packages]
        for command in ([python, "-m", "venv", str(self.folder)], pip):
            process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
            output, _ = await process.communicate()
            if process.returncode:
                say(f"{self.name}: {output.decode('utf-8', 'replace').strip()[-400:]}")
                return
        (self.folder / ".complete").touch()


async def _python(least: tuple[int, int]) -> str | None:
    if sys.version_info[:2] >= least:
        return sys.executable
    for minor in range(least[1], least[1] + 4):
        path = shutil.which(f"python3.{minor}")
        if path is None:
            continue
        # a shim of a version manager is on PATH also where it starts nothing
        process = await asyncio.create_subprocess_exec(
            path, "-c", "", stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        if await process.wait() == 0:
            return path
    return None


ROUTERS = ("vllm-router", "sglang-router")
VLLM_ROUTER = Environment(name="vllm-router", packages=("vllm-router==0.1.17",))
SGLANG_ROUTER = Environment(name="sglang-router", packages=("sglang-router==0.3.2",))
FASTAPI = Environment(name="fastapi-hop", packages=("fastapi==0.165.0", "httpx==0.28.1", "uvicorn[standard]==0.54.0"))
RLLM = Environment(name="rllm", packages=("rllm-model-gateway==0.1.0",))
VERIFIERS = Environment(name="verifiers", packages=("verifiers==0.4.0",), least_python=(3, 12))
AGENT_LIGHTNING = Environment(name="agentlightning", packages=("agentlightning==1.0.2",), least_python=(3, 12))
ENVIRONMENTS = {one.name: one for one in (VLLM_ROUTER, SGLANG_ROUTER, FASTAPI, RLLM, VERIFIERS, AGENT_LIGHTNING)}


async def _vllm_router(place: Place) -> Running:
    return await _router(place, "vllm-router", VLLM_ROUTER.program("vllm-router"))


async def _sglang_router(place: Place) -> Running:
    return await _router(place, "sglang-router", SGLANG_ROUTER.program("sglang-router"), "launch")


async def _router(place: Place, name: str, *command: str) -> Running:
    """Round robin, so that it looks at no prompt: forwarding is all that it does."""
    port = free_port()
    options = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", f"http://127.0.0.1:{place.upstream}"]
    options += ["--policy", "round_robin", "--prometheus-port", str(free_port()), "--log-level", "error"]
    program = await Program.start([*command, *options], core=place.core, log=place.folder / f"{name}.log")
    await listening(program, port)
    return Running(program=program, endpoint=Endpoint(name=name, port=port))


async def _fastapi(place: Place) -> Running:
    command = [FASTAPI.program("python"), _script("fastapi_hop"), str(place.upstream)]
    program = await Program.start(command, core=place.core, log=place.folder / "fastapi-hop.log")
    port = (await program.read())["port"]
    await listening(program, port)
    paths = tuple(f"/s/{number}/v1/messages" for number in range(place.sessions))
    return Running(program=program, endpoint=Endpoint(name="fastapi-hop", port=port, dialect="anthropic", paths=paths))


async def _verifiers(place: Place) -> Running:
    command = [VERIFIERS.program("python"), _script("verifiers_server"), str(place.upstream), str(place.sessions)]
    program = await Program.start(command, core=place.core, log=place.folder / "verifiers.log")
    ready = await program.read()
    tokens = tuple(f"Bearer {key}" for key in ready["keys"])
    endpoint = Endpoint(name="verifiers", port=ready["port"], authorizations=tokens)
    return Running(program=program, endpoint=endpoint)


async def _rllm(place: Place) -> Running:
    port = free_port()
    options = ["--host", "127.0.0.1", "--port", str(port), "--worker", f"http://127.0.0.1:{place.upstream}/v1"]
    options += ["--db-path", str(place.folder / "rllm.sqlite"), "--log-level", "error"]
    command = [RLLM.program("rllm-model-gateway"), *options]
    program = await Program.start(command, core=place.core, log=place.folder / "rllm.log")
    await listening(program, port)
    paths = tuple(f"/sessions/bench-{number}/v1/chat/completions" for number in range(place.sessions))
    return Running(program=program, endpoint=Endpoint(name="rllm", port=port, paths=paths))


async def _agent_lightning(place: Place) -> Running:
    port = free_port()
    options = [
        "host=127.0.0.1",
        f"port={port}",
        "default_proxy.model_name=bench",
        f"hydra.run.dir={place.folder}/hydra",
    ]
    command = [AGENT_LIGHTNING.program("agl-server"), *options]
    program = await Program.start(command, core=place.core, log=place.folder / "agentlightning.log")
    await listening(program, port)
    rollouts = [{"input": "bench", "rollout_id": f"bench-{number}"} for number in range(place.sessions)]
    models = [{"model": "bench", "endpoint": f"http://127.0.0.1:{place.upstream}/v1"}]
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        for path, body in (("/api/models", models), ("/api/rollouts", rollouts)):
            async with session.post(
                path, data=json.dumps(body), headers={"content-type": "application/json"}
            ) as answer:
                if answer.status >= 300:
                    raise BenchFailed(f"agentlightning refused {path}: {(await answer.text())[:300]}")
    paths = tuple(
        f"/proxy/rollout/bench-{number}/attempt/1/mode/train/openai/v1/chat/completions"
        for number in range(place.sessions)
    )
    return Running(program=program, endpoint=Endpoint(name="agentlightning", port=port, paths=paths))


def _script(name: str) -> str:
    return str(Path(programs.__path__[0]) / f"{name}.py")


PEERS = (
    Contender(name="vllm-router", does="forwards, Rust", start=_vllm_router),
    Contender(name="sglang-router", does="forwards, Rust", start=_sglang_router),
    Contender(name="fastapi-hop", does="whole hop, no disk", start=_fastapi),
    Contender(name="rllm", does="chat, captures to SQLite", start=_rllm),
    Contender(name="agentlightning", does="chat, captures in memory", start=_agent_lightning),
    Contender(name="verifiers", does="chat, captures no ids", start=_verifiers),
)

"""The command, in process (fast) or as a process of its own (signals)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from polynya.cli.main import app
from polynya.engines.scripted import Script, scripted_app, serve

from ..rollout.disks import without_rights

ASK = """
import json, os, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * int(os.environ.get("WORDS", "1"))}]})
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body.encode())
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


class Done:
    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self.code = code
        self.stdout = stdout
        self.stderr = stderr

    def one_object(self) -> dict[str, Any]:
        """All of stdout, which is one line."""
        (line,) = self.stdout.splitlines()
        found: dict[str, Any] = json.loads(line)
        return found

    def refused(self, code: int, *words: str) -> None:
        """One message that says all of ``words``, a fix, no traceback, the exit code, and nothing on stdout."""
        assert (self.code, self.stdout) == (code, ""), self.stderr
        assert self.stderr.count("error: ") == 1
        assert self.stderr.count("fix: ") == 1
        assert "\nTraceback" not in self.stderr
        assert [word for word in words if word not in self.stderr] == []

    def refused_as_json(self, code: int, kind: str, *words: str) -> None:
        assert self.code == code, self.stderr
        error = self.one_object()["error"]
        assert error["kind"] == kind
        assert error["boundary"] and error["fix"]
        assert [word for word in words if word not in error["message"]] == []
        assert "\nTraceback" not in self.stderr


class Cli:
    """``polynya ARGS`` in an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *args: str | Path) -> Done:
        result = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)
        return Done(result.exit_code, result.stdout, result.stderr)

    def start(self, *args: str | Path, rights: bool = True, **env: str) -> subprocess.Popen[str]:
        """As a process, with pipes on stdout and stderr. Without ``rights`` permissions bind root too."""
        argv = [sys.executable, "-m", "polynya.cli.main", *map(str, args)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        pipes["preexec_fn"] = None if rights else without_rights
        return subprocess.Popen(argv, cwd=self.folder, env={**os.environ, **env}, **pipes)

    def tasks(self, *tasks: dict[str, Any], name: str = "tasks.yaml") -> Path:
        """A task file; without tasks it holds one that asks once."""
        path = self.folder / name
        path.write_text(yaml.safe_dump(list(tasks) or [self.task()]))
        return path

    def task(self, command: str = "python3 ask.py", **fields: Any) -> dict[str, Any]:
        return {
            "task_id": "t",
            "instruction": "do it",
            "harness": {"name": "shell", "settings": {"command": command}},
            "runtime": {"name": "local", "files": {"ask.py": ASK}},
            "retries": 0,
            **fields,
        }


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLYNYA_CACHE", str(tmp_path / "cache"))
    return Cli(tmp_path)


@contextlib.contextmanager
def engine_server(script: Script | None = None) -> Iterator[str]:
    """A vLLM-shaped server on a loop of its own. Gives its base URL."""
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    urls: list[str] = []
    up = threading.Event()

    async def run() -> None:
        async with serve(scripted_app(script)) as url:
            urls.append(url)
            up.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    up.wait()
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port

"""Bodies that are large, too large, or no JSON that anybody meant: served, or refused in the dialect's words, never a 500."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from yarl import URL

from polynya.dialects.neutral import ChatRequest
from polynya.engines.scripted import Script, ScriptedEngine, Step
from polynya.schema import Int32Array

MakeRig = Callable[..., Any]
MIB = 1024 * 1024
SLACK = 8
PATHS = [
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1beta/models/m:generateContent",
]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
"""The SDKs' own."""


class Skimming(ScriptedEngine):
    """Renders no prompt: these tests are about bodies."""

    async def render_ids(self, chat: ChatRequest) -> Int32Array:
        return np.arange(1, 9, dtype=np.int32)


def body(path: str, text: str) -> dict[str, Any]:
    if "responses" in path:
        return {"model": "m", "input": text}
    if "generateContent" in path:
        return {"contents": [{"role": "user", "parts": [{"text": text}]}]}
    return {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": text}]}


def read_error(path: str, reply: Any) -> str:
    """The message of an error, after a look at the dialect's shape."""
    error = reply["error"]
    if path == "/v1/messages":
        assert reply["type"] == "error" and error["type"] in ("invalid_request_error", "request_too_large")
    elif "/v1beta/" in path:
        assert error["code"] in (400, 413) and error["status"] == "INVALID_ARGUMENT"
    else:
        assert error["type"] == "invalid_request_error"
    return str(error["message"])


@pytest.mark.parametrize("path", PATHS)
async def test_body_of_20_megabytes_is_served(make_rig: MakeRig, path: str) -> None:
    rig = await make_rig(engine=Skimming(Script(steps=[Step(text="long read")])))
    agent = await rig.open()
    sent = json.dumps(body(path, "Ä word " * (20 * MIB // 8)), ensure_ascii=False).encode()
    assert len(sent) >= 20 * MIB
    async with rig.client.post(rig.gateway.base_url(agent.key) + path, data=sent) as response:
        assert response.status == 200
        assert "long read" in await response.text()
    (call,) = agent.session.capture.calls
    assert call.exclusion is None and len(call.messages[-1]) > 19 * MIB


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A gateway in a process of its own, for its memory: base URL and its ``/proc`` folder."""
    run = tmp_path_factory.mktemp("bodies") / "run"
    command = [sys.executable, "-m", "polynya.cli.main", "gateway", "--engine", "scripted", "--run", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["base_url"], Path(f"/proc/{process.pid}")
        process.terminate()
        process.stdout.read()


def peak(proc: Path) -> int:
    line = next(line for line in (proc / "status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("chunked", [False, True], ids=["with its length", "chunked"])
@pytest.mark.parametrize("path", PATHS)
def test_body_of_a_gibibyte_is_413_and_costs_no_memory(gateway: tuple[str, Path], path: str, chunked: bool) -> None:
    """From a raw socket that sends all of it before it reads, as a simple client does."""
    base, proc = gateway
    before = peak(proc)
    url = URL(base + path)
    head = f"POST {url.raw_path_qs} HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
    block = b"x" * MIB
    with socket.create_connection((url.host, url.port or 80)) as client:
        if chunked:
            client.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
            framed = b"%x\r\n%b\r\n" % (len(block), block)
            for _ in range(1024):
                client.sendall(framed)
            client.sendall(b"0\r\n\r\n")
        else:
            client.sendall(f"{head}Content-Length: {1024 * MIB}\r\n\r\n".encode())
            for _ in range(1024):
                client.sendall(block)
        with client.makefile("rb") as answer:
            assert answer.readline().split()[1] == b"413"
            lines = iter(answer.readline, b"\r\n")
            headers = dict(line.decode().strip().lower().split(": ", 1) for line in lines)
            reply = json.loads(answer.read(int(headers["content-length"])))
    message = read_error(path, reply)
    assert str(32 * MIB) in message
    # of a body that says its length nothing is read; of the other one as much as is allowed
    assert peak(proc) - before < (32 + SLACK if chunked else SLACK) * MIB


def test_413_is_read_by_the_sdks_as_their_own_error(gateway: tuple[str, Path]) -> None:
    base, _ = gateway
    text = "x" * (40 * MIB)
    messages: Any = [{"role": "user", "content": text}]
    with openai.OpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.APIStatusError, match="larger than") as chat:
            client.chat.completions.create(model="m", messages=messages)
        with pytest.raises(openai.APIStatusError, match="larger than") as responses:
            client.responses.create(model="m", input=text)
    assert chat.value.status_code == responses.value.status_code == 413
    with (
        anthropic.Anthropic(base_url=base, api_key="x", max_retries=0) as other,
        pytest.raises(anthropic.RequestTooLargeError, match="larger than"),
    ):
        other.messages.create(model="m", max_tokens=9, messages=messages)


def test_connection_serves_the_next_request_after_a_413(gateway: tuple[str, Path]) -> None:
    base, _ = gateway
    url = URL(f"{base}/v1/chat/completions")
    client = http.client.HTTPConnection(url.host or "", url.port)
    sizes = [(b"x" * (33 * MIB), 413), (json.dumps(body("chat", "hi")).encode(), 200)]
    for sent, status in sizes * 2:
        client.request("POST", url.raw_path_qs, sent)
        socket_used = client.sock
        answer = client.getresponse()
        assert (answer.status, bool(answer.read())) == (status, True)
        assert client.sock is socket_used
    client.close()


@pytest.mark.parametrize("path", PATHS)
def test_refusal_of_a_large_body_for_another_reason_is_read_too(gateway: tuple[str, Path], path: str) -> None:
    """An unknown key is refused before the body is read; the client that is still sending must get the words."""
    url = URL(gateway[0]).with_path("/s/nobody" + path, encoded=True)
    client = http.client.HTTPConnection(url.host or "", url.port)
    client.request("POST", url.raw_path_qs, b"x" * (40 * MIB))
    answer = client.getresponse()
    assert answer.status == 401 and "unknown session key" in json.loads(answer.read())["error"]["message"]
    client.close()


def test_client_that_waits_for_a_go_ahead_is_refused_before_it_sends(gateway: tuple[str, Path]) -> None:
    base, _ = gateway
    url = URL(f"{base}/v1/messages")
    with socket.create_connection((url.host, url.port or 80)) as client:
        head = f"POST {url.raw_path_qs} HTTP/1.1\r\nHost: g\r\nContent-Length: {2**40}\r\nExpect: 100-continue\r\n\r\n"
        client.sendall(head.encode())
        assert client.makefile("rb").readline().split()[1] == b"413"


DEEP = 100_000


@pytest.mark.parametrize("path", [*PATHS, "/v1/messages/count_tokens", "/v1beta/models/m:countTokens"])
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda sent: sent[:-1] + b',"deep":' + b"[" * DEEP + b"]" * DEEP + b"}", id="nested 100k deep"),
        pytest.param(lambda sent: sent[:-1] + b',"deep":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}", id="objects"),
        pytest.param(lambda sent: sent.replace(b'"hi"', b"[" * DEEP + b"]" * DEEP), id="deep where text stands"),
        pytest.param(lambda sent: b"[" * DEEP, id="opened only"),
        pytest.param(lambda sent: sent.replace(b"hi", b"\xff\xfe"), id="no UTF-8"),
        pytest.param(lambda sent: sent.replace(b"hi", b"\xed\xa0\x80"), id="a surrogate as UTF-8"),
        pytest.param(lambda sent: sent.replace(b'"hi"', b"NaN"), id="NaN"),
        pytest.param(lambda sent: sent[:-1] + b',"temperature":NaN}', id="NaN in a field"),
        pytest.param(lambda sent: sent[:-1] + b',"x":-Infinity}', id="infinity"),
        pytest.param(lambda sent: sent + sent, id="twice"),
        pytest.param(lambda sent: b"", id="nothing"),
        pytest.param(lambda sent: b"\x1f\x8b\x08\x00rest", id="gzip"),
        pytest.param(lambda sent: sent.decode().encode("utf-16"), id="UTF-16"),
        pytest.param(lambda sent: b"\xef\xbb\xbf" + sent, id="byte order mark"),
    ],
)
async def test_body_that_is_no_json_is_400_in_the_dialects_words(
    make_rig: MakeRig, path: str, spoil: Callable[[bytes], bytes]
) -> None:
    rig = await make_rig()
    agent = await rig.open()
    sent = spoil(json.dumps(body(path.removesuffix("/count_tokens"), "hi")).encode())
    async with rig.client.post(rig.gateway.base_url(agent.key) + path, data=sent) as response:
        assert response.status == 400
        assert read_error(path.removesuffix("/count_tokens"), await response.json())
    assert agent.session.capture.calls == []


@pytest.mark.parametrize("path", PATHS)
async def test_of_equal_keys_the_last_counts_for_the_model_and_the_record(make_rig: MakeRig, path: str) -> None:
    rig = await make_rig()
    agent = await rig.open()
    once = json.dumps(body(path, "second")).encode()
    twice = json.dumps(body(path, "first")).encode()[:-1] + b"," + once[1:]
    async with rig.client.post(rig.gateway.base_url(agent.key) + path, data=twice) as response:
        assert response.status == 200
    (call,) = agent.session.capture.calls
    shown = b"".join(call.messages)
    assert b"second" in shown and b"first" not in shown


@pytest.mark.parametrize("path", PATHS)
async def test_compressed_body_is_refused_by_the_header_that_says_so(make_rig: MakeRig, path: str) -> None:
    rig = await make_rig()
    agent = await rig.open()
    url, sent = rig.gateway.base_url(agent.key) + path, gzip.compress(json.dumps(body(path, "hi")).encode())
    async with rig.client.post(url, data=sent, headers={"content-encoding": "gzip"}) as response:
        assert response.status == 400
        assert "content-encoding: 'gzip'" in read_error(path, await response.json())


async def test_body_that_breaks_off_is_no_call(make_rig: MakeRig) -> None:
    rig = await make_rig()
    agent = await rig.open()
    url = URL(agent.url)
    _, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(f"POST {url.raw_path_qs} HTTP/1.1\r\nHost: g\r\nContent-Length: 500\r\n\r\nhalf".encode())
    await writer.drain()
    await rig.until(lambda: rig.gateway.app.active == 1)
    writer.close()
    await rig.idle()
    assert rig.gateway.app.side_requests["client_gone_in_request"] == 1
    assert agent.session.capture.calls == []

"""Who may ask what: five kinds of credential, none of which opens what another one does."""

from __future__ import annotations

import io
import json
import stat
from typing import Any

import aiohttp
import pytest

from polynya.client import AsyncClient
from polynya.config import DispatchSettings
from polynya.errors import ConfigError, QueueFull, ServerRefused
from polynya.node.preflight import validate
from polynya.rollout.registry.base import TokenKind
from polynya.rollout.registry.tokens import mint
from polynya.rollout.service.host import boot_clock
from polynya.rollout.service.http import MAX_BODY
from polynya.rollout.service.server import ServerOptions, serving

from ..conftest import shell_task

USER_PATHS = [
    ("POST", "/v1/tasks"),
    ("GET", "/v1/tasks"),
    ("GET", "/v1/tasks/t"),
    ("DELETE", "/v1/tasks/t"),
    ("GET", "/v1/tasks/t/results"),
    ("GET", "/v1/results"),
    ("POST", "/v1/results/t.0/ack"),
    ("GET", "/v1/sessions/t.0"),
    ("DELETE", "/v1/sessions/t.0"),
    ("GET", "/v1/sessions/t.0/trajectory"),
    ("GET", "/v1/sessions/t.0/calls"),
    ("GET", "/v1/status"),
    ("GET", "/v1/nodes"),
    ("POST", "/v1/policy"),
    ("POST", "/v1/policy/pause"),
    ("POST", "/v1/policy/resume"),
    ("GET", "/metrics"),
]
ADMIN_PATHS = [("POST", "/v1/nodes/n/drain")]
NODE_PATHS = [("POST", f"/v1/node/{what}") for what in ("join", "claim", "beat", "complete", "leave", "attend")]
OPENS = {
    TokenKind.USER: [*USER_PATHS],
    TokenKind.ADMIN: [*USER_PATHS, *ADMIN_PATHS],
    TokenKind.NODE: NODE_PATHS,
    TokenKind.SESSION: [],
    TokenKind.EVALUATOR: [],
}


async def tokens_of(service: Any) -> dict[TokenKind, str]:
    """One of each kind; the session's and the evaluator's are of an attempt that holds its lease."""
    registry = service.server.dispatcher.registry
    found = dict(service.server.tokens)
    await service.server.dispatcher.submit(shell_task("sleep 600"))
    await service.server.dispatcher.join(_hello())
    (session,) = (await service.server.dispatcher.claim("other", 1, 1)).sessions
    for kind in (TokenKind.SESSION, TokenKind.EVALUATOR):
        token, record = mint(kind, session.session_id, attempt=session.attempt)
        await registry.add_token(record)
        found[kind] = token
    return found


def _hello() -> Any:
    from polynya.rollout.registry.base import NodeHello

    return NodeHello(node="other", epoch=1, capacity=1)


async def test_each_kind_of_token_opens_its_own_endpoints_and_no_others(service: Any) -> None:
    await service.serve()
    tokens = await tokens_of(service)
    wrong = []
    async with aiohttp.ClientSession(service.server.url) as http:
        for kind, token in tokens.items():
            for method, path in [*USER_PATHS, *ADMIN_PATHS, *NODE_PATHS]:
                headers = {"authorization": f"Bearer {token}"}
                async with http.request(method, path, data=b"nonsense", headers=headers) as response:
                    opened = response.status not in (401, 403)
                    if opened != ((method, path) in OPENS[kind]):
                        wrong.append((kind, method, path, response.status))
    assert wrong == []


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Basic abc",
        "Bearer ply_user_0000000000000000_" + "0" * 64,
        "Bearer ply_user_x",
    ],
)
async def test_no_token_and_a_wrong_one_are_the_same_401(service: Any, header: str) -> None:
    await service.serve()
    async with aiohttp.ClientSession(service.server.url) as http:
        headers = {"authorization": header} if header else {}
        for method, path in [*USER_PATHS, *ADMIN_PATHS, *NODE_PATHS]:
            async with http.request(method, path, headers=headers) as response:
                assert response.status == 401
                assert (await response.json())["error"]["kind"] == "Unauthorised"


async def test_a_token_that_was_revoked_or_whose_attempt_ended_opens_nothing(service: Any) -> None:
    await service.serve()
    registry = service.server.dispatcher.registry
    token, record = mint(TokenKind.USER, "someone")
    await registry.add_token(record)
    async with AsyncClient(service.server.url, token) as client:
        await client.status()
        await registry.revoke_token(record.kid)
        with pytest.raises(ServerRefused, match="401"):
            await client.status()


async def test_a_nodes_own_token_opens_its_own_requests_only(service: Any) -> None:
    await service.serve()
    token, record = mint(TokenKind.NODE, "one")
    await service.server.dispatcher.registry.add_token(record)
    async with aiohttp.ClientSession(service.server.url, headers={"authorization": f"Bearer {token}"}) as http:
        for name, status in (("one", 200), ("two", 403)):
            hello = {"node": name, "epoch": 1, "capacity": 1}
            async with http.post("/v1/node/join", json=hello) as response:
                assert response.status == status


async def test_tokens_are_readable_by_their_owner_only_and_stay_over_a_restart(service: Any) -> None:
    first = dict((await service.serve()).tokens)
    for kind in first:
        mode = (service.folder / "state" / f"{kind}.token").stat().st_mode
        assert stat.S_IMODE(mode) == 0o600
    second = dict((await service.serve()).tokens)
    assert first == second
    database = b"".join(path.read_bytes() for path in (service.folder / "state").glob("registry.sqlite*"))
    assert not any(token.encode() in database for token in first.values())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
async def test_it_listens_beyond_loopback_only_when_that_is_meant(tmp_path: Any, host: str) -> None:
    with pytest.raises(ConfigError, match="--public"):
        async with serving(ServerOptions(state=tmp_path, host=host), validate, clock=boot_clock):
            pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "path",
    [
        "/v1/sessions/..%2f..%2fuser.token/trajectory",
        "/v1/sessions/../user.token/trajectory",
        "/v1/tasks/%00/results",
        "/v1/tasks/" + "a" * 5000,
        "/v1/results?cursor=-1",
        "/v1/results?cursor=1e9",
        "/v1/results?limit=0",
        "/v1/results?limit=999999",
        "/v1/results?follow=yes",
        "/v1/tasks?cursor=" + "9" * 40,
    ],
)
async def test_odd_paths_and_queries_are_refused_and_open_nothing(service: Any, path: str) -> None:
    await service.serve()
    token = service.server.tokens[TokenKind.USER]
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {token}"}) as http:
        from yarl import URL

        async with http.get(URL(service.server.url + path, encoded=True)) as response:
            assert response.status in (400, 404)
            text = await response.text()
            assert token not in text and json.loads(text)["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"task_id":"../x","instruction":"i","harness":{"name":"shell"}}',
        b'{"task_id":"a/b","instruction":"i","harness":{"name":"shell"}}',
        b'{"task_id":"a","instruction":"i","harness":{"name":"no such"}}',
        b'{"task_id":"a","instruction":"i","harness":{"name":"shell"},"base_url":"http://evil"}',
        b'{"task_id":"a","instruction":"i","harness":{"name":"shell","settings":{"command":"x"}},"num_samples":0}',
        b"[" * 100_000,
    ],
)
async def test_a_task_that_cannot_be_is_a_400_that_says_why_and_is_not_kept(service: Any, body: bytes) -> None:
    await service.serve()
    headers = {"authorization": f"Bearer {service.server.tokens[TokenKind.USER]}"}
    async with (
        aiohttp.ClientSession(service.server.url, headers=headers) as http,
        http.post("/v1/tasks", data=body) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["message"]
    assert (await service.server.dispatcher.registry.counts()).tasks == 0


async def test_a_body_that_is_too_large_is_refused_by_its_length_and_by_its_bytes(service: Any) -> None:
    await service.serve()
    headers = {"authorization": f"Bearer {service.server.tokens[TokenKind.USER]}"}

    async def pieces() -> Any:
        for _ in range(MAX_BODY // 2**20 + 1):
            yield b"x" * 2**20

    async with aiohttp.ClientSession(service.server.url, headers=headers) as http:
        for data in (io.BytesIO(b"x" * (MAX_BODY + 1)), pieces()):
            async with http.post("/v1/tasks", data=data, expect100=True) as response:
                assert response.status == 413


async def test_a_full_queue_is_429_with_the_time_to_wait(service: Any) -> None:
    await service.serve(DispatchSettings(max_queued=3))
    client = service.client()
    await client.submit(shell_task("true", task_id="a", num_samples=3))
    with pytest.raises(ServerRefused, match="429 QueueFull"):
        await client.submit(shell_task("true", task_id="b", num_samples=1))
    headers = {"authorization": f"Bearer {service.server.tokens[TokenKind.USER]}"}
    body = {"task_id": "c", "instruction": "i", "harness": {"name": "shell", "settings": {"command": "x"}}}
    async with (
        aiohttp.ClientSession(service.server.url, headers=headers) as http,
        http.post("/v1/tasks", json=body) as response,
    ):
        assert response.status == 429 and int(response.headers["retry-after"]) >= 1
    with pytest.raises(QueueFull):
        await service.server.dispatcher.submit(shell_task("true", task_id="d"))


async def test_the_document_names_every_endpoint(service: Any) -> None:
    await service.serve()
    async with aiohttp.ClientSession(service.server.url) as http, http.get("/openapi.json") as response:
        document = await response.json()
    named = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert len(named) == len(USER_PATHS) + len(ADMIN_PATHS) + len(NODE_PATHS) + 1
    assert document["components"]["schemas"]["TaskSpec"]["required"] == ["task_id", "instruction", "harness"]
    assert "security" not in document["paths"]["/healthz"]["get"]
    assert document["paths"]["/v1/tasks"]["post"]["security"] == [{"bearer": []}]

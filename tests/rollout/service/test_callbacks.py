"""Callbacks: signed, repeated under one key, and never to where nobody allowed them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web

from polynya.config import DispatchSettings
from polynya.errors import ServerRefused, TaskFileError
from polynya.rollout.service.callbacks import Callbacks, check_url, public, signature

from ..conftest import shell_task

QUICK = DispatchSettings(
    lease_seconds=2.0, heartbeat_seconds=0.2, fence_seconds=1.5, callback_seconds=0.05, callback_max_seconds=0.1
)
ALLOWED = frozenset({"hooks.example.com"})


class Receiver:
    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.status = 200
        self.url = ""
        self._changed = asyncio.Condition()

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        async with self._changed:
            self.got.append(({name.lower(): value for name, value in request.headers.items()}, body))
            self._changed.notify_all()
        headers = {"location": "http://127.0.0.1:1/"} if self.status == 302 else {}
        return web.Response(status=self.status, headers=headers)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await asyncio.wait_for(self._changed.wait_for(condition), 20)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver()
    app = web.Application()
    app.router.add_post("/hook", made.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    yield made
    await runner.cleanup()


async def test_each_delivery_comes_signed_under_its_own_key(service: Any, talk: Any, receiver: Receiver) -> None:
    task, script = talk(2, callback=receiver.url)
    await service.serve(QUICK, callback_hosts=frozenset({"127.0.0.1"}))
    await service.node("one", script)
    await service.client().submit(task)
    await receiver.until(lambda: len(receiver.got) == 3)
    secret = (service.folder / "state" / "callback.secret").read_text().strip().encode()
    for headers, body in receiver.got:
        assert headers["x-polynya-signature"] == signature(secret, headers["x-polynya-timestamp"], body)
        assert json.loads(body)["delivery_id"] == headers["idempotency-key"]
    assert {headers["idempotency-key"] for headers, _ in receiver.got} == {"talk.0", "talk.1", "talk:end"}


@pytest.mark.parametrize("status", [500, 404, 302])
async def test_a_receiver_that_fails_gets_it_again_under_the_same_key_and_pulling_is_not_disturbed(
    service: Any, talk: Any, receiver: Receiver, status: int
) -> None:
    """76: whatever the receiver does, the result can be pulled until it is acknowledged."""
    receiver.status = status
    task, script = talk(1, callback=receiver.url)
    await service.serve(QUICK, callback_hosts=frozenset({"127.0.0.1"}))
    await service.node("one", script)
    client = service.client()
    await client.submit(task)
    (group,) = [group async for group in client.groups([task.task_id], ack=False)]
    assert len(group.rollouts) == 1
    await receiver.until(lambda: len(receiver.got) >= 4)
    receiver.status = 200
    failed = len(receiver.got)
    await receiver.until(lambda: len(receiver.got) >= failed + 2)
    keys = [headers["idempotency-key"] for headers, _ in receiver.got]
    assert set(keys) == {"talk.0", "talk:end"}


async def test_callbacks_are_off_and_a_task_that_wants_one_is_refused(service: Any, receiver: Receiver) -> None:
    await service.serve()
    with pytest.raises(ServerRefused, match=r"127.0.0.1 is not allowed.*callbacks are off"):
        await service.client().submit(shell_task("true", callback=receiver.url))


TRICKS = [
    "http://hooks.example.com/",
    "ftp://hooks.example.com/",
    "file:///etc/passwd",
    "gopher://hooks.example.com/",
    "https://",
    "https:///x",
    "//hooks.example.com/",
    "hooks.example.com",
    "https:hooks.example.com",
    "https://user@hooks.example.com/",
    "https://user:pass@hooks.example.com/",
    "https://hooks.example.com@evil.example/",
    "https://evil.example/hooks.example.com",
    "https://evil.example#hooks.example.com",
    "https://evil.example?hooks.example.com",
    "https://hooks.example.com.evil.example/",
    "https://evilhooks.example.com/",
    "https://hooks.example.com./",
    "https://hooks.example.com\\@evil.example/",
    "https://evil.example\\hooks.example.com/",
    "https://hooks.example.com\t/",
    "https://hooks.example.com\n.evil.example/",
    "https://hooks.example.com\r\nHost: x/",
    "https://hooks.example.com\x00/",
    " https://hooks.example.com/",
    "https://hooks.example.com:99999/",
    "https://hooks.example.com:abc/",
    "https://hooks.example.com:-1/",
    "https://[hooks.example.com]/",
    "https://[::1/",
    "https://127.0.0.1/",
    "https://127.1/",
    "https://2130706433/",
    "https://0x7f000001/",
    "https://0177.0.0.1/",
    "https://[::1]/",
    "https://[::ffff:127.0.0.1]/",
    "https://0.0.0.0/",
    "https://169.254.169.254/latest/meta-data/",
    "https://[fd00:ec2::254]/",
    "https://metadata.google.internal/",
    "https://localhost/",
    "https://LOCALHOST/",
    "https://ｈooks.example.com/",
    "https://hooks。example.com/",
    "https://xn--hooks.example.com/",
    "https://%68ooks.example.com/",
    "https://hooks%2eexample.com/",
    "javascript:alert(1)",
    "data:text/plain,x",
    "ws://hooks.example.com/",
    "HTTP://hooks.example.com/",
    "http://localhost/",
    "http://127.0.0.1/",
    "",
    "https://hooks.example.com /x",
]


@pytest.mark.parametrize("url", TRICKS)
def test_no_trick_makes_another_host_pass_for_an_allowed_one(url: str) -> None:
    with pytest.raises(TaskFileError, match="callback"):
        check_url(url, ALLOWED)


def test_the_allowed_host_passes_over_https() -> None:
    assert check_url("https://hooks.example.com:8443/a?b=c", ALLOWED).port == 8443
    assert check_url("HTTPS://Hooks.Example.com/", ALLOWED).hostname == "hooks.example.com"


PRIVATE = [
    "127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "255.255.255.255", "192.0.2.1", "::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:10.0.0.1", "::ffff:127.0.0.1",
    "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a00:1::1", "2001:db8::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_is_not_public_is_known_in_every_form(address: str) -> None:
    assert not public(address)


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946", "::ffff:93.184.216.34", "64:ff9b::5db8:d822"]
)
def test_public_addresses_are_public(address: str) -> None:
    assert public(address)


@pytest.mark.parametrize("addresses", [["10.0.0.1"], ["93.184.216.34", "127.0.0.1"], ["::ffff:169.254.169.254"], []])
async def test_a_name_that_leads_inside_gets_nothing(service: Any, addresses: list[str]) -> None:
    """Also when only one of its addresses does; the name server is asked once a try, and its answer is what is connected to."""
    server = await service.serve(QUICK)
    asked: list[str] = []

    async def resolver(host: str, port: int) -> list[str]:
        asked.append(host)
        return addresses

    callbacks = Callbacks(server.dispatcher, ALLOWED, b"key", resolver=resolver)
    await server.dispatcher.submit(shell_task("true", num_samples=1, callback="https://hooks.example.com/"))
    await server.dispatcher.cancel_task("t")
    due = await server.dispatcher.callbacks()
    await asyncio.gather(*(callbacks._deliver(one) for one in due))
    assert asked == ["hooks.example.com"] * len(due) and due
    later = await server.dispatcher.registry.callbacks(1e12)
    assert len(later) == len(due) and all(one.tries >= 1 for one in later)

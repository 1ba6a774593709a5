"""The connection on raw sockets: large bodies in pieces, kept alive, in a row, and clients that hang up."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from polynya.gateway.connection import BodyTooLarge, ClientGone, Exchange, Receive, Scope, Send
from polynya.gateway.protocol import GatewayProtocol, _HeadFirst

LARGE = 300_000


class App:
    """Echoes the size and the ends of each body; holds a reply back until ``go``."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.go = asyncio.Event()
        self.go.set()
        self.begun = asyncio.Event()
        self.gone = asyncio.Event()
        self.left: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            body = await exchange.body(self.limit)
        except BodyTooLarge:
            await exchange.reply(413, b"too large")
            return
        except ClientGone:
            self.left.append("in its request")
            self.gone.set()
            return
        self.begun.set()
        going = asyncio.ensure_future(self.go.wait())
        await asyncio.wait([going, exchange.watch()], return_when=asyncio.FIRST_COMPLETED)
        going.cancel()
        if exchange.client_gone:
            self.left.append("before its reply")
            self.gone.set()
            return
        await exchange.reply(200, b"%d %b %b" % (len(body), body[:3], body[-3:]))


@contextlib.asynccontextmanager
async def served(limit: int = 10**6) -> AsyncIterator[tuple[App, asyncio.StreamReader, asyncio.StreamWriter]]:
    app = App(limit)
    config = uvicorn.Config(cast("Any", app), lifespan="off", log_config=None, access_log=False)
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: GatewayProtocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        yield app, reader, writer
    finally:
        writer.close()
        server.close()
        while state.tasks:
            await asyncio.wait(state.tasks)


def post(body: bytes, *headers: str) -> bytes:
    lines = ["POST /x HTTP/1.1", "Host: h", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def reply(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return int(head.split()[1]), await reader.readexactly(size)


def large(first: bytes = b"abc", last: bytes = b"xyz") -> bytes:
    return first + b"." * (LARGE - 6) + last


async def test_large_and_small_bodies_take_turns_on_one_connection() -> None:
    async with served() as (_, reader, writer):
        for _ in range(3):
            writer.write(post(large()))
            assert await reply(reader) == (200, b"300000 abc xyz")
            writer.write(post(b"small"))
            assert await reply(reader) == (200, b"5 sma all")


@pytest.mark.parametrize("step", [1000, 70_000])
async def test_body_that_comes_in_any_pieces_is_whole(step: int) -> None:
    async with served() as (_, reader, writer):
        data = post(large())
        pieces = [data[i : i + 1] for i in range(80)] + [data[at : at + step] for at in range(80, len(data), step)]
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        assert await reply(reader) == (200, b"300000 abc xyz")


async def test_requests_that_are_sent_at_once_are_answered_in_order() -> None:
    async with served() as (_, reader, writer):
        writer.write(post(large(b"one")) + post(large(b"two")) + post(b"three"))
        assert [(await reply(reader))[1] for _ in range(3)] == [b"300000 one xyz", b"300000 two xyz", b"5 thr ree"]


async def test_chunked_body_is_joined() -> None:
    async with served() as (_, reader, writer):
        head = b"POST /x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (large(), b"!")) + b"0\r\n\r\n")
        assert await reply(reader) == (200, b"300001 abc yz!")


async def test_client_that_asks_first_is_told_to_go_on() -> None:
    async with served() as (_, reader, writer):
        data = post(large(), "Expect: 100-continue")
        writer.write(data[:-LARGE])
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(data[-LARGE:])
        assert await reply(reader) == (200, b"300000 abc xyz")


async def test_body_above_the_limit_is_refused_before_it_has_come_and_the_next_request_served() -> None:
    async with served(limit=1000) as (_, reader, writer):
        data = post(large())
        writer.write(data[:5000])
        assert await reply(reader) == (413, b"too large")
        writer.write(data[5000:] + post(b"small"))
        assert await reply(reader) == (200, b"5 sma all")


async def test_client_that_hangs_up_within_its_body_is_noticed() -> None:
    async with served() as (app, _, writer):
        writer.write(post(large())[:100_000])
        await writer.drain()
        writer.close()
        await app.gone.wait()
    assert app.left == ["in its request"]


@pytest.mark.parametrize("body", [b"small", large()])
async def test_client_that_hangs_up_before_its_reply_is_noticed(body: bytes) -> None:
    async with served() as (app, _, writer):
        app.go.clear()
        writer.write(post(body))
        await app.begun.wait()
        writer.close()
        await app.gone.wait()
    assert app.left == ["before its reply"]


class Wire(asyncio.Transport):
    """What is written, write by write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.writes.append(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True


async def test_head_goes_out_with_what_follows_it_at_once_or_soon_alone() -> None:
    wire = Wire()
    reply = _HeadFirst(wire, asyncio.get_running_loop())
    reply.write(b"head ")
    assert not wire.writes
    reply.write(b"body")
    reply.write(b"more")
    await asyncio.sleep(0)
    assert wire.writes == [b"head body", b"more"]
    waiting = _HeadFirst(wire, asyncio.get_running_loop())
    waiting.write(b"head")
    await asyncio.sleep(0)
    waiting.write(b"event")
    assert wire.writes[2:] == [b"head", b"event"]


async def test_head_without_a_body_goes_out_before_the_connection_is_closed_and_not_after() -> None:
    wire = Wire()
    reply = _HeadFirst(wire, asyncio.get_running_loop())
    reply.write(b"head")
    reply.close()
    assert wire.writes == [b"head"] and reply.is_closing()
    late = _HeadFirst(wire, asyncio.get_running_loop())
    late.write(b"never")
    await asyncio.sleep(0)
    assert wire.writes == [b"head"]


async def test_what_is_no_http_is_refused() -> None:
    async with served() as (_, reader, writer):
        writer.write(b"NONSENSE\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def test_client_that_announces_a_large_body_and_sends_none_costs_no_memory() -> None:
    async with served() as (app, _, writer):
        before = resident()
        others = [await asyncio.open_connection(*writer.get_extra_info("peername")) for _ in range(10)]
        for reader, other in others:
            other.write(b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 60000000\r\n\r\n")
            assert await reply(reader) == (413, b"too large")
        assert resident() - before < 60_000_000
        for _, other in others:
            other.close()
    assert app.left == []


@pytest.mark.parametrize("body", [b"small", large()])
@pytest.mark.parametrize("close", ["", ", close"])
async def test_upgrade_that_is_not_served_is_passed_over(body: bytes, close: str) -> None:
    """As Java's HttpClient asks for with each request over plain HTTP."""
    async with served() as (_, reader, writer):
        data = post(body, f"Connection: Upgrade, HTTP2-Settings{close}", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
        writer.write(data[:-3])
        await asyncio.sleep(0)
        writer.write(data[-3:] + post(b"next!"))
        assert (await reply(reader))[1].startswith(b"%d %b" % (len(body), body[:3]))
        if close:
            assert await reader.read() == b""
        else:
            assert await reply(reader) == (200, b"5 nex xt!")


async def test_chunked_body_of_an_upgrade_that_is_not_served_is_read() -> None:
    async with served() as (_, reader, writer):
        head = (
            b"POST /x HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        writer.write(post(b"first") + head + b"5\r\nchunk\r\n0\r\n\r\n" + post(b"next!"))
        assert [(await reply(reader))[1] for _ in range(3)] == [b"5 fir rst", b"5 chu unk", b"5 nex xt!"]

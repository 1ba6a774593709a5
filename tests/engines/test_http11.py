"""The pooled client on raw sockets: framing, reuse, and what a broken server does."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator

import pytest
import uvloop

from polynya.engines import http11
from polynya.engines.http11 import ConnectFailed, ConnectionLost, Garbled, Http11Client, Origin, Silence, unwritten


class Last(bytes):
    """An answer after which the server closes the connection."""


class AtOnce(bytes):
    """An answer that is sent in one piece."""


class Server:
    """Answers each request with the next of ``answers``."""

    def __init__(self, answers: list[bytes]) -> None:
        self.answers = answers
        self.connections = 0
        self.requests: list[bytes] = []
        self.answered = asyncio.Event()
        self.closed = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(size))
                answer = self.answers.pop(0)
                step = len(answer) or 1 if isinstance(answer, AtOnce) else 7
                for at in range(0, len(answer), step):
                    writer.write(answer[at : at + step])
                    await writer.drain()
                self.answered.set()
                if isinstance(answer, Last):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed.set()
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def served(*answers: bytes, read_timeout: float = 30.0) -> AsyncIterator[tuple[Server, Http11Client]]:
    server = Server(list(answers))
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    client = Http11Client(f"http://127.0.0.1:{port}/base", {"X-A": "1"}, connect_timeout=5.0, read_timeout=read_timeout)
    try:
        yield server, client
    finally:
        await client.close()
        listener.close()


def sized(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def test_request_goes_out_in_pieces_under_the_prefix_and_connections_are_used_again() -> None:
    async with served(sized(b"one"), sized(b"")) as (server, client):
        first = await client.request("POST", "/x", [b"ab", b"", b"cd"], {"X-B": "2"})
        second = await client.request("GET", "/y")
    assert (first.status, first.body, second.body) == (200, b"one", b"")
    assert server.connections == 1
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /base/x HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"X-A: 1\r\nX-B: 2\r\nContent-Length: 4" in head
    assert body == b"abcd"


@pytest.mark.parametrize(
    ("answer", "body", "reused"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", b"abcde", True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + sized(b"late"), b"late", True),
        (b"HTTP/1.1 102 Processing\r\n\r\n" * 2000 + sized(b"later"), b"later", True),
        (sized(b"bye", "200 OK", "Connection: close"), b"bye", False),
        (sized(gzip.compress(b"packed"), "200 OK", "Content-Encoding: gzip"), b"packed", True),
        (sized(b"not packed", "200 OK", "Content-Encoding: gzip"), b"not packed", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", b"ok", False),
        (sized(b"x" * 300_000), b"x" * 300_000, True),
    ],
)
async def test_reply_is_read_as_its_framing_says(answer: bytes, body: bytes, reused: bool) -> None:
    async with served(answer, sized(b"again")) as (server, client):
        assert (await client.request("POST", "/x")).body == body
        assert (await client.request("POST", "/x")).body == b"again"
    assert server.connections == (1 if reused else 2)


@pytest.mark.parametrize("surplus", [b"garbage", b"H", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nother"])
async def test_bytes_after_a_chunked_reply_are_no_part_of_it_nor_of_the_next(surplus: bytes) -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    async with served(AtOnce(chunked + surplus), sized(b"again")) as (server, client):
        assert (await client.request("POST", "/x")).body == b"abc"
        assert (await client.request("POST", "/x")).body == b"again"
    assert server.connections == 2


async def test_new_connection_is_used_when_it_is_asked_for() -> None:
    async with served(sized(b"one"), sized(b"two")) as (server, client):
        await client.request("POST", "/x")
        await client.request("POST", "/x", fresh=True)
    assert server.connections == 2


def test_request_that_is_cancelled_while_it_connects_leaves_nothing_behind() -> None:
    async def main() -> int:
        async with served() as (_, client):
            for turns in range(8):
                asked = asyncio.ensure_future(client.request("POST", "/x"))
                for _ in range(turns):
                    await asyncio.sleep(0)
                asked.cancel()
                await asyncio.wait([asked])
            for _ in range(20):
                await asyncio.sleep(0)
            return len(client._live)

    assert uvloop.run(main()) == 0


async def test_reply_without_a_length_ends_with_its_connection() -> None:
    async with served(Last(b"HTTP/1.1 200 OK\r\n\r\nup to the end"), sized(b"again")) as (server, client):
        assert (await client.request("POST", "/x")).body == b"up to the end"
        assert (await client.request("POST", "/x")).body == b"again"
    assert server.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_is_no_http_is_an_error_and_its_connection_is_closed(answer: bytes) -> None:
    async with served(answer, sized(b"fine")) as (server, client):
        with pytest.raises(Garbled, match=r"no HTTP/1\.1"):
            await client.request("POST", "/x")
        assert (await client.request("POST", "/x")).body == b"fine"
    assert server.connections == 2


@pytest.mark.parametrize(
    ("answer", "started"),
    [(b"", False), (b"HTTP/1.1 2", True), (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", True)],
)
async def test_connection_that_ends_before_or_within_a_reply_is_told_apart(answer: bytes, started: bool) -> None:
    async with served(Last(answer)) as (_, client):
        with pytest.raises(ConnectionLost) as caught:
            await client.request("POST", "/x")
    assert caught.value.started is started


async def test_bytes_that_nobody_asked_for_close_the_connection() -> None:
    async with served(sized(b"one") + b"HTTP/1.1 200 OK\r\n", sized(b"two")) as (server, client):
        assert (await client.request("POST", "/x")).body == b"one"
        await server.closed.wait()
        assert (await client.request("POST", "/x")).body == b"two"
    assert server.connections == 2


async def test_silence_ends_the_request() -> None:
    async with served(b"", read_timeout=0.05) as (_, client):
        with pytest.raises(Silence):
            await client.request("POST", "/x")


async def test_cancelled_request_closes_its_connection() -> None:
    async with served(b"") as (server, client):
        asked = asyncio.ensure_future(client.request("POST", "/x"))
        await server.answered.wait()
        asked.cancel()
        await server.closed.wait()


async def test_head_with_a_line_break_is_refused() -> None:
    async with served() as (_, client):
        with pytest.raises(ValueError, match="line break"):
            await client.request("POST", "/x", headers={"X": "a\r\nHost: b"})


@pytest.mark.parametrize("url", ["ftp://h", "nonsense", "http://", "http://h:99999"])
def test_what_is_no_http_url_names_itself(url: str) -> None:
    with pytest.raises(ConnectFailed, match=r"URL|Port|port"):
        Origin(url)


def test_origin_keeps_prefix_and_leaves_user_out_of_the_authority() -> None:
    origin = Origin("https://user:pw@[::1]/a/b/")
    assert (origin.host, origin.port, origin.prefix, origin.authority) == ("::1", 443, "/a/b", "[::1]")
    assert origin.tls is not None


def test_a_buffer_gives_its_bytes_away_without_a_copy() -> None:
    whole, view = unwritten(3)
    view[:2] = b"ab"
    view[2:] = b"c"
    assert whole == b"abc"


async def test_a_large_reply_is_handed_on_in_the_memory_that_it_was_read_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transport still holds its view of the buffer when the last byte is announced: that made ``BytesIO`` copy all."""
    made: list[bytes] = []

    def kept(size: int) -> tuple[bytes, memoryview]:
        whole, view = unwritten(size)
        made.append(whole)
        return whole, view

    monkeypatch.setattr(http11, "unwritten", kept)
    body = b"x" * 700_000
    async with served(AtOnce(sized(body))) as (_, http):
        reply = await http.request("GET", "/")
    assert reply.body == body
    assert reply.body is made[0]

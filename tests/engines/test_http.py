"""The pooled client: retries, time-outs, cancellation, over real sockets."""

import asyncio
import socket

import pytest

from polynya.engines.http import EngineHttp, HttpSettings, retry_after_seconds
from polynya.engines.scripted import Fault, Script, Step, scripted_app, serve
from polynya.errors import EngineProtocolError, EngineRejected, EngineTimeout, EngineUnavailable

CHAT = b'{"messages":[{"role":"user","content":"hi"}]}'


class Naps:
    """Instead of sleeping: what would have been slept."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


async def ask(url: str, naps: Naps, **settings: float) -> tuple[bytes, dict[str, int], int]:
    http = EngineHttp(url, settings=HttpSettings(**settings), sleep=naps)  # type: ignore[arg-type]
    try:
        answer = await http.post("/v1/chat/completions", CHAT)
        return answer.body, answer.flags, answer.resent
    finally:
        await http.close()


def script(**fault: object) -> Script:
    return Script(steps=[Step(text="x", fault=Fault(**fault))])  # type: ignore[arg-type]


@pytest.mark.parametrize("status", [429, 502, 503, 529])
async def test_a_status_that_says_later_is_retried(status: int) -> None:
    naps = Naps()
    async with serve(scripted_app(script(kind="http_error", status=status, times=2))) as url:
        body, flags, resent = await ask(url, naps)
    assert b"chat.completion" in body
    assert (flags, resent, len(naps.seconds)) == ({"upstream_retries": 2}, 0, 2)
    assert 0.125 <= naps.seconds[0] <= 0.25 <= naps.seconds[1] <= 0.5


async def test_retries_are_bounded_and_the_last_failure_is_raised() -> None:
    naps = Naps()
    app = scripted_app(script(kind="http_error", status=503, retry_after="4"))
    async with serve(app) as url:
        with pytest.raises(EngineUnavailable) as caught:
            await ask(url, naps, retries=2)
    assert (caught.value.status, caught.value.retry_after) == (503, 4.0)
    assert len(app.desk.calls) == 3
    assert naps.seconds == [4.0, 4.0]


async def test_a_server_that_wants_too_long_a_wait_is_not_waited_for() -> None:
    naps = Naps()
    async with serve(scripted_app(script(kind="http_error", status=503, retry_after="600"))) as url:
        with pytest.raises(EngineUnavailable):
            await ask(url, naps)
    assert naps.seconds == []


@pytest.mark.parametrize("status", [500, 504, 400, 422])
async def test_other_failures_are_not_retried(status: int) -> None:
    app = scripted_app(script(kind="http_error", status=status))
    async with serve(app) as url:
        with pytest.raises((EngineUnavailable, EngineRejected)):
            await ask(url, Naps())
    assert len(app.desk.calls) == 1


async def test_a_reset_before_the_answer_is_retried_and_counted_as_resent() -> None:
    async with serve(scripted_app(script(kind="reset", times=1))) as url:
        _, flags, resent = await ask(url, Naps())
    assert (flags, resent) == ({"upstream_retries": 1, "upstream_resent": 1}, 1)


@pytest.mark.parametrize("kind", ["reset_midway", "truncated", "bad_json"])
async def test_an_answer_that_breaks_off_is_asked_for_again_and_counted_as_resent(kind: str) -> None:
    app = scripted_app(script(kind=kind, times=1))
    async with serve(app) as url:
        body, flags, resent = await ask(url, Naps())
    assert b"chat.completion" in body
    assert (flags, resent) == ({"upstream_retries": 1, "upstream_resent": 1}, 1)
    assert len(app.desk.calls) == 2


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("reset_midway", EngineUnavailable, "broke off|connection lost"),
        ("truncated", EngineUnavailable, "broke off"),
        ("bad_json", EngineProtocolError, "stops after 39 bytes"),
    ],
)
async def test_an_answer_that_always_breaks_off_is_an_error(kind: str, error: type[Exception], words: str) -> None:
    app = scripted_app(script(kind=kind))
    async with serve(app) as url:
        with pytest.raises(error, match=words):
            await ask(url, Naps(), retries=2)
    assert len(app.desk.calls) == 3


async def test_a_refused_connection_is_retried_then_names_the_fix() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    naps = Naps()
    with pytest.raises(EngineUnavailable, match="check that the server runs") as caught:
        await ask(f"http://127.0.0.1:{port}", naps, retries=1)
    assert len(naps.seconds) == 1 and caught.value.status is None


async def test_silence_is_a_timeout() -> None:
    async with serve(scripted_app(script(kind="hang"))) as url:
        with pytest.raises(EngineTimeout, match="no byte for"):
            await ask(url, Naps(), read_timeout=0.05)


async def test_cancelling_closes_the_connection() -> None:
    app = scripted_app(script(kind="hang"))
    async with serve(app) as url:
        call = asyncio.create_task(ask(url, Naps()))
        await app.desk.until(lambda: app.desk.in_flight == 1)
        call.cancel()
        await app.desk.until(lambda: app.desk.aborted == 1)
        assert (await asyncio.wait({call}))[0] == {call}


async def test_hundreds_of_calls_are_in_flight_at_once() -> None:
    app = scripted_app(Script(steps=[Step(text="x", hold=True)]))
    async with serve(app) as url:
        http = EngineHttp(url)
        calls = [asyncio.create_task(http.post("/v1/chat/completions", CHAT)) for _ in range(300)]
        await app.desk.until(lambda: app.desk.in_flight == 300)
        app.desk.release()
        await asyncio.gather(*calls)
        await http.close()


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), ("2", 2.0), ("-1", 0.0), ("soon", None), ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0)],
)
def test_retry_after_is_read_in_both_forms(value: str | None, seconds: float | None) -> None:
    assert retry_after_seconds(value) == seconds


async def test_many_kept_connections_that_died_unseen_cost_one_retry() -> None:
    all_in = asyncio.Barrier(8)

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(CHAT)
        if first_round:
            await all_in.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await reader.read(1)
        writer.transport.abort()

    first_round = True
    server = await asyncio.start_server(once, "127.0.0.1", 0)
    http = EngineHttp(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", sleep=Naps())
    await asyncio.gather(*(http.post("/x", CHAT) for _ in range(8)))
    first_round = False
    answer = await http.post("/x", CHAT)
    assert (answer.retries, answer.resent) == (1, 1)
    await http.close()
    server.close()

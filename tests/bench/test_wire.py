"""Messages off a connection, however they are cut."""

from typing import Any

import pytest

from polynya.bench.wire import Peer, content_length, json_answer, status_of

_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"


class _Heard(Peer):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[int, bytes]] = []

    def message(self, head: bytes, body_at: int, end: int) -> None:
        self.heard.append((status_of(head), bytes(self.buffer[body_at:end])))

    def feed(self, data: bytes, size: int) -> list[tuple[int, bytes]]:
        for at in range(0, len(data), size):
            part: Any = memoryview(data)[at : at + size]
            while part:
                room = self.get_buffer(0)
                count = min(len(room), len(part))
                room[:count] = part[:count]
                room.release()
                self.buffer_updated(count)
                part = part[count:]
        return self.heard


@pytest.mark.parametrize("size", [1, 7, 70_000])
def test_messages_with_a_length_are_heard_whole(size: int) -> None:
    large = b"x" * 200_000
    data = json_answer(b"{}") + json_answer(large, b"404 Not Found") + json_answer(b"")
    assert _Heard().feed(data, size) == [(200, b"{}"), (404, large), (200, b"")]


@pytest.mark.parametrize("size", [1, 9, 1000])
def test_a_chunked_message_ends_with_its_last_chunk(size: int) -> None:
    assert _Heard().feed(_CHUNKED, size) == [(200, b"5\r\nhello\r\n0\r\n\r\n")]


def test_a_head_without_a_length_has_no_body() -> None:
    assert content_length(b"get / http/1.1\r\nhost: x\r\n\r\n") == 0

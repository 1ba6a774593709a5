"""The upstream: answers as vLLM does, from replies made beforehand, and counts what it is asked.

Prints one line, ``{"port": …}``. ``GET /bench/stats`` gives the counters and resets them, ``POST /bench/delay`` takes seconds.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter

import msgspec
import uvloop

from polynya.bench.wire import Peer, json_answer
from polynya.bench.workload import SESSION_MARK, TURN_MARK, Call, Spec, Workload

_CHAT = b"post /v1/chat/completions"
_MISSING = json_answer(
    b'{"error":{"message":"Not Found","type":"NotFoundError","param":null,"code":404}}', b"404 Not Found"
)
_PROBED = json_answer(
    b'{"id":"chatcmpl-0","object":"chat.completion","created":1796079855,"model":"bench","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"a"},"logprobs":{"content":[{"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[]}]},'
    b'"finish_reason":"length","token_ids":[64]}],"usage":{"prompt_tokens":4,"total_tokens":5,"completion_tokens":1},'
    b'"prompt_logprobs":null,"prompt_token_ids":[1,2,3,4]}'
)


class Upstream:
    """State of the mock."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.delay = 0.0
        self.answered = 0
        self.paths: Counter[str] = Counter()
        self.in_flight = 0
        self.most_in_flight = 0
        card = {"id": "bench", "object": "model", "owned_by": "vllm", "max_model_len": workload.spec.window}
        self.models = json_answer(msgspec.json.encode({"object": "list", "data": [card]}))

    def stats(self) -> bytes:
        body = msgspec.json.encode({"paths": self.paths, "most_in_flight": self.most_in_flight})
        self.paths.clear()
        self.most_in_flight = self.in_flight
        return json_answer(body)


class UpstreamPeer(Peer):
    def __init__(self, upstream: Upstream) -> None:
        super().__init__()
        self._upstream = upstream

    def message(self, head: bytes, body_at: int, end: int) -> None:
        if head.startswith(_CHAT):
            self._chat(body_at, end)
        else:
            self._side(head, body_at, end)

    def _chat(self, body_at: int, end: int) -> None:
        upstream = self._upstream
        at = self.buffer.find(SESSION_MARK, body_at, end)
        if at < 0:
            self._send([_PROBED])
            return
        turn_at = self.buffer.rfind(TURN_MARK, body_at, end) + len(TURN_MARK)
        session, epoch = self.buffer[at + 10 : at + 15], self.buffer[at + 22 : at + 27]
        call = Call(int(session), int(epoch), int(self.buffer[turn_at : turn_at + 5]))
        upstream.paths["chat"] += 1
        upstream.answered += 1
        answer = upstream.workload.variant(call.session).answer(call, upstream.answered)
        if upstream.delay:
            upstream.in_flight += 1
            upstream.most_in_flight = max(upstream.most_in_flight, upstream.in_flight)
            asyncio.get_running_loop().call_later(upstream.delay, self._late, answer)
        else:
            self._send(answer)

    def _late(self, answer: list[bytes | memoryview]) -> None:
        self._upstream.in_flight -= 1
        self._send(answer)

    def _send(self, answer: list[bytes | memoryview]) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.writelines(answer)

    def _side(self, head: bytes, body_at: int, end: int) -> None:
        upstream = self._upstream
        path = head.split(b" ", 2)[1].decode()
        if path == "/v1/models":
            answer = upstream.models
        elif path == "/version":
            answer = json_answer(b'{"version":"0.32.0"}')
        elif path in ("/health", "/healthz"):
            answer = json_answer(b"{}")
        elif path == "/bench/stats":
            answer = upstream.stats()
        elif path == "/bench/delay":
            upstream.delay = float(self.buffer[body_at:end])
            answer = json_answer(b"{}")
        elif path == "/tokenize" and self.buffer.find(SESSION_MARK, body_at, end) >= 0:
            upstream.paths["tokenize"] += 1
            ids = upstream.workload.variant(0).ids[: upstream.workload.spec.prompt_ids].tolist()
            answer = json_answer(msgspec.json.encode({"count": len(ids), "max_model_len": 0, "tokens": ids}))
        else:
            answer = _MISSING
        self._send([answer])


async def _serve(spec: Spec) -> None:
    upstream = Upstream(Workload(spec))
    server = await asyncio.get_running_loop().create_server(
        lambda: UpstreamPeer(upstream), "127.0.0.1", 0, backlog=2048
    )
    sys.stdout.write(f'{{"port":{server.sockets[0].getsockname()[1]}}}\n')
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(msgspec.json.decode(sys.argv[1], type=Spec)))

"""A chat server small enough to read: answers a script of turns as server-sent events, one listening socket, one thread."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def says(text: str, finish: str = "stop") -> dict[str, Any]:
    return {"content": text, "finish": finish}


def calls(name: str, **arguments: Any) -> dict[str, Any]:
    return {"content": "Working.", "tool": (name, json.dumps(arguments)), "finish": "tool_calls"}


class FakeChat:
    """``script``: one entry a request, a turn or an HTTP status; the last one repeats."""

    def __init__(self, script: list[dict[str, Any] | int], listener: socket.socket | None = None) -> None:
        self.script = script
        self.requests: list[dict[str, Any]] = []
        chat = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                chat.requests.append({"path": self.path, "headers": dict(self.headers), "body": body})
                turn = chat.script[min(len(chat.requests), len(chat.script)) - 1]
                if isinstance(turn, int):
                    self.send_response(turn)
                    self.end_headers()
                    self.wfile.write(b'{"error": {"message": "scripted"}}')
                    return
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                for event in _events(turn):
                    self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                self.wfile.write(b"data: [DONE]\n\n")

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=listener is None)
        if listener is not None:
            self.server.socket.close()
            listener.setblocking(True)
            self.server.socket = listener
        self.port = self.server.socket.getsockname()[1]
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self) -> FakeChat:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def _events(turn: dict[str, Any]) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": turn["content"]}]
    if "tool" in turn:
        name, arguments = turn["tool"]
        function = {"name": name, "arguments": arguments}
        deltas.append({"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}]})
    base = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "policy"}
    events = [{**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    return [*events, {**base, "choices": [{"index": 0, "delta": {}, "finish_reason": turn["finish"]}], "usage": usage}]

"""What a gateway of FastAPI, httpx and the standard library's json is: parse, translate, keep full copies, translate back.

It does polynya's whole hop but for the disk: Anthropic Messages in, OpenAI chat with ids and logprobs upstream, ids and
logprobs as Python lists in memory (the last two calls of a session, so that the bench does not run out of memory),
Anthropic events out. Started with the upstream's port; prints ``{"port": …}``.
"""

from __future__ import annotations

import json
import socket
import sys
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
import uvloop
from fastapi import FastAPI, Request, Response

STORE: dict[str, deque[dict[str, Any]]] = defaultdict(lambda: deque(maxlen=2))
_KEPT = ("temperature", "top_p", "max_tokens")


def to_chat(body: dict[str, Any]) -> dict[str, Any]:
    system = body.get("system") or ""
    if isinstance(system, list):
        system = "\n".join(block["text"] for block in system)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    for message in body["messages"]:
        messages += _translated(message)
    chat: dict[str, Any] = {"model": body["model"], "messages": messages, "stream": False}
    if tools := body.get("tools"):
        chat["tools"] = [
            {
                "type": "function",
                "function": {"name": t["name"], "description": t["description"], "parameters": t["input_schema"]},
            }
            for t in tools
        ]
    chat |= {key: body[key] for key in _KEPT if key in body}
    return chat | {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}


def _translated(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    if isinstance(content, str):
        return [{"role": message["role"], "content": content}]
    texts = "".join(block["text"] for block in content if block["type"] == "text")
    if message["role"] == "assistant":
        calls = [
            {"id": b["id"], "type": "function", "function": {"name": b["name"], "arguments": json.dumps(b["input"])}}
            for b in content
            if b["type"] == "tool_use"
        ]
        return [{"role": "assistant", "content": texts, **({"tool_calls": calls} if calls else {})}]
    results = [
        {"role": "tool", "tool_call_id": b["tool_use_id"], "content": b["content"]}
        for b in content
        if b["type"] == "tool_result"
    ]
    return results + ([{"role": "user", "content": texts}] if texts else [])


def to_events(answer: dict[str, Any]) -> bytes:
    message = answer["choices"][0]["message"]
    usage = {"input_tokens": answer["usage"]["prompt_tokens"], "output_tokens": answer["usage"]["completion_tokens"]}
    blocks: list[tuple[dict[str, Any], dict[str, Any]]] = []
    if message["content"]:
        blocks.append(({"type": "text", "text": ""}, {"type": "text_delta", "text": message["content"]}))
    for call in message.get("tool_calls") or []:
        function = call["function"]
        begun = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
        blocks.append((begun, {"type": "input_json_delta", "partial_json": function["arguments"]}))
    head = {
        "id": answer["id"],
        "type": "message",
        "role": "assistant",
        "model": answer["model"],
        "content": [],
        "usage": usage,
    }
    events: list[dict[str, Any]] = [{"type": "message_start", "message": head}]
    for index, (begun, delta) in enumerate(blocks):
        events.append({"type": "content_block_start", "index": index, "content_block": begun})
        events.append({"type": "content_block_delta", "index": index, "delta": delta})
        events.append({"type": "content_block_stop", "index": index})
    events.append({"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": usage})
    events.append({"type": "message_stop"})
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events).encode()


def record(session: str, chat: dict[str, Any], answer: dict[str, Any]) -> None:
    choice = answer["choices"][0]
    STORE[session].append(
        {
            "messages": chat["messages"],
            "tools": chat.get("tools"),
            "prompt_token_ids": answer["prompt_token_ids"],
            "token_ids": choice["token_ids"],
            "logprobs": [entry["logprob"] for entry in choice["logprobs"]["content"]],
            "reply": choice["message"],
        }
    )


def make_app(upstream: str) -> FastAPI:
    client = httpx.AsyncClient(base_url=upstream, timeout=None, limits=httpx.Limits(max_connections=None))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await client.aclose()

    app = FastAPI(lifespan=lifespan)

    @app.post("/s/{session}/v1/messages")
    async def messages(session: str, request: Request) -> Response:
        chat = to_chat(await request.json())
        answer = (await client.post("/v1/chat/completions", json=chat)).json()
        record(session, chat, answer)
        return Response(to_events(answer), media_type="text/event-stream")

    return app


async def main() -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(2048)
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    config = uvicorn.Config(make_app(f"http://127.0.0.1:{sys.argv[1]}"), log_level="error", http="httptools")
    await uvicorn.Server(config).serve(sockets=[listener])


if __name__ == "__main__":
    uvloop.run(main())

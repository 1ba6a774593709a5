"""The scripted engine over HTTP: a plain ASGI app in the shape of a vLLM server, to test adapters, faults and load on real sockets.

Speaks ``/v1/chat/completions`` (not streamed), ``/v1/models``, ``/version``, ``/tokenize``, ``/detokenize``, ``/health`` and
``/weight_info``. The session affinity is the ``x-session-id`` header. A client that goes away is noticed at once and counted
in ``desk.aborted``. Refuses streaming with a 400.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
import numpy as np

from polynya.dialects.neutral import ToolSpec
from polynya.engines.base import EffectiveSampling, EngineReply
from polynya.engines.scripted import tokens
from polynya.engines.scripted.desk import Desk, Planned, spoiled
from polynya.engines.scripted.script import WHOLE_CALL_FAULTS, Script
from polynya.engines.scripted.template import encode_special
from polynya.errors import ContextOverflow
from polynya.schema import Int32Array

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
TRANSPORT = "polynya.transport"
"""ASGI extension by which ``serve`` lets the app cut a connection."""
KEPT_BODIES = 256


class _Function(msgspec.Struct):
    name: str = ""
    description: str = ""
    parameters: msgspec.Raw = msgspec.Raw(b"{}")


class _Tool(msgspec.Struct):
    function: _Function = msgspec.field(default_factory=_Function)


class _Transfer(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


class _Body(msgspec.Struct):
    model: str = ""
    messages: list[tokens.WireMessage] = []
    tools: msgspec.Raw = msgspec.Raw(b"null")
    stream: bool = False
    logprobs: bool | None = None
    top_logprobs: int | None = None
    return_token_ids: bool | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    seed: int | None = None
    kv_transfer_params: _Transfer | None = None


class _Tokenize(msgspec.Struct):
    prompt: str | None = None
    messages: list[tokens.WireMessage] | None = None
    tools: msgspec.Raw = msgspec.Raw(b"null")
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class _Detokenize(msgspec.Struct):
    tokens: list[int]


class ScriptedApp:
    """An ASGI 3 application. ``desk`` and ``bodies`` (newest raw chat bodies) are for tests to read."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self.desk = Desk(self.script)
        self.bodies: deque[bytes] = deque(maxlen=KEPT_BODIES)
        self.headers: deque[dict[str, str]] = deque(maxlen=KEPT_BODIES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        body = await _read(receive)
        route = (scope["method"], scope["path"])
        if route == ("POST", "/v1/chat/completions"):
            await self._chat(scope, body, receive, send)
            return
        simple = self._simple(route, body)
        if simple is None:
            await _json(send, 404, {"detail": "Not Found"})
        else:
            await _json(send, 200, simple)

    def _simple(self, route: tuple[str, str], body: bytes) -> dict[str, Any] | None:
        script = self.script
        match route:
            case ("GET", "/health"):
                return {}
            case ("GET", "/version"):
                return {"version": "scripted"}
            case ("GET", "/weight_info"):
                return {"weight_version": self.desk.policy_version or "default"}
            case ("GET", "/v1/models"):
                card = {"id": script.model, "object": "model", "owned_by": "vllm", "max_model_len": script.window}
                return {"object": "list", "data": [card]}
            case ("POST", "/tokenize"):
                return self._tokenize(msgspec.json.decode(body, type=_Tokenize))
            case ("POST", "/detokenize"):
                return {"prompt": tokens.decode(msgspec.json.decode(body, type=_Detokenize).tokens)}
        return None

    def _tokenize(self, ask: _Tokenize) -> dict[str, Any]:
        if ask.messages is None:
            ids = np.array(encode_special(ask.prompt or ""), dtype=np.int32)
        else:
            ids = self._render(ask.messages, ask.tools, generation_prompt=ask.add_generation_prompt)
        found: dict[str, Any] = {"count": int(ids.size), "max_model_len": self.script.window, "tokens": ids.tolist()}
        if ask.return_token_strs:
            found["token_strs"] = [tokens.decode([token]) for token in ids.tolist()]
        return found

    def _render(
        self, messages: list[tokens.WireMessage], tools: msgspec.Raw, *, generation_prompt: bool = True
    ) -> Int32Array:
        return tokens.render(
            messages,
            bytes(tools),
            drop_reasoning=self.script.drop_reasoning,
            generation_prompt=generation_prompt,
        )

    async def _chat(self, scope: Scope, raw: bytes, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.bodies.append(raw)
        self.headers.append(headers)
        try:
            body = msgspec.json.decode(raw, type=_Body)
        except msgspec.DecodeError as exc:
            await _error(send, 400, str(exc), "BadRequestError")
            return
        if body.stream:
            await _error(
                send, 400, "stream: the scripted engine does not stream; send stream: false", "BadRequestError"
            )
            return
        if not self.script.images and tokens.MEDIA in self._render(body.messages, body.tools):
            await _error(send, 400, f"{self.script.model} is not a multimodal model", "BadRequestError")
            return
        try:
            planned = self._plan(body, headers.get("x-session-id", ""))
        except ContextOverflow as exc:
            await _error(send, 400, exc.message, "BadRequestError", param="input_tokens")
            return
        await self.desk.count("started")
        gone = asyncio.ensure_future(_disconnected(receive))
        work = asyncio.ensure_future(self._answer(planned, body, scope, send))
        await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
        outcome = "finished" if work.done() else "aborted"
        for task in (gone, work):
            task.cancel()
        await asyncio.gather(gone, work, return_exceptions=True)
        await self.desk.count(outcome)
        if work.done() and not work.cancelled() and (failure := work.exception()) is not None:
            raise failure

    def _plan(self, body: _Body, affinity: str) -> Planned:
        given = body.kv_transfer_params.prompt_token_ids if body.kv_transfer_params and self.script.token_in else None
        prompt = np.array(given, dtype=np.int32) if given is not None else self._render(body.messages, body.tools)
        sampling = EffectiveSampling(
            temperature=1.0 if body.temperature is None else body.temperature,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            seed=body.seed,
        )
        return self.desk.plan(affinity, prompt, _tool_specs(body.tools), sampling, token_in=given is not None)

    async def _answer(self, planned: Planned, body: _Body, scope: Scope, send: Send) -> None:
        await self.desk.work(planned)
        if planned.fault is not None and planned.fault.kind in WHOLE_CALL_FAULTS:
            await _fail(planned, scope, send)
            return
        await _send(send, 200, chat_body(planned, spoiled(planned, None), body, self.script.model))


def chat_body(planned: Planned, reply: EngineReply, body: _Body, model: str) -> bytes:
    """The JSON of one reply, compact, with the fields and nulls of a vLLM server."""
    said = reply.reply
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in said.tool_calls
    ]
    message: dict[str, Any] = {"role": "assistant", "content": said.text or None, "reasoning": said.reasoning or None}
    if calls:
        message["tool_calls"] = calls
    with_ids = bool(body.return_token_ids)
    kind = planned.fault.kind if planned.fault else ""
    shown_ids = reply.sampled_ids if with_ids and kind != "token_id_strings" else None
    prompt = reply.prompt_ids if with_ids else None
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _logprobs(planned, reply, kind) if body.logprobs and body.top_logprobs is not None else None,
        "finish_reason": said.finish_reason,
        "stop_reason": None,
        "token_ids": shown_ids.tolist() if shown_ids is not None else None,
    }
    usage = {
        "prompt_tokens": said.usage.prompt_tokens,
        "completion_tokens": said.usage.completion_tokens,
        "total_tokens": said.usage.prompt_tokens + said.usage.completion_tokens,
    }
    document = {
        "id": reply.upstream_id,
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [choice],
        "usage": usage,
        "prompt_token_ids": prompt.tolist() if prompt is not None else None,
        "kv_transfer_params": None,
    }
    return msgspec.json.encode(document)


def _logprobs(planned: Planned, reply: EngineReply, kind: str) -> dict[str, Any] | None:
    if reply.logprobs is None:
        return None
    spelled = kind in ("token_id_strings", "bad_token_id_string")
    content: list[dict[str, Any]] = []
    for position, (token, value) in enumerate(
        zip(planned.expected.sampled_ids.tolist(), reply.logprobs.tolist(), strict=False)
    ):
        text = tokens.decode([token])
        shown = f"token_id:{token}" if spelled else text
        if kind == "bad_token_id_string" and position == 0:
            shown = "token_id:x"
        number: Any = value
        if not np.isfinite(value):
            number = None if kind == "null_logprob" else msgspec.Raw(b"NaN")
        content.append({"token": shown, "logprob": number, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content}


async def _fail(planned: Planned, scope: Scope, send: Send) -> None:
    fault = planned.fault
    assert fault is not None
    match fault.kind:
        case "hang":
            await asyncio.Event().wait()
        case "http_error":
            extra = [(b"retry-after", fault.retry_after.encode())] if fault.retry_after is not None else []
            await _error(send, fault.status, f"scripted HTTP {fault.status}", "InternalServerError", headers=extra)
        case "overflow":
            await _error(
                send,
                400,
                "This model's maximum context length is 1 tokens. However, your prompt contains "
                f"{planned.record.prompt_ids.size} input tokens",
                "BadRequestError",
                param="input_tokens",
            )
        case "bad_json":
            await _send(send, 200, b'{"id":"scripted","choices":[{"message":')
        case "reset":
            _cut(scope)
        case "reset_midway" | "truncated":
            head = [(b"content-type", b"application/json"), (b"content-length", b"4096")]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await send({"type": "http.response.body", "body": b'{"id":"scripted"', "more_body": True})
            _cut(scope, reset=fault.kind == "reset_midway")


def _cut(scope: Scope, *, reset: bool = False) -> None:
    access = scope.get("extensions", {}).get(TRANSPORT)
    if access is None:
        raise RuntimeError("fault reset: this server gives no access to the connection; run the app with serve()")
    transport = access["transport"]
    if reset:
        # Closing with a linger time of zero sends RST in place of FIN.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    else:
        transport.close()


def _tool_specs(raw: msgspec.Raw) -> list[ToolSpec]:
    tools = msgspec.json.decode(bytes(raw), type=list[_Tool] | None) or []
    return [
        ToolSpec(name=t.function.name, description=t.function.description, parameters=t.function.parameters)
        for t in tools
    ]


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def _read(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _json(send: Send, status: int, document: dict[str, Any]) -> None:
    await _send(send, status, msgspec.json.encode(document))


async def _error(
    send: Send,
    status: int,
    text: str,
    kind: str,
    *,
    param: str | None = None,
    headers: list[tuple[bytes, bytes]] = [],  # noqa: B006
) -> None:
    document = {"error": {"message": text, "type": kind, "param": param, "code": status}}
    await _send(send, status, msgspec.json.encode(document), headers)


async def _send(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] = []) -> None:  # noqa: B006
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})

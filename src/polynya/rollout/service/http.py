"""HTTP in JSON: one table of endpoints, from which both the routes and the OpenAPI document are made.

Invariant: a body is read into the struct that the table names, strictly, with a bound on its size; every refusal is a JSON object
that names what is wrong and the fix. Nothing of a request is logged but its method, path and status.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from polynya import __version__
from polynya.errors import (
    ConfigError,
    PolynyaError,
    QueueFull,
    RegistryUnavailable,
    TaskConflict,
    UnknownRecord,
    UsageError,
)
from polynya.rollout.registry.base import Registry, TokenKind, TokenRecord
from polynya.rollout.service.access import admit, bearer

MAX_BODY = 32 * 1024 * 1024
_MAX_TARGET = 8 * 1024
_log = logging.getLogger("polynya.server")


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The ``error`` of an answer that is no success."""

    kind: str
    message: str
    fix: str = ""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a handler gets."""

    request: Request
    who: TokenRecord | None
    body: Any = None

    @property
    def path(self) -> dict[str, str]:
        return {str(name): str(value) for name, value in self.request.path_params.items()}

    def number(self, name: str, default: int, *, least: int = 0, most: int = 2**53) -> int:
        """A query parameter. Raises ConfigError naming it."""
        text = self.request.query_params.get(name)
        if text is None:
            return default
        if not (text.isascii() and text.isdigit() and least <= int(text[:20]) <= most):
            raise ConfigError(f"{name}: {text[:40]!r} is no number from {least} to {most}")
        return int(text)

    def text(self, name: str, default: str = "") -> str:
        return self.request.query_params.get(name, default)


Handler = Callable[[Asked], Awaitable[Any]]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    method: str
    path: str
    handler: Handler
    summary: str
    kinds: frozenset[TokenKind] | None
    """Who may ask; None: anybody."""
    body: Any = None
    """The struct that the request's JSON is read into."""
    answer: Any = None
    """The struct of a success, for the document."""
    query: tuple[str, ...] = ()


def reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def refuse(status: int, kind: str, message: str, fix: str = "", headers: dict[str, str] | None = None) -> Response:
    return reply({"error": Refusal(kind=kind, message=message, fix=fix)}, status, headers)


def application(endpoints: Sequence[Endpoint], registry: Registry) -> Starlette:
    """All endpoints, and ``/openapi.json``."""
    document = msgspec.json.encode(openapi(endpoints))

    async def described(_: Request) -> Response:
        return Response(document, media_type="application/json")

    routes = [Route(one.path, _guarded(one, registry), methods=[one.method]) for one in endpoints]
    app = Starlette(routes=[*routes, Route("/openapi.json", described, methods=["GET"])])
    app.add_exception_handler(HTTPException, _unserved)
    return app


async def _unserved(request: Request, exc: Exception) -> Response:
    status = exc.status_code if isinstance(exc, HTTPException) else 500
    path = request.url.path[:200]
    return refuse(
        status,
        "NotFound" if status == 404 else "NotServed",
        f"{request.method} {path} is not served",
        "see /openapi.json",
    )


def _guarded(endpoint: Endpoint, registry: Registry) -> Callable[[Request], Awaitable[Response]]:
    decoder = None if endpoint.body is None else msgspec.json.Decoder(endpoint.body)

    async def serve(request: Request) -> Response:
        try:
            answer = await _serve(endpoint, decoder, registry, request)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as exc:
            answer = _explained(exc)
        _log.debug("%s %s: %d", request.method, request.url.path, answer.status_code)
        return answer

    return serve


async def _serve(endpoint: Endpoint, decoder: Any, registry: Registry, request: Request) -> Response:
    if len(request.url.query) > _MAX_TARGET:
        return refuse(414, "TooLong", "the query is too long")
    who: TokenRecord | int | None = None
    if endpoint.kinds is not None:
        who = await admit(registry, bearer(request.headers.get("authorization", "")), endpoint.kinds)
        if who == 401:
            return refuse(
                401, "Unauthorised", "the token is missing or not known", headers={"www-authenticate": "Bearer"}
            )
        if isinstance(who, int):
            return refuse(who, "Forbidden", "a token of this kind does not open this endpoint")
    body = None
    if decoder is not None:
        raw = await _body(request)
        if raw is None:
            return refuse(413, "TooLarge", f"the body is larger than {MAX_BODY} bytes")
        body = decoder.decode(raw)
    answer = await endpoint.handler(
        Asked(request=request, who=who if isinstance(who, TokenRecord) else None, body=body)
    )
    return answer if isinstance(answer, Response) else reply(answer)


async def _body(request: Request) -> bytes | None:
    if int(request.headers.get("content-length") or 0) > MAX_BODY:
        return None
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
            return None
        parts.append(part)
    return b"".join(parts)


def _explained(exc: Exception) -> Response:
    match exc:
        case UnknownRecord():
            return refuse(404, exc.kind, exc.message, exc.fix)
        case TaskConflict():
            return refuse(409, exc.kind, exc.message, exc.fix)
        case QueueFull():
            return refuse(429, exc.kind, exc.message, exc.fix, {"retry-after": str(max(1, round(exc.retry_after)))})
        case RegistryUnavailable():
            return refuse(503, exc.kind, exc.message, exc.fix, {"retry-after": "1"})
        case UsageError():
            return refuse(400, exc.kind, exc.message, exc.fix)
        case msgspec.ValidationError() | msgspec.DecodeError() | RecursionError():
            return refuse(400, "BadRequest", f"body: {exc}"[:500], "see /openapi.json")
        case PolynyaError():
            return refuse(503, exc.kind, exc.message, exc.fix, {"retry-after": "1"})
    _log.error("a request failed", exc_info=exc)
    return refuse(500, "Internal", f"internal error: {type(exc).__name__}", "report this with the server's log")


def openapi(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """OpenAPI 3.1 of the endpoints."""
    types = [kind for one in endpoints for kind in (one.body, one.answer) if kind is not None] + [Refusal]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    by_type = dict(zip(map(repr, types), schemas, strict=True))
    paths: dict[str, Any] = {}
    for one in endpoints:
        operation: dict[str, Any] = {"summary": one.summary, "responses": {"200": {"description": "done"}}}
        names = [piece[1:-1] for piece in one.path.split("/") if piece.startswith("{")]
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ] + [{"name": name, "in": "query", "schema": {"type": "string"}} for name in one.query]
        if one.body is not None:
            operation["requestBody"] = {"required": True, "content": _json_of(by_type[repr(one.body)])}
        if one.answer is not None:
            operation["responses"]["200"]["content"] = _json_of(by_type[repr(one.answer)])
        operation["responses"]["default"] = {
            "description": "refused",
            "content": _json_of({"type": "object", "properties": {"error": by_type[repr(Refusal)]}}),
        }
        if one.kinds is not None:
            operation["security"] = [{"bearer": []}]
        paths.setdefault(one.path, {})[one.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "polynya rollout server", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }


def _json_of(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}

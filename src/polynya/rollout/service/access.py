"""Who may ask what: a bearer token opens the endpoints of its kind and no others.

Invariant: the five kinds are never interchangeable; a session's or an evaluator's token opens nothing here. Whoever is not known gets
401, whoever is known and may not gets 403, and neither learns which tokens exist.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from polynya.errors import ConfigError
from polynya.rollout.registry.base import Registry, TokenKind, TokenRecord
from polynya.rollout.registry.tokens import mint, verify

USERS = frozenset({TokenKind.USER, TokenKind.ADMIN})
ADMINS = frozenset({TokenKind.ADMIN})
NODES = frozenset({TokenKind.NODE})
KEPT = (TokenKind.USER, TokenKind.ADMIN, TokenKind.NODE)
ANY_NODE = "*"


def bearer(authorization: str) -> str:
    """The token of an ``Authorization`` header; empty: there is none."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


async def admit(registry: Registry, token: str, kinds: frozenset[TokenKind]) -> TokenRecord | int:
    """Whose it is, or the HTTP status of the refusal."""
    claimed = token.removeprefix("ply_").partition("_")[0]
    if claimed not in tuple(TokenKind):
        await verify(registry, token, TokenKind.USER)
        return 401
    record = await verify(registry, token, TokenKind(claimed))
    if record is None:
        return 401
    return record if record.kind in kinds else 403


async def keep_tokens(registry: Registry, folder: Path) -> dict[TokenKind, str]:
    """The server's own tokens, one of each kind of ``KEPT``, in files that only their owner reads. Made where there are none."""
    found: dict[TokenKind, str] = {}
    for kind in KEPT:
        path = folder / f"{kind}.token"
        with contextlib.suppress(FileNotFoundError):
            text = path.read_text().strip()
            if await verify(registry, text, kind) is not None:
                found[kind] = text
                continue
        token, record = mint(kind, ANY_NODE if kind == TokenKind.NODE else "local")
        await registry.add_token(record)
        _write_private(path, token)
        found[kind] = token
    return found


def _write_private(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        aside.unlink()
    try:
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror}", fix="choose another state folder") from exc
    with os.fdopen(handle, "w") as file:
        file.write(text + "\n")
    aside.replace(path)

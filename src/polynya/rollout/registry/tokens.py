"""Credentials: ``ply_<kind>_<kid>_<secret>``, 256 random bits each, kept as a SHA-256 only.

Invariant: the five kinds are never interchangeable, and a token of a session's attempt opens nothing when that attempt does not
hold the lease: there is nothing to revoke, and nothing to forget to revoke. Refuses without telling why, in the same time.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable

from polynya.rollout.registry.base import Registry, TokenKind, TokenRecord
from polynya.rollout.registry.database import Database

_TOKEN = re.compile(r"ply_(user|node|session|evaluator|admin)_([0-9a-f]{16})_[0-9a-f]{64}", re.ASCII)
_NOBODY = hashlib.sha256(b"").hexdigest()


def mint(
    kind: TokenKind, subject: str, *, attempt: int | None = None, random: Callable[[int], str] = secrets.token_hex
) -> tuple[str, TokenRecord]:
    """A new token and the record to keep of it; the token itself is shown once. ``random(n)`` gives ``n`` bytes as hex."""
    if (attempt is not None) != (kind in (TokenKind.SESSION, TokenKind.EVALUATOR)):
        raise ValueError(f"a token of kind {kind} {'needs' if attempt is None else 'has no'} attempt")
    kid = random(8)
    token = f"ply_{kind}_{kid}_{random(32)}"
    return token, TokenRecord(kid=kid, kind=kind, digest=_digest(token), subject=subject, attempt=attempt)


async def verify(
    registry: Registry, token: str, kind: TokenKind, *, same: Callable[[str, str], bool] = hmac.compare_digest
) -> TokenRecord | None:
    """Whose token of this kind it is; None for any other text, kind, or a token that ended."""
    shape = _TOKEN.fullmatch(token)
    record = await registry.token(shape[2]) if shape else None
    right = same(_digest(token), record.digest if record else _NOBODY)
    return record if right and record is not None and record.kind == kind else None


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def add(db: Database, record: TokenRecord) -> None:
    db.execute(
        "INSERT INTO tokens (kid, kind, digest, subject, attempt, revoked) VALUES (?, ?, ?, ?, ?, ?)",
        (record.kid, str(record.kind), record.digest, record.subject, record.attempt, int(record.revoked)),
    )


def find(db: Database, kid: str) -> TokenRecord | None:
    rows = db.execute(
        """SELECT kind, digest, subject, attempt FROM tokens t WHERE kid = ? AND revoked = 0 AND (attempt IS NULL OR EXISTS
            (SELECT 1 FROM sessions s WHERE s.session_id = t.subject AND s.attempt = t.attempt AND s.state = 'leased'))""",
        (kid,),
    )
    if not rows:
        return None
    kind, digest, subject, attempt = rows[0]
    return TokenRecord(kid=kid, kind=TokenKind(kind), digest=digest, subject=subject, attempt=attempt)


def revoke(db: Database, kid: str) -> bool:
    return bool(db.execute("UPDATE tokens SET revoked = 1 WHERE kid = ? AND revoked = 0 RETURNING kid", (kid,)))

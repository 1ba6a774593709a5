"""Credentials: five kinds, no two of them interchangeable, none of them kept."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from polynya.rollout.registry.base import Held, TokenKind, TokenRecord
from polynya.rollout.registry.tokens import mint, verify
from polynya.rollout.simulation.events import drive

from .world import LEASE, Direct, completion, direct, hello, task

PLAIN = [TokenKind.USER, TokenKind.NODE, TokenKind.ADMIN]


def made(registry: Direct, kind: TokenKind, subject: str = "me", attempt: int | None = None) -> str:
    token, record = mint(kind, subject, attempt=attempt)
    registry.add_token(record)
    return token


def whose(registry: Direct, token: str, kind: TokenKind) -> TokenRecord | None:
    return drive(verify(registry.registry, token, kind))


def running(registry: Direct) -> Direct:
    registry.submit(task("a", retries=3))
    registry.register(hello(), 0.0, LEASE)
    registry.claim("n", 1, 1, 0.0, LEASE)
    return registry


def attempt_of(kind: TokenKind) -> int | None:
    return None if kind in PLAIN else 1


@pytest.mark.parametrize("kind", TokenKind)
def test_token_opens_what_its_kind_opens_and_nothing_else(registry: Direct, kind: TokenKind) -> None:
    running(registry)
    token = made(registry, kind, "a.0", attempt_of(kind))
    assert [other for other in TokenKind if whose(registry, token, other)] == [kind]
    found = whose(registry, token, kind)
    assert found is not None
    assert (found.subject, found.attempt) == ("a.0", attempt_of(kind))


@pytest.mark.parametrize("kind", [TokenKind.SESSION, TokenKind.EVALUATOR])
@pytest.mark.parametrize("end", ["completed", "lost", "next attempt", "cancelled"])
def test_token_of_an_attempt_ends_with_its_lease(registry: Direct, kind: TokenKind, end: str) -> None:
    running(registry)
    (session,) = [s for s in [registry.session("a.0")] if s.attempt == 1]
    token = made(registry, kind, session.session_id, 1)
    assert whose(registry, token, kind)
    if end == "completed":
        registry.renew("n", 1, 1, [Held("a.0", 1)], 0.0, LEASE)
        registry.complete(completion_of_first())
    else:
        registry.leave("n")
    if end == "next attempt":
        registry.register(hello("n", 2), 0.0, LEASE)
        registry.claim("n", 2, 1, 0.0, LEASE)
        assert registry.session("a.0").attempt == 2
    if end == "cancelled":
        registry.cancel_session("a.0")
    assert whose(registry, token, kind) is None


def completion_of_first() -> object:
    from polynya.schema import Session

    session = Session(session_id="a.0", group_id="a", task=task("a", retries=3), sample_index=0)
    return completion(session)


def test_revoked_token_is_none(registry: Direct) -> None:
    token = made(registry, TokenKind.USER)
    kid = token.split("_")[2]
    assert registry.revoke_token(kid)
    assert not registry.revoke_token(kid)
    assert whose(registry, token, TokenKind.USER) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: t[:-1] + ("0" if t[-1] != "0" else "1"),
        lambda t: t.replace("ply_user", "ply_admin"),
        lambda t: t + "0",
        lambda t: " " + t,
        lambda t: t + "\n",
        lambda t: t.upper(),
        lambda t: "_".join([*t.split("_")[:2], "0" * 16, t.split("_")[3]]),
        lambda t: "",
        lambda t: "ply_user_' OR 1=1 --_" + "0" * 64,
        lambda t: "\ud800",
        lambda t: "ply_user_" + "٣" * 16 + "_" + "0" * 64,
    ],
)
def test_any_other_text_is_none_of_any_kind(registry: Direct, damage: object) -> None:
    token = made(registry, TokenKind.USER)
    other = damage(token)  # type: ignore[operator]
    assert other != token
    assert [kind for kind in TokenKind if whose(registry, other, kind)] == []


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("shaped", [True, False])
def test_every_text_is_compared_once_with_a_digest(registry: Direct, known: bool, shaped: bool) -> None:
    """So the time that a refusal takes tells nothing about which keys there are."""
    token = made(registry, TokenKind.USER) if known else mint(TokenKind.USER, "nobody")[0]
    lengths: list[tuple[int, int]] = []

    def same(left: str, right: str) -> bool:
        lengths.append((len(left), len(right)))
        return left == right

    found = drive(verify(registry.registry, token if shaped else "x", TokenKind.USER, same=same))
    assert (found is not None) is (known and shaped)
    assert lengths == [(64, 64)]


def test_secret_is_nowhere_in_the_files(tmp_path: Path) -> None:
    registry = direct(tmp_path / "r.db")
    secrets = [made(registry, kind, "a.0", attempt_of(kind)).split("_")[3] for kind in TokenKind]
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    registry.close()
    assert [secret for secret in secrets if secret.encode() in content] == []
    assert len(set(secrets)) == 5
    with closing(sqlite3.connect(tmp_path / "r.db")) as db:
        assert {len(digest) for (digest,) in db.execute("SELECT digest FROM tokens")} == {64}


def test_tokens_hold_256_random_bits(registry: Direct) -> None:
    asked: list[int] = []

    def random(n: int) -> str:
        asked.append(n)
        return "ab" * n

    token, _ = mint(TokenKind.NODE, "n", random=random)
    assert asked == [8, 32]
    assert token == "ply_node_" + "ab" * 8 + "_" + "ab" * 32


@pytest.mark.parametrize(("kind", "attempt"), [(TokenKind.SESSION, None), (TokenKind.USER, 1)])
def test_only_tokens_of_sessions_have_an_attempt(kind: TokenKind, attempt: int | None) -> None:
    with pytest.raises(ValueError, match="attempt"):
        mint(kind, "x", attempt=attempt)

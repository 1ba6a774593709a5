"""Deliveries to a URL that the task named: signed, tried again with growing waits, and only to hosts that were allowed by name.

Invariant: off unless hosts are allowed. A name is resolved once, every address of it must be a public one (or the host is an allowed
loopback one), and the connection goes to the address that was looked at, so no second answer of a name server can lead it elsewhere.
No redirect is followed, nothing of an answer is kept but its status. The same delivery always has the same ``Idempotency-Key``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult

from polynya.errors import ConfigError, PolynyaError, TaskFileError
from polynya.rollout.dispatch import Dispatcher
from polynya.rollout.registry.base import Callback

_SECONDS = 10.0
_AT_ONCE = 16
_POLL = 1.0
_REPLY_BYTES = 64 * 1024
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_log = logging.getLogger("polynya.server")

Resolve = Callable[[str, int], Awaitable[list[str]]]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def check_url(url: str, allowed: frozenset[str]) -> SplitResult:
    """Raises TaskFileError that says what is wrong with it. Nothing is asked of the network."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError as exc:
        raise TaskFileError(f"callback: {url!r:.200} is no URL: {exc}") from exc
    if any(ord(char) <= 32 or ord(char) == 127 for char in url) or "\\" in url:
        raise TaskFileError("callback: the URL holds a space, a control character or a backslash")
    if parts.username is not None or parts.password is not None:
        raise TaskFileError("callback: the URL holds a user name", fix="deliveries are signed; see docs/service.md")
    if not host or not host.isascii():
        raise TaskFileError("callback: the URL names no host in ASCII")
    if host not in allowed:
        known = ", ".join(sorted(allowed)) or "none: callbacks are off"
        raise TaskFileError(
            f"callback: {host} is not allowed ({known})", fix="start the server with --callback-host, or pull results"
        )
    if parts.scheme != "https" and not (parts.scheme == "http" and host in _LOOPBACK):
        raise TaskFileError(f"callback: {parts.scheme or 'no scheme'} is not served", fix="use https")
    return parts


def public(text: str) -> bool:
    """Whether an address is one of the open internet, also when it is wrapped into another form."""
    address: Address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in ipaddress.ip_network("64:ff9b::/96"):
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is None and address.teredo is not None:
            return False
        address = inner or address
    return address.is_global and not address.is_multicast


async def resolve(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class _Fixed(AbstractResolver):
    """Gives the address that was looked at."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        return [
            ResolveResult(
                hostname=host, host=self._address, port=port, family=family, proto=0, flags=socket.AI_NUMERICHOST
            )
        ]

    async def close(self) -> None:
        return None


class Callbacks:
    """Sends what is due. ``secret`` signs: ``X-Polynya-Signature`` is the hex HMAC-SHA256 of ``timestamp.body``."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        allowed: frozenset[str],
        secret: bytes,
        *,
        resolver: Resolve = resolve,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._dispatcher = dispatcher
        self._allowed = allowed
        self._secret = secret
        self._resolve = resolver
        self._wall = wall

    def validate(self, url: str) -> None:
        """Raises TaskFileError."""
        check_url(url, self._allowed)

    async def run(self) -> None:
        """For ever. A receiver that hangs holds up no other."""
        while True:
            seen = self._dispatcher.delivered.count
            try:
                due = await self._dispatcher.callbacks(_AT_ONCE)
                await asyncio.gather(*(self._deliver(callback) for callback in due))
            except PolynyaError as exc:
                _log.error("callbacks could not be looked at: %s", exc.message)
                due = []
            if not due:
                await self._dispatcher.delivered.wait(seen, _POLL)

    async def _deliver(self, callback: Callback) -> None:
        try:
            await self._post(callback)
        except (TimeoutError, PolynyaError, aiohttp.ClientError, OSError, ValueError) as exc:
            wait = await self._dispatcher.callback_failed(callback, f"{type(exc).__name__}: {exc}"[:300])
            again = "given up" if wait is None else f"again in {wait:g} s"
            _log.warning("callback of %s failed (%s), %s", callback.delivery_id, type(exc).__name__, again)
        else:
            await self._dispatcher.registry.callback_sent(callback.delivery_id)

    async def _post(self, callback: Callback) -> None:
        parts = check_url(callback.url, self._allowed)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        addresses = await self._resolve(host, port)
        if not addresses:
            raise ConfigError(f"callback: {host} has no address")
        if host not in _LOOPBACK and not all(public(address) for address in addresses):
            raise ConfigError(f"callback: {host} resolves to an address that is not public")
        body = msgspec.json.encode(callback.delivery)
        stamp = str(int(self._wall()))
        headers = {
            "content-type": "application/json",
            "idempotency-key": callback.delivery_id,
            "x-polynya-timestamp": stamp,
            "x-polynya-signature": signature(self._secret, stamp, body),
        }
        connector = aiohttp.TCPConnector(resolver=_Fixed(addresses[0]), use_dns_cache=False, force_close=True)
        timeout = aiohttp.ClientTimeout(total=_SECONDS)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as http,
            http.post(callback.url, data=body, headers=headers, allow_redirects=False) as answer,
        ):
            await answer.content.read(_REPLY_BYTES)
            if not 200 <= answer.status < 300:
                raise ConfigError(f"callback: {host} answered {answer.status}")


def signature(secret: bytes, timestamp: str, body: bytes) -> str:
    return hmac.new(secret, timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


def keep_secret(path: Path) -> bytes:
    """The signing key, made where there is none, readable by its owner only."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_text().strip().encode()
    text = secrets.token_hex(32)
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(text + "\n")
    return text.encode()

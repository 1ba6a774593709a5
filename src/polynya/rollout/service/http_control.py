"""``Control`` over HTTP: a node on another machine, or in another process."""

from __future__ import annotations

from typing import Any, TypeVar

import aiohttp
import msgspec

from polynya.errors import ServerRefused, ServerUnreachable
from polynya.rollout.dispatch import BeatAnswer, ClaimAnswer, Welcome
from polynya.rollout.registry.base import Completed, Held, NodeHello
from polynya.rollout.service.node_api import BeatAsk, ClaimAsk, CompleteAsk, LeaveAsk
from polynya.schema import SessionResult

T = TypeVar("T")
_SECONDS = 5.0
_SILENCE = 10.0
_RETRIED = frozenset({429, 500, 502, 503, 504})


class HttpControl:
    """Raises ServerRefused for a token or a version that the server does not take; that is not asked again."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._client: aiohttp.ClientSession | None = None

    async def join(self, hello: NodeHello) -> Welcome:
        return await self._ask("join", hello, Welcome)

    async def claim(self, node: str, epoch: int, slots: int, wait: float) -> ClaimAnswer:
        return await self._ask(
            "claim", ClaimAsk(node=node, epoch=epoch, slots=slots, wait=wait), ClaimAnswer, seconds=_SECONDS + wait
        )

    async def beat(self, node: str, epoch: int, number: int, held: list[Held]) -> BeatAnswer:
        return await self._ask("beat", BeatAsk(node=node, epoch=epoch, number=number, held=held), BeatAnswer)

    async def complete(self, node: str, result: SessionResult, trajectory: str | None) -> Completed:
        return await self._ask("complete", CompleteAsk(node=node, result=result, trajectory=trajectory), Completed)

    async def leave(self, node: str, epoch: int) -> None:
        await self._ask("leave", LeaveAsk(node=node, epoch=epoch), dict[str, Any])

    async def attend(self, node: str, epoch: int) -> None:
        url = f"{self._url}/v1/node/attend"
        timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE)
        body = msgspec.json.encode(LeaveAsk(node=node, epoch=epoch))
        try:
            async with self._http().post(url, data=body, timeout=timeout, allow_redirects=False) as response:
                while response.status == 200 and await response.content.readany():
                    pass
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise self._unreachable(url, exc) from exc
        raise ServerUnreachable(f"the rollout server at {url} ended the answer", fix="see its log")

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    def _http(self) -> aiohttp.ClientSession:
        if self._client is None:
            self._client = aiohttp.ClientSession(headers={"authorization": f"Bearer {self._token}"})
        return self._client

    @staticmethod
    def _unreachable(url: str, exc: BaseException) -> ServerUnreachable:
        return ServerUnreachable(
            f"the rollout server at {url} gives no answer: {type(exc).__name__}", fix="see whether it runs"
        )

    async def _ask(self, what: str, body: msgspec.Struct, answer: type[T], *, seconds: float = _SECONDS) -> T:
        url = f"{self._url}/v1/node/{what}"
        try:
            async with self._http().post(
                url,
                data=msgspec.json.encode(body),
                headers={"content-type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=seconds),
                allow_redirects=False,
            ) as response:
                text, status = await response.read(), response.status
        except (TimeoutError, aiohttp.ClientError, OSError) as exc:
            raise self._unreachable(url, exc) from exc
        if status in _RETRIED:
            raise ServerUnreachable(f"the rollout server at {url} answered {status}", fix="see its log")
        if status >= 300:
            raise ServerRefused(f"the rollout server at {url} answered {status}: {text[:300]!r}", status=status)
        return msgspec.json.decode(text, type=answer)

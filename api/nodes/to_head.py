"""The way from the API of a node to that of the head: HTTP, with the tokens that the client sent, checked there."""

import asyncio
import contextlib
import logging
from functools import partial

import httpx
from starlette.types import Receive, Scope, Send

from api.nodes.everywhere import HERE
from api.processes.forwarding import is_local
from api.processes.passing import exchange, handed_on, while_heard

log = logging.getLogger(__name__)

LOOK_S = 2.0
NAME = "the API on the head"
_ABORT = "/v1/rollout/abort"


def stays(scope: Scope) -> bool:
    """Whether the API of a node answers this by itself; the head's own words about requests here are among it."""
    asked_by_head = scope["path"] == _ABORT and any(name == HERE for name, _ in scope["headers"])
    return asked_by_head or is_local(scope["path"])


class HeadPassing:
    """Hands requests to the head's API. silence_s: after which a head that does not answer is given up."""

    def __init__(self, url: str, *, silence_s: float) -> None:
        self._silence_s = silence_s
        timeout = httpx.Timeout(None, connect=2.0)
        # No connection is kept: one that the other side has just closed would fail a request that was never read.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits, trust_env=False)
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request

    async def close(self) -> None:
        """Let connections go."""
        await self._client.aclose()

    async def hand_on(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Have the head answer. Raises ApiError while no answer has begun, ConnectionError after that."""
        scope = {**scope, "headers": [(name, value) for name, value in scope["headers"] if name != b"host"]}
        await handed_on(partial(exchange, self._client, NAME, scope, body), self._while_it_lives, receive, send)

    async def _while_it_lives(self, work: "asyncio.Future[None]") -> None:
        clock = asyncio.get_running_loop().time
        heard = clock()

        async def listen() -> None:
            nonlocal heard
            while True:
                await asyncio.sleep(LOOK_S)
                with contextlib.suppress(httpx.TransportError):  # and asked again: it may be we who stood still
                    await self._client.get("/live", timeout=self._silence_s)
                    heard = clock()

        listening = asyncio.create_task(listen())
        try:
            await while_heard(NAME, lambda: clock() - heard, self._silence_s, work)
        finally:
            listening.cancel()

"""The way from the API of a node to that of the head: HTTP, with the tokens that the client sent, checked there."""

import asyncio
import logging

import httpx
from starlette.types import Message, Receive, Scope, Send

from api.errors import ApiError, TimedOut
from api.nodes.everywhere import HERE
from api.processes.forwarding import is_local
from api.processes.passing import exchange
from api.sse import while_connected

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
        begun = False

        async def passed(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        scope = {**scope, "headers": [(name, value) for name, value in scope["headers"] if name != b"host"]}
        work = asyncio.ensure_future(exchange(self._client, NAME, scope, body, passed))
        try:
            await while_connected(receive, self._while_it_lives(work))
        except ApiError as error:
            if begun:
                raise ConnectionError(error.message) from None
            raise
        finally:
            work.cancel()

    async def _while_it_lives(self, work: "asyncio.Future[None]") -> None:
        loop = asyncio.get_running_loop()
        heard = loop.time()
        while not work.done():
            await asyncio.wait([work], timeout=LOOK_S)
            if work.done():
                break
            try:
                await self._client.get("/live", timeout=self._silence_s)
                heard = loop.time()
            except httpx.TransportError:
                if loop.time() - heard > self._silence_s:
                    raise TimedOut(f"{NAME} does not answer; whether it did what was asked is not known") from None
        work.result()

"""Server-sent events, framed as the OpenAI SDKs read them, and the watch over a client that goes away."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.errors import ApiError, status_of
from api.reply_counts import OUTER_SEND

log = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
KEEP_ALIVE_S = 10.0
"""Silence after which a comment is sent: proxies cut what says nothing for a minute, and pauses take longer."""
to_json = msgspec.json.Encoder().encode


def event(payload: Any) -> bytes:
    """One data event."""
    return b"data: " + to_json(payload) + b"\n\n"


class EventStream(Response):
    """Sends what a generator yields, closes the generator when the client goes away.

    A generator starts its work when it is first asked, so one that is never asked leaves nothing behind.
    The first event is awaited before the status goes out, so a request that never ran is a plain HTTP
    error, unless it took KEEP_ALIVE_S to find out: then a comment has gone ahead. Later errors become an `error`
    event, which has the status. late_headers: asked for when the status goes out.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        late_headers: Callable[[], dict[str, str]] = dict,
    ) -> None:
        self._events = events
        self._late_headers = late_headers
        self._lock = asyncio.Lock()  # the status goes out once, and before any event
        self._outer: Send | None = None
        self._begun = False
        self._sent = 0.0  # loop time of the last bytes
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        self._outer = scope.get(OUTER_SEND)
        try:
            await while_connected(receive, self._pump(send))
        except ClientDisconnect:
            pass
        finally:
            await self._events.aclose()

    async def _pump(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._sent = loop.time()
        alive = asyncio.create_task(self._keep_alive(send))
        try:
            async for data in self._events:
                await self._send(send, data)
        except ApiError as error:
            if not self._begun:
                raise
            body = {"message": error.message, "type": type(error).__name__, "code": error.code}
            await self._send(send, event({"error": body | {"status": status_of(error)}}) + DONE)
        finally:
            alive.cancel()
            (ended,) = await asyncio.gather(alive, return_exceptions=True)
            if isinstance(ended, Exception) and not isinstance(ended, OSError):  # OSError: the client has gone
                log.error("comments could not be sent on a stream", exc_info=ended)
        await self._send(send, b"", last=True)

    async def _keep_alive(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while True:
            left = self._sent + KEEP_ALIVE_S - loop.time()
            if left > 0:
                await asyncio.sleep(left)
            else:
                await self._send(send, KEEP_ALIVE)

    async def _send(self, send: Send, data: bytes, *, last: bool = False) -> None:
        if not self._begun:
            async with self._lock:
                await self._begin(send)
        await (self._outer or send)({"type": "http.response.body", "body": data, "more_body": not last})
        self._sent = asyncio.get_running_loop().time()

    async def _begin(self, send: Send) -> None:
        if not self._begun:
            headers = [(k.encode(), v.encode()) for k, v in self._late_headers().items()]
            headers += self.raw_headers
            await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
            self._begun = True


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, unless the client goes away first: then it is cancelled, and ClientDisconnect raised."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

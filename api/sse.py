"""Server-sent events, framed as the OpenAI SDKs read them, and the watch over a client that goes away."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.errors import ApiError

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
to_json = msgspec.json.Encoder().encode


def event(payload: Any) -> bytes:
    """One data event."""
    return b"data: " + to_json(payload) + b"\n\n"


class EventStream(Response):
    """Sends what a generator yields, closes the generator when the client goes away.

    A generator starts its work when it is first asked, so one that is never asked leaves nothing behind.
    The first event is awaited before the status goes out, so a request that never ran is a plain HTTP
    error. Later errors become an `error` event.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str] | None = None) -> None:
        self._events = events
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"} | (headers or {}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        try:
            await while_connected(receive, self._pump(send))
        except ClientDisconnect:
            pass
        finally:
            await self._events.aclose()

    async def _pump(self, send: Send) -> None:
        first = await anext(self._events, b"")
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except ApiError as error:
            body = {"error": {"message": error.message, "type": type(error).__name__, "code": error.code}}
            await send({"type": "http.response.body", "body": event(body) + DONE, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


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

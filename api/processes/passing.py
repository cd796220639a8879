"""The way to another API process: HTTP over the Unix socket that it listens on. Loaded where there are several only."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import httpx
import msgspec
from starlette.types import Message, Receive, Scope, Send

from api.answering import while_connected
from api.errors import ApiError, TimedOut, Unavailable
from api.generation import Aborted
from api.processes.forwarding import ABORT, CLIENT, AbortHere
from api.processes.peers import Peers

log = logging.getLogger(__name__)

COME_BACK_S = 15.0
"""How long a process that has died may take to be there again."""
AGAIN_S = 0.1
LOOK_S = 1.0
MARGIN_S = 5.0
_HOP = {
    *(b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"expect"),
    *(b"proxy-connection", b"content-length", b"http2-settings"),
}
_NOT_BACK = _HOP - {b"content-length"} | {b"date"}
"""Of an answer: the process that the client asked says when."""


class Passing:
    """Hands requests to other processes. silence_s: after which one that does not beat is taken for stuck."""

    def __init__(self, peers: Peers, *, silence_s: float) -> None:
        self._peers = peers
        self._silence_s = silence_s
        self._clients: dict[int, httpx.AsyncClient] = {}
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request

    async def close(self) -> None:
        """Let connections go."""
        for client in self._clients.values():
            await client.aclose()

    async def abort(self, index: int, request_ids: list[str] | None, timeout_s: float) -> Aborted:
        """What a process ended. One that is not there has none, and is reached so."""
        message = AbortHere(request_ids, timeout_s)
        try:
            async with asyncio.timeout(timeout_s + MARGIN_S):
                reply = await self._client(index).post(ABORT, content=msgspec.json.encode(message))
        except httpx.ConnectError:
            return Aborted(0)
        except (httpx.TransportError, TimeoutError) as error:
            log.warning("API process %d does not answer: %s", index, type(error).__name__)
            return Aborted(0, (f"api-{index}",))
        if reply.status_code != 200:
            log.warning("API process %d answered %d to an abort", index, reply.status_code)
            return Aborted(0, (f"api-{index}",))
        return Aborted(msgspec.json.decode(reply.content, type=int))

    async def hand_on(self, index: int, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Have a process answer. Raises ApiError while no answer has begun, ConnectionError after that."""
        answer, beaten = partial(self._exchange, index, scope, body), partial(self._peers.board.silent_s, index)
        watched = partial(while_heard, f"API process {index}", beaten, self._silence_s)
        await handed_on(answer, watched, receive, send)

    async def _exchange(self, index: int, scope: Scope, body: bytes, send: Send) -> None:
        client = (scope["client"][0] if scope.get("client") else "").encode("latin-1")
        scope = {**scope, "headers": [*scope["headers"], (CLIENT, client)]}
        await exchange(self._client(index), f"API process {index}", scope, body, send)

    def _client(self, index: int) -> httpx.AsyncClient:
        if index not in self._clients:
            # No connection is kept: one that the other side has just closed would fail a request that was never read.
            limits = httpx.Limits(max_keepalive_connections=0)
            transport = httpx.AsyncHTTPTransport(uds=str(self._peers.socket(index)), limits=limits)
            self._clients[index] = httpx.AsyncClient(
                base_url="http://api", transport=transport, timeout=httpx.Timeout(None, connect=2.0), trust_env=False
            )
        return self._clients[index]


async def handed_on(
    answer: Callable[[Send], Coroutine[Any, Any, None]],
    watched: Callable[["asyncio.Future[None]"], Awaitable[None]],
    receive: Receive,
    send: Send,
) -> None:
    """Let answer(send) run while the client is there. watched(answer under way): until it is over, or given up.

    Raises ApiError while no answer has begun, ConnectionError after that.
    """
    begun = False

    async def passed(message: Message) -> None:
        nonlocal begun
        begun = True
        await send(message)

    work = asyncio.ensure_future(answer(passed))
    try:
        await while_connected(receive, watched(work))
    except ApiError as error:
        if begun:
            raise ConnectionError(error.message) from None
        raise
    finally:
        work.cancel()


async def while_heard(name: str, silent_s: Callable[[], float], limit_s: float, work: "asyncio.Future[None]") -> None:
    """Until it is over, or whoever does it has been silent for too long. silent_s(): for how long now.

    What this process stands still itself is no silence of the other's: that may have stood still with it, or nobody
    here has heard it. Raises what the work does, and TimedOut.
    """
    clock, stood_still = asyncio.get_running_loop().time, 0.0  # since the other was heard
    while not work.done():
        before = clock()
        await asyncio.wait([work], timeout=LOOK_S)
        silent = silent_s()
        stood_still = min(stood_still + max(0.0, clock() - before - LOOK_S), silent)
        if not work.done() and silent - stood_still > limit_s:
            log.error("%s has not been heard for %.0f s: a request to it is given up", name, silent)
            raise TimedOut(f"{name} does not move; whether it did what was asked is not known")
    work.result()


async def exchange(client: httpx.AsyncClient, name: str, scope: Scope, body: bytes, send: Send) -> None:
    """Pass a request on as it came, and its answer back. name: of who answers. Raises Unavailable.

    One that is not there is waited for, COME_BACK_S; nothing is sent twice.
    """
    headers = [(k, v) for k, v in scope["headers"] if k not in _HOP]
    target = {"target": _target(scope)}  # as it came: a URL of httpx's would be refused, or another, in cases
    request = client.build_request(scope["method"], "/", headers=headers, content=body, extensions=target)
    answer = await _reached(client, name, request)
    try:
        kept = [(k.lower(), v) for k, v in answer.headers.raw if k.lower() not in _NOT_BACK]
        await send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
        async for part in answer.aiter_raw():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    except httpx.TransportError:
        raise Unavailable(f"{name} went away before it had answered") from None
    finally:
        await answer.aclose()


async def _reached(client: httpx.AsyncClient, name: str, request: httpx.Request) -> httpx.Response:
    until = asyncio.get_running_loop().time() + COME_BACK_S
    while True:
        try:
            return await client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            if asyncio.get_running_loop().time() >= until:
                raise Unavailable(f"{name} is not there; nothing was done") from None
            await asyncio.sleep(AGAIN_S)
        except httpx.TransportError:
            raise Unavailable(
                f"{name} went away before it answered; whether it did what was asked is not known"
            ) from None


def _target(scope: Scope) -> bytes:
    query: bytes = scope.get("query_string", b"")
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    return path + b"?" + query if query else path

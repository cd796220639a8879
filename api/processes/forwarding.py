"""Requests that another API process has to answer, and how they get there.

    data, health and static routes          here (LOCAL)
    ... with the id of a request that runs elsewhere    by the process that runs it
    everything else                          by the lead

They travel as they came, over the Unix socket of the other process, tokens and all, so that every check is made there
too. A process that is not there is waited for, as long as nothing was sent to it; one that goes away in between, or
does not move, has its request answered with 503 or 504: nobody knows then whether it was done.
"""

import contextlib
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import ApiError
from api.processes.peers import LEAD, Peers
from api.replies import Json, error_response
from weight_manager.errors import UNREADABLE

if TYPE_CHECKING:
    from api.processes.passing import Passing

GENERATE = frozenset(
    {
        *("/v1/rollout/generate", "/v1/rollout/score"),
        *("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/tokens"),
        *("/generate", "/inference/v1/generate"),
    }
)
"""Routes whose requests have ids."""
LOCAL = GENERATE | {
    *("/live", "/health", "/ping", "/ready", "/health_generate"),
    *("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"),
    *("/v1/completions/render", "/v1/chat/completions/render"),
    *("/openapi.json", "/", "/ui", "/version"),
}
LOCAL_BELOW = ("/v1/models", "/docs")
"""Paths that every process answers by itself, with all that is below them."""
ABORT = "/internal/abort"
CLIENT = b"x-rollout-client"
"""Header: who sent a request that another process passed on."""
_HAS_ID = re.compile(rb'"(?:request_id|rid)"\s*:')


class AbortHere(msgspec.Struct, frozen=True):
    """[ANY PROCESS -> ANY OTHER] POST /internal/abort: end these of your requests, or all. -> how many."""

    request_ids: list[str] | None
    timeout_s: float


class Internal:
    """ASGI middleware of the Unix socket: what comes from there is answered here, for the client it names.

    abort: ends requests of this process, by id or all, within so many seconds.
    """

    def __init__(self, app: ASGIApp, abort: Callable[[list[str] | None, float], Awaitable[int]]) -> None:
        self._app = app
        self._abort = abort

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take one request, as ASGI has it."""
        if scope["type"] == "http":
            internal = is_internal(scope)
            client = dict(scope["headers"]).get(CLIENT) if internal else None
            scope["headers"] = [(k, v) for k, v in scope["headers"] if k != CLIENT]
            if client is not None:
                scope["client"] = (client.decode("latin-1"), 0)
            elif internal and scope["path"] == ABORT:  # said by a process itself: what it passes on names its client
                asked = msgspec.json.decode(await _body(receive), type=AbortHere)
                ended = await self._abort(asked.request_ids, asked.timeout_s)
                await Json(ended)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Decides(Protocol):
    """The API that decides, as seen by one that does not."""

    async def hand_on(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Have it answer. Raises ApiError while no answer has begun, ConnectionError after that."""


class Elsewhere:
    """ASGI middleware around an API that does not decide: what does not stay here is passed on. answered: counts what
    fails on the way."""

    def __init__(
        self,
        app: ASGIApp,
        to: Decides,
        stays: Callable[[Scope], bool],
        max_bytes: int,
        answered: Callable[[str, int], None],
    ) -> None:
        self._app = app
        self._to = to
        self._stays = stays
        self._max_bytes = max_bytes
        self._answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take one request, as ASGI has it."""
        if scope["type"] != "http" or self._stays(scope):
            await self._app(scope, receive, send)
            return
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return  # the client is gone
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                # It would be refused there by its length, too; it need not travel.
                scope["headers"] = [*scope["headers"], (b"content-length", str(len(body)).encode())]
                await self._app(scope, _nothing_more, send)
                return
            if not message.get("more_body", False):
                break
        try:
            await self._to.hand_on(scope, bytes(body), receive, send)
        except ClientDisconnect:
            pass
        except ApiError as error:
            response = error_response(error)
            self._answered("none", response.status_code)
            await response(scope, receive, send)


class ToLead:
    """The first process, as the others of its host see it."""

    def __init__(self, passing: "Passing") -> None:
        self._passing = passing

    async def hand_on(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """See Decides."""
        await self._passing.hand_on(LEAD, scope, body, receive, send)


def stays(scope: Scope) -> bool:
    """Whether a process that does not lead answers this by itself."""
    return is_internal(scope) or is_local(scope["path"])


class Claiming:
    """ASGI middleware right around the routes (bodies are whole here): one process runs the requests of an id."""

    def __init__(self, app: ASGIApp, peers: Peers, passing: "Passing") -> None:
        self._app = app
        self._peers = peers
        self._passing = passing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take one request, as ASGI has it."""
        if scope["type"] != "http" or scope["path"] not in GENERATE or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            first: Message | HTTPException = await receive()
        except HTTPException as error:
            first = error  # the body cannot be taken: the application says so
        ids = named(first["body"]) if not isinstance(first, HTTPException) and first["type"] == "http.request" else []
        given = False

        async def again() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            if isinstance(first, HTTPException):
                raise first
            return first

        if not ids:
            await self._app(scope, again, send)
            return
        with self._peers.claims.claimed(ids) as owner:
            if owner is None or is_internal(scope):
                await self._app(scope, again, send)
                return
        assert not isinstance(first, HTTPException)
        try:
            await self._passing.hand_on(owner, scope, first["body"], receive, send)
        except ClientDisconnect:
            pass
        except ApiError as error:
            await error_response(error)(scope, receive, send)


class _Ids(msgspec.Struct):
    request_id: str | None = None
    rid: str | list[str] | None = None


class _Batch(msgspec.Struct):
    text: str | list[msgspec.Raw] | None = None
    input_ids: list[msgspec.Raw] | None = None


_read_ids = msgspec.json.Decoder(_Ids).decode
_read_batch = msgspec.json.Decoder(_Batch).decode


def named(body: bytes) -> list[str]:
    """The ids that a client gave the request of this body; none if it cannot be read, which others will say."""
    if _HAS_ID.search(body) is None:
        return []
    with contextlib.suppress(*UNREADABLE):
        ids = _read_ids(body)
        if ids.request_id:
            return [ids.request_id]
        rids = _each(ids.rid, _read_batch(body)) if isinstance(ids.rid, str) else ids.rid or []
        return [rid for rid in rids if rid]
    return []


def _each(rid: str, batch: _Batch) -> list[str]:
    """The one id of a batch for /generate names its prompts by their numbers, as `sglang_generate` calls them."""
    prompts: Sequence[object] = [rid]
    if isinstance(batch.text, list):
        prompts = batch.text
    elif batch.input_ids and bytes(batch.input_ids[0]).lstrip().startswith(b"["):
        prompts = batch.input_ids
    return [f"{rid}_{i}" for i in range(len(prompts))] if rid and len(prompts) > 1 else [rid]


def is_local(path: str) -> bool:
    """Whether every process answers this by itself."""
    path = path.rstrip("/") or "/"
    return path in LOCAL or any(path == below or path.startswith(below + "/") for below in LOCAL_BELOW)


def is_internal(scope: Scope) -> bool:
    """Whether it came over the Unix socket, from another API process."""
    return bool(scope.get("state", {}).get("internal"))


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    while (message := await receive())["type"] == "http.request":
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    return bytes(body)


async def _nothing_more() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}

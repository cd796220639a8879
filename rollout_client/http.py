"""HTTP client of the service's native routes: generation, pauses, weights. Sync and async, the same methods.

    with RolloutClient("http://127.0.0.1:8000") as client:
        result = client.generate(prompt_ids=[[1, 2, 3]], n=8, max_tokens=64)
        for output in result.outputs:
            output.token_ids, output.logprobs, output.spans

Ids are exactly what was sampled, the stop token included; logprobs are of the distribution sampled from;
spans say which weight version made which tokens, and `output.computed_by(...)` which computed what they were sampled
from. What each method takes, sends and returns is written in http_calls.py; here it is sent, in two ways.
"""

import inspect
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, get_args

import httpx

from rollout_client import http_calls as calls
from rollout_client.http_calls import (
    DEFAULT_URL,
    Generation,
    Loaded,
    Output,
    PauseState,
    Prompt,
    PromptIds,
    RequestFailed,
    Score,
    Scores,
    Unreachable,
    Weights,
    timeout,
)
from rollout_client.spans import ForwardPass, Span

__all__ = [
    "AsyncRolloutClient",
    "ForwardPass",
    "Generation",
    "Loaded",
    "Output",
    "PauseState",
    "RequestFailed",
    "RolloutClient",
    "Score",
    "Scores",
    "Span",
    "Unreachable",
    "Weights",
]

P = ParamSpec("P")
T = TypeVar("T")
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)
_IDLE_S, _EVERY_S, _TIMES = 30, 10, 6
"""A reply may take hours, in which nothing comes. After so long the kernel asks the other side whether it is there, and
after so many answers that do not come, so far apart, the connection is over: a host may lose its power.
"""
_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", _IDLE_S), ("TCP_KEEPINTVL", _EVERY_S), ("TCP_KEEPCNT", _TIMES))
        if hasattr(socket, name)  # trainers also run where these have other names
    ),
]

SILENCE_S = 120.0
"""A stream that has nothing to say says that every ten seconds, so one that does not is over."""
_MEET_S = 30.0
"""How long a service may take to say that it is one, before the first reply that may take hours is waited for. What
takes a connection and answers nothing, as the port for pushes does, would be waited for without end.
"""
_MUTE = "GET /live was not answered: is this the service's HTTP address?"


class _Transport(httpx.HTTPTransport):
    """Asks whether there is a service, once, before what has no timeout."""

    def __init__(self) -> None:
        super().__init__(retries=2, limits=_LIMITS, socket_options=_ALIVE)
        self._met = False

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if not self._met and _has_no_timeout(request):
            try:
                answer = super().handle_request(_greeting(request))
                answer.read()
                answer.close()
            except httpx.ReadTimeout:
                raise httpx.ReadTimeout(_MUTE) from None
            self._met = True
        return super().handle_request(request)


class _AsyncTransport(httpx.AsyncHTTPTransport):
    """The same on asyncio."""

    def __init__(self) -> None:
        super().__init__(retries=2, limits=_LIMITS, socket_options=_ALIVE)
        self._met = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if not self._met and _has_no_timeout(request):
            try:
                answer = await super().handle_async_request(_greeting(request))
                await answer.aread()
                await answer.aclose()
            except httpx.ReadTimeout:
                raise httpx.ReadTimeout(_MUTE) from None
            self._met = True
        return await super().handle_async_request(request)


def _has_no_timeout(request: httpx.Request) -> bool:
    return request.extensions["timeout"]["read"] is None


def _greeting(request: httpx.Request) -> httpx.Request:
    """Anybody who speaks HTTP answers it, whatever he says."""
    limits = httpx.Timeout(_MEET_S, connect=calls.CONNECT_S).as_dict()
    return httpx.Request("GET", request.url.copy_with(raw_path=b"/live"), extensions={"timeout": limits})


def _described(method: Callable[..., Any], verb: Callable[..., Any]) -> None:
    """What `help`, editors and `inspect.signature` say of a method is what they say of its verb."""
    signature = inspect.signature(verb)
    (reply,) = get_args(signature.return_annotation)
    me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__name__, method.__doc__ = verb.__name__, verb.__doc__
    method.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[me, *signature.parameters.values()], return_annotation=None if reply is type(None) else reply
    )


def _blocking(verb: Callable[P, calls.Call[T]]) -> "Callable[Concatenate[RolloutClient, P], T]":
    def method(self: "RolloutClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._do(verb(*args, **kwargs))

    _described(method, verb)
    return method


def _awaited(
    verb: Callable[P, calls.Call[T]],
) -> "Callable[Concatenate[AsyncRolloutClient, P], Coroutine[Any, Any, T]]":
    async def method(self: "AsyncRolloutClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._do(verb(*args, **kwargs))

    _described(method, verb)
    return method


class RolloutClient:
    """Blocking. token: the admin token where control verbs are used. Raises RequestFailed and Unreachable."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._http = httpx.Client(
            base_url=url,
            headers=calls.headers(token),
            transport=transport or _Transport(),
        )

    generate = _blocking(calls.generate)
    score = _blocking(calls.score)
    pause = _blocking(calls.pause)
    resume = _blocking(calls.resume)
    pause_state = _blocking(calls.pause_state)
    abort = _blocking(calls.abort)
    weights = _blocking(calls.weights)
    wait_for_version = _blocking(calls.wait_for_version)
    load_weights = _blocking(calls.load_weights)
    rollback = _blocking(calls.rollback)
    abort_push = _blocking(calls.abort_push)
    adapters = _blocking(calls.adapters)
    load_adapter = _blocking(calls.load_adapter)
    unload_adapter = _blocking(calls.unload_adapter)
    rollback_adapter = _blocking(calls.rollback_adapter)
    ready = _blocking(calls.ready)

    def stream(
        self, prompt: Prompt | None = None, *, prompt_ids: PromptIds | None = None, **fields: Any
    ) -> Iterator[Generation]:
        """Generate like `generate`, piece by piece. Stopping the iteration ends the request on the server."""
        call = calls.stream(prompt, prompt_ids, fields)
        try:
            with self._http.stream(call.method, call.path, json=call.body, timeout=timeout(SILENCE_S)) as response:
                if not response.is_success:
                    response.read()
                    raise calls.failure(response)
                for line in response.iter_lines():
                    if (piece := calls.event(line)) is not None:
                        yield piece
        except httpx.TransportError as error:
            raise Unreachable(f"{self._http.base_url}: {error}") from error

    def close(self) -> None:
        """Close connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _do(self, call: calls.Call[T]) -> T:
        try:
            response = self._http.request(
                call.method, call.path, json=call.body, params=call.query, timeout=timeout(call.timeout_s)
            )
        except httpx.TransportError as error:
            raise Unreachable(f"{self._http.base_url}: {error}") from error
        return call.decode(response)


class AsyncRolloutClient:
    """`RolloutClient` on asyncio."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=calls.headers(token),
            transport=transport or _AsyncTransport(),
        )

    generate = _awaited(calls.generate)
    score = _awaited(calls.score)
    pause = _awaited(calls.pause)
    resume = _awaited(calls.resume)
    pause_state = _awaited(calls.pause_state)
    abort = _awaited(calls.abort)
    weights = _awaited(calls.weights)
    wait_for_version = _awaited(calls.wait_for_version)
    load_weights = _awaited(calls.load_weights)
    rollback = _awaited(calls.rollback)
    abort_push = _awaited(calls.abort_push)
    adapters = _awaited(calls.adapters)
    load_adapter = _awaited(calls.load_adapter)
    unload_adapter = _awaited(calls.unload_adapter)
    rollback_adapter = _awaited(calls.rollback_adapter)
    ready = _awaited(calls.ready)

    async def stream(
        self, prompt: Prompt | None = None, *, prompt_ids: PromptIds | None = None, **fields: Any
    ) -> AsyncIterator[Generation]:
        """See RolloutClient.stream."""
        call = calls.stream(prompt, prompt_ids, fields)
        try:
            async with self._http.stream(
                call.method, call.path, json=call.body, timeout=timeout(SILENCE_S)
            ) as response:
                if not response.is_success:
                    await response.aread()
                    raise calls.failure(response)
                async for line in response.aiter_lines():
                    if (piece := calls.event(line)) is not None:
                        yield piece
        except httpx.TransportError as error:
            raise Unreachable(f"{self._http.base_url}: {error}") from error

    async def aclose(self) -> None:
        """Close connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _do(self, call: calls.Call[T]) -> T:
        try:
            response = await self._http.request(
                call.method, call.path, json=call.body, params=call.query, timeout=timeout(call.timeout_s)
            )
        except httpx.TransportError as error:
            raise Unreachable(f"{self._http.base_url}: {error}") from error
        return call.decode(response)

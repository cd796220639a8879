"""The client of http.py on asyncio."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Self, TypeVar

import httpx

from rollout_client import http_calls as calls
from rollout_client.http_calls import (
    DEFAULT_URL,
    Generation,
    InFlight,
    Loaded,
    PauseMode,
    PauseState,
    Prompt,
    PromptIds,
    Unreachable,
    Weights,
    timeout,
)

T = TypeVar("T")


class AsyncRolloutClient:
    """The same on asyncio."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=calls.headers(token),
            transport=transport or httpx.AsyncHTTPTransport(retries=2, limits=limits),
        )

    async def generate(
        self,
        prompt: Prompt | None = None,
        *,
        prompt_ids: PromptIds | None = None,
        n: int = 1,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
        session: str | None = None,
        request_id: str | None = None,
        min_weight_version: int | None = None,
        **more: Any,
    ) -> Generation:
        """See RolloutClient.generate. Cancelling it ends the request on the server."""
        fields = {
            "n": n,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "session": session,
            "request_id": request_id,
            "min_weight_version": min_weight_version,
        }
        return await self._do(calls.generate(prompt, prompt_ids, False, fields | more))

    async def stream(
        self, prompt: Prompt | None = None, *, prompt_ids: PromptIds | None = None, **fields: Any
    ) -> AsyncIterator[Generation]:
        """See RolloutClient.stream."""
        call = calls.generate(prompt, prompt_ids, True, fields)
        try:
            async with self._http.stream(call.method, call.path, json=call.body, timeout=timeout(None)) as response:
                if not response.is_success:
                    await response.aread()
                    raise calls.failure(response)
                async for line in response.aiter_lines():
                    if (piece := calls.event(line)) is not None:
                        yield piece
        except httpx.TransportError as error:
            raise Unreachable(f"{self._http.base_url}: {error}") from error

    async def pause(
        self,
        mode: PauseMode = "abort",
        *,
        lease_s: float | None = None,
        clear_cache: bool = True,
        deadline_s: float = 60.0,
    ) -> PauseState:
        """See RolloutClient.pause."""
        return await self._do(calls.pause(mode, lease_s, clear_cache, deadline_s))

    async def resume(self) -> PauseState:
        """See RolloutClient.resume."""
        return await self._do(calls.RESUME)

    async def pause_state(self) -> PauseState:
        """See RolloutClient.pause_state."""
        return await self._do(calls.PAUSE_STATE)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """See RolloutClient.abort."""
        return (await self._do(calls.abort(request_ids))).aborted

    async def weights(self) -> Weights:
        """See RolloutClient.weights."""
        return await self._do(calls.WEIGHTS)

    async def wait_for_version(self, version: int, *, timeout_s: float = 60.0) -> Weights:
        """See RolloutClient.wait_for_version."""
        return await self._do(calls.wait(version, timeout_s))

    async def load_weights(
        self,
        path: str,
        *,
        version: int | None = None,
        in_flight: InFlight = "keep",
        deadline_s: float = 180.0,
        force: bool = False,
    ) -> Loaded:
        """See RolloutClient.load_weights."""
        return await self._do(calls.load(path, version, in_flight, deadline_s, force))

    async def rollback(self, *, in_flight: InFlight = "keep", deadline_s: float = 60.0) -> Loaded:
        """See RolloutClient.rollback."""
        return await self._do(calls.rollback(in_flight, deadline_s))

    async def abort_push(self) -> None:
        """See RolloutClient.abort_push."""
        await self._do(calls.ABORT_PUSH)

    async def ready(self) -> dict[str, Any]:
        """See RolloutClient.ready."""
        return await self._do(calls.READY)

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
                call.method,
                call.path,
                json=call.body,
                params=call.query,
                timeout=timeout(call.timeout_s),
            )
        except httpx.TransportError as error:
            raise Unreachable(f"{self._http.base_url}: {error}") from error
        return call.decode(response)

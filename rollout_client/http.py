"""HTTP client of the service's native routes: generation, pauses, weights. Sync and async, the same methods.

    with RolloutClient("http://127.0.0.1:8000") as client:
        result = client.generate(prompt_ids=[[1, 2, 3]], n=8, max_tokens=64)
        for output in result.outputs:
            output.token_ids, output.logprobs, output.spans

Ids are exactly what was sampled, the stop token included; logprobs are of the distribution sampled from;
spans say which weight version made which tokens, and `output.computed_by(...)` which computed what they were sampled
from.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Self, TypeVar

import httpx

from rollout_client import http_calls as calls
from rollout_client.http_async import AsyncRolloutClient
from rollout_client.http_calls import (
    DEFAULT_URL,
    Generation,
    InFlight,
    Loaded,
    Output,
    PauseMode,
    PauseState,
    Prompt,
    PromptIds,
    RequestFailed,
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
    "Span",
    "Unreachable",
    "Weights",
]

T = TypeVar("T")


class RolloutClient:
    """Blocking. token: the admin token where control verbs are used. Raises RequestFailed and Unreachable."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.Client(
            base_url=url,
            headers=calls.headers(token),
            transport=transport or httpx.HTTPTransport(retries=2, limits=limits),
        )

    def generate(
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
        """Sample n continuations of each prompt. `more`: any other field of the route's request schema."""
        fields = {
            "n": n,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "session": session,
            "request_id": request_id,
            "min_weight_version": min_weight_version,
        }
        return self._do(calls.generate(prompt, prompt_ids, False, fields | more))

    def stream(
        self, prompt: Prompt | None = None, *, prompt_ids: PromptIds | None = None, **fields: Any
    ) -> Iterator[Generation]:
        """As `generate`, piece by piece. Stopping the iteration ends the request on the server."""
        call = calls.generate(prompt, prompt_ids, True, fields)
        try:
            with self._http.stream(call.method, call.path, json=call.body, timeout=timeout(None)) as response:
                if not response.is_success:
                    response.read()
                    raise calls.failure(response)
                for line in response.iter_lines():
                    if (piece := calls.event(line)) is not None:
                        yield piece
        except httpx.TransportError as error:
            raise Unreachable(f"{self._http.base_url}: {error}") from error

    def pause(
        self,
        mode: PauseMode = "abort",
        *,
        lease_s: float | None = None,
        clear_cache: bool = True,
        deadline_s: float = 60.0,
    ) -> PauseState:
        """Hold new requests and stop stepping on every replica. lease_s: resumes by itself; 0 = never."""
        return self._do(calls.pause(mode, lease_s, clear_cache, deadline_s))

    def resume(self) -> PauseState:
        """Go on. Idempotent."""
        return self._do(calls.RESUME)

    def pause_state(self) -> PauseState:
        """Whether and how generation is paused."""
        return self._do(calls.PAUSE_STATE)

    def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End requests by id, or all; their callers get what there is. Returns how many were open."""
        return self._do(calls.abort(request_ids)).aborted

    def weights(self) -> Weights:
        """What is live, what is on its way, who holds what."""
        return self._do(calls.WEIGHTS)

    def wait_for_version(self, version: int, *, timeout_s: float = 60.0) -> Weights:
        """Return once this version or a later one is live. RequestFailed (409) after timeout_s."""
        return self._do(calls.wait(version, timeout_s))

    def load_weights(
        self,
        path: str,
        *,
        version: int | None = None,
        in_flight: InFlight = "keep",
        deadline_s: float = 180.0,
        force: bool = False,
    ) -> Loaded:
        """Make a checkpoint directory on the server live, all or nothing."""
        return self._do(calls.load(path, version, in_flight, deadline_s, force))

    def rollback(self, *, in_flight: InFlight = "keep", deadline_s: float = 60.0) -> Loaded:
        """Serve the version before the live one again. RequestFailed (409) when it is not kept any more."""
        return self._do(calls.rollback(in_flight, deadline_s))

    def abort_push(self) -> None:
        """End the push in progress, whoever holds it."""
        self._do(calls.ABORT_PUSH)

    def ready(self) -> dict[str, Any]:
        """Health of every replica. RequestFailed (503) while none is ready."""
        return self._do(calls.READY)

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
                call.method,
                call.path,
                json=call.body,
                params=call.query,
                timeout=timeout(call.timeout_s),
            )
        except httpx.TransportError as error:
            raise Unreachable(f"{self._http.base_url}: {error}") from error
        return call.decode(response)

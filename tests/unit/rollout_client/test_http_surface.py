"""What trainers call: names, parameters and defaults of both clients. A change here breaks somebody's code."""

import inspect

import pytest

from rollout_client.http import AsyncRolloutClient, RolloutClient

PROMPT = "prompt: str | collections.abc.Sequence[str] | None = None"
IDS = (
    "prompt_ids: collections.abc.Sequence[int] | collections.abc.Sequence[collections.abc.Sequence[int]] | None = None"
)
IN_FLIGHT = "in_flight: Literal['keep', 'recompute', 'abort', 'wait'] = 'keep'"
ADAPTER_IN_FLIGHT = "in_flight: Literal['keep', 'recompute', 'abort', 'wait', 'finish'] = 'keep'"
SAMPLING = (
    "n: int = 1, max_tokens: int | None = None, temperature: float = 1.0, seed: int | None = None, "
    "session: str | None = None, request_id: str | None = None, min_weight_version: int | None = None, **more: Any"
)
CALLS = "rollout_client.http_calls"
VERBS = {
    "generate": f"(self, {PROMPT}, *, {IDS}, {SAMPLING}) -> {CALLS}.Generation",
    "score": "(self, prompt_ids: collections.abc.Sequence[collections.abc.Sequence[int]], "
    "token_ids: collections.abc.Sequence[collections.abc.Sequence[int]], *, temperature: float = 1.0, "
    "weight_version: int | None = None, weight_digest: str | None = None, session: str | None = None, "
    f"request_id: str | None = None, **more: Any) -> {CALLS}.Scores",
    "pause": "(self, mode: Literal['abort', 'wait', 'keep', 'recompute'] = 'abort', *, lease_s: float | None = None, "
    f"clear_cache: bool = True, deadline_s: float = 60.0) -> {CALLS}.PauseState",
    "resume": f"(self) -> {CALLS}.PauseState",
    "pause_state": f"(self) -> {CALLS}.PauseState",
    "abort": "(self, request_ids: collections.abc.Sequence[str] | None = None) -> int",
    "weights": f"(self) -> {CALLS}.Weights",
    "wait_for_version": f"(self, version: int, *, timeout_s: float = 60.0) -> {CALLS}.Weights",
    "load_weights": f"(self, path: str, *, version: int | None = None, {IN_FLIGHT}, deadline_s: float = 180.0, "
    f"force: bool = False) -> {CALLS}.Loaded",
    "rollback": f"(self, *, {IN_FLIGHT}, deadline_s: float = 60.0) -> {CALLS}.Loaded",
    "abort_push": "(self) -> None",
    "adapters": f"(self) -> list[{CALLS}.Adapter]",
    "load_adapter": f"(self, name: str, path: str, *, version: int | None = None, {ADAPTER_IN_FLIGHT}, "
    f"deadline_s: float = 60.0, force: bool = False) -> {CALLS}.LoadedAdapter",
    "unload_adapter": "(self, name: str, *, deadline_s: float = 60.0) -> None",
    "rollback_adapter": f"(self, name: str, *, {ADAPTER_IN_FLIGHT}, deadline_s: float = 60.0) -> {CALLS}.LoadedAdapter",
    "ready": "(self) -> dict[str, typing.Any]",
}
OWN = {
    RolloutClient: {
        "__init__": "(self, url: str = 'http://127.0.0.1:8000', *, token: str | None = None, "
        "transport: httpx.BaseTransport | None = None) -> None",
        "stream": f"(self, {PROMPT}, *, {IDS}, **fields: Any) -> collections.abc.Iterator[{CALLS}.Generation]",
        "close": "(self) -> None",
    },
    AsyncRolloutClient: {
        "__init__": "(self, url: str = 'http://127.0.0.1:8000', *, token: str | None = None, "
        "transport: httpx.AsyncBaseTransport | None = None) -> None",
        "stream": f"(self, {PROMPT}, *, {IDS}, **fields: Any) -> collections.abc.AsyncIterator[{CALLS}.Generation]",
        "aclose": "(self) -> None",
    },
}


@pytest.mark.parametrize("client", OWN)
def test_methods_and_their_parameters(client):
    found = {
        name: str(inspect.signature(method))
        for name, method in vars(client).items()
        if callable(method) and (name == "__init__" or not name.startswith("_"))
    }
    assert found == OWN[client] | VERBS


@pytest.mark.parametrize("name", VERBS)
def test_methods_are_documented_under_their_names_and_the_async_ones_are_coroutines(name):
    for client, is_coroutine in ((RolloutClient, False), (AsyncRolloutClient, True)):
        method = getattr(client, name)
        assert (method.__name__, inspect.iscoroutinefunction(method)) == (name, is_coroutine)
        assert method.__doc__

"""Bad HTTP input gets a 4xx that says what is wrong, and the service goes on as if nothing had been sent."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.integration.live import LiveService

GENERATE = "/v1/rollout/generate"
COMPLETIONS = "/v1/completions"
IDS = [5, 6, 7]


@pytest.fixture(autouse=True)
def healthy(service: LiveService) -> Iterator[None]:
    """The same tokens before and after, from a service that says that it is ready."""
    with service.client() as client:
        ask = {"prompt_ids": IDS, "max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
        before = client.generate(**ask).outputs[0].token_ids
        yield
        assert client.generate(**ask).outputs[0].token_ids == before
        assert client.ready()["status"] == "ok"
        assert not client.pause_state().paused


@pytest.mark.parametrize(
    ("route", "body", "says"),
    [
        (GENERATE, {"prompt_ids": "five"}, "prompt_ids"),
        (GENERATE, {"prompt_ids": [1, "x"]}, "prompt_ids"),
        (GENERATE, {"prompt_ids": [1.5]}, "prompt_ids"),
        (GENERATE, {"prompt_ids": [-1]}, "prompt_ids"),
        (GENERATE, {"prompt_ids": [128]}, "128"),
        (GENERATE, {"prompt_ids": []}, "prompt_ids"),
        (GENERATE, {}, "prompt"),
        (GENERATE, {"prompt_ids": IDS, "prompt": "both"}, "prompt"),
        (GENERATE, {"prompt_ids": IDS, "max_token": 3}, "max_token"),
        (GENERATE, {"prompt_ids": IDS, "max_tokens": "many"}, "max_tokens"),
        (GENERATE, {"prompt_ids": IDS, "max_tokens": -1}, "max_tokens"),
        (GENERATE, {"prompt_ids": IDS, "n": 0}, "n"),
        (GENERATE, {"prompt_ids": IDS, "temperature": -1}, "temperature"),
        (GENERATE, {"prompt_ids": IDS, "top_p": 0}, "top_p"),
        (GENERATE, {"prompt_ids": IDS, "stop": 5}, "stop"),
        (GENERATE, {"prompt_ids": list(range(1, 128)) * 3}, "256"),
        (GENERATE, {"prompt_ids": IDS, "min_weight_version": 10**9, "version_timeout_s": 0.2}, "version"),
        (COMPLETIONS, {"prompt": IDS, "n": 0}, "n"),
        (COMPLETIONS, {"prompt": IDS, "temperature": -1}, "temperature"),
        (COMPLETIONS, {"prompt": list(range(1, 128)) * 3}, "256"),
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
        ("/v1/chat/completions", {"messages": "hello"}, "messages"),
        ("/v1/rollout/pause", {"mode": "sideways"}, "mode"),
        ("/v1/rollout/weights/load", {"path": "/etc"}, "disk_roots"),
        ("/v1/rollout/weights/load", {"path": "nowhere", "version": -1}, "version"),
    ],
)
def test_a_wrong_body_is_refused(service: LiveService, route: str, body: dict[str, Any], says: str) -> None:
    answer = httpx.post(service.url + route, json=body, timeout=10)
    assert 400 <= answer.status_code < 500, answer.text
    assert says in json.dumps(answer.json()["error"])


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b'"text"', b'{"prompt": "\xff\xfe"}', b"\x80\x04\x95", b"{" * 100_000],
)
@pytest.mark.parametrize("route", [GENERATE, COMPLETIONS])
def test_bytes_that_are_no_request_are_refused(service: LiveService, route: str, raw: bytes) -> None:
    answer = httpx.post(service.url + route, content=raw, headers={"content-type": "application/json"}, timeout=10)
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [{"prompt": "x" * (10 << 20)}, {"prompt_ids": [1] * (5 << 20)}])
def test_a_prompt_of_ten_megabytes_is_refused(service: LiveService, body: dict[str, Any]) -> None:
    answer = httpx.post(service.url + GENERATE, json=body, timeout=30)
    assert answer.status_code == 413
    assert answer.json()["error"]["message"]


def test_a_prompt_that_fits_the_body_but_not_the_context_is_refused(service: LiveService) -> None:
    answer = httpx.post(service.url + GENERATE, json={"prompt_ids": [1] * (1 << 20)}, timeout=30)
    assert 400 <= answer.status_code < 500


@pytest.mark.parametrize("route", ["/v1/rollout/versions", "/nothing", "/v1/models/other"])
def test_an_unknown_route_or_model_is_a_404(service: LiveService, route: str) -> None:
    answer = httpx.get(service.url + route)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"]


def test_a_version_that_never_comes_is_a_409(service: LiveService) -> None:
    answer = httpx.get(f"{service.url}/v1/rollout/weights/wait", params={"version": 10**9, "timeout_s": 0.2})
    assert answer.status_code == 409
    assert "version" in answer.json()["error"]["message"]

"""Two nodes, each a whole service with a store, a worker and an API, whose stores form a tree: adapters that are pushed
to the root are served by both, under one version, which every token names.
"""

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from rollout_client.errors import RolloutError
from rollout_client.http import RolloutClient
from tests.integration.conftest import small
from tests.integration.live import LiveService
from tests.reference.adapters import adapter, adapter_config
from tests.reference.checkpoint import Checkpoint, random_weights

PROMPT = [5, 17, 42, 9]
LONGEST_S = 180
RANK = 4
CONFIG = adapter_config(RANK)


@pytest.fixture
def node(tiny: Checkpoint) -> Iterator[Callable[..., LiveService]]:
    """Starts services that end with the test, and leave nothing."""
    services: list[LiveService] = []

    def start(*settings: str) -> LiveService:
        words = [word for setting in settings for word in ("--set", setting)]
        services.append(LiveService(tiny.directory, *words, *small()))
        services[-1].start().wait_for_all()
        return services[-1]

    try:
        yield start
        for service in reversed(services):
            assert service.stop() == 0, service.tail()
            service.assert_nothing_left()
    finally:
        for service in services:
            service.close()


def listed(service: LiveService) -> list[str]:
    """Names of the adapters, as OpenAI's clients see them."""
    models = httpx.get(f"{service.url}/v1/models", timeout=10.0).json()["data"]
    return sorted(model["id"] for model in models if model.get("parent"))


def sampled(service: LiveService, name: str) -> tuple[set[int | None], list[int], Any]:
    """Versions of the adapter that its spans name, its tokens, and their logprobs."""
    with RolloutClient(service.url) as client:
        (output,) = client.generate(
            prompt_ids=PROMPT, adapter=name, max_tokens=24, temperature=0.0, ignore_eos=True
        ).outputs
    return {span.adapter_version for span in output.spans}, output.token_ids, np.array(output.logprobs)


@pytest.mark.timeout(LONGEST_S)
def test_two_nodes_serve_one_version_of_an_adapter(node: Callable[..., LiveService], tiny: Checkpoint) -> None:
    base, run = random_weights(tiny.config, 401), f"nodes-{uuid.uuid4().hex[:8]}"
    root = node("store.relay_endpoint=tcp://127.0.0.1:*")
    with root.publisher(run) as publisher:
        publisher.push(base, 1)
        for version, name in ((3, "policy-a"), (5, "policy-b")):
            publisher.push_adapter(name, adapter(base, version, RANK), CONFIG, version)
        late = node(f"store.upstream={(root.run_dir / 'relay_endpoint').read_text().strip()}")
        both = root, late
        for name, versions in (("policy-a", {3}), ("policy-b", {5}), ("", {None})):
            (said, tokens, logprobs), (said_too, tokens_too, logprobs_too) = (sampled(one, name) for one in both)
            assert said == said_too == versions
            assert tokens == tokens_too
            np.testing.assert_allclose(logprobs, logprobs_too, atol=1e-4)
        before = sampled(late, "policy-a")[1]
        assert publisher.push_adapter("policy-a", adapter(base, 9, RANK), CONFIG, 9).replicas == 2
        for service in both:
            assert listed(service) == ["policy-a", "policy-b"]
            said, tokens, _ = sampled(service, "policy-a")
            assert said == {9}
            assert tokens != before
        publisher.unload_adapter("policy-b")
        for service in both:
            assert listed(service) == ["policy-a"]
            with pytest.raises(RolloutError, match="policy-b"):
                sampled(service, "policy-b")
        with late.publisher(run) as other, pytest.raises(RolloutError, match="ask the root"):
            other.push_adapter("policy-a", adapter(base, 10, RANK), CONFIG, 10)
        with root.client() as client:
            client.rollback_adapter("policy-a")
        for service in both:
            assert sampled(service, "policy-a")[:2] == ({3}, before)

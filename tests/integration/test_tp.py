"""Two ranks serve what one rank serves, through pushes and a clear and reload."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.integration.conftest import running
from tests.integration.live import READY_S, LiveService
from tests.reference.adapters import adapter, adapter_config, merged
from tests.reference.checkpoint import Checkpoint, Weights, random_weights
from tests.reference.llama import Replay

PROMPTS = np.random.default_rng(3).integers(1, 128, (8, 12)).tolist()


@pytest.fixture(scope="module")
def split(tiny: Checkpoint) -> Iterator[LiveService]:
    """One replica of two ranks."""
    yield from running(tiny.directory, "--tp", "2", dies=True)


def greedy(live: LiveService) -> list[list[int]]:
    with live.client() as client:
        reply = client.generate(prompt_ids=PROMPTS, max_tokens=24, temperature=0.0, ignore_eos=True)
    return [output.token_ids for output in reply.outputs]


def logprobs(live: LiveService, ids: list[int]) -> list[float]:
    with live.client() as client:
        return (
            client.generate(prompt_ids=ids, max_tokens=16, temperature=1.0, seed=7, ignore_eos=True).outputs[0].logprobs
        )


def test_two_ranks_make_the_tokens_of_one(service: LiveService, split: LiveService, tiny: Checkpoint) -> None:
    for version, seed in enumerate((301, 302, 303), start=1):
        weights = random_weights(tiny.config, seed)
        for live in (service, split):
            with live.publisher("tp") as publisher:
                assert publisher.push(weights, version).version == version
        assert greedy(split) == greedy(service)
        np.testing.assert_allclose(logprobs(split, PROMPTS[0]), logprobs(service, PROMPTS[0]), atol=1e-4)


def test_the_ranks_sum_in_memory_that_they_share(split: LiveService) -> None:
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in store_view(split)["pids"]]
    assert len(maps) == 2
    assert all("memfd:paddle-rollout-sums" in text for text in maps), split.tail()


def test_an_adapters_versions_come_and_go_and_outlive_the_ranks(split: LiveService, tiny: Checkpoint) -> None:
    """More versions than an adapter has places, so that those before have to be let go; then the ranks are killed."""
    weights = random_weights(tiny.config, 305)
    with split.publisher("tp-adapter") as publisher:
        publisher.push(weights, 1)
        for version in range(1, 12):
            changes = adapter(weights, version, 4)
            publisher.push_adapter("policy-a", changes, adapter_config(4), version)
            check_adapted(split, tiny, merged(weights, changes), version)
    before = store_view(split)
    os.kill(before["pids"][0], signal.SIGKILL)
    until = time.monotonic() + READY_S
    while store_view(split).get("pids") == before["pids"] or not httpx.get(f"{split.url}/ready", timeout=30).is_success:
        assert time.monotonic() < until, split.tail()
        time.sleep(0.05)
    check_adapted(split, tiny, merged(weights, changes), version)
    described = httpx.get(f"{split.url}/v1/rollout/adapters", timeout=30).json()["adapters"]
    assert [entry["version"] for entry in described] == [version]


def store_view(live: LiveService) -> dict[str, Any]:
    """What the store says of the replica; nothing while there is none."""
    (replica,) = httpx.get(f"{live.url}/v1/rollout/weights", timeout=30).json()["replicas"]
    view: dict[str, Any] = replica["store"] or {}
    return view


def check_adapted(live: LiveService, tiny: Checkpoint, weights: Weights, version: int) -> None:
    """What is served under the adapter's name is these weights, and says so."""
    with live.client() as client:
        reply = client.generate(prompt_ids=PROMPTS[0], max_tokens=8, temperature=0, ignore_eos=True, adapter="policy-a")
    (output,) = reply.outputs
    assert [span.adapter_version for span in output.spans] == [version]
    expected = Replay(tiny.config, [weights]).logprobs(PROMPTS[0] + output.token_ids, [0] * 20).argmax(-1)
    assert output.token_ids == expected[11:-1].tolist()


def test_they_come_back_after_clear_and_reload(split: LiveService, tiny: Checkpoint) -> None:
    weights = random_weights(tiny.config, 304)
    with split.publisher("tp-clear") as publisher:
        publisher.push(weights, 1)
    before = greedy(split)
    for route in ("/v1/rollout/memory/release", "/v1/rollout/memory/resume"):
        answer = httpx.post(split.url + route, timeout=30)
        assert answer.status_code == 200, answer.text
    assert greedy(split) == before
    replay = Replay(tiny.config, [weights])
    expected = replay.logprobs(PROMPTS[0] + before[0], [0] * 36).argmax(-1)
    assert before[0] == expected[11:-1].tolist()


def test_every_rank_holds_its_share(split: LiveService) -> None:
    found = httpx.post(f"{split.url}/v1/rollout/weights/verify", timeout=30).json()["replicas"]["0"]
    assert sorted(found) == ["0", "1"]
    assert found["0"]["model.norm.weight"] == found["1"]["model.norm.weight"]
    shard = "model.layers.0.mlp.up_proj.weight"
    assert found["0"][shard] != found["1"][shard]

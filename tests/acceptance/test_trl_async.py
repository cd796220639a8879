"""TRL's AsyncGRPOTrainer: a rollout process of its own samples while the trainer trains and syncs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.conftest import RunClient
from tests.acceptance.tools import takes_minutes
from tests.integration.conftest import running
from tests.integration.live import LiveService

SYNCS = 4


@takes_minutes
@pytest.mark.timeout(600)
def test_async_grpo(service: LiveService, qwen2: Path, tmp_path: Path, run_client: RunClient) -> None:
    steps, staleness, every = 6, 2, 1
    args = (service.url, service.push_endpoint, qwen2, tmp_path / "out", steps, staleness, every, "weights")
    found = run_client("trl", "trl_async", *args, timeout_s=540)
    assert found["steps"] == steps
    assert found["counters"]["rollout/pushes"] >= SYNCS
    more = found["more"]
    assert max(more["sample/staleness_max"]) <= staleness
    fresh = [i for i, stale in enumerate(more["sample/staleness_max"]) if stale == 0]
    assert fresh, more
    for step in fresh:  # sampled from the weights that are trained: the first step at least
        assert abs(more["ratio"][step] - 1) < 1e-3, more
        assert abs(found["logged"]["kl"][step]) < 1e-4, found["logged"]
    with service.client() as client:
        assert not client.pause_state().paused


@pytest.fixture
def with_disk(qwen2: Path, tmp_path: Path) -> Iterator[LiveService]:
    """A service that may load adapters from where the trainer saves them."""
    yield from running(qwen2, "--set", f'store.disk_roots=["{tmp_path}"]')


@takes_minutes
@pytest.mark.timeout(900)
def test_async_grpo_syncs_an_adapter(
    with_disk: LiveService, qwen2: Path, tmp_path: Path, run_client: RunClient
) -> None:
    """As TRL has it for vLLM: it saves the adapter, loads it under a name of each version, and samples by that name."""
    steps, staleness, every = 200, 2, 1
    args = (with_disk.url, with_disk.push_endpoint, qwen2, tmp_path / "out", steps, staleness, every, "adapter")
    found = run_client("trl", "trl_async", *args, timeout_s=840)
    assert found["steps"] == steps
    more, rewards = found["more"], found["logged"]["reward"]
    fresh = [i for i, stale in enumerate(more["sample/staleness_max"]) if stale == 0]
    assert fresh, more
    for step in fresh:  # sampled from the adapter that is trained
        assert abs(more["ratio"][step] - 1) < 1e-4, more
        assert abs(found["logged"]["kl"][step]) < 1e-4, found["logged"]
    early, late = (sum(part) / len(part) for part in (rewards[:30], rewards[-30:]))
    gaps = [abs(found["logged"]["kl"][step]) for step in fresh]
    print(f"reward {early:.3f} -> {late:.3f}; logprobs of {len(fresh)} fresh steps differ by {max(gaps):.1e} at most")
    assert late > early + 0.1, rewards  # one step's mean moves by 0.05 from sample to sample
    with with_disk.client() as client:
        assert client.weights().live.version == 0, "the base has not moved"
        names = {adapter.name for adapter in client.adapters()}
    assert f"trl-policy-v{steps}" in names or f"trl-policy-v{steps + 1}" in names, names
    assert len(names) <= staleness + 2

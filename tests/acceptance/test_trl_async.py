"""TRL's AsyncGRPOTrainer: a rollout process of its own samples while the trainer trains and syncs."""

from pathlib import Path

import pytest

from tests.acceptance.conftest import RunClient
from tests.acceptance.tools import takes_minutes
from tests.integration.live import LiveService

SYNCS = 4


@takes_minutes
@pytest.mark.timeout(600)
def test_async_grpo(service: LiveService, qwen2: Path, tmp_path: Path, run_client: RunClient) -> None:
    steps, staleness, every = 6, 2, 1
    args = (service.url, service.push_endpoint, qwen2, tmp_path / "out", steps, staleness, every)
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

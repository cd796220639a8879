import math
from pathlib import Path

import pytest

from tests.acceptance.conftest import RunClient
from tests.acceptance.tools import takes_minutes
from tests.integration.live import LiveService

STEPS = 20


@takes_minutes
@pytest.mark.timeout(400)
def test_grpo_with_rollout_func(service: LiveService, qwen2: Path, tmp_path: Path, run_client: RunClient) -> None:
    args = (service.url, service.push_endpoint, qwen2, tmp_path / "out", STEPS)
    found = run_client("trl", "trl_rollout", *args, timeout_s=360)
    assert found["steps"] == STEPS
    assert len(found["logged"]["loss"]) == STEPS
    assert all(map(math.isfinite, found["logged"]["loss"]))
    # Each step sampled from the version that was pushed for it, and from no other.
    assert found["versions"] == list(range(1, STEPS + 1))
    assert found["metrics"]["rollout/pushes"] == STEPS
    with service.client() as client:
        live = client.weights().live
    assert live is not None
    assert (live.run_id, live.version) == ("trl-rollout", STEPS)

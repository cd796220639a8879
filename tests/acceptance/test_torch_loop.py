from pathlib import Path

import pytest

from tests.acceptance.conftest import RunClient
from tests.acceptance.tools import takes_minutes
from tests.integration.live import LiveService

STEPS = 8


@takes_minutes
@pytest.mark.timeout(180)
def test_a_loop_of_one_s_own(service: LiveService, qwen2: Path, run_client: RunClient) -> None:
    found = run_client("trl", "torch_loop", service.url, service.push_endpoint, qwen2, STEPS, timeout_s=150)
    assert found["versions"] == [[step] for step in range(1, STEPS + 1)]
    assert found["counters"]["rollout/pushes"] == STEPS + 1
    assert found["apart"] < 1e-4

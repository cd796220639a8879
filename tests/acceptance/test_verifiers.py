from pathlib import Path

import pytest

from tests.acceptance.conftest import RunClient
from tests.acceptance.tools import takes_minutes
from tests.integration.live import LiveService


@takes_minutes
@pytest.mark.timeout(300)
def test_renderers_generate_and_verifiers_response(service: LiveService, qwen2: Path, run_client: RunClient) -> None:
    assert run_client("verifiers", "verifiers_generate", service.url, qwen2, timeout_s=240) == "ok"

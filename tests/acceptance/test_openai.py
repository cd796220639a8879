from tests.acceptance.conftest import RunClient
from tests.integration.live import LiveService


def test_openai_sdk(service: LiveService, run_client: RunClient) -> None:
    assert run_client("openai", "openai_sdk", service.url) == "ok"

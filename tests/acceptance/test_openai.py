from tests.acceptance.conftest import RunClient
from tests.acceptance.tools import takes_minutes
from tests.integration.live import LiveService

HELD_S = 14.0


def test_openai_sdk(service: LiveService, run_client: RunClient) -> None:
    assert run_client("openai", "openai_sdk", service.url) == "ok"


@takes_minutes
def test_openai_sdk_on_a_stream_that_is_held(service: LiveService, run_client: RunClient) -> None:
    """Longer than the SDK waits in silence."""
    found = run_client("openai", "openai_held", service.url, HELD_S)
    assert found["seconds"] >= HELD_S
    assert found["tokens"] == 4

"""Agent frameworks, unmodified, with tools that are called and answers that are held to a schema.

The model is too small to call a tool of itself, so where one is to be called the request says so.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.conftest import RunClient
from tests.acceptance.tools import takes_minutes
from tests.integration.conftest import running
from tests.integration.live import LiveService

SMOLLM2 = Path("models/SmolLM2-135M-Instruct")


@pytest.fixture(scope="module")
def service() -> Iterator[LiveService]:
    if not SMOLLM2.is_dir():
        pytest.fail("models/SmolLM2-135M-Instruct is not there: run `make model`")
    yield from running(SMOLLM2, "--dtype", "bfloat16", "--max-model-len", "2048")


@takes_minutes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("client", ["openai", "instructor", "langchain", "litellm"])
def test_agents(service: LiveService, run_client: RunClient, client: str) -> None:
    assert run_client("agents", f"agents_{client}", service.url, timeout_s=240) == "ok"


@takes_minutes
@pytest.mark.timeout(300)
def test_verifiers_tool_env(service: LiveService, run_client: RunClient) -> None:
    """Over several turns, each of which begins with the ids of the one before."""
    found = run_client("verifiers-toolenv", "agents_verifiers", service.url, timeout_s=240, NO_KEY="none")
    assert found == {"exact": True, "calls": 12}

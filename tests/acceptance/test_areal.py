from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance import tiny_qwen2
from tests.acceptance.conftest import RunClient
from tests.acceptance.tools import takes_minutes
from tests.integration.conftest import running
from tests.integration.live import LiveService


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """What the trainer saves: other weights of the same model."""
    return tiny_qwen2.write(tmp_path / "saved", seed=2)


@pytest.fixture
def open_service(qwen2: Path, checkpoint: Path) -> Iterator[LiveService]:
    """A service that may load what is saved there."""
    yield from running(qwen2, "--set", f'store.disk_roots=["{checkpoint.parent}"]')


@takes_minutes
@pytest.mark.timeout(400)
def test_remote_sglang_engine(
    open_service: LiveService, checkpoint: Path, tmp_path: Path, run_client: RunClient
) -> None:
    address = open_service.url.removeprefix("http://")
    found = run_client("areal", "areal_engine", address, checkpoint, tmp_path / "areal", timeout_s=360)
    assert found["interrupted_s"] > 0.9
    with open_service.client() as client:
        live = client.weights().live
        state = client.pause_state()
    assert live is not None
    assert live.version > 0
    assert not state.paused

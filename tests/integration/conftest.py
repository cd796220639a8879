"""Real processes: every service here is what `paddle-rollout serve` starts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.live import LiveService
from tests.reference.checkpoint import Checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A two-layer Llama with tied embeddings, the size of the demo's."""
    return Checkpoint.random(tmp_path_factory.mktemp("tiny") / "model", seed=1)


@pytest.fixture(scope="module")
def service(tiny: Checkpoint) -> Iterator[LiveService]:
    """Two replicas of `tiny`, shared by a module; each test must leave it serving."""
    yield from running(tiny.directory, "--replicas", "2")


def running(model: Path, *args: str) -> Iterator[LiveService]:
    """Body of a fixture: a service of which all replicas are ready, and afterwards the proof that nothing is left."""
    live = LiveService(model, *args)
    try:
        live.start().wait_for_all()
        yield live
        assert live.stop() == 0, live.tail()
        live.assert_nothing_left()
    finally:
        live.close()

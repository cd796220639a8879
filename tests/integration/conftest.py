"""Real processes: every service here is what `paddle-rollout serve` starts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.live import LiveService
from tests.reference.checkpoint import Checkpoint

SMALL = (
    "worker.sum_parts=2",
    "worker.block_size=4",
    "worker.num_blocks=64",
    "worker.max_tokens_per_step=24",
    "worker.max_batch=12",
)
"""A sequence of the replays needs up to 21 of these blocks. Eight run at a time."""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A two-layer Llama with tied embeddings, the size of the demo's."""
    return Checkpoint.random(tmp_path_factory.mktemp("tiny") / "model", seed=1)


@pytest.fixture(scope="module")
def service(tiny: Checkpoint) -> Iterator[LiveService]:
    """Two replicas of `tiny`, shared by a module; each test must leave it serving."""
    yield from running(tiny.directory, "--replicas", "2")


@pytest.fixture(scope="module")
def one_rank(tiny: Checkpoint) -> Iterator[LiveService]:
    """Two replicas of one rank."""
    yield from running(tiny.directory, "--replicas", "2", *small(), dies=True)


@pytest.fixture(scope="module")
def two_ranks(tiny: Checkpoint) -> Iterator[LiveService]:
    """One replica of two ranks."""
    yield from running(tiny.directory, "--tp", "2", *small(), dies=True)


def small() -> list[str]:
    """Options of a service that preempts, and computes again in part what an update finds."""
    return [word for setting in SMALL for word in ("--set", setting)]


def running(model: Path, *args: str, dies: bool = False) -> Iterator[LiveService]:
    """Body of a fixture: a service of which all replicas are ready, and afterwards the proof that nothing is left.

    dies: whether a test ends its ranks. Else there are no spares: one costs what the start of a rank does.
    """
    live = LiveService(model, *([] if dies else ["--set", "worker.spares=0"]), *args)
    try:
        live.start().wait_for_all()
        yield live
        assert live.stop() == 0, live.tail()
        live.assert_nothing_left()
    finally:
        live.close()

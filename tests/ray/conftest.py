"""A Ray cluster of three nodes on this machine, and services on it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray.cluster import Nodes
from tests.ray.fleet import RayService, until
from tests.reference.checkpoint import Checkpoint

GONE_S = 20.0


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """The head has two CPUs. Tests that kill a node add another one."""
    if "RAY_TESTS" not in os.environ:
        pytest.skip("a Ray cluster of three nodes takes two cores for minutes: make ray-test runs it")
    nodes = Nodes(tmp_path_factory.mktemp("cluster") / "log", head_cpus=2)
    try:
        for _ in range(2):
            nodes.add()
        yield nodes
    finally:
        nodes.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.random(tmp_path_factory.mktemp("tiny") / "model", seed=1)


@pytest.fixture
def serve(tiny: Checkpoint, cluster: Nodes) -> Iterator[type[RayService]]:
    """Starts services; afterwards there is nothing left of them, here and on the nodes."""
    started: list[RayService] = []

    def start(*args: str, model: Path = tiny.directory) -> RayService:
        started.append(RayService(model, cluster.address, *args))
        return started[-1].start()

    try:
        yield start
        for service in started:
            assert service.stop() == 0, service.tail()
            service.assert_nothing_left()
            until(lambda service=service: not service.left_on_nodes(), GONE_S, lambda s=service: str(s.left_on_nodes()))
    finally:
        for service in started:
            service.close()

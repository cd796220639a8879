import pytest

from tests.unit.worker.loop.rig import Rig


@pytest.fixture
def make_rig():
    """Rig factory; keyword arguments are fields of WorkerConfig."""
    rigs = []

    def make(**config):
        rigs.append(Rig(**config))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.stop()


@pytest.fixture
def rig(make_rig):
    """One with defaults."""
    return make_rig()

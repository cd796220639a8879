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


@pytest.fixture
def busy(make_rig):
    """Serving version 0, with one long stream under way."""
    rig = make_rig(fake={"step_s": 0.005}, hold_s=0.4, unknown_s=1.0)
    rig.first = rig.serve()
    rig.api.generate("long", max_tokens=150)
    rig.api.until(lambda: rig.api.tokens("long") > 2)
    return rig

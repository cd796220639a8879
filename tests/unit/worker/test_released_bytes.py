"""What a clear says it released: of a device, what that got back."""

import pytest

from tests.fake_engine import FakeEngine
from worker.adapter_views import AdapterViews
from worker.boot import _NoGroups
from worker.engine.base import EngineSpec
from worker.orders import Actions, Order, Phase, Signal


class OnCard(FakeEngine):
    """Its memory is a number."""

    def __init__(self, spec, others=0):
        super().__init__(spec)
        self.free, self.others = 1000, others

    def free_memory(self):
        return self.free

    def allocate_kv(self):
        self.free -= 300

    def release_kv(self):
        self.free += 300 - self.others
        return 7


@pytest.mark.parametrize(("others", "released"), [(0, 300), (100, 200), (900, 0)])
def test_it_is_what_others_can_have_now(others, released):
    engine = OnCard(EngineSpec(10, 8, 4, 4), others)
    engine.allocate_kv()
    actions = Actions(engine, lambda path: None, _NoGroups(), lambda: None, AdapterViews(None, 0, None))
    actions.start(Order(Signal.CLEAR, Phase.RELEASE, tags=("kv_cache",)))
    assert actions.settle(ok=True).data == {"kv_cache": released}

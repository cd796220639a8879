"""A device whose steps are over when a test says so, below the loop of a rank. It computes on the host, at once."""

import contextlib
import threading
import time
from types import SimpleNamespace

from tests import fake_engine
from tests.fake_engine import FakeEngine
from tests.unit.worker.conftest import Ahead
from weight_manager.messages import InPlace
from worker import membership

PATIENCE_S = 30.0


class Gate:
    """Whether steps end. A device that is held has begun one that does not, until it may."""

    def __init__(self):
        self._changed = threading.Condition()
        self._held, self._may, self._waited = False, 0, False

    @property
    def held(self):
        return self._held

    def hold(self):
        """Returns when a step is being waited for that does not end."""
        with self._changed:
            self._held, self._waited = True, False
            assert self._changed.wait_for(lambda: self._waited, PATIENCE_S)

    def let_one_end(self):
        """Returns when the one after it is being waited for."""
        with self._changed:
            self._may, self._waited = 1, False
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._waited and not self._may, PATIENCE_S)

    def let_go(self):
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def wait(self):
        with self._changed:
            assert self._changed.wait_for(self._ends, PATIENCE_S)
            self._may = 0

    def through(self):
        with self._changed:
            return self._ends()

    def _ends(self):
        ends = not self._held or self._may > 0
        if not ends:
            self._waited = True
            self._changed.notify_all()
        return ends


def installed(monkeypatch, *, flips_early=False):
    """Ranks of rigs compute with such a device. flips_early: it launches steps with weights that are not bound, and
    binds beside steps. Of what is returned, gate: of its steps. ahead: what it was told to copy. prepare: called as it
    prepares a version. behind: the weights of each step that was launched behind another. torn: what was written to
    while a step read it, as it has memory for two versions.
    """
    found = SimpleNamespace(gate=Gate(), ahead=[], prepare=lambda: None, behind=[], torn=[])
    under_way = []

    class Held(Ahead):
        def __init__(self, engine, rows):
            super().__init__(engine, rows)
            self.weights = engine.weights()
            under_way.append(self)

        def wait(self):
            found.gate.wait()
            self._ends()

        def through(self):
            through = found.gate.through()
            if through:
                self._ends()
            return through

        def follow(self, batch, sources):
            found.behind.append(self.engine.weights())
            behind = super().follow(batch, sources)
            return Held(behind.engine, behind.rows)

        def _ends(self):
            """And all before it have ended."""
            if self in under_way:
                del under_way[: under_way.index(self) + 1]

    class Device(FakeEngine):
        def free_memory(self):
            return 0

        def forward(self, batch):
            host = SimpleNamespace(spec=self.spec, forward=super().forward, weights=lambda: self._weights)
            return Held(host, host.forward(batch))

        def bind(self, prepared):
            while any(step.weights != prepared for step in under_way.copy()):
                under_way[-1].wait()
            super().bind(prepared)

        def stage(self, live, views, regions):
            found.prepare()
            self._writes()
            return self.prepare(views)

        def _writes(self):
            found.torn += [step.weights for step in under_way.copy() if step.weights != self._weights]

        def read(self, handle, name):
            raise NotImplementedError

        def copy_ahead(self, key, memory, spans):
            self._writes()
            found.ahead.append((key, tuple(spans)))

    class FlipsEarly(Device):
        @contextlib.contextmanager
        def launching_with(self, prepared):
            bound, self._weights = self._weights, prepared
            yield
            self._weights = bound

        def bind_behind(self, prepared):
            FakeEngine.bind(self, prepared)

    monkeypatch.setattr(fake_engine, "FakeEngine", FlipsEarly if flips_early else Device)
    monkeypatch.setattr(membership, "_ARRIVING_S", 2 * PATIENCE_S)  # tests take their time
    return found


def with_streams(make_rig):
    """A rig with two streams under way."""
    rig = make_rig(fake={"step_s": 0.002}, num_blocks=2000, max_model_len=512, hold_s=20.0, unknown_s=30.0)
    rig.serve()
    for name in ("a", "b"):
        rig.api.generate(name, max_tokens=300)
    rig.api.until(lambda: min(rig.api.tokens(name) for name in ("a", "b")) > 5)
    return rig


def arriving(rig, live):
    """The store says that a part of it is there, which makes the rank listen."""
    rig.store.send(InPlace(live.slot, live.write_epoch, [(0, 64)]))


def until(true):
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


def held(rig, device, live):
    """A step is under way and does not end, and the rank listens for more of a version."""
    arriving(rig, live)
    until(lambda: device.ahead)
    device.gate.hold()
    assert rig.loop._leader.membership.expects


def finish(rig):
    for name in ("a", "b"):
        rig.api.finish(name)
        rig.check(rig.api, name)


def voted_beside_the_last_step(busy, device):
    """The rank has voted, and the step under way is the last that was launched before. Returns how many were launched
    behind others.
    """
    one = busy.store.write(1, 1)
    held(busy, device, one)
    assert busy.store.prepare("s", one).ok
    behind = len(device.behind)
    device.gate.let_one_end()
    return behind

"""What a rank that is alone does while its device computes: parts of the next version are copied, and it is prepared
and voted on. Everything else waits for the step. The engine computes on the host; steps are over when a test says so.
"""

import threading
import time
from types import SimpleNamespace

import pytest

from tests import fake_engine
from tests.fake_engine import FakeEngine
from tests.unit.worker.conftest import Ahead
from tests.unit.worker.loop.test_adapter_commits import Adapter
from weight_manager.messages import Finalize, Finalized, Flip, Flipped, InPlace, Prepare, Prepared, Rollback, RolledBack
from worker import membership, stepping

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


@pytest.fixture
def device(monkeypatch):
    """gate: of its steps. ahead: what it was told to copy. prepare: called as it prepares a version. behind: steps that
    were launched behind others.
    """
    found = SimpleNamespace(gate=Gate(), ahead=[], prepare=lambda: None, behind=0)

    class Held(Ahead):
        def wait(self):
            found.gate.wait()

        def through(self):
            return found.gate.through()

        def follow(self, batch, sources):
            found.behind += 1
            behind = super().follow(batch, sources)
            return Held(behind.engine, behind.rows)

    class Device(FakeEngine):
        def free_memory(self):
            return 0

        def forward(self, batch):
            host = SimpleNamespace(spec=self.spec, forward=super().forward)
            return Held(host, host.forward(batch))

        def stage(self, live, views, regions):
            found.prepare()
            return self.prepare(views)

        def read(self, handle, name):
            raise NotImplementedError

        def copy_ahead(self, key, memory, spans):
            found.ahead.append((key, tuple(spans)))

    monkeypatch.setattr(fake_engine, "FakeEngine", Device)
    monkeypatch.setattr(membership, "_ARRIVING_S", 2 * PATIENCE_S)  # tests take their time
    return found


@pytest.fixture
def busy(make_rig, device):
    """Two streams under way."""
    rig = make_rig(fake={"step_s": 0.002}, num_blocks=2000, max_model_len=512, hold_s=20.0, unknown_s=30.0)
    rig.serve()
    for name in ("a", "b"):
        rig.api.generate(name, max_tokens=300)
    rig.api.until(lambda: min(rig.api.tokens(name) for name in ("a", "b")) > 5)
    yield rig
    device.gate.let_go()


def _arriving(rig, live):
    """The store says that a part of it is there, which makes the rank listen."""
    rig.store.send(InPlace(live.slot, live.write_epoch, [(0, 64)]))


def _until(true):
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


def _held(rig, device, live):
    """A step is under way and does not end, and the rank listens for more of a version."""
    _arriving(rig, live)
    _until(lambda: device.ahead)
    device.gate.hold()
    assert rig.loop._leader.membership.expects


def _finish(rig):
    for name in ("a", "b"):
        rig.api.finish(name)
        rig.check(rig.api, name)


def test_a_version_is_copied_prepared_and_voted_on_while_a_step_is_computed(busy, device):
    one = busy.store.write(1, 1)
    _held(busy, device, one)
    busy.store.send(InPlace(1, one.write_epoch, [(64, 128)]))
    _until(lambda: device.ahead[-1] == ((1, one.write_epoch), ((64, 128),)))
    assert busy.store.prepare("s", one).ok
    assert device.gate.held
    device.gate.let_go()
    assert busy.store.flip("s").ok
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    _finish(busy)
    assert busy.versions("a") == [0, 1]


def test_a_vote_that_takes_longer_than_a_step_comes_beside_a_later_one(busy, device):
    ready = threading.Event()
    device.prepare = lambda: ready.wait(PATIENCE_S)
    one = busy.store.write(1, 1)
    _held(busy, device, one)
    busy.store.send(Prepare("s", one, "keep", 30.0))
    before = busy.api.tokens("a")
    _until(lambda: busy.loop._actions.work is not None)
    device.gate.let_go()
    busy.api.until(lambda: busy.api.tokens("a") > before + 3)
    device.gate.hold()
    ready.set()
    assert busy.store.expect(Prepared).ok
    assert device.gate.held


def test_a_version_that_cannot_be_prepared_is_refused_beside_a_step_and_changes_nothing(busy, device):
    def refuse():
        raise ValueError("not this one")

    device.prepare = refuse
    one = busy.store.write(1, 1)
    _held(busy, device, one)
    vote = busy.store.prepare("s", one)
    assert not vote.ok
    assert "not this one" in vote.error
    device.gate.let_go()
    _finish(busy)
    assert busy.versions("a") == [0]


def test_a_flip_waits_for_the_step_and_so_does_all_that_follows_it(busy, device):
    one = busy.store.write(1, 1)
    _held(busy, device, one)
    assert busy.store.prepare("s", one).ok
    busy.store.send(Flip("s"))
    busy.store.send(InPlace(0, 99, [(0, 64)]))
    assert busy.store.poll(0.2) is None
    assert device.ahead[-1][0] == (1, one.write_epoch)
    device.gate.let_go()
    assert busy.store.expect(Flipped).ok
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    _finish(busy)


def _voted_beside_the_last_step(busy, device):
    """The rank has voted, and the step under way is the last that was launched before. Returns how many were launched
    behind others.
    """
    one = busy.store.write(1, 1)
    _held(busy, device, one)
    assert busy.store.prepare("s", one).ok
    behind = device.behind
    device.gate.let_one_end()
    return behind


def test_a_flip_waits_for_no_step_but_the_one_under_way(busy, device, monkeypatch):
    monkeypatch.setattr(stepping, "_LEAD_S", -PATIENCE_S)  # the device is never about to stand idle
    monkeypatch.setattr(stepping, "_WORTH_S", 0.0)
    behind = _voted_beside_the_last_step(busy, device)
    busy.store.send(Flip("s"))
    device.gate.let_go()
    assert busy.store.expect(Flipped).ok
    assert device.behind == behind
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    _finish(busy)
    assert busy.versions("a") == [0, 1]


def test_a_device_is_not_left_idle_for_a_flip_that_is_not_said(busy, device, monkeypatch):
    monkeypatch.setattr(stepping, "_WORTH_S", 0.0)
    behind = _voted_beside_the_last_step(busy, device)
    _until(lambda: device.behind > behind)
    assert device.gate.held, "the step before is still under way"
    device.gate.let_go()
    assert busy.store.flip("s").ok
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    _finish(busy)


def test_a_step_that_was_put_off_is_launched_once_the_commit_is_over(busy, device, monkeypatch):
    monkeypatch.setattr(stepping, "_LEAD_S", -PATIENCE_S)
    monkeypatch.setattr(stepping, "_WORTH_S", 0.0)
    _voted_beside_the_last_step(busy, device)
    busy.store.send(Rollback("s", "no more"))
    device.gate.let_go()
    busy.store.expect(RolledBack)
    _finish(busy)
    assert busy.versions("a") == [0]


def test_a_commit_that_is_taken_back_beside_a_step(busy, device):
    one = busy.store.write(1, 1)
    _held(busy, device, one)
    assert busy.store.prepare("s", one).ok
    busy.store.send(Rollback("s", "no more"))
    device.gate.let_go()
    busy.store.expect(RolledBack)
    busy.store.push("t", busy.store.write(2, 1))
    _finish(busy)
    assert busy.versions("a") == [0, 2]


def test_a_version_waits_where_sequences_have_to_end_first(busy, device):
    one = busy.store.write(1, 1)
    _held(busy, device, one)
    busy.store.send(Prepare("s", one, "wait", 30.0))
    assert busy.store.poll(0.2) is None
    device.gate.let_go()
    _finish(busy)
    assert busy.store.expect(Prepared).ok


def test_nothing_begins_beside_a_step_that_an_order_waits_for(busy, device):
    """An adapter is to be prepared, which waits for the step that was launched ahead. A version of the model that the
    store wants prepared meanwhile comes after it: one order at a time.
    """
    adapter, one = Adapter(busy), busy.store.write(1, 1)
    _held(busy, device, one)
    adapter.prepare(1)
    time.sleep(0.05)  # it is there when the step is over; were it not, this test would see less
    device.gate.let_one_end()
    busy.store.send(Prepare("s", one, "keep", 30.0))
    time.sleep(0.1)
    device.gate.let_go()
    assert {adapter.expect(Prepared).session for _ in range(2)} == {"s", "s1"}
    assert busy.error is None

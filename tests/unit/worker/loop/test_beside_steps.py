"""What a rank that is alone does while its device computes: parts of the next version are copied, and it is prepared
and voted on. Everything else waits for the step. The engine computes on the host; steps are over when a test says so.
"""

import threading
import time

import pytest

from tests.unit.worker.loop import gated_device
from tests.unit.worker.loop.gated_device import PATIENCE_S, finish, held, until, voted_beside_the_last_step
from tests.unit.worker.loop.test_adapter_commits import Adapter
from weight_manager.messages import Finalize, Finalized, Flip, Flipped, InPlace, Prepare, Prepared, Rollback, RolledBack
from worker import stepping


@pytest.fixture
def device(monkeypatch):
    return gated_device.installed(monkeypatch)


@pytest.fixture
def busy(make_rig, device):
    yield gated_device.with_streams(make_rig)
    device.gate.let_go()


def test_a_version_is_copied_prepared_and_voted_on_while_a_step_is_computed(busy, device):
    one = busy.store.write(1, 1)
    held(busy, device, one)
    busy.store.send(InPlace(1, one.write_epoch, [(64, 128)]))
    until(lambda: device.ahead[-1] == ((1, one.write_epoch), ((64, 128),)))
    assert busy.store.prepare("s", one).ok
    assert device.gate.held
    device.gate.let_go()
    assert busy.store.flip("s").ok
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    finish(busy)
    assert busy.versions("a") == [0, 1]


def test_a_vote_that_takes_longer_than_a_step_comes_beside_a_later_one(busy, device):
    ready = threading.Event()
    device.prepare = lambda: ready.wait(PATIENCE_S)
    one = busy.store.write(1, 1)
    held(busy, device, one)
    busy.store.send(Prepare("s", one, "keep", 30.0))
    before = busy.api.tokens("a")
    until(lambda: busy.loop._actions.work is not None)
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
    held(busy, device, one)
    vote = busy.store.prepare("s", one)
    assert not vote.ok
    assert "not this one" in vote.error
    device.gate.let_go()
    finish(busy)
    assert busy.versions("a") == [0]


def test_a_flip_waits_for_the_step_and_so_does_all_that_follows_it(busy, device):
    one = busy.store.write(1, 1)
    held(busy, device, one)
    assert busy.store.prepare("s", one).ok
    busy.store.send(Flip("s"))
    busy.store.send(InPlace(0, 99, [(0, 64)]))
    assert busy.store.poll(0.2) is None
    assert device.ahead[-1][0] == (1, one.write_epoch)
    device.gate.let_go()
    assert busy.store.expect(Flipped).ok
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    finish(busy)


def test_a_flip_waits_for_no_step_but_the_one_under_way(busy, device, monkeypatch):
    monkeypatch.setattr(stepping, "_LEAD_S", -PATIENCE_S)  # the device is never about to stand idle
    monkeypatch.setattr(stepping, "_WORTH_S", 0.0)
    behind = voted_beside_the_last_step(busy, device)
    assert busy.loop._put_off, "the step behind is not launched yet"
    busy.store.send(Flip("s"))
    until(lambda: not busy.loop._put_off)  # it has heard of it: else the step may end before
    device.gate.let_go()
    assert busy.store.expect(Flipped).ok
    assert len(device.behind) == behind
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    finish(busy)
    assert busy.versions("a") == [0, 1]


def test_a_device_is_not_left_idle_for_a_flip_that_is_not_said(busy, device, monkeypatch):
    monkeypatch.setattr(stepping, "_WORTH_S", 0.0)
    behind = voted_beside_the_last_step(busy, device)
    until(lambda: len(device.behind) > behind)
    assert device.gate.held, "the step before is still under way"
    device.gate.let_go()
    assert busy.store.flip("s").ok
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    finish(busy)


def test_a_step_that_was_put_off_is_launched_once_the_commit_is_over(busy, device, monkeypatch):
    monkeypatch.setattr(stepping, "_LEAD_S", -PATIENCE_S)
    monkeypatch.setattr(stepping, "_WORTH_S", 0.0)
    voted_beside_the_last_step(busy, device)
    busy.store.send(Rollback("s", "no more"))
    device.gate.let_go()
    busy.store.expect(RolledBack)
    finish(busy)
    assert busy.versions("a") == [0]


def test_a_commit_that_is_taken_back_beside_a_step(busy, device):
    one = busy.store.write(1, 1)
    held(busy, device, one)
    assert busy.store.prepare("s", one).ok
    busy.store.send(Rollback("s", "no more"))
    device.gate.let_go()
    busy.store.expect(RolledBack)
    busy.store.push("t", busy.store.write(2, 1))
    finish(busy)
    assert busy.versions("a") == [0, 2]


def test_a_version_waits_where_sequences_have_to_end_first(busy, device):
    one = busy.store.write(1, 1)
    held(busy, device, one)
    busy.store.send(Prepare("s", one, "wait", 30.0))
    assert busy.store.poll(0.2) is None
    device.gate.let_go()
    finish(busy)
    assert busy.store.expect(Prepared).ok


def test_nothing_begins_beside_a_step_that_an_order_waits_for(busy, device):
    """An adapter is to be prepared, which waits for the step that was launched ahead. A version of the model that the
    store wants prepared meanwhile comes after it: one order at a time.
    """
    adapter, one = Adapter(busy), busy.store.write(1, 1)
    held(busy, device, one)
    adapter.prepare(1)
    time.sleep(0.05)  # it is there when the step is over; were it not, this test would see less
    device.gate.let_one_end()
    busy.store.send(Prepare("s", one, "keep", 30.0))
    time.sleep(0.1)
    device.gate.let_go()
    assert {adapter.expect(Prepared).session for _ in range(2)} == {"s", "s1"}
    assert busy.error is None

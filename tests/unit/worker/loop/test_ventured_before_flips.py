"""A step of the weights that the store has said to flip to, launched before the flip: behind the last step of those
before, so that a device goes on without a gap. Steps are over when a test says so; the engine computes on the host.
"""

import threading

import pytest

from tests.unit.worker.loop import gated_device
from tests.unit.worker.loop.gated_device import PATIENCE_S, finish, until, voted_beside_the_last_step
from weight_manager.messages import Finalize, Finalized, Flip, Flipped, Register, Registered, Rollback, RolledBack
from worker import stepping
from worker.messages import Abort, Pause, Resume
from worker.scheduler import Scheduler


@pytest.fixture
def device(monkeypatch):
    device = gated_device.installed(monkeypatch)
    device.flips_early = True
    monkeypatch.setattr(stepping, "_LEAD_S", -PATIENCE_S)  # the device is never about to stand idle
    monkeypatch.setattr(stepping, "_WORTH_S", 0.0)
    return device


@pytest.fixture
def busy(make_rig, device):
    yield gated_device.with_streams(make_rig)
    device.gate.let_go()


def _early(rig, device):
    """The store says to flip while the last step of the weights before is computed, and the step behind it is launched
    with the ones that come; what clients have of either stream by then.
    """
    behind = voted_beside_the_last_step(rig, device)
    rig.store.send(Flip("s"))
    until(lambda: len(device.behind) > behind)
    assert device.behind[behind:] == [rig.store.hashes[1]]
    assert rig.loop._actions.live.version == 0, "nothing has been flipped"
    assert rig.store.poll(0.05) is None
    rig.api.pump(0.2)
    return {name: rig.api.tokens(name) for name in ("a", "b")}


def _nothing_is_told(rig, known):
    """But the last tokens of the weights before."""
    rig.api.pump(0.2)
    assert [rig.api.tokens(name) for name in known] == [count + 1 for count in known.values()]
    assert {span.version for name in known for span in rig.api.result(name)[1]} == {0}


def test_the_step_behind_the_last_one_is_of_the_weights_that_come(busy, device):
    known = _early(busy, device)
    device.gate.let_go()
    assert busy.store.expect(Flipped).ok
    _nothing_is_told(busy, known)
    launched = len(device.behind)
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    finish(busy)
    assert busy.versions("a") == [0, 1]
    assert set(device.behind[launched:]) == {busy.store.hashes[1]}
    assert busy.api.stats().counters.get("discarded_steps", 0) == 0, "it counted"


def test_it_is_thrown_away_where_the_version_is_taken_back(busy, device):
    known = _early(busy, device)
    device.gate.let_go()
    assert busy.store.expect(Flipped).ok
    _nothing_is_told(busy, known)
    busy.store.send(Rollback("s", "a replica said no"))
    busy.store.expect(RolledBack)
    finish(busy)
    assert busy.versions("a") == [0]
    assert busy.api.stats().counters["discarded_steps"] == 1


def test_it_is_thrown_away_where_the_flip_fails(busy, device):
    _early(busy, device)
    engine = busy.loop._actions.engine
    bind = engine.bind

    def fails_once(prepared):
        engine.bind = bind
        raise RuntimeError("no")

    engine.bind = fails_once
    device.gate.let_go()
    assert not busy.store.expect(Flipped).ok
    finish(busy)
    assert busy.versions("a") == [0]
    assert busy.api.stats().counters["discarded_steps"] == 1
    busy.store.push("t", busy.store.write(2, 1))


def test_a_request_that_is_aborted_before_the_flip_has_no_token_of_it(busy, device):
    _early(busy, device)
    answer = busy.api.start(Abort, ["a"])
    device.gate.let_go()
    assert busy.store.expect(Flipped).ok
    busy.api.answer(answer)
    assert busy.api.finish("a")[2] == "abort"
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    assert busy.api.finish("b")[2] == "length"
    busy.check(busy.api, "b")
    assert [busy.versions(name) for name in ("a", "b")] == [[0], [0, 1]]
    assert busy.api.stats().counters["discarded_steps"] == 1


def test_a_pause_that_comes_before_the_flip_is_kept(busy, device):
    known = _early(busy, device)
    answer = busy.api.start(Pause, "keep", clear_cache=False)
    device.gate.let_go()
    assert busy.store.expect(Flipped).ok
    busy.api.answer(answer)
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    _nothing_is_told(busy, known)
    busy.api.call(Resume)
    finish(busy)
    assert busy.versions("a") == [0, 1]


@pytest.mark.parametrize("live", ["the version before", "the next"])
def test_a_store_that_goes_before_the_flip_says_later_what_is_live(busy, device, live):
    known = _early(busy, device)
    before, after = busy.loop._leader.membership.serving, busy.loop._leader.membership.session.live
    busy.store.close()
    device.gate.let_go()
    _nothing_is_told(busy, known)
    busy.store.open()
    busy.store.expect(Register)
    one = before if live == "the version before" else after
    busy.store.send(Registered(busy.store.arena_path, one, 1.0))
    finish(busy)
    assert busy.versions("a") == ([0] if one is before else [0, 1])


def test_nothing_is_kept_of_it_where_the_step_before_it_fails(busy, device, monkeypatch):
    _early(busy, device)
    apply, failed = Scheduler.apply, []

    def fails_once(self, logits, seconds=0.0):
        if not failed:
            failed.append(True)
            raise RuntimeError("no")
        apply(self, logits, seconds)

    monkeypatch.setattr(Scheduler, "apply", fails_once)
    device.gate.let_go()
    assert busy.store.expect(Flipped).ok
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    for name in ("a", "b"):
        assert busy.api.finish(name)[2] == "error"
    assert busy.versions("a") == [0]
    busy.api.generate("c", max_tokens=20)
    assert busy.api.finish("c")[2] == "length"
    busy.check(busy.api, "c")
    assert busy.versions("c") == [1]


def test_a_flip_that_has_just_missed_its_step_leaves_the_device_no_gap_either(busy, device, monkeypatch):
    """The step behind the one under way was launched before the store said it, so it is of the weights before."""
    monkeypatch.setattr(stepping, "_LEAD_S", PATIENCE_S)
    behind = voted_beside_the_last_step(busy, device)
    until(lambda: len(device.behind) > behind)
    busy.store.send(Flip("s"))
    device.gate.let_one_end()
    until(lambda: len(device.behind) > behind + 1)
    assert device.gate.held
    assert device.behind[behind:] == [busy.store.hashes[0], busy.store.hashes[1]]
    device.gate.let_go()
    assert busy.store.expect(Flipped).ok
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    finish(busy)
    assert busy.versions("a") == [0, 1]
    assert busy.api.stats().counters.get("discarded_steps", 0) == 0


def test_the_last_tokens_before_a_flip_do_not_wait_for_it(busy, device, monkeypatch):
    monkeypatch.setattr(stepping, "_LEAD_S", PATIENCE_S)
    engine, flips, may = busy.loop._actions.engine, threading.Event(), threading.Event()
    behind, bind = voted_beside_the_last_step(busy, device), engine.bind
    until(lambda: len(device.behind) > behind)

    def waits(prepared):
        flips.set()
        assert may.wait(PATIENCE_S)
        bind(prepared)

    engine.bind = waits
    busy.api.pump(0.2)
    known = busy.api.tokens("a")
    busy.store.send(Flip("s"))
    device.gate.let_go()
    assert flips.wait(PATIENCE_S)
    busy.api.pump(0.2)
    told = busy.api.tokens("a")
    may.set()
    assert busy.store.expect(Flipped).ok
    assert told == known + 2, "of the step under way, and of the one that was launched behind it"
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    finish(busy)


def test_one_that_cannot_be_launched_is_launched_after_the_flip(busy, device, monkeypatch):
    behind = voted_beside_the_last_step(busy, device)
    follow, failed = stepping.Stepping.venture_behind, []

    def fails(self, logits):
        failed.append(True)
        raise RuntimeError("no")

    monkeypatch.setattr(stepping.Stepping, "venture_behind", fails)
    busy.store.send(Flip("s"))
    until(lambda: failed)
    assert len(device.behind) == behind
    device.gate.let_go()
    assert busy.store.expect(Flipped).ok
    monkeypatch.setattr(stepping.Stepping, "venture_behind", follow)
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    finish(busy)
    assert busy.versions("a") == [0, 1]


@pytest.mark.parametrize("policy", ["recompute", "abort"])
def test_nothing_is_launched_for_sequences_that_do_not_go_on_as_they_are(busy, device, policy):
    one = busy.store.write(1, 1)
    gated_device.held(busy, device, one)
    assert busy.store.prepare("s", one, policy).ok
    behind = len(device.behind)
    device.gate.let_one_end()
    busy.store.send(Flip("s"))
    assert busy.store.poll(0.2) is None
    assert len(device.behind) == behind
    device.gate.let_go()
    assert busy.store.expect(Flipped).ok
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    for name in ("a", "b"):
        busy.api.finish(name)


def test_a_flip_to_what_was_not_voted_for_is_refused_after_the_step(busy, device):
    behind = voted_beside_the_last_step(busy, device)
    busy.store.send(Flip("another"))
    assert busy.store.poll(0.2) is None
    assert len(device.behind) == behind
    device.gate.let_go()
    assert not busy.store.expect(Flipped).ok
    busy.store.send(Rollback("s", "no more"))
    busy.store.expect(RolledBack)
    finish(busy)

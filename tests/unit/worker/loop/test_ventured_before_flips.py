"""A flip while a device computes: the store hears of it at once, a step of the new weights is launched behind the last
of those before, so that a device goes on without a gap, and the steps that were launched before the flip are told as
what they are. Steps are over when a test says so; the engine computes on the host.
"""

import threading

import pytest

from tests.unit.worker.loop import gated_device
from tests.unit.worker.loop.gated_device import PATIENCE_S, finish, until, voted_beside_the_last_step
from weight_manager.messages import (
    Finalize,
    Finalized,
    Flip,
    Flipped,
    InPlace,
    Prepare,
    Prepared,
    Register,
    Registered,
    Rollback,
    RolledBack,
)
from worker import stepping
from worker.leader import Leader
from worker.messages import Abort, Pause, Resume
from worker.scheduler import Scheduler


@pytest.fixture
def device(monkeypatch):
    device = gated_device.installed(monkeypatch, flips_early=True)
    monkeypatch.setattr(stepping, "_LEAD_S", -PATIENCE_S)  # the device is never about to stand idle
    monkeypatch.setattr(stepping, "_WORTH_S", 0.0)
    return device


@pytest.fixture
def busy(make_rig, device):
    yield gated_device.with_streams(make_rig)
    device.gate.let_go()
    assert not device.torn, "nobody writes to what a step reads"


def _known(rig):
    """How many tokens clients have of either stream."""
    rig.api.pump(0.2)
    return {name: rig.api.tokens(name) for name in ("a", "b")}


def _early(rig, device):
    """The store says to flip while the last step of the weights before is computed, the step behind it is launched with
    the ones that come, and the store hears that it is so; what clients have of either stream by then.
    """
    behind = voted_beside_the_last_step(rig, device)
    assert rig.store.flip("s").ok
    until(lambda: len(device.behind) > behind)
    assert device.gate.held
    assert device.behind[behind:] == [rig.store.hashes[1]]
    return _known(rig)


def _nothing_is_told(rig, known):
    """But the last tokens of the weights before."""
    rig.api.pump(0.2)
    assert [rig.api.tokens(name) for name in known] == [count + 1 for count in known.values()]
    assert {span.version for name in known for span in rig.api.result(name)[1]} == {0}


def test_the_step_behind_the_last_one_is_of_the_weights_that_come(busy, device):
    known = _early(busy, device)
    device.gate.let_go()
    _nothing_is_told(busy, known)
    launched = len(device.behind)
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    finish(busy)
    assert busy.versions("a") == [0, 1]
    assert set(device.behind[launched:]) == {busy.store.hashes[1]}
    assert busy.api.stats().counters.get("discarded_steps", 0) == 0, "it counted"


@pytest.mark.parametrize("meanwhile", [True, False])
def test_it_is_thrown_away_where_the_version_is_taken_back(busy, device, meanwhile):
    """And nothing else is. meanwhile: the last step of the weights before is still computed."""
    known = _early(busy, device)
    if meanwhile:
        busy.store.send(Rollback("s", "a replica said no"))
        assert busy.store.poll(0.1) is None
    device.gate.let_go()
    if not meanwhile:
        _nothing_is_told(busy, known)
        busy.store.send(Rollback("s", "a replica said no"))
    busy.store.expect(RolledBack)
    finish(busy)
    assert busy.versions("a") == [0]
    assert busy.api.stats().counters["discarded_steps"] == 1


@pytest.mark.parametrize("missed", [False, True])
def test_the_next_push_may_come_with_the_rollback(busy, device, monkeypatch, missed):
    """It has the slot, here and in the arena, of what is taken back: nothing writes there while a step reads it."""
    known = _missed(busy, device, monkeypatch)[1] if missed else _early(busy, device)
    two, parts = busy.store.write(2, 1), len(device.ahead)
    busy.store.send(Rollback("s", "a replica said no"))
    busy.store.send(InPlace(two.slot, two.write_epoch, [(0, 64)]))
    busy.store.send(Prepare("t", two, "keep", 30.0))
    assert busy.store.poll(0.2) is None
    assert len(device.ahead) == parts
    assert _known(busy) == known
    device.gate.let_go()
    busy.store.expect(RolledBack)
    assert busy.store.expect(Prepared).ok
    assert busy.store.flip("t").ok
    busy.store.send(Finalize("t"))
    busy.store.expect(Finalized)
    finish(busy)
    assert busy.versions("a") == [0, 2]
    assert busy.api.stats().counters.get("fenced_steps", 0) == 0


def test_no_step_is_launched_behind_where_the_flip_fails(busy, device):
    engine = busy.loop._actions.engine
    bind = engine.bind_behind

    def fails_once(prepared):
        engine.bind_behind = bind
        raise RuntimeError("no")

    engine.bind_behind = fails_once
    behind = voted_beside_the_last_step(busy, device)
    assert not busy.store.flip("s").ok
    device.gate.let_go()
    finish(busy)
    assert busy.versions("a") == [0]
    assert set(device.behind[behind:]) == {busy.store.hashes[0]}
    assert busy.api.stats().counters.get("discarded_steps", 0) == 0
    busy.store.push("t", busy.store.write(2, 1))


def test_a_request_that_is_aborted_before_the_flip_has_no_token_of_it(busy, device):
    _early(busy, device)
    answer = busy.api.start(Abort, ["a"])
    device.gate.let_go()
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
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    for name in ("a", "b"):
        assert busy.api.finish(name)[2] == "error"
    assert busy.versions("a") == [0]
    busy.api.generate("c", max_tokens=20)
    assert busy.api.finish("c")[2] == "length"
    busy.check(busy.api, "c")
    assert busy.versions("c") == [1]


def _missed(rig, device, monkeypatch):
    """The same, but the step behind the one under way was launched before the store said it, so that both are of the
    weights before.
    """
    monkeypatch.setattr(stepping, "_LEAD_S", PATIENCE_S)
    behind = voted_beside_the_last_step(rig, device)
    until(lambda: len(device.behind) > behind)
    assert rig.store.flip("s").ok
    assert device.gate.held
    assert device.behind[behind:] == [rig.store.hashes[0]]
    return behind, _known(rig)


def test_a_flip_that_has_just_missed_its_step_waits_for_none_either(busy, device, monkeypatch):
    behind, known = _missed(busy, device, monkeypatch)
    device.gate.let_one_end()
    assert device.behind[behind:] == [busy.store.hashes[0], busy.store.hashes[1]]
    _nothing_is_told(busy, known)
    device.gate.let_go()
    _nothing_is_told(busy, {name: count + 1 for name, count in known.items()})
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    finish(busy)
    assert busy.versions("a") == [0, 1]
    assert busy.api.stats().counters.get("discarded_steps", 0) == 0


@pytest.mark.parametrize("ends", ["finalize", "rollback"])
def test_a_step_of_the_weights_before_that_an_abort_throws_away_is_still_computed(busy, device, monkeypatch, ends):
    """So nothing may be written to what it reads, whatever the store says."""
    _missed(busy, device, monkeypatch)
    answer = busy.api.start(Abort, ["a"])
    one = busy.store.write(2, 0) if ends == "finalize" else None
    busy.store.send(Finalize("s") if ends == "finalize" else Rollback("s", "no more"))
    if one is not None:
        busy.store.send(InPlace(one.slot, one.write_epoch, [(0, 64)]))
        busy.store.send(Prepare("t", one, "keep", 30.0))
    device.gate.let_one_end()
    device.gate.let_go()
    busy.api.answer(answer)
    busy.store.expect(Finalized if ends == "finalize" else RolledBack)
    if one is not None:
        assert busy.store.expect(Prepared).ok
        busy.store.send(Rollback("t", "no more"))
        busy.store.expect(RolledBack)
    assert busy.api.finish("b")[2] == "length"
    busy.check(busy.api, "b")
    assert busy.versions("b") == ([0, 1] if ends == "finalize" else [0])


@pytest.mark.parametrize("missed", [False, True])
def test_the_last_word_is_answered_beside_a_step_and_acted_on_after_it(busy, device, monkeypatch, missed):
    """The next push comes at once: it has the slot that the store had the version before in, which is void nowhere."""
    known = _missed(busy, device, monkeypatch)[1] if missed else _early(busy, device)
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    assert device.gate.held
    two = busy.store.write(2, 0)
    parts = len(device.ahead)
    busy.store.send(InPlace(two.slot, two.write_epoch, [(0, 64)]))
    busy.store.send(Prepare("t", two, "keep", 30.0))
    busy.api.generate("c", max_tokens=20)
    assert busy.store.poll(0.2) is None
    assert len(device.ahead) == parts
    assert _known(busy) == known
    device.gate.let_go()
    assert busy.store.expect(Prepared).ok
    assert busy.store.flip("t").ok
    busy.store.send(Finalize("t"))
    busy.store.expect(Finalized)
    finish(busy)
    assert busy.versions("a") == [0, 1, 2]
    assert 0 not in busy.versions("c"), "it was let in after the word that the next one is live"
    counters = busy.api.stats().counters
    assert (counters.get("fenced_steps", 0), counters.get("discarded_steps", 0)) == (0, 0)


@pytest.mark.parametrize("missed", [False, True])
def test_a_last_word_that_is_answered_is_not_slept_upon(busy, device, monkeypatch, missed):
    leader = busy.loop._leader
    receive, slept = leader._channel.receive, []

    def noted(timeout_s):
        slept.append(timeout_s if leader.membership._queue else 0.0)
        return receive(timeout_s)

    if missed:
        _missed(busy, device, monkeypatch)
    else:
        _early(busy, device)
    leader._channel.receive = noted
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    device.gate.let_go()
    finish(busy)
    assert busy.versions("a") == [0, 1]
    assert max(slept) == 0.0


def test_a_step_counts_where_the_version_that_was_flipped_to_loses_its_slot(busy, device):
    """The store has taken it back, and begun the next push, before the step is over."""
    known = _early(busy, device)
    busy.store.send(Rollback("s", "a replica said no"))
    two = busy.store.write(2, 1)
    device.gate.let_go()
    busy.store.expect(RolledBack)
    assert all(count > known[name] for name, count in _known(busy).items())
    busy.store.push("t", two)
    finish(busy)
    assert busy.versions("a") == [0, 2]
    assert busy.api.stats().counters.get("fenced_steps", 0) == 0


def test_a_step_of_a_replica_that_both_versions_have_left_does_not_count(busy, device):
    """It was stopped for long."""
    known = _early(busy, device)
    busy.store.write(2, 0)
    three = busy.store.write(3, 1)
    device.gate.let_go()
    busy.store.expect(Register)
    assert _known(busy) == known
    busy.store.send(Registered(busy.store.arena_path, three, 1.0))
    finish(busy)
    assert busy.versions("a") == [0, 3]


def test_a_flip_that_is_heard_of_between_two_steps_does_not_wait_for_the_one_under_way(busy, device, monkeypatch):
    monkeypatch.setattr(stepping, "_LEAD_S", PATIENCE_S)
    behind = voted_beside_the_last_step(busy, device)
    until(lambda: len(device.behind) > behind)
    monkeypatch.setattr(Leader, "hear_flip", lambda self: False)
    busy.store.send(Flip("s"))
    assert busy.store.poll(0.1) is None
    device.gate.let_one_end()
    assert busy.store.expect(Flipped).ok
    assert device.gate.held
    assert device.behind[behind:] == [busy.store.hashes[0], busy.store.hashes[1]]
    known = _known(busy)
    device.gate.let_go()
    _nothing_is_told(busy, known)
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    finish(busy)
    assert busy.versions("a") == [0, 1]
    assert busy.api.stats().counters.get("discarded_steps", 0) == 0


def test_the_answer_does_not_wait_for_the_launch_of_the_step_behind(busy, device, monkeypatch):
    behind, launch, may = voted_beside_the_last_step(busy, device), stepping.Stepping.venture_behind, threading.Event()
    monkeypatch.setattr(
        stepping.Stepping, "venture_behind", lambda self, logits: may.wait(PATIENCE_S) and launch(self, logits)
    )
    assert busy.store.flip("s").ok
    assert len(device.behind) == behind
    may.set()
    until(lambda: len(device.behind) > behind)
    device.gate.let_go()
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    finish(busy)
    assert busy.versions("a") == [0, 1]


def test_one_that_cannot_be_launched_is_launched_after_the_flip(busy, device, monkeypatch):
    behind = voted_beside_the_last_step(busy, device)
    follow, failed = stepping.Stepping.venture_behind, []

    def fails(self, logits):
        failed.append(True)
        raise RuntimeError("no")

    monkeypatch.setattr(stepping.Stepping, "venture_behind", fails)
    assert busy.store.flip("s").ok
    until(lambda: failed)
    assert len(device.behind) == behind
    device.gate.let_go()
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
    assert busy.store.flip("s").ok
    assert device.gate.held
    known = _known(busy)
    device.gate.let_go()
    _nothing_is_told(busy, known)
    assert len(device.behind) == behind
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    for name in ("a", "b"):
        reason = busy.api.finish(name)[2]
        assert reason == ("abort" if policy == "abort" else "length")
        busy.check(busy.api, name)


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

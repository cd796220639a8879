import time

import pytest

from tests import fake_engine
from tests.fake_engine import FakeEngine
from weight_manager import messages as store_messages
from weight_manager.messages import (
    Adopted,
    Finalize,
    Flip,
    Flipped,
    InPlace,
    Prepared,
    Register,
    Registered,
    Rollback,
    RolledBack,
)
from worker.orders import Actions


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_a_commit_changes_the_version_in_the_middle_of_a_stream(busy, policy):
    report = busy.store.push("s1", busy.store.write(1, 1), policy)
    assert 0 <= report.stall_ms < 500
    assert busy.api.finish("long")[2] == "length"
    assert busy.versions("long") == [0, 1]
    busy.check(busy.api, "long")


def test_an_abort_policy_ends_what_runs_under_the_old_version(busy):
    busy.store.push("s1", busy.store.write(1, 1), "abort")
    assert busy.api.finish("long")[2] == "abort"
    assert busy.versions("long") == [0]
    busy.check(busy.api, "long")


def test_a_wait_policy_votes_when_drained_and_lets_nobody_in(busy):
    busy.store.send(store_messages.Prepare("s1", busy.store.write(1, 1), "wait", 10.0))
    busy.api.generate("late", max_tokens=3)
    assert busy.store.expect(Prepared) == Prepared("s1")
    assert busy.api.finish("long")[2] == "length"
    assert busy.versions("long") == [0]
    assert not busy.api.finished("late")
    busy.store.flip("s1")
    busy.store.send(Finalize("s1"))
    busy.api.finish("late")
    assert busy.versions("late") == [1]


def test_a_wait_that_does_not_drain_in_time_votes_no_and_goes_on(busy):
    vote = busy.store.prepare("s1", busy.store.write(1, 1), "wait", deadline_s=0.05)
    assert not vote.ok
    assert "still run" in vote.error
    assert busy.api.finish("long")[2] == "length"


def test_a_wait_is_given_up_by_a_rollback(busy):
    busy.store.send(store_messages.Prepare("s1", busy.store.write(1, 1), "wait", 10.0))
    busy.store.send(Rollback("s1", "trainer gone"))
    assert busy.store.expect(RolledBack) == RolledBack("s1")
    busy.api.generate("late", max_tokens=3)
    busy.api.finish("late")


def test_between_flip_and_finalize_nothing_moves(busy):
    live = busy.store.write(1, 1)
    assert busy.store.prepare("s1", live).ok
    assert busy.store.flip("s1").ok
    busy.api.pump(0.05)
    before = busy.api.tokens("long")
    time.sleep(0.15)
    assert busy.api.stats().version == 0  # not before it is final
    assert busy.api.tokens("long") == before
    busy.store.send(Finalize("s1"))
    stall = busy.store.expect(store_messages.Finalized).stall_ms
    assert stall >= 150
    busy.api.finish("long")
    busy.check(busy.api, "long")
    assert busy.api.stats().version == 1


def test_a_rollback_after_the_flip_leaves_no_trace(busy):
    busy.store.prepare("s1", busy.store.write(1, 1))
    busy.store.flip("s1")
    busy.store.send(Rollback("s1", "another replica could not flip"))
    assert busy.store.expect(RolledBack) == RolledBack("s1")
    busy.api.finish("long")
    assert busy.versions("long") == [0]
    busy.check(busy.api, "long")


def test_a_version_that_cannot_be_mapped_is_voted_down_and_nothing_changes(busy):
    live = busy.store.write(1, 1)
    busy.arena.bump(1)  # given away again before it was prepared
    vote = busy.store.prepare("s1", live)
    assert not vote.ok
    assert "given away" in vote.error
    busy.store.send(Rollback("s1", "refused"))
    busy.store.expect(RolledBack)
    assert busy.store.push("s2", busy.store.write(2, 1))
    busy.api.finish("long")
    assert busy.versions("long") == [0, 2]
    busy.check(busy.api, "long")


def test_a_flip_that_fails_goes_back_everywhere(busy):
    live = busy.store.write(1, 1)
    assert busy.store.prepare("s1", live).ok
    weights = busy.loop._actions.weights
    weights._staged = None  # what flip would bind is gone
    vote = busy.store.flip("s1")
    assert not vote.ok
    assert "nothing is prepared" in vote.error
    busy.api.finish("long")
    busy.check(busy.api, "long")


def test_flip_of_an_unknown_session_is_a_no(rig):
    rig.serve()
    rig.store.send(Flip("never"))
    assert not rig.store.expect(Flipped).ok


def test_a_finalize_without_a_flip_makes_nothing_live(busy):
    """The store went on without us: what we hold is not what is live, so we ask, and serve what we are told."""
    assert busy.store.prepare("s1", busy.store.write(1, 1)).ok
    busy.store.send(Finalize("s1"))
    busy.store.register(busy.first)
    assert busy.api.finish("long")[2] == "length"
    assert busy.versions("long") == [0]
    busy.check(busy.api, "long")


@pytest.mark.parametrize("committed", [True, False])
def test_the_truth_after_a_store_that_died_in_the_middle(busy, committed):
    live = busy.store.write(1, 1)
    busy.store.prepare("s1", live)
    busy.store.flip("s1")
    busy.store.close()
    time.sleep(0.1)
    before = busy.api.tokens("long")
    busy.store.open()
    busy.store.expect(Register)
    busy.store.send(Registered(busy.store.arena_path, live if committed else busy.first, 1.0))
    truth = live if committed else busy.first
    assert busy.store.expect(Adopted) == Adopted(truth.epoch)
    busy.api.finish("long")
    assert busy.versions("long") == ([0, 1] if committed else [0])
    busy.check(busy.api, "long")
    assert before <= busy.api.tokens("long")


def test_a_silent_store_is_asked_again_after_the_hold(busy):
    live = busy.store.write(1, 1)
    busy.store.prepare("s1", live)
    busy.store.flip("s1")
    busy.store.expect(Register)
    busy.store.send(Registered(busy.store.arena_path, live, 1.0))
    assert busy.store.expect(Adopted) == Adopted(live.epoch)
    busy.api.finish("long")
    busy.check(busy.api, "long")


def test_without_any_store_the_old_version_goes_on_in_the_end(busy):
    busy.store.prepare("s1", busy.store.write(1, 1))
    busy.store.flip("s1")
    busy.store.close()
    busy.api.finish("long")
    assert busy.versions("long") == [0]
    busy.check(busy.api, "long")
    busy.store.open()


@pytest.fixture
def waiting(make_rig):
    """Drained and prepared for a commit that waits; a request that came late waits for its end."""
    rig = make_rig(hold_s=0.4, unknown_s=1.0)
    rig.first = rig.serve()
    assert rig.store.prepare("s1", rig.store.write(1, 1), "wait", deadline_s=0.3).ok
    rig.api.generate("late", max_tokens=3)
    time.sleep(0.05)
    assert not rig.api.finished("late")
    return rig


def test_a_store_lost_after_the_vote_lets_requests_in_again(waiting):
    waiting.store.close()
    assert waiting.api.finish("late")[2] == "length"
    assert waiting.versions("late") == [0]
    waiting.store.open()
    waiting.store.register(waiting.first)
    assert waiting.store.push("s2", waiting.store.write(2, 1))


def test_a_store_silent_after_the_vote_is_asked_and_its_flip_comes_too_late(waiting):
    """Stopped, it breaks no connection: the vote is taken back after its deadline and the usual patience."""
    waiting.store.expect(Register)
    assert waiting.api.finish("late")[2] == "length"
    assert waiting.versions("late") == [0]
    assert not waiting.store.flip("s1").ok
    waiting.store.send(Rollback("s1", "a replica could not flip"))
    assert waiting.store.expect(RolledBack) == RolledBack("s1")


def test_a_lost_store_changes_nothing_for_requests(busy):
    busy.store.close()
    busy.api.finish("long")
    busy.store.open()
    busy.store.register(busy.first)
    assert busy.api.stats().state == "serving"


def test_a_slot_given_away_while_we_slept_voids_the_step(busy):
    newer = busy.store.write(1, 0)  # the live slot is overwritten: we were stopped and the store went on
    busy.store.expect(Register)
    busy.store.send(Registered(busy.store.arena_path, newer, 1.0))
    assert busy.store.expect(Adopted) == Adopted(newer.epoch)
    busy.api.finish("long")
    assert busy.versions("long") == [0, 1]
    busy.check(busy.api, "long")
    assert busy.api.stats().counters["fenced_steps"] == 1


def test_what_was_said_within_a_step_of_bytes_that_are_there_is_one_message():
    actions = Actions(None, None, None, None, None)
    of_one = [[(0, 64)], [(64, 8), (96, 8)]]
    said = [*(InPlace(1, 7, spans) for spans in of_one), InPlace(1, 9, [(0, 8)]), InPlace(1, 7, [(8, 8)])]
    for message in said:
        actions.hear(message)
    assert actions.take_heard() == (InPlace(1, 7, [(0, 64), (64, 8), (96, 8)]), *said[2:]), "not of another push"
    assert said[0].spans == [(0, 64)]
    assert not actions.heard


def test_a_rank_with_memory_of_its_own_is_told_what_is_intact_and_another_is_not(make_rig, monkeypatch):
    rig = make_rig()
    rig.serve()
    assert not next(m for m in rig.store.seen if isinstance(m, Register)).copies_ahead
    ahead = []

    class Device(FakeEngine):
        def stage(self, live, views, regions):
            return self.prepare(views)

        def read(self, handle, name):
            raise NotImplementedError

        def copy_ahead(self, key, memory, spans):
            ahead.append((key, spans))

    monkeypatch.setattr(fake_engine, "FakeEngine", Device)
    rig = make_rig()
    rig.serve()
    assert next(m for m in rig.store.seen if isinstance(m, Register)).copies_ahead
    one = rig.store.write(1, 1)
    rig.store.send(InPlace(1, one.write_epoch, [(0, 64), (128, 64)]))
    rig.store.send(InPlace(1, one.write_epoch - 1, [(0, 64)]))  # of a push that is over
    assert rig.store.prepare("s1", one).ok
    assert ahead == [((1, one.write_epoch), [(0, 64), (128, 64)])]
    rig.store.send(InPlace(0, rig.arena.write_epoch(0), [(0, 64)]))  # none is spare between a vote and its end
    assert rig.store.flip("s1").ok
    assert len(ahead) == 1

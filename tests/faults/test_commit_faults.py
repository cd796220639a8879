"""Replicas that say no, fail, die or fall silent during a commit. All of them serve the new version, or none does."""

import time

import pytest

from rollout_client import errors
from rollout_client import protocol as wire
from rollout_client.publisher import WeightPublisher
from tests.faults.replica import Replica
from weight_manager import messages


@pytest.fixture
def fleet(store, replica, push, weights, digest_of):
    """Two replicas serve version 1. `pair(prepare="no")` scripts the second."""

    def pair(**plan):
        good, other = replica(0), replica(1)
        push(weights(1), 1)
        good.seen.clear()
        other.seen.clear()
        other.plan.update(plan)
        return good, other

    return pair


@pytest.mark.parametrize("message", ["prepare", "flip"])
def test_one_no_leaves_everybody_on_the_old_version(fleet, store, push, weights, digest_of, within, message):
    good, other = fleet(**{message: "no"})
    with within(2), pytest.raises(errors.PushRefused) as refused:
        push(weights(9), 2)
    assert refused.value.rank == "replica 1 rank 0"
    assert "model.norm.weight" in str(refused.value)
    if message == "prepare":
        assert refused.value.tensors == ["model.norm.weight"]
        assert not good.saw(messages.Flip), "nobody is asked to flip before everybody is prepared"
    assert good.saw(messages.Rollback)
    assert other.saw(messages.Rollback)
    assert store.serving() == good.served() == other.served() == (1, digest_of(weights(1)))
    assert store.status().last_error["rank"] == "replica 1 rank 0"
    other.plan.clear()
    with within(2):
        assert push(weights(2), 2).replicas == 2
    assert store.serving() == good.served() == other.served() == (2, digest_of(weights(2)))


@pytest.mark.parametrize("message", ["prepare", "flip"])
def test_a_silent_replica_fails_the_commit_and_must_register_again(
    fleet, store, push, weights, digest_of, within, until, message
):
    good, other = fleet(**{message: "silent", "rollback": "silent"})
    with within(4), pytest.raises(errors.DeadlineExceeded) as refused:
        push(weights(9), 2, timeout_s=2)
    assert "replica 1" in str(refused.value)
    assert store.serving() == good.served() == (1, digest_of(weights(1)))
    other.plan.clear()
    until(lambda: other.saw(messages.Registered))
    assert other.saw(messages.Refused), "it was told to register again"
    until(lambda: store.status().replicas["1"]["ready"])
    with within(2):
        assert push(weights(2), 2).replicas == 2
    assert store.serving() == good.served() == other.served() == (2, digest_of(weights(2)))


@pytest.mark.parametrize("message", ["prepare", "flip"])
def test_a_replica_that_dies_leaves_the_vote_and_the_rest_commits(
    fleet, replica, store, push, weights, digest_of, within, message
):
    good, _ = fleet(**{message: "die"})
    with within(2):
        assert push(weights(2), 2).replicas == 1
    assert store.serving() == good.served() == (2, digest_of(weights(2)))
    assert "1" not in store.status().replicas
    back = replica(1)
    assert back.saw(messages.Registered)[0].live.version == 2
    with within(2):
        assert push(weights(3), 3).replicas == 2
    assert store.serving() == good.served() == back.served() == (3, digest_of(weights(3)))


@pytest.mark.parametrize("message", ["prepare", "flip"])
def test_weights_that_kill_every_replica_do_not_go_live(replica, store, push, weights, digest_of, within, message):
    alone = replica(0)
    push(weights(1), 1)
    alone.plan[message] = "die"
    with within(2), pytest.raises(errors.PushRefused, match="no replica is left"):
        push(weights(9), 2)
    assert store.serving() == (1, digest_of(weights(1)))
    back = replica(0)
    assert back.served() == (1, digest_of(weights(1)))
    assert push(weights(2), 2).replicas == 1
    assert back.served() == (2, digest_of(weights(2)))


def test_a_death_after_the_commit_undoes_nothing(fleet, store, push, weights, digest_of, within):
    good, _ = fleet(finalize="die")
    with within(4):
        report = push(weights(2), 2)
    assert report.stall_ms == {"0": 1.5}
    assert store.serving() == good.served() == (2, digest_of(weights(2)))


@pytest.mark.parametrize("store_config", [{"silent_s": 1.0}])
def test_a_replica_silent_between_pushes_does_not_hold_up_the_next(
    replica, store, push, weights, digest_of, within, until
):
    good, other = replica(0), replica(1)
    other.beats, other.plan["refused"] = False, "silent"
    until(lambda: "1" not in store.status().replicas)
    assert store.status().counters["replicas_silent"] >= 1
    with within(2):
        push(weights(2), 2)
    assert store.serving() == good.served() == (2, digest_of(weights(2)))


def test_a_replica_that_comes_during_a_commit_waits_for_its_outcome(
    fleet, replica, store, trainer, weights, digest_of, until
):
    good, other = fleet(flip="silent", rollback="silent")
    t = trainer()
    placement = t.begin(weights(9), 2)
    t.say(wire.Written(placement.session, t.write()))
    assert isinstance(t.ask(wire.Seal(placement.session)), wire.Sealed)
    t.say(wire.Commit(placement.session))
    until(lambda: other.saw(messages.Flip))
    assert store.status().session["state"] == "flipping"
    late = replica(2, wait=False)
    time.sleep(0.4)  # flip_s is 1
    assert store.status().session["state"] == "flipping"
    assert not store.status().replicas.get("2")
    assert not late.saw(messages.Registered), "the outcome is not known yet"
    assert t.hear(3).code == "deadline"
    until(lambda: late.saw(messages.Registered))
    assert late.saw(messages.Registered)[0].live.version == 1
    assert store.serving() == good.served() == late.served() == (1, digest_of(weights(1)))


def test_a_trainer_that_gives_up_during_the_commit_undoes_it(fleet, store, trainer, weights, digest_of, until):
    good, other = fleet(flip="silent")
    t = trainer()
    placement = t.begin(weights(9), 2)
    t.say(wire.Written(placement.session, t.write()))
    assert isinstance(t.ask(wire.Seal(placement.session)), wire.Sealed)
    t.say(wire.Commit(placement.session))
    until(lambda: other.saw(messages.Flip))
    t.say(wire.Abort(placement.session, "changed my mind"))
    answers = [t.hear(2), t.hear(2)]
    assert {type(a) for a in answers} == {wire.Aborted, wire.Error}
    assert store.status().last_error["code"] == "aborted"
    assert store.serving() == good.served() == other.served() == (1, digest_of(weights(1)))


def test_a_replica_of_another_layout_is_refused(store, replica, until):
    stranger = replica(0, wait=False, layout="0" * 16, refused="silent")
    until(lambda: stranger.saw(messages.Refused))
    assert "model config, dtype and tp must be the same" in stranger.saw(messages.Refused)[0].message
    assert store.status().replicas == {}


def test_a_replica_left_behind_is_told_to_adopt(replica, store, push, weights, digest_of, until):
    behind = replica()
    push(weights(1), 1)
    behind.live = store.status().previous  # as if it had missed the commit
    until(lambda: behind.saw(messages.Adopt))
    assert behind.served() == (1, digest_of(weights(1)))


def test_without_replicas_a_push_commits_for_whoever_comes(store, replica, push, weights, digest_of):
    assert push(weights(1), 1).replicas == 0
    assert store.serving() == (1, digest_of(weights(1)))
    assert replica().served() == (1, digest_of(weights(1)))


def test_a_trainer_may_ask_for_what_an_operator_already_commits(fleet, store, trainer, weights, digest_of, until):
    good, other = fleet(flip="silent", rollback="silent")
    t = trainer()
    placement = t.begin(weights(9), 2)
    t.say(wire.Written(placement.session, t.write()))
    assert isinstance(t.ask(wire.Seal(placement.session)), wire.Sealed)
    store.api.send(messages.encode(messages.CommitSession("op")))
    until(lambda: other.saw(messages.Flip))
    assert t.ask(wire.Commit(placement.session), 3).code == "deadline"
    assert store.serving() == good.served() == (1, digest_of(weights(1)))


@pytest.mark.parametrize("store_config", [{"load_weights": False}])
def test_the_first_version_of_all_is_adopted_after_the_fact(launch, store_config, weights, digest_of, until, run):
    store = launch(**store_config)
    until((store.run_dir / "push_endpoint").exists)
    assert store.status().live is None
    replica = Replica(store)
    try:
        until(lambda: replica.saw(messages.Registered))
        assert replica.saw(messages.Registered)[0].live is None
        with WeightPublisher(store.endpoint, run_id=run, progress=False) as publisher:
            assert publisher.push(weights(1), 1, timeout_s=30).replicas == 0
            until(lambda: store.status().replicas["0"]["ready"])
            assert replica.served() == (1, digest_of(weights(1)))
            assert publisher.push(weights(2), 2, timeout_s=30).replicas == 1
        assert replica.served() == (2, digest_of(weights(2)))
    finally:
        replica.close()

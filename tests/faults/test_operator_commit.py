"""A push that an operator commits in its trainer's stead, as the four-phase update over HTTP does."""

from rollout_client import protocol as wire
from weight_manager.messages import CommitSession, SessionTensors


def sealed(trainer, weights, version=1):
    one = trainer()
    one.begin(weights(1), version)
    one.say(wire.Written(one.placement.session, one.write()))
    assert isinstance(one.ask(wire.Seal(one.placement.session)), wire.Sealed)
    return one


def test_tensors_arrive_one_by_one(store, trainer, weights, until):
    one = trainer()
    one.begin(weights(1), 1)
    names = list(weights(1))
    assert store.wait_live().ask(SessionTensors("a", names)).data["missing"] == names
    digests = one.write()
    one.say(wire.Written(one.placement.session, digests[:1]))
    first = one.placement.copies[0].part
    until(lambda: names[first] not in store.ask(SessionTensors("b", names)).data["missing"])
    one.say(wire.Written(one.placement.session, digests[1:]))
    until(lambda: store.ask(SessionTensors("c", names)).data["missing"] == [])
    assert store.ask(SessionTensors("d", ["other"])).data["missing"] == ["other"]


def test_commit_by_the_operator(store, trainer, replica, weights, digest_of):
    store.wait_live()
    replica()
    one = sealed(trainer, weights)
    result = store.ask(CommitSession("x"))
    assert result.ok, result
    assert result.data["version"] == 1
    assert store.serving() == (1, digest_of(weights(1)))
    assert isinstance(one.ask(wire.Commit(one.placement.session)), wire.Committed)


def test_operator_and_trainer_commit_at_once(store, trainer, replica, weights, until):
    store.wait_live()
    one_replica = replica(prepare="late")  # so that both ask during the same commit
    one = sealed(trainer, weights)
    one.say(wire.Commit(one.placement.session))
    assert store.ask(CommitSession("x")).ok
    assert isinstance(one.hear(), wire.Committed)
    until(lambda: one_replica.live.version == 1)


def test_a_replica_that_refuses_is_named_to_the_operator(store, trainer, replica, weights):
    store.wait_live()
    replica(prepare="no")
    sealed(trainer, weights)
    result = store.ask(CommitSession("x"))
    assert not result.ok
    assert "model.norm.weight" in result.message
    assert store.status().live.version == 0


def test_nothing_to_commit(store, trainer, weights):
    store.wait_live()
    assert store.ask(CommitSession("x")).code == "unknown_session"
    trainer().begin(weights(1), 1)
    result = store.ask(CommitSession("y"))
    assert not result.ok
    assert "not sealed" in result.message

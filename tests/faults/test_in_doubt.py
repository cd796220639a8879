"""Operators at a store that follows another one: between its flip and the word from above nobody here decides."""

from tests.faults import relay_fleet
from tests.faults.waiting import until
from weight_manager.messages import AbortSession, CommitSession


def test_an_operator_cannot_undo_what_may_be_recorded_above(fleet, weights):
    a = fleet.add("a", replica=relay_fleet.Gated)
    b = fleet.add("b", "a")
    fleet.wait_ready()
    pushed = fleet.start_push(weights(1), 1)
    until(lambda: b.relay()["above"]["in_doubt"])
    refused = b.store.ask(AbortSession("x"))
    assert not refused.ok
    assert "only the store above knows" in refused.message
    a.replica.gate.set()
    assert pushed.result(timeout=10).version == 1
    fleet.serve(1, weights(1))


def test_a_replica_that_dies_in_doubt_does_not_undo_it_either(fleet, weights):
    a = fleet.add("a", replica=relay_fleet.Gated)
    b = fleet.add("b", "a")
    fleet.wait_ready()
    pushed = fleet.start_push(weights(1), 1)
    until(lambda: b.relay()["above"]["in_doubt"])
    b.replica.die()
    until(lambda: b.store.status().replicas == {})
    assert b.relay()["above"]["in_doubt"]
    a.replica.gate.set()
    assert pushed.result(timeout=10).version == 1
    until(lambda: b.store.status().live.version == 1)


def test_a_push_is_committed_at_the_root_and_nowhere_else(fleet, weights, trainer_of):
    fleet.chain(2)
    b = fleet.hosts["b"]
    _, finish = trainer_of(fleet, weights(1), 1, held_back=1)
    until(lambda: b.store.status().session)
    refused = b.store.ask(CommitSession("x"))
    assert not refused.ok
    assert "ask the root" in refused.message
    assert finish().version == 1
    fleet.serve(1, weights(1))

"""Stores of several hosts: one push reaches all of them, late ones catch up, and a rollback goes everywhere."""

import time

import pytest
import zmq

from rollout_client import errors
from tests.faults.relay_fleet import LEASE_S, TOKEN
from tests.faults.small_model import LAYOUT
from tests.faults.waiting import until
from weight_manager import messages
from weight_manager.arena import ArenaReader


def nbytes(tensors):
    return sum(t.nbytes for t in tensors.values())


def live_bytes(host):
    (path,) = host.store.arena_dir.glob("*.arena")
    with ArenaReader(path) as reader:
        return bytes(reader.slot(host.store.status().live.slot))


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_one_push_reaches_every_store_of_a_chain_and_each_sends_it_once(fleet, weights, within, transport):
    fleet.chain(4)
    before = [host.relay()["sent_bytes"] for host in fleet.hosts.values()]
    with within(4):
        report = fleet.push(weights(1), 1, transport=transport)
    assert report.replicas == 4
    fleet.serve(1, weights(1))
    sent = [h.relay()["sent_bytes"] - b for h, b in zip(fleet.hosts.values(), before, strict=True)]
    assert sent == [nbytes(weights(1))] * 3 + [0]


def test_nobody_serves_the_new_version_before_all_can(fleet, weights, within):
    """The tokens of a version exist nowhere until its commit point: flips are held on every host."""
    a, b, c = fleet.chain(3)
    c.replica.plan["prepare"] = "no"
    with pytest.raises(errors.PushError) as refused, within(4):
        fleet.push(weights(1), 1)
    assert "store t@" in refused.value.rank
    assert "replica 0 rank 0" in refused.value.rank
    assert [len(h.replica.saw(messages.Flip)) for h in (a, b, c)] == [0, 0, 0]
    c.replica.plan["prepare"] = "yes"
    fleet.serve(0, weights(0))
    fleet.push(weights(1), 1)
    fleet.serve(1, weights(1))


def test_a_late_store_is_not_ready_before_it_holds_what_is_live(fleet, weights, within):
    fleet.chain(2)
    fleet.push(weights(1), 1)
    with within(6):
        late = fleet.add("c", "b")
        until(late.ready)
    fleet.serve(1, weights(1))
    fleet.push(weights(2), 2)
    fleet.serve(2, weights(2))


def test_a_store_that_joins_while_a_push_runs_takes_part_in_it(fleet, weights, trainer_of):
    fleet.chain(2)
    _, finish = trainer_of(fleet, weights(1), 1, held_back=3)
    fleet.add("c", "b")
    until(lambda: fleet.hosts["b"].relay()["below"])
    finish()
    fleet.serve(1, weights(1), seconds=5)


def test_a_tree_with_slices_over_tensor_parallel_ranks(fleet, weights):
    a = fleet.add("a", tp=2, replica=None)
    b, c, d = (fleet.add(name, above, tp=2, replica=None) for name, above in (("b", "a"), ("c", "a"), ("d", "b")))
    fleet.wait_ready()
    fleet.push(weights(3), 1)
    fleet.wait_ready()
    until(lambda: all(h.store.status().live.version == 1 for h in (b, c, d)))
    assert live_bytes(b) == live_bytes(c) == live_bytes(d) == live_bytes(a)


def test_a_partial_push_is_whole_everywhere(fleet, weights):
    fleet.chain(3)
    fleet.push(weights(1), 1)
    name = LAYOUT.manifest.parameters[-1].name
    fleet.push({name: weights(2)[name]}, 2, base_version=1)
    fleet.serve(2, weights(1) | {name: weights(2)[name]})


def test_a_rollback_goes_everywhere_and_moves_no_bytes(fleet, weights, within):
    a, *_ = fleet.chain(3)
    for version in (1, 2):
        fleet.push(weights(version), version)
    before = [h.relay()["sent_bytes"] for h in fleet.hosts.values()]
    with within(3):
        result = a.store.ask(messages.RollbackWeights("r"))
    assert result.ok, result
    fleet.serve(1, weights(1))
    assert [h.relay()["sent_bytes"] for h in fleet.hosts.values()] == before
    fleet.push(weights(3), 3)
    fleet.serve(3, weights(3))


def test_leases_last_down_a_long_chain(fleet):
    *_, last = fleet.chain(8)
    left = []
    until(lambda: left.append(last.relay()["above"]["lease_s"]) or len(left) == 100)
    assert min(left) > 0.3 * LEASE_S


def test_a_store_below_takes_no_pushes_of_its_own(fleet, weights):
    a, b = fleet.chain(2)
    fleet.hosts = {"b": b, "a": a}
    with pytest.raises(errors.PushError, match="ask the root"):
        fleet.push(weights(1), 1)
    assert not b.store.ask(messages.RollbackWeights("r")).ok
    fleet.serve(0, weights(0))


@pytest.mark.parametrize(("config", "why"), [({"token": TOKEN + "!"}, "token"), ({"tp": 2, "replica": None}, "layout")])
def test_a_store_that_does_not_belong_stays_outside(fleet, config, why):
    a = fleet.add("a")
    stranger = fleet.add("b", "a", **config)
    until(lambda: why in stranger.relay()["above"]["refusal"])
    assert not stranger.may_serve()
    assert not stranger.ready()
    assert a.relay()["below"] == {}


def test_nonsense_on_the_relay_socket_harms_nobody(fleet, weights):
    a, _ = fleet.chain(2)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.set(zmq.LINGER, 0)
        stranger.connect(a.relay_endpoint)
        for frames in ([b"x"], [b""], [b"\x81\xa1t\xa4vote"], [b"x"] * 5, [bytes(100_000)]):
            stranger.send_multipart(frames)
        assert stranger.poll(2000)
    fleet.push(weights(1), 1)
    fleet.serve(1, weights(1))


def test_an_old_version_is_pulled_by_a_store_that_was_away(fleet, weights, within):
    _, b = fleet.chain(2)
    fleet.push(weights(1), 1)
    b.kill()
    time.sleep(0.1)
    until(lambda: not b.may_serve())
    until(lambda: fleet.hosts["a"].relay()["below"] == {})
    with within(3):
        fleet.push(weights(2), 2)
    with within(6):
        b.restart()
        fleet.serve(2, weights(2), seconds=6)

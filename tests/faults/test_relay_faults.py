"""Stores below that die, stop, crawl, refuse or are cut off, and the root itself, at every stage of a push.

In each case what is served changes by a commit only, nobody serves an old version beside a new one, all of it within a
stated time, the next good push works, and whoever was away ends up with what is live.
"""

import os
import signal
import time

import pytest

from rollout_client import errors
from rollout_client import protocol as wire
from tests.faults.relay_fleet import LEASE_S, Gated, Proxy
from tests.faults.waiting import until
from weight_manager import messages
from worker.service import free_ports

MARGIN = 4.0
"""Seconds for processes on a busy machine to do their part."""


def test_a_store_killed_while_bytes_arrive_fails_the_push_and_the_next_works_without_it(
    fleet, weights, trainer_of, within
):
    *_, c = fleet.chain(3)
    trainer, _ = trainer_of(fleet, weights(1), 1, held_back=3)
    c.kill()
    with within(LEASE_S + MARGIN):
        answer = until(lambda: refusal(trainer), LEASE_S + MARGIN)
    assert "store t@" in answer.message
    assert answer.retryable
    fleet.serve(0, weights(0), "a", "b")
    with within(MARGIN):
        fleet.push(weights(2), 2)
    fleet.serve(2, weights(2), "a", "b")
    assert not c.may_serve()
    c.restart()
    fleet.serve(2, weights(2), "c", seconds=6)


def refusal(trainer):
    time.sleep(0.05)
    answer = trainer.ask(wire.Renew(trainer.placement.session))
    return answer if isinstance(answer, wire.Error) else None


@pytest.mark.parametrize("stage", ["prepare", "flip"])
@pytest.mark.parametrize("policy", ["all", "quorum"])
def test_a_store_killed_during_the_commit(fleet, weights, within, stage, policy):
    a, b, c = star(fleet, policy)
    c.replica.plan[stage] = "silent"
    pushed = fleet.start_push(weights(1), 1)
    until(lambda: c.replica.saw(messages.Prepare if stage == "prepare" else messages.Flip))
    c.kill()
    with within(LEASE_S + MARGIN):
        error = pushed.exception(timeout=10)
        assert not c.may_serve() or error is not None, "the others went on while it may still have served"
    served = 0 if policy == "all" else 1
    assert isinstance(error, errors.PushError) is (policy == "all")
    fleet.serve(served, weights(served), "a", "b")
    assert a.replica.live.version == b.replica.live.version == served
    with within(LEASE_S + MARGIN):
        fleet.push(weights(2), 2)
    c.replica.plan[stage] = "yes"
    c.restart()
    fleet.serve(2, weights(2), seconds=6)


def star(fleet, policy="all", **config):
    hosts = [
        fleet.add(name, above, relay_policy=policy, **config) for name, above in (("a", None), ("b", "a"), ("c", "a"))
    ]
    fleet.wait_ready()
    return hosts


def test_a_stopped_store_is_left_behind_by_a_quorum_fenced_and_catches_up(fleet, weights, within):
    *_, c = star(fleet, "quorum")
    os.kill(c.pid, signal.SIGSTOP)
    with within(LEASE_S + MARGIN):
        fleet.push(weights(1), 1)
    assert not c.may_serve(), "its ranks still serve version 0 beside version 1"
    fleet.serve(1, weights(1), "a", "b")
    os.kill(c.pid, signal.SIGCONT)
    with within(MARGIN):
        fleet.serve(1, weights(1), "c", seconds=MARGIN)


def test_a_stopped_store_fails_the_push_if_all_must_take_part(fleet, weights, within):
    *_, c = star(fleet)
    os.kill(c.pid, signal.SIGSTOP)
    with pytest.raises(errors.PushError, match="silent"), within(LEASE_S + MARGIN):
        fleet.push(weights(1), 1)
    fleet.serve(0, weights(0), "a", "b")
    assert not c.may_serve()
    os.kill(c.pid, signal.SIGCONT)
    fleet.wait_ready(seconds=MARGIN)
    fleet.push(weights(2), 2)
    fleet.serve(2, weights(2))


def test_a_store_that_refuses_is_left_behind_by_a_quorum_without_waiting(fleet, weights, within):
    *_, c = star(fleet, "quorum", relay_lease_s=5.0)
    c.replica.plan["prepare"] = "no"
    with within(MARGIN):
        fleet.push(weights(1), 1)
        assert not c.may_serve(), "the version was recorded before the refusing store was fenced"
    assert not c.ready()
    c.replica.plan["prepare"] = "yes"
    with within(8):
        fleet.serve(1, weights(1), seconds=8)


def test_no_quorum_no_commit(fleet, weights, within):
    _, b, c = star(fleet, "quorum")
    b.replica.plan["prepare"] = c.replica.plan["prepare"] = "no"
    with pytest.raises(errors.PushError, match="1 stores are left, 2 must take part"), within(MARGIN):
        fleet.push(weights(1), 1)
    b.replica.plan["prepare"] = c.replica.plan["prepare"] = "yes"
    fleet.serve(0, weights(0), seconds=MARGIN)
    fleet.push(weights(2), 2)
    fleet.serve(2, weights(2))


@pytest.mark.parametrize(("policy", "port"), [("all", "data"), ("all", None), ("quorum", "data"), ("quorum", None)])
def test_a_slow_store_costs_a_quorum_its_patience_and_all_of_them_its_time(fleet, weights, within, policy, port):
    port = port and free_ports(1)[0]
    a = fleet.add("a", relay_policy=policy, relay_data_port=port)
    fleet.add("b", "a", relay_policy=policy)
    proxy = Proxy(a.relay_endpoint, port)
    c = fleet.add("c", "a", relay_policy=policy, upstream=proxy.endpoint)
    fleet.wait_ready()
    proxy.rate = 160_000  # two seconds for a version
    before = time.monotonic()
    fleet.push(weights(1), 1)
    took = time.monotonic() - before
    assert (1.5 if policy == "all" else 1.0) <= took < 1.5 + LEASE_S + MARGIN
    fleet.serve(1, weights(1), "a", "b")
    proxy.rate = 1 << 40
    fleet.serve(1, weights(1), "c", seconds=2 * MARGIN)
    assert c.replica.served()[0] == 1
    proxy.close()


@pytest.mark.parametrize("port", ["data", None])
def test_a_partition_that_heals(fleet, weights, within, port):
    port = port and free_ports(1)[0]
    a = fleet.add("a", relay_data_port=port)
    proxy = Proxy(a.relay_endpoint, port)
    b = fleet.add("b", upstream=proxy.endpoint)
    c = fleet.add("c", "b")
    fleet.wait_ready()
    proxy.cut = True
    until(lambda: not b.may_serve() and not c.may_serve(), LEASE_S + MARGIN)
    assert not b.ready()
    assert not c.ready()
    until(lambda: a.relay()["below"] == {}, LEASE_S + MARGIN)
    with within(MARGIN):
        fleet.push(weights(1), 1)
    proxy.cut = False
    with within(2 * MARGIN):
        fleet.serve(1, weights(1), seconds=2 * MARGIN)
    proxy.close()


def test_a_root_that_dies_before_its_record_leaves_everyone_on_the_old_version(fleet, weights, within):
    a, b, c = doubtful(fleet)
    pushed = fleet.start_push(weights(1), 1, timeout_s=3)
    until(lambda: b.relay()["above"]["in_doubt"] and c.relay()["above"]["in_doubt"])
    a.kill()
    a.replica.gate.set()
    a.restart()
    with within(LEASE_S + 2 * MARGIN):  # until then those below hold a flipped version back, and their answers
        until(lambda: not (b.relay()["above"]["in_doubt"] or c.relay()["above"]["in_doubt"]), LEASE_S + 2 * MARGIN)
        fleet.serve(0, weights(0), seconds=LEASE_S + 2 * MARGIN)
    pushed.cancel() or pushed.exception(timeout=20)
    fleet.push(weights(2), 2)
    fleet.serve(2, weights(2))


def doubtful(fleet):
    """A chain whose root's replica flips last, when told."""
    a = fleet.add("a", replica=Gated)
    b, c = fleet.add("b", "a"), fleet.add("c", "b")
    fleet.wait_ready()
    return a, b, c


def test_a_store_that_dies_between_its_flip_and_the_record_learns_that_it_was_committed(fleet, weights, within):
    a, b, _ = doubtful(fleet)
    pushed = fleet.start_push(weights(1), 1)
    until(lambda: b.relay()["above"]["in_doubt"])
    b.signal(signal.SIGSTOP)
    a.replica.gate.set()
    assert pushed.result(timeout=10).version == 1
    assert a.store.status().live.version == 1
    assert b.replica.saw(messages.Finalize) == [], "its output is held until it knows"
    sent = a.relay()["sent_bytes"]
    b.kill()
    b.restart()
    with within(LEASE_S + 2 * MARGIN):  # the store below it may hold a lease of its last life
        fleet.serve(1, weights(1), seconds=LEASE_S + 2 * MARGIN)
    assert a.relay()["sent_bytes"] == sent, "the bytes were in its slot already"


def test_a_restarted_root_waits_for_leases_it_may_have_given(fleet, weights, within):
    a, b = (fleet.add("a", relay_policy="quorum", relay_quorum=1), fleet.add("b", "a"))
    fleet.wait_ready()
    os.kill(b.pid, signal.SIGSTOP)
    a.kill()
    a.restart()
    until(lambda: a.store.status().live)
    with within(LEASE_S + 2 * MARGIN):
        fleet.push(weights(1), 1)
    assert not b.may_serve()
    os.kill(b.pid, signal.SIGCONT)
    fleet.serve(1, weights(1), seconds=2 * MARGIN)

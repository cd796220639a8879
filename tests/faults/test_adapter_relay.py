"""Adapters down a tree of stores: on every host or on none, whoever dies, stops, joins late or is away meanwhile.

What holds of the model's weights (test_relay.py, test_relay_faults.py) holds of each adapter: what is served changes by
a commit only, and nobody is admitted who lacks one that is live, or has one too many.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from rollout_client import errors
from rollout_client.publisher import WeightPublisher
from tests.faults.relay_fleet import LEASE_S, TOKEN, GatedVote, Host
from tests.faults.small_model import ADAPTER_CONFIG, adapter, adapter_digest
from tests.faults.waiting import until
from weight_manager import messages

MARGIN = 30.0
"""Seconds for processes on a busy machine to do their part."""


def state(host: Host, name: str = "policy-a") -> str:
    """Of what is pushed to an adapter there."""
    found = [a["session"]["state"] for a in host.store.status().adapters if a["name"] == name and a["session"]]
    return found[0] if found else ""


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_a_push_reaches_every_store_of_a_chain(fleet, weights, transport):
    fleet.chain(3)
    for version in (1, 2, 3):
        report = fleet.push_adapter(version, version, transport=transport)
        assert (report.version, report.replicas) == (version, 3)
        for host in fleet.hosts.values():
            assert host.adapters() == {"policy-a": (version, adapter_digest(adapter(version)))}
    fleet.serve(0, weights(0))


def test_one_no_anywhere_leaves_everybody_on_the_version_before(fleet):
    *_, c = fleet.chain(3)
    c.replica.plan["prepare"] = "no"
    with pytest.raises(errors.PushError, match="replica 0 rank 0 cannot prepare"):
        fleet.push_adapter(1, 1)
    fleet.serve_adapters({}, seconds=MARGIN)
    c.replica.plan.clear()
    fleet.push_adapter(1, 1)
    c.replica.plan["prepare"] = "no"
    with pytest.raises(errors.PushError, match="replica 0 rank 0 cannot prepare"):
        fleet.push_adapter(2, 2)
    c.replica.plan.clear()
    fleet.serve_adapters({"policy-a": (1, 1)}, seconds=MARGIN)
    for host in fleet.hosts.values():
        assert {m.epoch for m in host.replica.saw(messages.Finalize)} <= {host.replica.adapters["policy-a"].live.epoch}


def test_adapters_and_the_model_are_pushed_at_the_same_time(fleet, weights):
    fleet.chain(2)
    pushed = [fleet.start_adapter(seed, 1, name) for seed, name in ((1, "policy-a"), (2, "policy-b"))]
    fleet.push(weights(1), 1)
    assert [one.result(timeout=MARGIN).version for one in pushed] == [1, 1]
    fleet.serve(1, weights(1), seconds=MARGIN)
    fleet.serve_adapters({"policy-a": (1, 1), "policy-b": (2, 1)})


THREE = {"policy-a": (1, 4), "policy-b": (2, 7), "policy-c": (3, 1)}


def push_three(fleet):
    for name, (seed, version) in THREE.items():
        fleet.push_adapter(seed, version, name)


def test_a_late_store_has_all_adapters_before_it_is_admitted(fleet, weights):
    fleet.chain(2)
    fleet.push(weights(1), 1)
    push_three(fleet)
    late = fleet.add("c", "b")
    until(lambda: list(late.store.arena_dir.glob("*.arena")) and late.may_serve(), MARGIN)
    held = {a["name"]: a["version"] for a in late.store.status().adapters}
    assert held == {name: version for name, (_, version) in THREE.items()}
    fleet.serve_adapters(THREE, seconds=MARGIN)
    fleet.serve(1, weights(1), seconds=MARGIN)
    fleet.push_adapter(9, 9)
    fleet.serve_adapters(THREE | {"policy-a": (9, 9)})


def test_a_store_below_takes_no_adapters_of_its_own(fleet):
    _, b = fleet.chain(2)
    fleet.push_adapter(1, 1)
    with WeightPublisher(b.store.endpoint, run_id="run", token=TOKEN) as publisher:
        with pytest.raises(errors.PushError, match="ask the root"):
            publisher.push_adapter("policy-a", adapter(2), ADAPTER_CONFIG, 2)
        with pytest.raises(errors.PushError, match="ask the root"):
            publisher.unload_adapter("policy-a")
        with pytest.raises(errors.PushError, match="ask the root"):
            publisher.merge_adapter("policy-a", 2)
    for request in (
        messages.LoadAdapter("x", "policy-a", str(b.store.run_dir)),
        messages.UnloadAdapter("x", "policy-a"),
        messages.RollbackAdapter("x", "policy-a"),
    ):
        assert "ask the root" in b.store.ask(request).message
    fleet.serve_adapters({"policy-a": (1, 1)})


def test_unload_returns_once_nobody_below_begins_anything(fleet):
    *_, c = fleet.chain(3)
    push_three(fleet)
    with fleet.publisher() as publisher:
        publisher.unload_adapter("policy-b")
    assert c.replica.adapters.keys() == {"policy-a", "policy-c"}, "as it says itself"
    fleet.serve_adapters({name: THREE[name] for name in ("policy-a", "policy-c")})
    fleet.push_adapter(5, 1, "policy-b")
    fleet.serve_adapters(THREE | {"policy-b": (5, 1)})


def test_a_store_that_is_stopped_holds_an_unload_up_until_it_is_fenced(fleet):
    _, b = fleet.chain(2)
    fleet.push_adapter(1, 1)
    b.signal(signal.SIGSTOP)
    with fleet.publisher() as publisher:
        publisher.unload_adapter("policy-a", timeout_s=MARGIN)
    assert not b.may_serve(), "it would begin sequences under a name that nobody may begin any"
    b.signal(signal.SIGCONT)
    fleet.serve_adapters({}, seconds=MARGIN)


def test_a_store_that_was_away_unloads_what_was_unloaded_before_it_is_admitted(fleet):
    _, b = fleet.chain(2)
    push_three(fleet)
    b.kill()
    with fleet.publisher() as publisher:
        publisher.unload_adapter("policy-a", timeout_s=MARGIN)
    fleet.push_adapter(8, 8, "policy-b")
    seen = len(b.replica.saw(messages.Registered))
    b.restart()
    until(lambda: len(b.replica.saw(messages.Registered)) > seen, MARGIN)
    told = {a.name: a.live.version for a in b.replica.saw(messages.Registered)[seen].adapters}
    assert told == {"policy-b": 8, "policy-c": 1}
    fleet.serve_adapters({"policy-b": (8, 8), "policy-c": (3, 1)}, seconds=MARGIN)


def test_a_rollback_goes_everywhere_and_moves_no_bytes(fleet):
    a, *_ = fleet.chain(3)
    for version in (1, 2):
        fleet.push_adapter(version, version)
    before = [h.relay()["sent_bytes"] for h in fleet.hosts.values()]
    assert a.store.ask(messages.RollbackAdapter("r", "policy-a")).ok
    fleet.serve_adapters({"policy-a": (1, 1)})
    assert [h.relay()["sent_bytes"] for h in fleet.hosts.values()] == before


def test_another_shape_takes_the_place_of_the_first_everywhere(fleet):
    _, b = fleet.chain(2)
    fleet.push_adapter(1, 1)
    wide = ADAPTER_CONFIG | {"r": 8}
    with fleet.publisher() as publisher:
        publisher.push_adapter("policy-a", adapter(2, 8), wide, 2)
    for host in fleet.hosts.values():
        assert host.adapters() == {"policy-a": (2, adapter_digest(adapter(2, 8), wide))}
    until(lambda: len(list(b.store.arena_dir.glob("*-adapters-*"))) == 1, MARGIN)


def test_a_merge_goes_everywhere(fleet, weights):
    a, *_ = fleet.chain(3)
    fleet.push(weights(1), 1)
    with fleet.publisher() as publisher:
        report = publisher.push_adapter("policy-a", adapter(2), ADAPTER_CONFIG, 2, merge=True)
    name = "model.layers.0.self_attn.q_proj.weight"
    served = {host.serving() for host in fleet.hosts.values()}
    assert served == {(2, report.digest)}
    read = a.store.ask(messages.ReadTensor("x", name)).data["bytes"]
    product = (
        adapter(2)["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
        @ (adapter(2)["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"])
    )
    merged = weights(1)[name] + product * np.float32(2.0)
    assert np.array_equal(np.frombuffer(read, np.float32).reshape(merged.shape), merged)
    fleet.serve_adapters({"policy-a": (2, 2)})


@pytest.mark.parametrize("late", [False, True])
def test_a_store_below_knows_of_a_merge_when_it_becomes_a_root(fleet, weights, late):
    """It would merge another adapter on top of the first."""
    names = [] if late else fleet.chain(2)
    if late:
        fleet.chain(1)
    fleet.push(weights(1), 1)
    with fleet.publisher() as publisher:
        publisher.push_adapter("policy-a", adapter(2), ADAPTER_CONFIG, 2, merge=True)
    b = fleet.add("b", "a") if late else names[1]
    fleet.wait_ready("b", seconds=MARGIN)
    fleet.serve_adapters({"policy-a": (2, 2)}, "b", seconds=MARGIN)
    b.kill()
    b.restart(upstream=None)
    until(lambda: b.store.status().live is not None)
    assert b.store.ask(messages.MergeAdapter("x", "policy-a")).code == "base_mismatch"


@pytest.mark.parametrize("policy", ["all", "quorum"])
def test_a_store_killed_before_its_vote(fleet, policy):
    *_, c = star(fleet, policy)
    fleet.push_adapter(1, 1)
    c.replica.plan["prepare"] = "silent"
    pushed = fleet.start_adapter(2, 2)
    until(lambda: len(c.replica.saw(messages.Prepare)) == 2, MARGIN)
    c.kill()
    error = pushed.exception(timeout=MARGIN)
    assert not c.may_serve() or error is not None, "the others went on while it may still have served"
    assert isinstance(error, errors.PushError) is (policy == "all")
    served = 1 if policy == "all" else 2
    fleet.serve_adapters({"policy-a": (served, served)}, "a", "b", seconds=MARGIN)
    c.replica.plan.clear()
    fleet.push_adapter(3, 3, timeout_s=MARGIN)
    c.restart()
    fleet.serve_adapters({"policy-a": (3, 3)}, seconds=MARGIN)


def star(fleet, policy="all", **root):
    hosts = [
        fleet.add(name, above, relay_policy=policy, **(root if above is None else {}))
        for name, above in (("a", None), ("b", "a"), ("c", "a"))
    ]
    fleet.wait_ready(seconds=MARGIN)
    return hosts


def doubtful(fleet, seed, version):
    """A version that b has voted for, while c, which has not, is stopped. Returns the hosts and the push."""
    a, b, c = star(fleet, replica=GatedVote, max_deadline_s=60, flip_s=15)
    a.replica.gate.set()
    fleet.push_adapter(1, 1)
    a.replica.gate.clear()
    pushed = fleet.start_adapter(seed, version, timeout_s=40)
    until(lambda: state(b) == state(c) == "ready", MARGIN)
    for host in (c, a, c, a):
        host.relay()  # who answers has sent what it had to say before: c is not stopped with its vote in hand
    c.signal(signal.SIGSTOP)
    a.replica.gate.set()
    until(lambda: b.relay()["above"]["in_doubt"], MARGIN)
    return a, b, c, pushed


def test_a_store_in_doubt_learns_from_the_next_life_of_the_root_that_nothing_was_committed(fleet):
    a, b, c, pushed = doubtful(fleet, 2, 2)
    assert b.replica.adapter_served("policy-a") == (1, adapter_digest(adapter(1)))
    assert not b.store.ask(messages.AbortSession("x", adapter="policy-a")).ok, "only the store above knows"
    a.kill()
    a.restart()
    until(lambda: not b.relay()["above"]["in_doubt"], MARGIN)
    c.signal(signal.SIGCONT)
    pushed.exception(timeout=60)  # it may have been begun again, and gone through
    version = a.adapters()["policy-a"][0]
    fleet.serve_adapters({"policy-a": (version, version)}, seconds=MARGIN)
    fleet.push_adapter(3, 3)
    fleet.serve_adapters({"policy-a": (3, 3)}, seconds=MARGIN)


def test_a_store_that_dies_in_doubt_learns_that_it_was_committed(fleet):
    a, b, c, pushed = doubtful(fleet, 2, 2)
    b.signal(signal.SIGSTOP)
    c.signal(signal.SIGCONT)
    until(lambda: a.store.status().adapters[0]["version"] == 2, MARGIN)
    assert b.replica.adapter_served("policy-a") == (1, adapter_digest(adapter(1)))
    sent = a.relay()["sent_bytes"]
    b.kill()
    b.restart()
    assert pushed.result(timeout=MARGIN).version == 2
    fleet.serve_adapters({"policy-a": (2, 2)}, seconds=MARGIN)
    assert a.relay()["sent_bytes"] == sent, "the bytes were in its slot already"


def test_the_answer_to_a_push_waits_for_a_store_that_may_serve_the_version_before(fleet):
    _, b, c, pushed = doubtful(fleet, 2, 2)
    b.signal(signal.SIGSTOP)
    c.signal(signal.SIGCONT)
    assert pushed.result(timeout=MARGIN).version == 2
    assert not b.may_serve()
    b.signal(signal.SIGCONT)
    fleet.serve_adapters({"policy-a": (2, 2)}, seconds=MARGIN)


def test_a_root_that_is_killed_has_its_adapters_and_so_have_those_below(fleet):
    a, *_ = fleet.chain(3)
    push_three(fleet)
    a.kill()
    a.restart()
    fleet.serve_adapters(THREE, seconds=MARGIN)
    time.sleep(3.2)  # after a restart no slot is given away before replicas have said what they read
    fleet.push_adapter(9, 9)
    fleet.serve_adapters(THREE | {"policy-a": (9, 9)}, seconds=MARGIN)


@pytest.mark.parametrize("reboots", [False, True])
def test_a_store_in_the_middle_that_dies_takes_no_adapter_from_those_below(fleet, reboots):
    _, b, c = fleet.chain(3)
    push_three(fleet)
    epochs = {name: a.live.epoch for name, a in c.replica.adapters.items()}
    b.kill()
    if reboots:
        for path in b.store.arena_dir.iterdir():
            path.unlink()
    b.restart()
    fleet.serve_adapters(THREE, seconds=MARGIN)
    if not reboots:  # else it is made live again, from the bytes that are there
        assert {name: a.live.epoch for name, a in c.replica.adapters.items()} == epochs
    fleet.push_adapter(9, 9, timeout_s=MARGIN)
    fleet.serve_adapters(THREE | {"policy-a": (9, 9)}, seconds=MARGIN)


def test_a_stopped_store_is_left_behind_by_a_quorum_and_fenced_before_the_record(fleet):
    *_, c = star(fleet, "quorum")
    push_three(fleet)
    c.signal(signal.SIGSTOP)
    fleet.push_adapter(9, 9, timeout_s=MARGIN)
    assert not c.may_serve(), "its ranks still serve the version before beside the new one"
    fleet.serve_adapters(THREE | {"policy-a": (9, 9)}, "a", "b")
    c.signal(signal.SIGCONT)
    fleet.serve_adapters(THREE | {"policy-a": (9, 9)}, seconds=LEASE_S + MARGIN)


def removed_files(host):
    """Files that are gone and that the store still holds: their memory is not given back before it lets go."""
    held = Path(f"/proc/{host.pid}/fd").iterdir()
    with contextlib.suppress(OSError):
        return [name for fd in held if "(deleted)" in (name := os.readlink(fd)) and "adapters" in name]
    return ["one that was closed meanwhile"]


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_the_memory_of_an_adapter_that_is_unloaded_is_given_back_at_once(fleet, transport):
    """Of one that was pushed whole, and of one whose push was refused: not when the collector of cycles comes by."""
    hosts = fleet.chain(2)
    with fleet.publisher() as publisher:
        for version in range(1, 6):
            fleet.push_adapter(version, version, transport=transport)
            publisher.unload_adapter("policy-a")
            hosts[1].replica.plan["prepare"] = "no"
            with pytest.raises(errors.PushError):
                fleet.push_adapter(version, version, transport=transport)
            hosts[1].replica.plan["prepare"] = "yes"
    for host in hosts:
        until(lambda host=host: not removed_files(host), 5)

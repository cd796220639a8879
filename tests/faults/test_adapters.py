"""Adapters on a real store: staged, proved, voted on and recorded like the model's weights, each line by itself."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from rollout_client import errors, slot_lock
from rollout_client import protocol as wire
from rollout_client.arena_file import ArenaFile
from rollout_client.digest import digest_of
from rollout_client.peft import adapter_config, adapter_tensors
from rollout_client.protocol import AdapterPush
from rollout_client.publisher import WeightPublisher
from tests.faults.small_model import ADAPTER_CONFIG, adapter, adapter_digest
from weight_manager import messages


@pytest.fixture
def publisher(store, run):
    with WeightPublisher(store.endpoint, run_id=run, busy_timeout_s=1) as made:
        yield made


@pytest.fixture
def push_adapter(publisher):
    def push(seed, version, name="policy-a", **options):
        return publisher.push_adapter(name, adapter(seed), ADAPTER_CONFIG, version, **options)

    return push


@pytest.fixture
def loaded(store):
    """name -> (version, digest), as the status says."""
    return lambda: {a["name"]: (a["version"], a["digest"]) for a in store.status().adapters if a["version"] is not None}


def begin(trainer, seed, version, name="policy-a"):
    """Open a session of an adapter word by word."""
    named = dict(adapter_tensors(adapter(seed)))
    push = AdapterPush(name, adapter_config(ADAPTER_CONFIG))
    return trainer.begin(named, version, transport="zmq", adapter=push)


def send(trainer, placement):
    for number, copy in enumerate(placement.copies):
        raw = np.ascontiguousarray(trainer.sources[copy.part]).tobytes()
        trainer.say(wire.Chunk(placement.session, number, 0, [len(raw)]), raw)
        trainer.say(wire.Written(placement.session, [(number, digest_of(raw))]))
    return trainer.ask(wire.Seal(placement.session))


@pytest.mark.parametrize("transport", ["auto", "zmq"])
def test_a_push_is_live_on_every_replica_with_the_trainers_bytes(store, replica, run, loaded, transport):
    replicas = [replica(0), replica(1)]
    with WeightPublisher(store.endpoint, run_id=run, transport=transport) as publisher:
        for version in (1, 2, 3):
            tensors = adapter(version)
            report = publisher.push_adapter("policy-a", tensors, ADAPTER_CONFIG, version)
            assert (report.version, report.digest, report.replicas) == (version, adapter_digest(tensors), 2)
            assert report.transport == ("zmq" if transport == "zmq" else "shm")
            for one in replicas:
                assert one.adapter_served("policy-a") == (version, adapter_digest(tensors))
            assert loaded() == {"policy-a": (version, adapter_digest(tensors))}
    assert store.serving()[0] == 0, "the model's own version does not move"


def test_delta_sends_what_differs_to_the_same_bytes(store, replica, run):
    one = replica(0)
    with WeightPublisher(store.endpoint, run_id=run, transport="zmq", delta=True) as publisher:
        publisher.push_adapter("policy-a", adapter(1), ADAPTER_CONFIG, 1)
        publisher.push_adapter("policy-b", adapter(2), ADAPTER_CONFIG, 1)
        tensors = adapter(1)
        next(iter(tensors.values()))[0, 0] += 1
        report = publisher.push_adapter("policy-a", tensors, ADAPTER_CONFIG, 2)
    assert report.sent < report.nbytes / 10
    assert one.adapter_served("policy-a") == (2, adapter_digest(tensors))


def test_versions_rise_for_each_name_by_itself(replica, push_adapter, loaded):
    replica(0)
    push_adapter(5, 5)
    push_adapter(1, 1, name="policy-b")
    with pytest.raises(errors.StaleVersion):
        push_adapter(4, 4)
    assert push_adapter(9, 5).already
    assert loaded() == {"policy-a": (5, adapter_digest(adapter(5))), "policy-b": (1, adapter_digest(adapter(1)))}


def test_the_model_and_two_adapters_are_pushed_at_the_same_time(store, replica, trainer, push, weights, loaded):
    replica(0)
    first, second = trainer(), trainer()
    placements = [begin(first, 1, 1, "policy-a"), begin(second, 2, 1, "policy-b")]
    assert push(weights(1), 1).version == 1, "a push of the model in between"
    for one, placement in zip((first, second), placements, strict=True):
        assert isinstance(send(one, placement), wire.Sealed)
    for one, placement in zip((second, first), placements[::-1], strict=True):
        assert isinstance(one.ask(wire.Commit(placement.session)), wire.Committed)
    assert loaded() == {"policy-a": (1, adapter_digest(adapter(1))), "policy-b": (1, adapter_digest(adapter(2)))}
    assert store.serving()[0] == 1


def test_a_second_push_of_the_same_adapter_waits_or_is_busy(replica, trainer, push_adapter):
    replica(0)
    push_adapter(1, 1)
    begin(trainer(run_id="other"), 2, 2)
    with pytest.raises(errors.Busy, match="adapter policy-a"):
        push_adapter(3, 3)


@pytest.mark.parametrize("answer", ["no", "silent"])
def test_one_no_leaves_everybody_on_the_version_before(replica, push_adapter, loaded, answer):
    good, other = replica(0), replica(1)
    push_adapter(1, 1)
    other.plan["prepare"] = answer
    with pytest.raises(errors.PushRefused if answer == "no" else errors.DeadlineExceeded):
        push_adapter(2, 2, timeout_s=2)
    assert good.adapter_served("policy-a") == (1, adapter_digest(adapter(1)))
    assert not [m for m in good.saw(messages.Finalize) if m.epoch != good.adapters["policy-a"].live.epoch]
    assert loaded() == {"policy-a": (1, adapter_digest(adapter(1)))}
    other.plan.clear()
    assert push_adapter(2, 2).version == 2


def test_a_first_version_that_is_refused_leaves_no_trace(store, replica, push_adapter, until):
    other = replica(0)
    other.plan["prepare"] = "no"
    with pytest.raises(errors.PushRefused, match="replica 0 rank 0 cannot prepare"):
        push_adapter(1, 1)
    until(lambda: not list(store.arena_dir.glob("*-adapters-*")))
    assert not list((store.run_dir / "adapters").iterdir())
    assert store.status().adapters == []


def test_a_replica_that_dies_leaves_the_vote_and_comes_back_to_what_is_live(replica, push_adapter):
    good, _ = replica(0), replica(1, prepare="die")
    assert push_adapter(1, 1).replicas == 1
    back = replica(1)
    assert back.saw(messages.Registered)[0].adapters == list(good.adapters.values())


def test_who_registers_during_a_commit_is_told_and_waited_for(store, replica, trainer):
    replica(0, prepare="late")
    one = trainer()
    placement = begin(one, 1, 1)
    send(one, placement)
    one.say(wire.Commit(placement.session))
    late = replica(1, wait=False)
    answer = one.hear()
    assert isinstance(answer, wire.Committed)
    assert answer.replicas == 2
    assert late.adapter_served("policy-a") == (1, adapter_digest(adapter(1)))


def test_adapters_survive_the_death_of_the_store(store, replica, push_adapter, loaded, run):
    push_adapter(1, 1, name="policy-a")
    push_adapter(2, 7, name="policy-b")
    before = loaded()
    epochs = {a["name"]: a["epoch"] for a in store.status().adapters}
    store.end(signal.SIGKILL)
    store.start()
    store.wait_live()
    assert loaded() == before
    one = replica(0)
    assert {name: a.live.epoch for name, a in one.adapters.items()} == epochs
    assert one.adapter_served("policy-b") == before["policy-b"]
    with WeightPublisher(store.endpoint, run_id=run) as again:
        with pytest.raises(errors.StaleVersion):
            again.push_adapter("policy-b", adapter(3), ADAPTER_CONFIG, 6)
        again.push_adapter("policy-b", adapter(3), ADAPTER_CONFIG, 8)
    assert one.adapters["policy-b"].live.epoch > max(epochs.values())


def test_a_trainer_whose_plan_is_not_what_it_was_pushes_on(store, replica, run):
    """The store was started again; then another trainer's push of another shape came in between."""
    with WeightPublisher(store.endpoint, run_id=run) as publisher, WeightPublisher(store.endpoint, run_id=run) as other:
        for version in (1, 2):
            publisher.push_adapter("policy-a", adapter(version), ADAPTER_CONFIG, version)
        store.end(signal.SIGKILL)
        store.start()
        store.wait_live()
        one = replica(0)
        for version in (3, 4):
            publisher.push_adapter("policy-a", adapter(version), ADAPTER_CONFIG, version)
            assert one.adapter_served("policy-a") == (version, adapter_digest(adapter(version)))
        other.push_adapter("policy-a", adapter(5, 8), ADAPTER_CONFIG | {"r": 8}, 5)
        publisher.push_adapter("policy-a", adapter(6), ADAPTER_CONFIG, 6)
        assert one.adapter_served("policy-a") == (6, adapter_digest(adapter(6)))


def heard_of(trainer, kind):
    """The next answer of this kind, and that no error comes before it."""
    while True:
        answer = trainer.hear(30)
        assert not isinstance(answer, wire.Error), answer
        if isinstance(answer, kind):
            return answer


@pytest.fixture
def told_ahead(trainer):
    """A trainer's connection whose push of version 1 through shared memory is live, and where the next one goes."""
    one = trainer()
    named = dict(adapter_tensors(adapter(1)))
    push = AdapterPush("policy-a", adapter_config(ADAPTER_CONFIG))
    one.ahead, deadline = None, time.monotonic() + 30
    while one.ahead is None:  # at first the other slots have no memory yet
        assert time.monotonic() < deadline
        placement = one.begin(named, 1, adapter=push, force=True)
        one.copies, one.plan, one.push = placement.copies, placement.plan, push
        one.arena_path = placement.arena_path
        deliver(one, placement.session)
        one.ahead = heard_of(one, wire.Committed).ahead
    return one


def deliver(one, session):
    """Write, say so and seal, whatever has been answered so far."""
    one.welcome = msgspec.structs.replace(one.welcome, arena_path=one.arena_path)
    one.placement = msgspec.structs.replace(one.placement, copies=one.copies)
    one.say(wire.Written(session, one.write()))
    one.say(wire.Seal(session, 30.0, commit=True))


def begin_ahead(one, seed, version):
    """Say the begin of a push whose bytes go where the last answer said, and do not hear what comes of it."""
    one.sources = list(dict(adapter_tensors(adapter(seed))).values())
    one.placement = one.ahead
    one.say(wire.Begin(version, [], adapter=one.push, plan=one.plan, session=one.ahead.session))


def test_a_push_begins_where_the_answer_to_the_last_one_said(replica, told_ahead, loaded):
    one = replica(0)
    for version in range(2, 8):
        asked = told_ahead.ahead
        assert asked.plan == told_ahead.plan
        begin_ahead(told_ahead, version, version)
        deliver(told_ahead, asked.session)
        placed = heard_of(told_ahead, wire.Placement)
        assert (placed.session, placed.write_epoch) == (asked.session, asked.write_epoch)
        assert placed.slot_offset == asked.slot_offset
        told_ahead.ahead = heard_of(told_ahead, wire.Committed).ahead
        assert told_ahead.ahead is not None
        assert one.adapter_served("policy-a") == (version, adapter_digest(adapter(version)))


def test_bytes_that_are_not_those_of_the_digests_are_refused_there_too(replica, told_ahead, loaded):
    one = replica(0)
    begin_ahead(told_ahead, 2, 2)
    told_ahead.placement = msgspec.structs.replace(told_ahead.placement, copies=told_ahead.copies)
    told_ahead.welcome = msgspec.structs.replace(told_ahead.welcome, arena_path=told_ahead.arena_path)
    (first, digest), *others = told_ahead.write()
    told_ahead.say(wire.Written(told_ahead.ahead.session, [(first, digest ^ 1), *others]))
    assert isinstance(told_ahead.hear(), wire.Placement)
    assert told_ahead.ask(wire.Seal(told_ahead.ahead.session)).code == "checksum_mismatch"
    assert one.adapter_served("policy-a") == (1, adapter_digest(adapter(1)))


@pytest.mark.parametrize("meanwhile", ["another push", "a push that is undone", "another session's name"])
def test_who_comes_too_late_for_its_place_is_given_another(replica, told_ahead, run, trainer, push_adapter, meanwhile):
    one = replica(0)
    if meanwhile == "another push":
        push_adapter(5, 5)
    elif meanwhile == "a push that is undone":
        other = trainer()
        placement = begin(other, 5, 5)
        assert isinstance(other.ask(wire.Abort(placement.session)), wire.Aborted)
    else:
        told_ahead.ahead = msgspec.structs.replace(told_ahead.ahead, session="0" * 16)
    begin_ahead(told_ahead, 6, 6)
    placed = heard_of(told_ahead, wire.Placement)
    assert placed.session != told_ahead.ahead.session
    told_ahead.placement = placed
    deliver(told_ahead, placed.session)
    heard_of(told_ahead, wire.Committed)
    assert one.adapter_served("policy-a") == (6, adapter_digest(adapter(6)))


@pytest.mark.parametrize("store_config", [{"disk_roots": ["/"]}])
def test_a_directory_that_was_loaded_into_its_place_is_not_written_over(store, replica, told_ahead, saved):
    one = replica(0)
    answer = store.ask(messages.LoadAdapter("x", "policy-a", saved(5), version=5))
    assert answer.ok, answer
    begin_ahead(told_ahead, 6, 6)
    assert heard_of(told_ahead, wire.Placement).slot_offset != told_ahead.ahead.slot_offset
    assert one.adapter_served("policy-a") == (5, adapter_digest(adapter(5)))


def test_a_trainer_that_writes_ahead_and_never_begins_keeps_nobody_out(replica, told_ahead, push_adapter, loaded):
    """It was stopped: its writer lock is held, and what it has written is in nobody's version."""
    one = replica(0)
    with ArenaFile(told_ahead.arena_path, write=True) as arena:
        span = told_ahead.ahead.slot_offset, told_ahead.ahead.slot_bytes
        assert slot_lock.lock_shared(arena.fd, *span)
        for version in range(2, 6):
            push_adapter(version, version)
            arena.slot(arena.slot_at(span[0]))[: 1 << 12] = b"\xff" * (1 << 12)
            assert one.adapter_served("policy-a") == (version, adapter_digest(adapter(version)))


def test_the_version_before_is_kept_for_a_rollback(store, replica, push_adapter, loaded):
    """What is given away before a push has begun is never that one."""
    one = replica(0)
    for version in range(1, 7):
        push_adapter(version, version)
    assert store.ask(messages.RollbackAdapter("z", "policy-a")).ok
    assert one.adapter_served("policy-a") == (5, adapter_digest(adapter(5)))
    push_adapter(7, 7)
    assert one.adapter_served("policy-a") == (7, adapter_digest(adapter(7)))


def test_bytes_that_changed_while_no_store_was_there_are_not_taken_over(store, push_adapter, loaded):
    push_adapter(1, 1)
    store.end(signal.SIGKILL)
    (path,) = store.arena_dir.glob("*-adapters-*")
    with path.open("r+b") as file:
        file.seek(4096 + 64)
        file.write(b"\1\2\3\4")
    store.start()
    store.wait_live()
    assert loaded() == {}
    assert not path.exists()


def test_an_ordered_end_leaves_nothing_in_shared_memory(store, push_adapter):
    push_adapter(1, 1)
    assert list(store.arena_dir.glob("*-adapters-*"))
    assert store.end() == 0
    assert not list(store.arena_dir.iterdir())


SAVED = pytest.mark.parametrize("store_config", [{"snapshot": True}])


def empty(store):
    """As after a reboot, or in a container of its own: nothing is left in memory."""
    for arena in store.arena_dir.iterdir():
        arena.unlink()


@SAVED
def test_adapters_come_back_after_an_ordered_end(
    store, replica, publisher, push_adapter, loaded, until, run, store_config
):
    push_adapter(1, 1)
    push_adapter(2, 7, name="policy-b")
    push_adapter(3, 1, name="policy-c")
    push_adapter(4, 9)
    publisher.unload_adapter("policy-c")
    before = loaded()
    assert store.end() == 0
    assert not list(store.arena_dir.iterdir())
    store.start()
    store.wait_live()
    until(lambda: loaded() == before)
    assert replica(0).adapter_served("policy-a") == before["policy-a"] == (9, adapter_digest(adapter(4)))
    with WeightPublisher(store.endpoint, run_id=run) as again:
        with pytest.raises(errors.StaleVersion):
            again.push_adapter("policy-b", adapter(5), ADAPTER_CONFIG, 6)
        again.push_adapter("policy-b", adapter(5), ADAPTER_CONFIG, 8)
    assert loaded()["policy-b"] == (8, adapter_digest(adapter(5)))


@SAVED
def test_adapters_come_back_into_an_empty_container(store, publisher, push_adapter, loaded, until, store_config):
    push_adapter(1, 1)
    wide = ADAPTER_CONFIG | {"r": 8}
    publisher.push_adapter("policy-a", adapter(2, 8), wide, 2)
    publisher.push_adapter("policy-a", adapter(3, 8), wide, 3)
    file = store.run_dir / "adapters" / "policy-a.weights"
    until(lambda: file.exists() and json.loads(file.read_bytes()[:4096])["live"]["version"] == 3)
    store.end(signal.SIGKILL)
    empty(store)
    store.start()
    store.wait_live()
    until(lambda: loaded() == {"policy-a": (3, adapter_digest(adapter(3, 8), wide))})


@SAVED
def test_a_damaged_snapshot_of_an_adapter_is_not_served(store, push_adapter, loaded, until, store_config):
    push_adapter(1, 1)
    push_adapter(2, 2, name="policy-b")
    push_adapter(3, 3, name="policy-c")
    store.end()
    folder = store.run_dir / "adapters"
    for name, at in (("policy-a", 4096 + 100), ("policy-c", 0)):
        raw = bytearray((folder / f"{name}.weights").read_bytes())
        raw[at] ^= 1
        (folder / f"{name}.weights").write_bytes(raw)
    store.start()
    store.wait_live()
    until(lambda: loaded() == {"policy-b": (2, adapter_digest(adapter(2)))})
    until(lambda: {"of no use", "cannot be read"} <= said(store))
    assert loaded().keys() == {"policy-b"}
    with WeightPublisher(store.endpoint, run_id="again") as again:
        again.push_adapter("policy-a", adapter(4), ADAPTER_CONFIG, 4)
    assert loaded()["policy-a"] == (4, adapter_digest(adapter(4)))


def said(store):
    """Which of these words are in its log."""
    text = (store.run_dir / "log").read_text()
    return {words for words in ("of no use", "cannot be read") if words in text}


def test_records_that_a_crash_left_unreadable_or_half_written_are_removed(store, push_adapter, loaded, until):
    """No record of an adapter is synced: after the machine lost its power, one may be there without its bytes."""
    push_adapter(1, 1)
    store.end(signal.SIGKILL)
    folder = store.run_dir / "adapters"
    (kept,) = folder.iterdir()
    (folder / "policy-b@01234567.json").touch()
    (folder / f".{kept.name}.4711").write_bytes(kept.read_bytes())
    (folder / ".policy-a.weights.4711").write_bytes(b"half a snapshot")
    store.start()
    store.wait_live()
    until(lambda: loaded() == {"policy-a": (1, adapter_digest(adapter(1)))})
    assert list(folder.iterdir()) == [kept]


def test_without_snapshots_adapters_are_gone_after_an_ordered_end(store, push_adapter, loaded):
    push_adapter(1, 1)
    store.end()
    store.start()
    store.wait_live()
    assert loaded() == {}


def test_what_a_sequence_finishes_on_is_never_overwritten(store, replica, push_adapter, until):
    one = replica(0)
    for version in range(1, 8):  # of eight slots one must stay free, or nothing can be pushed
        push_adapter(version, version, in_flight="finish")
        live = one.adapters["policy-a"]
        one.pinned.append(messages.HeldAdapter(live.live.epoch, live.arena_path, live.live.slot))
        assert one.saw(messages.Prepare)[-1].in_flight == "finish"
    held = {h.slot for h in one.pinned}
    assert len(held) == 7
    push_adapter(8, 8)
    assert one.adapters["policy-a"].live.slot not in held
    with pytest.raises(errors.Busy, match="every slot"):
        push_adapter(9, 9)
    one.pinned.clear()
    until(lambda: len(store.status().replicas["0"]["adapters"]["held"]) == 1)
    assert push_adapter(9, 9).version == 9


def test_unload_returns_once_no_replica_begins_anything(store, replica, publisher, push_adapter, until, loaded):
    one = replica(0)
    push_adapter(1, 5)
    epoch = one.adapters["policy-a"].live.epoch
    live = one.adapters["policy-a"]
    one.pinned.append(messages.HeldAdapter(epoch, live.arena_path, live.live.slot))
    publisher.unload_adapter("policy-a")
    assert one.adapters == {}
    assert loaded() == {}
    assert list(store.arena_dir.glob("*-adapters-*")), "a sequence still finishes on it"
    one.pinned.clear()
    until(lambda: not list(store.arena_dir.glob("*-adapters-*")))
    with pytest.raises(errors.InvalidPush, match="no adapter 'policy-a'"):
        publisher.unload_adapter("policy-a")
    push_adapter(2, 1)
    assert one.adapters["policy-a"].live.epoch > epoch, "an epoch names one version for ever"


def test_a_trainer_that_dies_is_undone_by_its_lease(store, replica, trainer, push_adapter, until, loaded):
    replica(0)
    push_adapter(1, 1)
    begin(trainer(run_id="other"), 2, 2)
    until(lambda: any("was not heard of" in str(a["last_error"]) for a in store.status().adapters))
    assert loaded() == {"policy-a": (1, adapter_digest(adapter(1)))}
    assert push_adapter(3, 3).version == 3


def test_another_shape_takes_the_place_of_the_first_once_it_is_live(store, replica, publisher, push_adapter, until):
    one = replica(0)
    push_adapter(1, 1)
    wide = ADAPTER_CONFIG | {"r": 8}
    one.plan["prepare"] = "no"
    with pytest.raises(errors.PushRefused):
        publisher.push_adapter("policy-a", adapter(2, 8), wide, 2)
    assert one.adapter_served("policy-a") == (1, adapter_digest(adapter(1)))
    one.plan.clear()
    with pytest.raises(errors.StaleVersion):
        publisher.push_adapter("policy-a", adapter(2, 8), wide, 0)
    publisher.push_adapter("policy-a", adapter(2, 8), wide, 2)
    assert one.adapter_served("policy-a") == (2, adapter_digest(adapter(2, 8), wide))
    until(lambda: len(list(store.arena_dir.glob("*-adapters-*"))) == 1)
    (status,) = store.status().adapters
    assert (status["rank"], status["version"]) == (8, 2)


def test_an_operator_ends_a_push_of_an_adapter_and_goes_back(store, replica, trainer, push_adapter, loaded):
    one = replica(0)
    push_adapter(1, 1)
    push_adapter(2, 2)
    placement = begin(trainer(run_id="other"), 3, 3)
    assert isinstance(placement, wire.Placement)
    assert store.ask(messages.AbortSession("x", adapter="policy-a")).ok
    assert store.ask(messages.AbortSession("y", adapter="policy-a")).code == "unknown_session"
    assert store.ask(messages.RollbackAdapter("z", "policy-a")).ok
    assert one.adapter_served("policy-a") == (1, adapter_digest(adapter(1)))
    assert loaded()["policy-a"][0] == 1
    assert store.ask(messages.RollbackAdapter("z", "policy-x")).code == "unknown_adapter"


def test_an_operator_does_not_go_back_while_another_shape_is_pushed(
    store, replica, trainer, push_adapter, loaded, until
):
    """The name is about to stand for another line. Gone back to after that, the line that it stood for would have been
    what a restart found, and what replicas served until they were reminded.
    """
    one = replica(0)
    push_adapter(1, 1)
    push_adapter(2, 2)
    wide = AdapterPush("policy-a", adapter_config(ADAPTER_CONFIG | {"r": 8}))
    pushed = trainer(run_id="other")
    placement = pushed.begin(dict(adapter_tensors(adapter(3, 8))), 3, transport="zmq", adapter=wide)
    assert isinstance(placement, wire.Placement)
    answer = store.ask(messages.RollbackAdapter("z", "policy-a"))
    assert (answer.ok, answer.code) == (False, "busy")
    assert one.adapter_served("policy-a")[0] == loaded()["policy-a"][0] == 2
    assert store.ask(messages.AbortSession("x", adapter="policy-a")).ok
    until(lambda: store.ask(messages.RollbackAdapter("z", "policy-a")).ok)  # busy until the line that was begun is gone
    assert loaded()["policy-a"][0] == 1


@pytest.mark.parametrize("store_config", [{"finalize_s": 30.0}])
def test_a_version_that_is_pushed_again_is_not_there_before_everybody_has_moved_to_it(
    store, replica, trainer, loaded, until, store_config
):
    """A trainer that lost its connection asks again: a replica may begin its next request under the version before."""
    one = replica(0, finalize="silent")
    first = trainer()
    placement = begin(first, 1, 1)
    send(first, placement)
    first.say(wire.Commit(placement.session))
    until(lambda: loaded().get("policy-a", (0,))[0] == 1)
    again = trainer()
    answer = begin(again, 1, 1)
    assert isinstance(answer, wire.Error)
    assert (answer.code, answer.retryable) == ("busy", True)
    assert "not everybody has moved to it yet" in answer.message
    one.die()
    assert isinstance(first.hear(), wire.Committed)
    answer = begin(again, 1, 1)
    assert isinstance(answer, wire.Committed)
    assert answer.already


@pytest.mark.parametrize("store_config", [{"model_names": ["policy", "default"], "disk_roots": ["/"]}])
def test_no_adapter_bears_a_name_of_the_model(store, replica, push_adapter, saved, model):
    replica(0)
    for name in ("policy", "default", model.name):
        with pytest.raises(errors.InvalidPush, match=f"{name} is the model's own name"):
            push_adapter(1, 1, name=name)
        answer = store.ask(messages.LoadAdapter("x", name, saved(1)))
        assert "is the model's own name" in answer.message
    assert store.status().adapters == []
    assert push_adapter(1, 1, name="policy-a").version == 1


@pytest.fixture
def saved(tmp_path):
    def save(seed, config=ADAPTER_CONFIG, **more):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        save_file(adapter(seed) | more, tmp_path / "adapter_model.safetensors")
        return str(tmp_path)

    return save


@pytest.fixture
def rooted(launch, tmp_path):
    return launch(disk_roots=[str(tmp_path)]).wait_live()


def test_a_directory_that_peft_saved_is_loaded(rooted, saved):
    for seed in (1, 2):
        answer = rooted.ask(messages.LoadAdapter("x", "policy-a", saved(seed)))
        assert answer.ok, answer
        assert (answer.data["version"], answer.data["digest"]) == (seed - 1, adapter_digest(adapter(seed)))
    assert rooted.ask(messages.UnloadAdapter("y", "policy-a")).ok
    assert rooted.status().adapters == []


@pytest.mark.parametrize(
    ("config", "more", "code", "says"),
    [
        (ADAPTER_CONFIG | {"use_dora": True}, {}, "io", "DoRA"),
        (ADAPTER_CONFIG | {"r": 2}, {}, "shape_mismatch", "(2, 64) is served"),
        (ADAPTER_CONFIG | {"target_modules": ["q_proj", "v_proj", "k_proj"]}, {}, "missing_tensor", "k_proj"),
        (ADAPTER_CONFIG, {"base_model.model.lm_head.weight": np.zeros((96, 64), np.float32)}, "io", "lm_head"),
    ],
)
def test_a_directory_that_cannot_be_served_is_refused_in_words(rooted, saved, config, more, code, says):
    answer = rooted.ask(messages.LoadAdapter("x", "policy-a", saved(1, config, **more)))
    assert (answer.ok, answer.code) == (False, code)
    assert says in answer.message
    assert rooted.status().adapters == []


def test_a_directory_outside_the_roots_is_not_read(store, saved):
    answer = store.ask(messages.LoadAdapter("x", "policy-a", saved(1)))
    assert not answer.ok
    assert "disk_roots" in answer.message


@pytest.mark.parametrize("store_config", [{"max_adapters": 1, "max_adapter_rank": 4}])
def test_number_and_rank_are_capped(push_adapter, publisher):
    push_adapter(1, 1)
    with pytest.raises(errors.InvalidPush, match="unload one"):
        push_adapter(1, 1, name="policy-b")
    with pytest.raises(errors.InvalidPush, match="rank 8 is over"):
        publisher.push_adapter("policy-a", adapter(2, 8), ADAPTER_CONFIG | {"r": 8}, 2)
    publisher.unload_adapter("policy-a")
    push_adapter(1, 1, name="policy-b")


@pytest.mark.parametrize("store_config", [{"adapter_bytes": 1 << 20}])
def test_bytes_are_capped(publisher, push_adapter):
    push_adapter(1, 1)
    wide = ADAPTER_CONFIG | {"r": 256}
    with pytest.raises(errors.InvalidPush, match="adapter_bytes"):
        publisher.push_adapter("policy-b", adapter(2, 256), wide, 1)


@pytest.mark.parametrize("store_config", [{"max_adapters": 0}])
def test_a_service_may_take_none(push_adapter):
    with pytest.raises(errors.InvalidPush, match="takes no adapters"):
        push_adapter(1, 1)


def test_all_that_is_wrong_with_a_push_is_listed_and_nothing_is_staged(store, publisher, push_adapter, until):
    tensors = adapter(1)
    gone = [name for name in tensors if "layers.1" in name and "q_proj" in name]
    for name in gone:
        del tensors[name]
    tensors["base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"] = np.zeros((4, 64), np.float32)
    with pytest.raises(errors.InvalidPush) as refused:
        publisher.push_adapter("policy-a", tensors, ADAPTER_CONFIG, 1)
    assert "layers.7.self_attn.q_proj, which this model does not have" in str(refused.value)
    del tensors["base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"]
    with pytest.raises(errors.InvalidPush) as refused:
        publisher.push_adapter("policy-a", tensors, ADAPTER_CONFIG, 1)
    assert len(refused.value.tensors) == len(gone)
    until(lambda: store.status().adapters == [] and not list(store.arena_dir.glob("*-adapters-*")))


def test_finish_is_for_adapters(trainer, weights):
    answer = trainer().begin(weights(1), 1, in_flight="finish")
    assert isinstance(answer, wire.Error)
    assert "one version is served" in answer.message


def test_two_trainer_ranks_push_an_adapter_together(store, replica, run):

    one = replica(0)
    tensors = adapter(1)
    halves = [dict(list(tensors.items())[half::2]) for half in (0, 1)]
    reports = {}

    def push(rank):
        with WeightPublisher(store.endpoint, run_id=run) as publisher:
            reports[rank] = publisher.push_adapter(
                "policy-a", halves[rank], ADAPTER_CONFIG, 1, rank=rank, world=2, timeout_s=20
            )

    threads = [threading.Thread(target=push, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {report.digest for report in reports.values()} == {adapter_digest(tensors)}
    assert one.adapter_served("policy-a") == (1, adapter_digest(tensors))


def test_a_name_that_is_no_name_is_refused_by_the_store_too(trainer):
    answer = begin(trainer(), 1, 1, "../policy")
    assert isinstance(answer, wire.Error)
    assert "cannot be an adapter's name" in answer.message


def with_adapter(base, changes):
    """The model's weights with an adapter's changes in them, as PEFT merges them."""
    found = dict(base)
    for name in base:
        module = "base_model.model." + name.removesuffix(".weight")
        if f"{module}.lora_A.weight" in changes:
            product = changes[f"{module}.lora_B.weight"] @ changes[f"{module}.lora_A.weight"]
            found[name] = base[name] + product * np.float32(2.0)
    return found


def test_an_adapter_is_merged_into_weights_without_any(
    store, replica, publisher, push, push_adapter, weights, digest_of, loaded
):
    one = replica(0)
    push(weights(1), 1)
    for version in (2, 3, 4):
        report = publisher.push_adapter("policy-a", adapter(version), ADAPTER_CONFIG, version, merge=True)
        wanted = (version, digest_of(with_adapter(weights(1), adapter(version))))
        assert (report.version, report.digest) == store.serving() == one.served() == wanted
    assert loaded()["policy-a"][0] == 4
    assert publisher.merge_adapter("policy-a", 4).already
    push(weights(5), 5)
    assert publisher.merge_adapter("policy-a", 6).digest == digest_of(with_adapter(weights(5), adapter(4)))
    with pytest.raises(errors.StaleVersion):
        publisher.merge_adapter("policy-a", 2)
    with pytest.raises(errors.InvalidPush, match="policy-x"):
        publisher.merge_adapter("policy-x", 9)


def test_back_from_a_merge_is_without_the_adapter(store, publisher, push, push_adapter, weights, digest_of):
    push(weights(1), 1)
    publisher.push_adapter("policy-a", adapter(2), ADAPTER_CONFIG, 2, merge=True)
    assert store.ask(messages.RollbackWeights("x")).ok
    assert store.serving() == (1, digest_of(weights(1)))
    assert store.ask(messages.MergeAdapter("y", "policy-a")).data["version"] == 2
    assert store.serving() == (2, digest_of(with_adapter(weights(1), adapter(2))))


def test_what_is_merged_is_not_merged_again_once_nobody_vouches_for_the_rest(
    store, publisher, push, weights, digest_of, run
):
    push(weights(1), 1)
    publisher.push_adapter("policy-a", adapter(2), ADAPTER_CONFIG, 2, merge=True)
    store.end(signal.SIGKILL)
    store.start()
    store.wait_live()
    with (
        WeightPublisher(store.endpoint, run_id=run) as again,
        pytest.raises(errors.InvalidPush, match="push the model's own weights first"),
    ):
        again.merge_adapter("policy-a", 3)
    assert store.serving()[1] == digest_of(with_adapter(weights(1), adapter(2)))


@pytest.mark.parametrize("store_config", [{"dtype": "bfloat16"}])
def test_a_merge_into_bfloat16_is_rounded_once(store, publisher, push, weights):
    push(weights(1), 1)
    publisher.push_adapter("policy-a", adapter(2), ADAPTER_CONFIG, 2, merge=True)
    name = "model.layers.0.self_attn.q_proj.weight"
    read = store.ask(messages.ReadTensor("x", name, 0, 1 << 20)).data
    base = rounded(weights(1)[name])
    merged = with_adapter({name: base}, adapter(2))[name]
    assert np.frombuffer(read["bytes"], np.uint16).reshape(base.shape).tolist() == bits(merged).tolist()


def bits(array):
    """Nearest bfloat16s, ties to even."""
    wide = array.view(np.uint32)
    return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)


def rounded(array):
    return (bits(array).astype(np.uint32) << 16).view(np.float32)


def test_after_a_restart_nothing_is_given_away_before_replicas_have_said_what_they_read(store, push_adapter, run):
    push_adapter(1, 1)
    store.end(signal.SIGKILL)
    store.start()
    store.wait_live()
    with (
        WeightPublisher(store.endpoint, run_id=run, busy_timeout_s=0.2) as hasty,
        pytest.raises(errors.Busy, match="every slot"),
    ):
        hasty.push_adapter("policy-a", adapter(2), ADAPTER_CONFIG, 2)
    with WeightPublisher(store.endpoint, run_id=run) as patient:
        assert patient.push_adapter("policy-a", adapter(2), ADAPTER_CONFIG, 2).version == 2


def test_a_config_that_is_matched_for_ever_stops_nobody(replica, publisher, push_adapter):
    replica(0)
    config = ADAPTER_CONFIG | {"target_modules": "(a|a?)+X|([a-z._0-9]+)+X"}
    with pytest.raises(errors.InvalidPush, match="matching its patterns"):
        publisher.push_adapter("policy-a", adapter(1), config, 1)
    assert push_adapter(1, 1).version == 1


def test_memory_of_lines_that_are_gone_is_given_back(store, replica, publisher, push_adapter, until):
    """Unloaded, or replaced by one of another rank: what the store still maps stays allocated, without a name."""
    replica(0)

    def removed_and_held():
        links = (os.readlink(fd) for fd in Path(f"/proc/{store.process.pid}/fd").iterdir())
        maps = Path(f"/proc/{store.process.pid}/maps").read_text().splitlines()
        return [line for line in (*links, *maps) if "-adapters-" in line and line.endswith("(deleted)")]

    for version in range(1, 6):
        push_adapter(version, version)
        rank = 4 * version
        publisher.push_adapter("policy-b", adapter(version, rank), ADAPTER_CONFIG | {"r": rank}, version)
        publisher.unload_adapter("policy-a")
    until(lambda: not removed_and_held())


def test_a_trainer_whose_first_push_was_over_before_it_wrote_may_push_again(
    store, replica, publisher, push_adapter, loaded, monkeypatch, until
):
    """As one that was stopped for longer than its lease: the adapter's arena is gone with the session."""
    replica(0)
    stage = publisher._stage

    def late(begin, placement, *rest):
        store.ask(messages.AbortSession("over", adapter="policy-a"))
        until(lambda: not Path(placement.arena_path).exists())
        stage(begin, placement, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(publisher, "_stage", late)
        with pytest.raises(errors.SessionLost, match="removed the arena of policy-a") as failed:
            push_adapter(1, 1)
    assert failed.value.retryable
    assert push_adapter(1, 1).version == 1
    assert loaded() == {"policy-a": (1, adapter_digest(adapter(1)))}


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_trainer_keeps_nothing_of_adapters_that_an_operator_unloaded(store, replica, run, transport):
    """One that trains an adapter for each of its tasks for weeks would map, and remember, all of them."""
    replica(0)

    def held():
        mine = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
        maps = Path("/proc/self/maps").read_text().splitlines()
        return [line for line in (*mine, *maps) if "-adapters-" in line and line.endswith("(deleted)")]

    before = len(held())  # of other tests' stores
    with WeightPublisher(store.endpoint, run_id=run, transport=transport, delta=transport == "zmq") as publisher:
        for number in range(6):
            publisher.push_adapter(f"task-{number}", adapter(number), ADAPTER_CONFIG, 1)
            assert store.ask(messages.UnloadAdapter(f"unload-{number}", f"task-{number}")).ok
        publisher.push_adapter("last", adapter(7), ADAPTER_CONFIG, 1)
        assert len(held()) - before == 0
        kept = publisher._link.kept.keys() | publisher._link.plans.keys() | publisher._link.adapter_shm.keys()
        assert kept <= {"", "last"}
        assert publisher.push_adapter("last", adapter(8), ADAPTER_CONFIG, 2).version == 2

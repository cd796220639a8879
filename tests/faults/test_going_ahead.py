"""Versions that go live from device memory before the arena has them, and everybody's death in between."""

import ctypes
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from rollout_client import protocol as wire
from rollout_client import slot_lock
from rollout_client.arena_file import ArenaFile
from rollout_client.copying import source_view
from rollout_client.digest import digest_of as hashed
from rollout_client.offers import Offers
from rollout_client.own_memory import Run
from tests.faults.device_replica import DeviceReplica
from tests.faults.trainer import Trainer
from tests.faults.waiting import until
from tests.memfd_device import MemfdCuda
from weight_manager import messages


class Pusher(Trainer):
    """A trainer on a device of the host."""

    def start(self, tensors, version, **fields):
        placement = self.begin(tensors, version, devices=True, durability="device", **fields)
        assert isinstance(placement, wire.Placement), placement
        self.prepare()
        return placement

    def prepare(self):
        """What is sent for each copy of the placement."""
        self.pieces = [
            np.ascontiguousarray(source_view(self.sources[copy.part].reshape(-1), copy))
            for copy in self.placement.copies
        ]
        self.digests = [(number, hashed(piece.data)) for number, piece in enumerate(self.pieces)]

    def fill(self, pieces=None):
        """Have every rank copy from this process's memory; whether all have."""
        with ArenaFile(self.welcome.arena_path) as arena:
            slot = arena.slot_at(self.placement.slot_offset)
        cuda, runs = MemfdCuda(), []
        for copy, piece in zip(self.placement.copies, pieces or self.pieces, strict=True):
            runs.append(Run(copy.dst_offset * 4, cuda.allocate(piece.nbytes), piece.nbytes))
            ctypes.memmove(runs[-1].address, piece.ctypes.data, piece.nbytes)
        offers = Offers(cuda)
        offers.begin(self.placement.devices, slot, self.placement.write_epoch)
        offers.take(runs, last=True)
        offers.taken()
        whole = offers.whole
        offers.close()
        return whole

    def ahead(self):
        assert self.fill()
        return self.ask(wire.Ahead(self.placement.session, self.digests))

    def arena(self):
        """The rest of the push."""
        self.say(wire.Written(self.placement.session, self.write()))
        self.say(wire.Seal(self.placement.session, commit=True))
        return self.hear(), self.hear()


@pytest.fixture(autouse=True)
def libcuda(monkeypatch):
    """Processes that the store starts find a device of memfds."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "memfd_cuda"), prepend=os.pathsep)


@pytest.fixture
def pusher(store):
    made = []

    def new():
        made.append(Pusher(store.endpoint))
        return made[-1]

    yield new
    for one in made:
        one.close()


@pytest.fixture
def ranks(store):
    """Joins replicas on devices."""
    made = []

    def join(number=0, *, wait=True, **plan):
        made.append(DeviceReplica(store, number, **plan))
        if wait:
            until(lambda: store.status().replicas.get(str(number), {}).get("ready"))
        return made[-1]

    yield join
    for one in made:
        one.close()


@pytest.fixture
def locked(pusher, weights):
    """A trainer whose version is live, and that still holds the lock on the arena's slot."""
    held = []

    def go(number=1):
        one = pusher()
        assert one.start(weights(number), number).ahead
        arena = ArenaFile(one.welcome.arena_path, write=True)
        held.append(arena)
        assert slot_lock.lock_shared(arena.fd, one.placement.slot_offset, one.placement.slot_bytes)
        answer = one.ahead()
        assert isinstance(answer, wire.IsLive), answer
        one.let_go = arena.close
        return one

    yield go
    for arena in held:
        arena.close()


def safe(store):
    return until(lambda: (status := store.status()).ahead is None and status)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_version_is_live_before_the_arena_has_it(store, ranks, locked, weights, digest_of, replicas):
    serving = [ranks(number) for number in range(replicas)]
    trainer = locked()
    status, wanted = store.status(), digest_of(weights(1))
    assert (status.live.version, status.live.digest) == (1, wanted)
    assert (status.ahead["way"], status.ahead["held"]) == ("from its trainer", list(range(replicas)))
    assert [one.served() for one in serving] == [(1, wanted)] * replicas
    assert store.serving()[1] != wanted
    sealed, committed = trainer.arena()
    trainer.let_go()
    assert sealed == wire.Sealed(trainer.placement.session, wanted)
    assert (committed.version, committed.digest, committed.replicas) == (1, wanted, replicas)
    assert store.serving() == (1, wanted)
    status = store.status()
    assert (status.ahead, status.lost, status.counters["rescued"]) == (None, None, 0)
    assert status.counters["commits_ahead"] == 1


@pytest.mark.parametrize("ranks_too", [False, True], ids=["the trainer", "the trainer and all ranks"])
def test_who_dies_loses_nothing(store, ranks, locked, weights, digest_of, ranks_too):
    rank, trainer = ranks(), locked()
    if ranks_too:
        rank.die()
    trainer.let_go()
    status = safe(store)
    assert store.serving() == (1, digest_of(weights(1)))
    assert status.counters["rescued"] == 1
    assert ranks(1).served() == (1, digest_of(weights(1)))


def test_a_trainer_that_is_stopped_is_not_waited_for(store, ranks, locked, weights, digest_of):
    ranks()
    trainer = locked()
    safe(store)  # it still holds its lock
    assert store.serving() == (1, digest_of(weights(1)))
    sealed, committed = trainer.arena()  # it wakes up
    assert (type(sealed), type(committed)) == (wire.Sealed, wire.Committed)
    assert store.serving() == (1, digest_of(weights(1)))


def test_a_store_that_is_killed_finds_the_version_at_the_ranks(store, ranks, locked, weights, digest_of):
    ranks()
    trainer = locked()
    store.end(signal.SIGKILL)
    trainer.let_go()
    store.start()
    status = store.status()
    assert (status.live.version, status.ahead, status.lost) == (1, None, None)
    assert store.serving() == (1, digest_of(weights(1)))


def test_with_everybody_a_version_is_lost_and_its_number_is_kept_for_its_bytes(
    store, ranks, locked, pusher, weights, digest_of
):
    rank, first = ranks(), pusher()
    first.start(weights(1), 1)
    assert isinstance(first.ahead(), wire.IsLive)
    assert isinstance(first.arena()[1], wire.Committed)
    trainer = locked(2)
    store.end(signal.SIGKILL)
    rank.die()
    trainer.let_go()
    store.start()
    status = store.status()
    assert (status.live.version, status.lost.version) == (1, 2)
    assert status.live.epoch > status.lost.epoch
    assert status.counters["versions_lost"] == 1
    assert status.last_error["message"].startswith("version 2 was live from device memory and is lost")
    assert store.serving() == (1, digest_of(weights(1)))
    assert "is lost" in (store.run_dir / "log").read_text()
    assert ranks(1).served() == (1, digest_of(weights(1)))
    other = pusher()
    other.start(weights(3), 2)
    refused = other.ahead()
    assert (refused.code, "went live before" in refused.message) == ("stale_version", True)
    again = pusher()
    again.start(weights(2), 2)
    assert isinstance(again.ahead(), wire.IsLive)
    assert isinstance(again.arena()[1], wire.Committed)
    status = store.status()
    assert (status.live.version, status.lost) == (2, None)


def test_a_version_that_the_arena_got_is_not_lost_with_a_store_that_is_told_to_stop(store, ranks, pusher, weights):
    """Of which nothing is left on purpose, unless it keeps a snapshot."""
    ranks()
    trainer = pusher()
    trainer.start(weights(1), 1)
    assert isinstance(trainer.ahead(), wire.IsLive)
    assert isinstance(trainer.arena()[1], wire.Committed)
    store.end(signal.SIGTERM)
    store.start()
    status = store.status()
    assert (status.lost, status.last_error) == (None, None)


@pytest.mark.parametrize("store_config", [{"snapshot": True}])
def test_a_version_that_a_snapshot_brings_back_after_a_reboot_is_no_error(store, ranks, pusher, weights, digest_of):
    """Shared memory and its ranks are gone, and what was written last says that the version was in a device only."""
    rank, trainer = ranks(), pusher()
    trainer.start(weights(1), 1)
    assert isinstance(trainer.ahead(), wire.IsLive)
    assert isinstance(trainer.arena()[1], wire.Committed)
    until(lambda: "version 1 is on disk" in (store.run_dir / "log").read_text())
    store.end(signal.SIGKILL)
    rank.die()
    for path in store.arena_dir.iterdir():
        path.unlink()
    store.start()
    store.wait_live()
    status = store.status()
    assert (status.live.version, status.lost, status.last_error) == (1, None, None)
    assert store.serving() == (1, digest_of(weights(1)))


@pytest.fixture
def hanging(libcuda, monkeypatch, tmp_path):
    """A driver that does not come back, in processes that copy into the arena."""
    wait = "import sys, time\nif 'weight_manager.from_device' in sys.orig_argv:\n    time.sleep(3600)\n"
    (tmp_path / "hanging").mkdir()
    (tmp_path / "hanging" / "sitecustomize.py").write_text(wait)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hanging"), prepend=os.pathsep)


@pytest.fixture
def stranded(libcuda, monkeypatch, tmp_path, store, ranks, locked):
    """A driver with which no process gets at the memory, and a version that is live on a rank alone; that rank."""
    fail = "import os, sys\nif 'weight_manager.from_device' in sys.orig_argv:\n    os._exit(1)\n"
    (tmp_path / "failing").mkdir()
    (tmp_path / "failing" / "sitecustomize.py").write_text(fail)
    with monkeypatch.context() as patched:
        patched.setenv("PYTHONPATH", str(tmp_path / "failing"), prepend=os.pathsep)
        store.end(signal.SIGKILL)
        store.start()
        store.wait_live()
    rank = ranks()
    locked().let_go()
    until(lambda: store.status().ahead["way"] == "stranded in device memory")
    return rank


def begun(pusher, tensors, **fields):
    """A session of version 1, once no copy is being tried."""

    def begin():
        one = pusher()
        answer = one.begin(tensors, 1, **fields)
        assert isinstance(answer, wire.Placement) or answer.code == "busy", answer
        return one if isinstance(answer, wire.Placement) else None

    return until(begin)


def test_a_stranded_version_that_is_pushed_again_comes_into_the_arena(
    store, stranded, ranks, pusher, weights, digest_of
):
    again = begun(pusher, weights(1))
    sealed, committed = again.arena()
    assert (type(sealed), committed.version, committed.already) == (wire.Sealed, 1, False)
    status = store.status()
    assert (status.ahead, status.live.version, status.previous) == (None, 1, None)
    assert store.serving() == stranded.served() == (1, digest_of(weights(1)))
    assert ranks(1).served() == (1, digest_of(weights(1)))
    third = pusher().begin(weights(1), 1)
    assert (type(third), third.already) == (wire.Committed, True)


def test_a_stranded_version_is_not_replaced_by_other_bytes_of_its_number(store, stranded, pusher, weights, digest_of):
    other = begun(pusher, weights(3))
    other.say(wire.Written(other.placement.session, other.write()))
    refused = other.ask(wire.Seal(other.placement.session, commit=True))
    assert (refused.code, "went live before" in refused.message) == ("stale_version", True)
    assert store.status().live.digest == digest_of(weights(1))
    assert stranded.served() == (1, digest_of(weights(1)))


@pytest.mark.parametrize("store_config", [{"snapshot": True}])
def test_a_store_that_is_told_to_stop_does_not_wait_for_a_copy_that_hangs(hanging, store, ranks, locked):
    rank, trainer = ranks(), locked()
    trainer.let_go()
    until(lambda: store.status().ahead["way"] == "from device memory")
    rank.die()
    until(lambda: not store.status().replicas)
    store.end(signal.SIGTERM)  # within ten seconds, of the thirty that a copy has


def test_other_bytes_in_the_arena_are_replaced_by_those_that_are_served(store, ranks, locked, weights, digest_of):
    ranks()
    trainer = locked()
    with trainer.slot() as slot:
        slot[:64] = bytes(64)
    trainer.say(wire.Written(trainer.placement.session, trainer.digests))
    trainer.let_go()
    trainer.say(wire.Seal(trainer.placement.session, commit=True))
    assert [type(trainer.hear(30)), type(trainer.hear(30))] == [wire.Sealed, wire.Committed]
    assert store.serving() == (1, digest_of(weights(1)))
    counters = store.status().counters
    assert (counters["checksum_mismatches"], counters["rescued"]) == (1, 1)


def test_a_trainer_that_brings_other_bytes_has_to_be_gone_before_they_are_replaced(
    store, ranks, locked, weights, digest_of
):
    ranks()
    trainer = locked()
    with trainer.slot() as slot:
        slot[:64] = bytes(64)
        trainer.say(wire.Written(trainer.placement.session, trainer.digests))
        until(lambda: store.status().ahead["way"] == "from device memory")
        with pytest.raises(AssertionError, match="nothing came of it"):
            until(lambda: store.status().ahead is None, seconds=3.0)
        slot[:64] = bytes(64)
    trainer.let_go()
    safe(store)
    assert store.serving() == (1, digest_of(weights(1)))


def test_a_rank_that_was_given_other_bytes_says_no(store, ranks, pusher, weights, digest_of):
    rank, trainer = ranks(), pusher()
    trainer.start(weights(1), 1)
    trainer.fill([np.zeros_like(piece) for piece in trainer.pieces])
    answer = trainer.ask(wire.Ahead(trainer.placement.session, trainer.digests))
    assert answer.code == "refused"
    assert "does not hold version 1" in answer.message
    assert rank.served() == (0, digest_of(weights(0)))
    assert store.serving() == (0, digest_of(weights(0)))


def test_meanwhile_everything_else_waits(store, ranks, locked, pusher, weights, digest_of):
    ranks()
    trainer = locked()
    late = ranks(1, wait=False)
    with pytest.raises(AssertionError, match="busy"):
        pusher().start(weights(2), 2)
    back = store.ask(messages.RollbackWeights("back"))
    read = store.ask(messages.ReadTensor("read", "model.norm.weight"))
    again = pusher().begin(weights(1), 1)
    assert [back.code, read.code, again.code] == ["busy"] * 3
    time.sleep(0.3)
    assert not late.saw(messages.Registered)
    trainer.arena()
    until(lambda: store.status().replicas.get("1", {}).get("ready"))
    assert late.served() == (1, digest_of(weights(1)))
    assert store.ask(messages.RollbackWeights("back")).ok
    assert late.served() == (0, digest_of(weights(0)))


@pytest.mark.parametrize(
    ("fields", "store_config", "why"),
    [
        ({"world": 2}, {}, "one process"),
        ({"transport": "zmq"}, {}, "one process"),
        ({"base_version": 0}, {}, "one process"),
        ({}, {"refuse_non_finite": True}, "refuse_non_finite"),
        ({}, {"relay_endpoint": "tcp://127.0.0.1:*"}, "other hosts"),
    ],
)
def test_where_it_cannot_be_the_trainer_is_told_why(store, ranks, pusher, weights, fields, store_config, why):
    ranks()
    placement = pusher().start(weights(1), 1, **fields)
    assert not placement.ahead
    assert why in placement.not_ahead


def test_a_replica_without_device_memory_keeps_a_version_back(store, ranks, replica, pusher, weights):
    ranks()
    replica(1)
    placement = pusher().start(weights(1), 1)
    assert (placement.ahead, placement.not_ahead) == (False, "a replica has no device memory of its own")


def test_replicas_that_were_not_filled_keep_it_back_later(store, ranks, pusher, weights, digest_of):
    ranks()
    trainer = pusher()
    assert trainer.start(weights(1), 1).ahead
    ranks(1)
    answer = trainer.ahead()
    assert isinstance(answer, wire.NotAhead)
    assert isinstance(trainer.arena()[1], wire.Committed)
    assert store.serving() == (1, digest_of(weights(1)))

"""The replicas as the store sees them: who is taken in, and when."""

import os
import subprocess
from types import SimpleNamespace

import pytest

from weight_manager.config import StoreConfig
from weight_manager.messages import (
    AdaptersHeld,
    Adopt,
    Adopted,
    Beat,
    Finalize,
    HeldAdapter,
    InPlace,
    Leaving,
    Live,
    Register,
    Registered,
)
from weight_manager.metrics import Counters
from weight_manager.replicas import Replicas
from weight_manager.watching import Watching

OLD, NEW = Live("run", 1, 1, 0, "a" * 16), Live("run", 2, 2, 1, "b" * 16)


class Coordinator:
    """Stands for the store's: version OLD is live, until a commit that waits for somebody to leave makes it NEW."""

    def __init__(self):
        self.settled, self.awaits_arena = True, False
        self.taken = []
        self.history = SimpleNamespace(live=OLD, pass_over=self.taken.append)
        self.layout = SimpleNamespace(digest="layout")
        self.slots = SimpleNamespace(arena=SimpleNamespace(path="arena"))
        self.ballot, self.changes = None, 0

    def replica_gone(self, number, why):
        if not self.settled:
            self.settled, self.history.live = True, NEW
            self.replicas.admit_held(0.0)

    def drive(self, now):
        """Nothing waits for anybody."""

    def note_error(self, error, extra):
        """Nobody asks for the last one."""


@pytest.fixture
def replicas(tmp_path):
    said, coordinator = [], Coordinator()
    made = coordinator.replicas = Replicas(
        *(StoreConfig(run_dir=tmp_path, model=tmp_path), coordinator),
        send=lambda peer, message: said.append((peer, message)) or True,
        lease=None,
        watching=Watching(),
        counters=Counters(),
    )
    made.said, made.coordinator = said, coordinator
    yield made
    made.close()


def test_a_replica_whose_new_life_settles_the_commit_is_taken_in_at_once(replicas):
    """Its old life was the last that the commit waited for: nobody would admit the new one after that."""
    me = [os.getpid()]
    replicas.request(b"old", Register(0, me, "layout"))
    replicas.coordinator.settled = False
    replicas.request(b"new", Register(0, me, "layout"))
    assert [(peer, m.live) for peer, m in replicas.said if isinstance(m, Registered)] == [(b"old", OLD), (b"new", NEW)]
    assert replicas.numbers() == {0}


def test_a_replica_is_held_while_the_lease_from_above_is_out(replicas):
    replicas._lease = SimpleNamespace(closed=True)
    replicas.request(b"me", Register(0, [os.getpid()], "layout"))
    assert replicas.numbers() == set()
    replicas._lease.closed = False
    replicas.admit_held(0.0)
    assert replicas.numbers() == {0}


@pytest.mark.parametrize(("told_to", "level", "died"), [(True, "INFO", 0), (False, "WARNING", 1)])
def test_a_replica_that_was_told_to_stop_has_not_died(replicas, caplog, told_to, level, died):
    caplog.set_level("INFO")
    process = subprocess.Popen(["sleep", "60"])
    replicas.request(b"me", Register(0, [process.pid], "layout"))
    if told_to:
        replicas.request(b"me", Leaving())
    process.kill()
    process.wait()
    replicas._watching.call(replicas._watching.wait(1000))
    assert replicas.numbers() == set()
    (said,) = [r for r in caplog.records if r.message.startswith(("replica 0 died", "replica 0 has stopped"))]
    assert said.levelname == level
    assert replicas._counters.values()["replicas_died"] == died


@pytest.mark.parametrize("full", [True, False], ids=["its queue was full", "it let go of its weights"])
def test_a_replica_that_holds_nothing_is_told_at_its_beat_what_is_live_if_it_could_not_be_told(replicas, full):
    replicas.coordinator.history.live = None
    replicas.request(b"me", Register(0, [os.getpid()], "layout"))
    take, replicas._send = replicas._send, lambda peer, message: take(peer, message) and not full
    replicas.coordinator.history.live = NEW
    replicas.went_live(NEW, voted=False)
    replicas._send = take
    if not full:
        replicas.request(b"me", Adopted(NEW.epoch))
    replicas.said.clear()
    for _ in range(2):
        replicas.request(b"me", Beat(0, ""))
    assert replicas.said == [(b"me", Adopt(NEW))] * full


def test_a_replica_that_was_told_of_an_adapter_may_serve_it_until_it_says_what_it_serves(replicas):
    """An unload waits for it: its word may be on its way."""
    told = SimpleNamespace(name="policy-a")
    replicas.lines = SimpleNamespace(live=[told], of_session=lambda session: None, replica_gone=lambda *_: None)
    replicas.request(b"me", Register(0, [os.getpid()], "layout"))
    assert replicas.serving("policy-a") == {0}
    replicas.request(b"me", AdaptersHeld({}, []))
    assert replicas.serving("policy-a") == set()
    replicas.send(0, Finalize("s", "policy-b", 7))
    assert replicas.serving("policy-b") == {0}
    replicas.request(b"me", AdaptersHeld({"policy-b": 7}, []))
    assert replicas.serving("policy-b") == {0}


def test_only_who_copies_ahead_and_serves_hears_of_bytes_that_are_intact(replicas):
    me = [os.getpid()]
    for number, ahead in enumerate((True, False, True)):
        replicas.request(b"%d" % number, Register(number, me, "layout", copies_ahead=ahead))
    for number in (0, 1):
        replicas.request(b"%d" % number, Adopted(OLD.epoch))
    replicas.said.clear()
    replicas.in_place(1, 7, [(0, 64)])
    assert replicas.said == [(b"0", InPlace(1, 7, [(0, 64)]))]


def test_only_who_copies_adapters_ahead_and_has_this_one_hears_of_its_bytes(replicas):
    me = [os.getpid()]
    for number, ahead in enumerate((True, True, False)):
        replicas.request(b"%d" % number, Register(number, me, "layout", adapters_ahead=ahead))
    for number, name in enumerate("aba"):
        replicas.request(b"%d" % number, AdaptersHeld({name: 7}, []))
    replicas.said.clear()
    message = InPlace(1, 7, [(0, 64)], "a", "arena")
    replicas.adapter_in_place(message)
    assert replicas.said == [(b"0", message)]


def test_epochs_that_a_replica_holds_are_not_given_again(replicas):
    """The store may have begun without its history."""
    replicas.request(
        b"me", Register(0, [os.getpid()], "layout", [HeldAdapter(7, "arena", 0), HeldAdapter(9, "arena", 1)])
    )
    replicas.request(b"me", Beat(12, "digest"))
    assert replicas.coordinator.taken == [9, 12]


def test_a_replica_that_holds_other_bytes_under_the_live_epoch_is_not_ready_and_told_to_adopt(replicas):
    """The store began without its history, gave the epoch again, and the replica could not map what is live."""
    replicas.request(b"me", Register(0, [os.getpid()], "layout"))
    replicas.request(b"me", Adopted(OLD.epoch, ok=False, error="no memory"))
    replicas.said.clear()
    replicas.request(b"me", Beat(OLD.epoch, "c" * 16))
    assert not replicas.status(0.0)["0"]["ready"]
    assert replicas.said == [(b"me", Adopt(OLD))]
    replicas.request(b"me", Adopted(OLD.epoch))
    assert replicas.status(0.0)["0"]["ready"]
    replicas.request(b"me", Beat(OLD.epoch, OLD.digest))
    assert replicas.status(0.0)["0"]["ready"]
    assert replicas.said == [(b"me", Adopt(OLD))]

import threading
import time

import numpy as np
import pytest

from rollout_client import errors, slot_lock
from rollout_client import protocol as wire
from rollout_client.protocol import Copy
from rollout_client.publisher import WeightPublisher
from rollout_client.tensors import Slice

A = np.arange(12, dtype=np.float32).reshape(3, 4)
B = np.arange(5, dtype=np.float32) + 100
TWO = [Copy(0, (12,), 0, (1,), 0, (1,), "float32"), Copy(1, (5,), 0, (1,), 16, (1,), "float32")]


class Slow:
    """A tensor that takes its time."""

    dtype, shape = "float32", (3, 4)
    element_size = staticmethod(lambda: 4)

    def __init__(self, seconds):
        self.seconds = seconds

    def __dlpack__(self, **_):
        raise AssertionError("not on a CPU")

    def __dlpack_device__(self):
        return (2, 0)

    def cpu(self):
        time.sleep(self.seconds)
        return A


def test_the_slot_is_locked_while_it_is_written_and_not_after(store, publisher, arena):
    free = {}

    class Watched(Slow):
        def cpu(self):
            free["moving"] = arena.writers_gone(0)
            return A

    def seal(message, _):
        free["sealing"] = arena.writers_gone(0)
        return wire.Sealed(message.session, "")

    store.place(TWO)
    store.on[wire.Seal] = seal
    publisher().push({"a": Watched(0), "b": B}, 1)
    assert free == {"moving": False, "sealing": True}


def test_a_slot_given_away_meanwhile_is_not_touched(store, publisher, arena):
    store.place(TWO)
    place = store.on[wire.Begin]

    def late(begin, payload):
        placement = place(begin, payload)
        arena.bump(0)
        return placement

    store.on[wire.Begin] = late
    with pytest.raises(errors.SessionLost, match="given to another session"):
        publisher().push({"a": A, "b": B}, 1)
    assert not np.frombuffer(arena.slot(0), np.uint8).any()


def test_a_slot_the_store_is_taking_back_is_not_touched(store, publisher, arena):
    store.place(TWO)
    with open(arena.path, "r+b") as other:
        assert slot_lock._set(other.fileno(), slot_lock.fcntl.F_WRLCK, arena.slot_offset(0), arena.slot_bytes)
        with pytest.raises(errors.SessionLost, match="taken the slot back"):
            publisher().push({"a": A, "b": B}, 1)


def test_a_running_push_is_waited_for_but_not_for_ever(store, publisher):
    store.place(TWO)
    place, left = store.on[wire.Begin], [2]

    def busy(begin, payload):
        left[0] -= 1
        return wire.Error("busy", "another", retryable=True) if left[0] >= 0 else place(begin, payload)

    store.on[wire.Begin] = busy
    publisher().push({"a": A, "b": B}, 1)
    assert len(store.of(wire.Begin)) == 3
    left[0] = 1000
    began = time.monotonic()
    with pytest.raises(errors.Busy):
        publisher(busy_timeout_s=0.3).push({"a": A, "b": B}, 1)
    assert time.monotonic() - began < 2


def test_a_version_that_is_live_already_sends_nothing(store, publisher):
    store.on[wire.Begin] = lambda m, _: wire.Committed(m.version, "d", 0, {}, {}, already=True)
    report = publisher().push({"a": A}, 5)
    assert (report.already, report.nbytes, report.version) == (True, 0, 5)
    assert store.of(wire.Seal) == []


@pytest.mark.parametrize("kind", [wire.Begin, wire.Seal, wire.Commit])
def test_a_refusal_at_any_step_is_raised_and_the_session_given_up(store, publisher, kind):
    store.place(TWO)
    store.on[kind] = lambda m, _: wire.Error("refused", "no", getattr(m, "session", ""), ["a"], "replica 1 rank 0")
    with pytest.raises(errors.PushRefused) as refused:
        publisher().push({"a": A, "b": B}, 1)
    assert (refused.value.rank, refused.value.tensors) == ("replica 1 rank 0", ["a"])
    assert len(store.of(wire.Abort)) == (kind is not wire.Begin)


def test_a_tensor_that_cannot_be_read_ends_the_session(store, publisher):
    class Broken:
        dtype, shape = "float32", (3, 4)
        element_size = staticmethod(lambda: 4)

        def __dlpack__(self):
            raise MemoryError("gone")

        def __dlpack_device__(self):
            raise MemoryError("gone")

    store.place(TWO)
    with pytest.raises(MemoryError):
        publisher().push({"a": Broken(), "b": B}, 1)
    assert len(store.of(wire.Abort)) == 1
    assert store.of(wire.Seal) == []


def test_the_lease_is_kept_while_a_tensor_takes_its_time(store, publisher, monkeypatch):
    monkeypatch.setattr("rollout_client.shm_transport.INLINE_BYTES", 0)
    monkeypatch.setattr("rollout_client.shm_transport.AT_ONCE_BYTES", 0)
    store.lease_s = 0.4
    store.place(TWO)
    publisher().push({"a": Slow(0.8), "b": B}, 1)
    assert 3 <= len(store.of(wire.Renew)) <= 10


def test_a_session_that_ends_while_bytes_move_stops_the_push(store, publisher, monkeypatch):
    monkeypatch.setattr("rollout_client.shm_transport.INLINE_BYTES", 0)
    monkeypatch.setattr("rollout_client.shm_transport.AT_ONCE_BYTES", 0)
    store.lease_s = 0.2
    store.place(TWO)
    store.on[wire.Renew] = lambda m, _: wire.Error("aborted", "an operator said so", m.session)
    with pytest.raises(errors.SessionLost, match="an operator said so"):
        publisher().push({"a": Slow(0.6), "b": B}, 1)
    assert store.arena.writers_gone(0)


@pytest.mark.parametrize("kind", [wire.Hello, wire.Begin, wire.Renew, wire.Seal])
def test_a_silent_store_is_not_waited_for_longer_than_said(store, publisher, kind, monkeypatch):
    monkeypatch.setattr("rollout_client.shm_transport.INLINE_BYTES", 0)
    monkeypatch.setattr("rollout_client.shm_transport.AT_ONCE_BYTES", 0)
    monkeypatch.setattr("rollout_client.store_link.REPLY_MARGIN_S", 0.2)
    monkeypatch.setattr("rollout_client.store_link.ABORT_S", 0.2)
    store.lease_s = 0.3
    store.place(TWO)
    del store.on[kind]
    began = time.monotonic()
    with pytest.raises((errors.StoreUnavailable, errors.DeadlineExceeded)):
        publisher(connect_timeout_s=0.5).push({"a": Slow(0.9), "b": B}, 1, timeout_s=1.5)
    assert time.monotonic() - began < 4


def test_no_store_at_all(publisher):
    began = time.monotonic()
    with (
        WeightPublisher("tcp://127.0.0.1:1", run_id="r", connect_timeout_s=0.3) as client,
        pytest.raises(errors.StoreUnavailable, match=r"tcp://127\.0\.0\.1:1"),
    ):
        client.push({"a": A}, 1)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("committed", [True, False])
def test_a_lost_answer_to_commit_is_looked_up(store, publisher, committed, monkeypatch):
    monkeypatch.setattr("rollout_client.store_link.REPLY_MARGIN_S", 0.1)
    monkeypatch.setattr("rollout_client.store_link.ABORT_S", 0.5)
    store.place(TWO)

    def commit(message, _):
        store.live = ("r", store.begun.version) if committed else ("r", 1)

    store.on[wire.Commit] = commit
    del store.on[wire.Abort]
    if committed:
        assert publisher().push({"a": A, "b": B}, 2, timeout_s=0.4).version == 2
    else:
        with pytest.raises(errors.StoreUnavailable):
            publisher().push({"a": A, "b": B}, 2, timeout_s=0.4)


def test_late_answers_of_a_lost_session_do_not_confuse_the_next(store, publisher):
    store.place(TWO)
    store.on[wire.Seal] = lambda m, _: [
        b"\x00junk",
        wire.Error("lease_expired", "old", "another session"),
        wire.Renewed("another session", 1.0, 0),
        wire.Sealed("another session", "x"),
        wire.Sealed(m.session, "0" * 16),
    ]
    assert publisher().push({"a": A, "b": B}, 1).version == 1


def test_slices_and_ranks_are_named_in_begin(store, publisher):
    store.place([])
    publisher().push([("a", Slice(A, (6, 4), offset=(3, 0))), ("b", Slice(B, (9,), start=4))], 1, rank=1, world=2)
    begin = store.begun
    assert (begin.rank, begin.world) == (1, 2)
    assert begin.parts[0] == wire.Part("a", "float32", (6, 4), (3, 0), (3, 4))
    assert begin.parts[1] == wire.Part("b", "float32", (9,), flat=(4, 9))


def test_wrong_arguments_say_what_is_wrong():
    with pytest.raises(ValueError, match="run_id"):
        WeightPublisher(run_id="")
    with pytest.raises(ValueError, match="auto, shm, zmq or cuda_ipc"):
        WeightPublisher(run_id="r", transport="tcp")
    with pytest.raises(ValueError, match="is no endpoint"):
        WeightPublisher("5600", run_id="r")


def test_threads_take_turns_and_nothing_is_left_behind(store, publisher):
    store.place(TWO)
    client, done = publisher(), []
    threads = [threading.Thread(target=lambda v=v: done.append(client.push({"a": A, "b": B}, v))) for v in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(r.version for r in done) == [0, 1, 2, 3]
    client.close()
    client.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("push")]


def test_another_threads_push_is_waited_for_no_longer_than_this_one_may_take(store, publisher):
    store.place(TWO)
    one, began = publisher(), threading.Event()

    class Held(Slow):
        def cpu(self):
            began.set()
            return super().cpu()

    other = threading.Thread(target=lambda: one.push({"a": Held(2.0), "b": B}, 1))
    other.start()
    began.wait(30)
    start = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded, match="another thread"):
        one.push({"a": A, "b": B}, 2, timeout_s=0.2)
    assert time.monotonic() - start < 1.0
    other.join()

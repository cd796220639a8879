"""What a trainer can write into: the slot that it stages, while it does, and nothing else."""

import contextlib
import ctypes
import os
import signal
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from rollout_client import errors, shm_transport
from rollout_client import protocol as wire
from rollout_client.protocol import Copy
from rollout_client.shm_transport import TrainerArena
from weight_manager.arena import Arena

A = np.arange(12, dtype=np.float32).reshape(3, 4)
ONE = [Copy(0, (12,), 0, (1,), 0, (1,), "float32")]


def address(view):
    return np.frombuffer(view, np.uint8).ctypes.data


def stray(place):
    """How a process ends that writes one byte there."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.memset(place, 1, 1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


@pytest.mark.parametrize("slot_bytes", [64 << 10, (2 << 20) + 4096], ids=["small", "of huge pages"])
def test_a_stray_write_is_a_crash_of_the_trainer_except_into_what_it_stages(tmp_path, slot_bytes):
    with Arena.create(tmp_path, "unit", slot_bytes) as made, TrainerArena(made.path) as arena:
        places = [address(arena.slot(slot)) for slot in (0, 1)]
        assert [stray(place) for place in places] == [signal.SIGSEGV] * 2
        with arena.staging(1) as slot:
            assert address(slot) == places[1]
            assert [stray(place) for place in places] == [signal.SIGSEGV, 0]
        assert [stray(place + slot_bytes - 1) for place in places] == [signal.SIGSEGV] * 2
        with pytest.raises(ZeroDivisionError), arena.staging(0):
            raise ZeroDivisionError
        assert stray(places[0]) == signal.SIGSEGV
        with pytest.raises(TypeError, match="read-only"):
            arena.slot(0)[0] = 1


@pytest.mark.parametrize("ends", ["live", "refused", "failed while it moved"])
def test_a_slot_is_read_only_after_the_push_however_that_ended(store, publisher, ends):
    seen = {}
    one = publisher(transport="shm")

    class Watched:
        dtype, shape = "float32", (3, 4)
        element_size = staticmethod(lambda: 4)

        def __dlpack__(self, **_):
            raise AssertionError("not on a CPU")

        def __dlpack_device__(self):
            return (2, 0)

        def cpu(self):
            seen["moving"] = stray(address(one._link.shm._arena.slot(0)))
            if ends == "failed while it moved":
                raise ZeroDivisionError
            return A

    def seal(message, _):
        seen["sealing"] = stray(address(one._link.shm._arena.slot(0)))
        no = wire.Error("checksum_mismatch", "no", message.session)
        return no if ends == "refused" else wire.Sealed(message.session, "")

    store.place(ONE)
    store.on[wire.Seal] = seal
    if ends == "live":
        one.push({"a": Watched()}, 1)
    else:
        with pytest.raises(errors.ChecksumMismatch if ends == "refused" else ZeroDivisionError):
            one.push({"a": Watched()}, 1)
    assert seen["moving"] == 0
    assert seen.get("sealing", signal.SIGSEGV) == signal.SIGSEGV
    assert stray(address(one._link.shm._arena.slot(0))) == signal.SIGSEGV


def test_no_interruption_ends_the_wait_for_threads_that_still_write(monkeypatch):
    running: Future[None] = Future()
    waits = []

    def interrupted(futures):
        waits.append(futures)
        if len(waits) < 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(shm_transport, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shm_transport._wait_for([running])
    assert len(waits) == 3


def test_a_small_push_from_the_host_lets_go_what_ranks_have_mapped_of_a_gpu(store, publisher):
    """The weights have left the GPU; what they lay in is free there only when no rank has it mapped."""
    one, let_go = publisher(transport="shm"), []
    store.place(ONE)
    one.push({"a": A}, 1)
    one._link.shm._cuda = SimpleNamespace(keep_only=lambda: let_go.append(1), settle=lambda: None, close=lambda: None)
    one.push({"a": A + 1}, 2)
    assert let_go == [1]


@pytest.mark.parametrize("refused", [True, False])
def test_a_gpu_reads_nothing_of_a_trainer_any_more_once_its_push_has_ended(store, publisher, monkeypatch, refused):
    """What it is about to hash is begun before the store has answered, which may be no."""
    one, settled = publisher(transport="shm"), []
    store.place(ONE)
    one.push({"a": A}, 1)
    one._link.shm._cuda = SimpleNamespace(keep_only=lambda: None, settle=lambda: settled.append(1), close=lambda: None)

    def refuse(*_):
        raise errors.PushRefused("stale_version", "not above the last")

    if refused:
        monkeypatch.setattr(one, "_begin", refuse)
    with pytest.raises(errors.PushRefused) if refused else contextlib.nullcontext():
        one.push({"a": A + 1}, 2)
    assert settled == [1]

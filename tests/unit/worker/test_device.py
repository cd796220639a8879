"""The device contract: the CPU for real, the GPU against stand-ins for Paddle's CUDA calls and the CUDA runtime."""

import numpy as np
import pytest

from worker.device import Cpu, Gpu, device_for
from worker.memory import give_back_to_system


class CudaStandIn:
    """Paddle with a GPU that does nothing but write down what was asked of it, in order."""

    def __init__(self, devices=2, compiled=True):
        self.journal, self.devices, self.compiled = [], devices, compiled
        self.device = self.cuda = self.utils = self.dlpack = self
        self.inside = None

    def is_compiled_with_cuda(self):
        return self.compiled

    def device_count(self):
        return self.devices

    def set_device(self, name):
        self.journal.append(("set_device", name))

    def from_dlpack(self, array):
        return HostTensor(self, array)

    def Stream(self):  # noqa: N802
        return "side"

    def current_stream(self):
        return ComputeStream(self)

    def Event(self):  # noqa: N802
        return Event(self)

    def stream_guard(self, stream):
        cuda = self

        class Guard:
            def __enter__(self):
                cuda.inside = stream

            def __exit__(self, *_):
                cuda.inside = None

        return Guard()

    def synchronize(self):
        self.journal.append(("synchronize",))

    def empty_cache(self):
        self.journal.append(("empty_cache",))

    def cudaHostRegister(self, address, size, flags):  # noqa: N802
        self.journal.append(("pin", address.value, size.value, flags.value))
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802
        self.journal.append(("unpin", address.value))
        return 0


class HostTensor:
    def __init__(self, cuda, array, where="host"):
        self.cuda_, self.array, self.where = cuda, array, where

    def cuda(self, blocking):
        self.cuda_.journal.append(("copy", self.cuda_.inside, blocking))
        return HostTensor(self.cuda_, self.array, "device")

    def view(self, dtype):
        self.cuda_.journal.append(("view", self.where, str(self.array.dtype), dtype))
        return self

    def astype(self, dtype):
        self.cuda_.journal.append(("astype", self.cuda_.inside, dtype))
        return self


class Event:
    def __init__(self, cuda):
        self.cuda = cuda

    def record(self, stream):
        self.cuda.journal.append(("record", stream))


class ComputeStream:
    def __init__(self, cuda):
        self.cuda = cuda

    def wait_event(self, event):
        self.cuda.journal.append(("wait",))


@pytest.fixture
def cuda():
    return CudaStandIn()


@pytest.fixture
def slot():
    """A slot's bytes, and two views of it."""
    flat = np.arange(64, dtype=np.float32)
    return flat, {"a": flat[0:16].reshape(4, 4), "b": flat[32:48]}


def test_a_gpu_copies_on_a_side_stream_and_waits_at_the_flip(cuda, slot):
    flat, views = slot
    device = Gpu(cuda, lambda: cuda)
    upload = device.upload(views)
    portable_read_only = 1 | 8
    assert cuda.journal == [
        ("pin", flat.ctypes.data, 48 * 4, portable_read_only),
        ("copy", "side", False),
        ("copy", "side", False),
        ("record", "side"),
    ]
    upload.wait()
    assert cuda.journal[-1] == ("wait",)
    assert {name: tensor.where for name, tensor in upload.tensors.items()} == {"a": "device", "b": "device"}


def test_a_slot_is_pinned_once_and_unpinned_before_it_is_unmapped(cuda, slot):
    flat, views = slot
    device = Gpu(cuda, lambda: cuda)
    device.upload(views)
    device.upload(views)
    assert sum(entry[0] == "pin" for entry in cuda.journal) == 1
    device.forget()
    assert cuda.journal[-2:] == [("synchronize",), ("unpin", flat.ctypes.data)]
    before = len(cuda.journal)
    device.forget()
    assert len(cuda.journal) == before


def test_bits_of_bfloat16_are_read_as_such_on_the_device(cuda):
    Gpu(cuda, lambda: cuda).upload({"w": np.zeros(8, np.uint16)})
    assert ("view", "device", "int16", "bfloat16") in cuda.journal
    assert ("astype", "side", "float32") in cuda.journal


def test_a_slot_that_cannot_be_pinned_is_copied_all_the_same(cuda, slot, caplog):
    cuda.cudaHostRegister = lambda *_: 801
    device = Gpu(cuda, lambda: cuda)
    assert len(device.upload(slot[1]).tensors) == 2
    assert "CUDA error 801" in caplog.text
    device.forget()
    assert ("synchronize",) not in cuda.journal


def test_a_rank_takes_the_gpu_of_its_number_or_says_why_not():
    cuda = CudaStandIn(devices=2)
    Gpu(cuda, lambda: cuda).select(1)
    assert cuda.journal == [("set_device", "gpu:1")]
    with pytest.raises(RuntimeError, match="rank 2 needs a GPU of its own; 2 are visible"):
        Gpu(cuda, lambda: cuda).select(2)
    with pytest.raises(RuntimeError, match="needs a CUDA build"):
        Gpu(CudaStandIn(compiled=False), lambda: cuda).select(0)
    Gpu(cuda, lambda: cuda).release_cached()
    assert cuda.journal[-1] == ("empty_cache",)
    assert (Gpu.tp_backend, Cpu.tp_backend) == ("nccl", "gloo")


def test_a_cpu_computes_on_the_slot_itself_but_for_bfloat16():
    device = device_for("cpu")
    device.select(0)
    floats = np.arange(6, dtype=np.float32).reshape(2, 3)
    bits = (np.array([1.5, -2.0], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    upload = device.upload({"f": floats, "b": bits})
    floats[0, 0] = 42
    assert upload.tensors["f"][0, 0].item() == 42
    assert upload.tensors["b"].numpy().tolist() == [1.5, -2.0]
    upload.wait()
    device.forget()
    device.release_cached()


def test_this_build_of_paddle_refuses_a_gpu():
    with pytest.raises(RuntimeError, match="needs a CUDA build"):
        device_for("gpu").select(0)


def test_memory_that_was_freed_leaves_the_process():
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    kept = [bytearray(1 << 16) for _ in range(1600)]  # below the mmap threshold: from the heap
    spacers = [bytearray(64) for _ in range(10)]
    before = resident()
    del kept
    give_back_to_system()
    assert before - resident() > 50 << 20
    assert len(spacers) == 10

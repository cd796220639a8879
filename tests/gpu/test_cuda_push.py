import ctypes
import logging
from typing import Any

import numpy as np
import pytest

from rollout_client import shm_transport
from rollout_client.cuda_slots import PinnedSlots
from rollout_client.errors import ChecksumMismatch
from rollout_client.publisher import WeightPublisher
from tests.faults import small_model
from tests.faults.store_process import Store

torch = pytest.importorskip("torch")


def on(device: Any, seed: int, **to: Any) -> dict[str, Any]:
    return {name: torch.from_numpy(array).to(device, **to) for name, array in small_model.weights(seed).items()}


def by_cpu(publisher: WeightPublisher, tensors: dict[str, Any], version: int) -> str:
    return publisher.push({name: tensor.cpu() for name, tensor in tensors.items()}, version).digest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_push_from_the_gpu_is_the_push_from_the_cpu(publisher: WeightPublisher, served: Any, device: Any, dtype):
    tensors = on(device, 1, dtype=getattr(torch, dtype))
    expected = by_cpu(publisher, tensors, 1)
    for version in 2, 3, 4:  # both slots, and one of them again
        assert publisher.push(tensors, version).digest == expected
        assert served() == (version, expected)


def test_transposed_and_misaligned_tensors_arrive_as_they_read(publisher: WeightPublisher, served: Any, device: Any):
    odd: dict[str, Any] = {}
    for name, tensor in on(device, 2).items():
        if tensor.dim() == 2:
            odd[name] = tensor.t().contiguous().t()
        else:
            odd[name] = torch.cat([tensor[:1], tensor])[1:]
    expected = by_cpu(publisher, odd, 1)
    assert publisher.push(odd, 2).digest == expected
    assert served() == (2, expected)


def test_some_tensors_on_the_cpu_and_some_parameters(publisher: WeightPublisher, device: Any):
    tensors = on(device, 3)
    expected = by_cpu(publisher, tensors, 1)
    mixed = {
        name: tensor.cpu() if i % 2 else torch.nn.Parameter(tensor) for i, (name, tensor) in enumerate(tensors.items())
    }
    assert publisher.push(mixed, 2).digest == expected


def test_the_copy_waits_for_the_kernels_that_make_the_weights(publisher: WeightPublisher, device: Any):
    tensors = on(device, 4)
    expected = by_cpu(publisher, {name: tensor * 3 for name, tensor in tensors.items()}, 1)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(500_000_000)  # about a quarter of a second
        for tensor in tensors.values():
            tensor.mul_(3)
        assert publisher.push(tensors, 2).digest == expected


def test_a_slot_that_got_new_memory_is_pinned_again(publisher: WeightPublisher, store: Store, served: Any, device: Any):
    tensors = on(device, 5)
    expected = by_cpu(publisher, tensors, 1)
    publisher.push(tensors, 2)
    publisher.push(tensors, 3)
    (arena,) = store.arena_dir.glob("*.arena")
    live = store.status().live.slot
    hole = ctypes.CDLL(None, use_errno=True).fallocate
    with arena.open("r+b") as file:
        size, first = publisher._link.shm._arena.slot_bytes, publisher._link.shm._arena.slot_offset(1 - live)
        assert hole(file.fileno(), 3, ctypes.c_int64(first), ctypes.c_int64(size)) == 0
    assert publisher.push(tensors, 4).digest == expected
    assert served() == (4, expected)


def test_without_the_probe_stale_memory_is_refused_and_nothing_changes(
    publisher: WeightPublisher, store: Store, served: Any, device: Any, monkeypatch: pytest.MonkeyPatch
):
    tensors = on(device, 6)
    publisher.push(tensors, 1)
    publisher.push(tensors, 2)
    before = served()
    (arena,) = store.arena_dir.glob("*.arena")
    monkeypatch.setattr(PinnedSlots, "_arrives", lambda *_: True)
    with arena.open("r+b") as file:
        slots = publisher._link.shm._arena
        size, first = slots.slot_bytes, slots.slot_offset(1 - store.status().live.slot)
        assert ctypes.CDLL(None).fallocate(file.fileno(), 3, ctypes.c_int64(first), ctypes.c_int64(size)) == 0
    with pytest.raises(ChecksumMismatch):
        publisher.push(on(device, 7), 3)
    assert served() == before


def test_a_registered_slot_is_filled_without_a_mapping_that_may_be_written(
    publisher: WeightPublisher, store: Store, device: Any, monkeypatch: pytest.MonkeyPatch
):
    tensors = on(device, 5)
    expected = by_cpu(publisher, tensors, 1)
    for version in 2, 3:
        publisher.push(on(device, version), version)
    allowed: list[bool] = []
    monkeypatch.setattr(shm_transport, "protect", lambda view, *, write: allowed.append(write))
    assert publisher.push(tensors, 4).digest == expected
    assert not allowed


def test_a_driver_that_cannot_pin_is_said_once_and_torch_goes_on(
    publisher: WeightPublisher, store: Store, device: Any, caplog: pytest.LogCaptureFixture
):
    tensors = on(device, 8)
    expected = by_cpu(publisher, tensors, 1)
    slots = publisher._link.shm._arena
    blocked = [slots.slot(0), slots.slot(1)]
    addresses = [np.frombuffer(memory, np.uint8).ctypes.data for memory in blocked]
    register = torch.cuda.cudart().cudaHostRegister
    try:
        for number, address in enumerate(addresses):  # already pinned: the driver says no
            with slots.staging(number) as memory:
                assert int(register(address, memory.nbytes, 0)) == 0
        with caplog.at_level(logging.WARNING):
            for version in 2, 3, 4:
                assert publisher.push(tensors, version).digest == expected
        assert len([r for r in caplog.records if "cannot pin weight slot" in r.message]) == 2
    finally:
        for address in addresses:
            torch.cuda.cudart().cudaHostUnregister(address)


def test_closing_unpins_so_that_the_memory_can_be_pinned_again(store: Store, device: Any):
    for version in 1, 2, 3:
        with WeightPublisher(store.endpoint, run_id="again", transport="shm") as publisher:
            publisher.push(on(device, version), version)
            assert publisher._link.shm._cuda._slots._pinned
        assert publisher._link.shm is None

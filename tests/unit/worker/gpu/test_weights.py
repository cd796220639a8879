"""Where a rank's weights lie in a device slot, and which slot may be filled or given back. The driver is a stand-in."""

import mmap

import numpy as np
import pytest

from weight_manager.families import manifest_for
from weight_manager.layout import make_layout, rank_views
from worker.gpu.weights import DeviceSlots, placement

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "vocab_size": 96,
}


class DriverInMemory:
    """Device memory is a bytearray's; addresses are real ones, so copies can be checked."""

    page = 4096

    def __init__(self):
        self.memory, self.mapped, self.registered = {}, set(), {}

    def enter(self):
        pass

    def stream(self):
        return None

    def wait(self, stream):
        pass

    def reserve(self, nbytes):
        memory = np.zeros(nbytes, np.uint8)
        self.memory[memory.ctypes.data] = memory
        return memory.ctypes.data

    def create(self, nbytes, *, shared=False):
        return nbytes

    def map(self, address, nbytes, handle):
        self.mapped.add(address)

    def unmap(self, address, nbytes, handle):
        self.mapped.remove(address)

    def register(self, address, nbytes, *, read_only):
        assert read_only
        assert address % 4096 == nbytes % 4096 == 0
        self.registered[address] = nbytes

    def unregister(self, address):
        del self.registered[address]

    def from_address(self, address, source, nbytes, stream):
        base = next(base for base in self.mapped if base <= address < base + self.memory[base].nbytes)
        there = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_ubyte * nbytes).from_address(source))
        self.memory[base][address - base : address - base + nbytes] = there


def _views(layout, rank, seed):
    slot = np.frombuffer(mmap.mmap(-1, layout.slot_bytes), np.uint8)
    slot[:] = np.random.default_rng(seed).integers(0, 256, layout.slot_bytes, np.uint8)
    return rank_views(layout, rank, slot)


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tensor_arrives_at_its_place(dtype, tp, rank):
    layout = make_layout(manifest_for(CONFIG, dtype), tp)
    driver, where = DriverInMemory(), placement(layout, rank)
    slots = DeviceSlots(driver, where)
    views = _views(layout, rank, 1)
    slot = slots.stage(views).slot
    memory = driver.memory[slots.regions[slot].address]
    for name, view in views.items():
        offset, shape = where.places[name]
        assert shape == view.shape
        assert offset % 16 == 0
        assert memory[offset : offset + view.nbytes].tobytes() == view.tobytes(), name
    whole = sum(view.nbytes for name, view in views.items() if "qkv" not in name and "gate_up" not in name)
    assert where.nbytes < whole * 1.2  # another rank's tensors are not there


def test_a_version_is_staged_beside_what_is_bound_and_nothing_that_is_held_is_given_back():
    layout = make_layout(manifest_for(CONFIG, "float32"), 1)
    driver = DriverInMemory()
    slots = DeviceSlots(driver, placement(layout, 0))
    first = slots.stage(_views(layout, 0, 1))
    slots.bind(first)
    second = slots.stage(_views(layout, 0, 2))
    assert second.slot != first.slot
    slots.bind(second)
    slots.bind(first)  # rolled back
    del second
    slots.bind(None)
    assert not driver.mapped
    kept = slots.stage(_views(layout, 0, 3))
    slots.bind(None)  # of an older mapping that is let go once the new one is prepared
    assert len(driver.mapped) == 1
    slots.bind(kept)
    assert slots.bound == kept.slot


def test_the_arena_is_pinned_once_and_let_go_before_it_is_unmapped():
    layout = make_layout(manifest_for(CONFIG, "float32"), 1)
    driver = DriverInMemory()
    slots = DeviceSlots(driver, placement(layout, 0))
    ours, theirs = _views(layout, 0, 1), _views(layout, 0, 2)
    for views in (ours, theirs, ours):
        slots.bind(slots.stage(views))
    assert list(driver.registered.values()) == [layout.slot_bytes] * 2
    slots.bind(None)
    assert not driver.registered

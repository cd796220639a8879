"""Where a rank's weights lie in a device slot, and which slot may be filled or given back. The driver is a stand-in."""

import ctypes
import mmap

import numpy as np
import pytest

from tests.memfd_device import MemfdDriver
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


def _views(layout, rank, seed):
    slot = np.frombuffer(mmap.mmap(-1, layout.slot_bytes), np.uint8)
    slot[:] = np.random.default_rng(seed).integers(0, 256, layout.slot_bytes, np.uint8)
    return rank_views(layout, rank, slot)


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tensor_arrives_at_its_place(dtype, tp, rank):
    layout = make_layout(manifest_for(CONFIG, dtype), tp)
    driver, where = MemfdDriver(), placement(layout, rank)
    slots = DeviceSlots(driver, where)
    views = _views(layout, rank, 1)
    slot = slots.stage(views).slot
    memory = np.frombuffer((ctypes.c_ubyte * where.nbytes).from_address(slots.regions[slot].address), np.uint8)
    for name, view in views.items():
        offset, shape = where.places[name]
        assert shape == view.shape
        assert offset % 16 == 0
        assert memory[offset : offset + view.nbytes].tobytes() == view.tobytes(), name
    whole = sum(view.nbytes for name, view in views.items() if "qkv" not in name and "gate_up" not in name)
    assert where.nbytes < whole * 1.2  # another rank's tensors are not there


def test_a_version_is_staged_beside_what_is_bound_and_nothing_that_is_held_is_given_back():
    layout = make_layout(manifest_for(CONFIG, "float32"), 1)
    driver = MemfdDriver()
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
    driver = MemfdDriver()
    slots = DeviceSlots(driver, placement(layout, 0))
    ours, theirs = _views(layout, 0, 1), _views(layout, 0, 2)
    for views in (ours, theirs, ours):
        slots.bind(slots.stage(views))
    assert list(driver.registered.values()) == [layout.slot_bytes] * 2
    slots.bind(None)
    assert not driver.registered

"""The digest of a version as a device holds it. The kernel is a stand-in with the real one's inputs and outputs: it
hashes what it reads on whole words, only fetches what is tiny, and leaves the rest to the host."""

import ctypes

import numpy as np
import pytest
import xxhash

from rollout_client.cuda_hash import TINY
from weight_manager.families import manifest_for
from weight_manager.layout import EVERY_RANK, make_layout, region_digests, version_digest
from weight_manager.messages import Live
from worker.gpu import digests
from worker.gpu.digests import DeviceDigests
from worker.gpu.weights import placement

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],  # biases of a few bytes, some of them on no word's boundary
    "hidden_size": 30,
    "intermediate_size": 1000,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "vocab_size": 310_000,  # over a piece of a digest
}


def _at(address, nbytes):
    return (ctypes.c_ubyte * nbytes).from_address(address)


class HostDriver:
    """Device memory is the host's."""

    capability = (9, 0)

    def enter(self): ...
    def stream(self): ...
    def wait(self, stream): ...

    def pinned(self, shape, dtype):
        return np.full(shape, 0xAA, dtype)  # memory that nobody has cleared

    def to_host(self, target, address, stream):
        ctypes.memmove(target.ctypes.data, address, target.nbytes)


class HostKernel:
    """Stands for the compiled kernel `xxh3` of rollout_client/cuda_hash.py."""

    def __init__(self, driver, image): ...

    def launch(self, name, grid, threads, stream, arguments):
        (count,) = grid
        table, out, tiny = (argument.value for argument in arguments)
        rows = np.frombuffer(_at(table, count * 16), np.uint64).reshape(count, 2).tolist()
        found = np.frombuffer(_at(out, count * 8), np.uint64)
        for row, (address, nbytes) in enumerate(rows):
            assert address % 8 == 0 or nbytes == 0, "it reads whole words"
            if nbytes > TINY:
                found[row] = xxhash.xxh3_64_intdigest(_at(address, nbytes))
            elif nbytes:
                ctypes.memmove(tiny + row * TINY, address, nbytes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_the_versions_digest_and_any_byte_counts(monkeypatch, dtype):
    monkeypatch.setattr(digests, "Module", HostKernel)
    monkeypatch.setattr(digests, "compiled", lambda *_: b"")
    layout = make_layout(manifest_for(CONFIG, dtype), 1)
    slot = np.random.default_rng(0).integers(0, 256, layout.slot_bytes, np.uint8)
    proof = DeviceDigests(HostDriver(), layout, placement(layout, 0))
    assert proof.version(slot.ctypes.data) == version_digest(layout, region_digests(layout, slot))
    assert (dtype == "bfloat16") == any(region.offset % 8 for region in layout.regions), "some lie on no boundary"
    size = 4 if dtype == "float32" else 2
    for region in layout.regions:
        last = region.offset + int(np.prod(region.shape)) * size - 1
        slot[last] ^= 1
        assert proof.version(slot.ctypes.data) != version_digest(layout, []), region.name
        assert proof.version(slot.ctypes.data) == version_digest(layout, region_digests(layout, slot)), region.name
        slot[last] ^= 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_several_proves_what_it_reads_and_nothing_else(monkeypatch, rank):
    monkeypatch.setattr(digests, "compiled", lambda *_: b"")
    monkeypatch.setattr(digests, "Module", HostKernel)
    config = CONFIG | {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 32}
    layout = make_layout(manifest_for(config, "bfloat16"), 2)
    arena = np.random.default_rng(1).integers(0, 256, layout.slot_bytes, np.uint8)
    where = placement(layout, rank)
    words = np.zeros(where.nbytes // 8 + 1, np.uint64)  # on a word's boundary, as a device's memory is
    slot = words.view(np.uint8)
    for run in where.runs:
        slot[run.target : run.target + run.nbytes] = arena[run.source : run.source + run.nbytes]
    proof = DeviceDigests(HostDriver(), layout, where, rank)
    live = Live("run", 1, 0, 1, "never looked at")

    def holds():
        return proof.holds(slot.ctypes.data, live, region_digests(layout, arena))

    assert holds()
    own = [region for region in layout.regions if region.rank in (rank, EVERY_RANK)]
    assert len(own) < len(layout.regions)
    for region in own:
        offset, _ = where.places[region.name]
        for there, at in ((slot, offset), (arena, region.offset)):
            there[at] ^= 1
            assert not holds(), region.name
            there[at] ^= 1
    for region in layout.regions:
        if region not in own:
            arena[region.offset] ^= 1
    assert holds()

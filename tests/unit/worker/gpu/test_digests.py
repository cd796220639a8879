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
    def event(self): ...
    def record(self, event, stream): ...
    def wait_event(self, stream, event): ...
    def wait(self, stream): ...

    def pinned(self, shape, dtype):
        return np.full(shape, 0xAA, dtype)  # memory that nobody has cleared

    def to_host(self, target, address, stream):
        ctypes.memmove(target.ctypes.data, address, target.nbytes)


class HostKernel:
    """Stands for the compiled kernel `xxh3` of rollout_client/cuda_hash.py."""

    def __init__(self, driver, image):
        self.read = 0  # bytes

    def launch(self, name, grid, threads, stream, arguments):
        (count,) = grid
        table, out, tiny = (argument.value for argument in arguments)
        rows = np.frombuffer(_at(table, count * 16), np.uint64).reshape(count, 2).tolist()
        found = np.frombuffer(_at(out, count * 8), np.uint64)
        for row, (address, nbytes) in enumerate(rows):
            assert address % 8 == 0 or nbytes == 0, "it reads whole words"
            self.read += nbytes
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


@pytest.fixture
def proof(monkeypatch):
    """Digests of a slot in which what is plain, tiny and on no word's boundary lies side by side."""
    monkeypatch.setattr(digests, "Module", HostKernel)
    monkeypatch.setattr(digests, "compiled", lambda *_: b"")
    monkeypatch.setattr(digests, "_AT_ONCE", 1)
    layout = make_layout(manifest_for(CONFIG, "bfloat16"), 1)
    made = DeviceDigests(HostDriver(), layout, placement(layout, 0))
    made.slot = np.random.default_rng(0).integers(0, 256, layout.slot_bytes, np.uint8)
    made.address, made.layout = made.slot.ctypes.data, layout
    return made


def _true(proof):
    return region_digests(proof.layout, proof.slot)


def test_what_was_hashed_while_it_came_is_not_read_again(proof):
    early, ranges = proof.begin(proof.address), proof.layout.ranges
    half = len(ranges) // 2
    for start, nbytes in ranges[:half]:
        proof.read_ahead(early, [(start, nbytes)], None)
    seen = proof._module.read
    assert 0 < seen <= sum(nbytes for _, nbytes in ranges[:half])
    assert proof.regions(proof.address, early) == _true(proof)
    rest = proof._module.read - seen
    assert seen + rest == sum(int(size) for size in proof._sizes[proof._starts % 8 == 0])


def test_a_version_that_was_all_hashed_while_it_came_costs_no_launch(monkeypatch):
    for name, value in (("Module", HostKernel), ("compiled", lambda *_: b""), ("_AT_ONCE", 1)):
        monkeypatch.setattr(digests, name, value)
    nothing_tiny = CONFIG | {"hidden_size": 640, "vocab_size": 1000}
    layout = make_layout(manifest_for(nothing_tiny, "float32"), 1)
    slot = np.random.default_rng(0).integers(0, 256, layout.slot_bytes, np.uint8)
    proof = DeviceDigests(HostDriver(), layout, placement(layout, 0))
    early = proof.begin(slot.ctypes.data)
    proof.read_ahead(early, layout.ranges, None)
    monkeypatch.setattr(HostKernel, "launch", None)
    live = Live("run", 1, 0, 1, version_digest(layout, region_digests(layout, slot)))
    assert proof.holds(slot.ctypes.data, live, (), early)


def test_a_piece_that_comes_in_parts_is_read_once_it_is_there(proof):
    early, (start, nbytes) = proof.begin(proof.address), max(proof.layout.ranges, key=lambda one: one[1])
    proof.slot[start + nbytes - 1] ^= 1
    proof.read_ahead(early, [(start, nbytes - 4)], None)  # more than one piece: the first is whole
    assert proof._module.read == 16 << 20
    proof.slot[start + nbytes - 1] ^= 1
    proof.read_ahead(early, [(start + nbytes - 4, 4)], None)
    assert proof.regions(proof.address, early) == _true(proof)


def test_parts_that_lie_together_are_looked_at_together(proof, monkeypatch):
    """Few launches, each of many pieces."""
    monkeypatch.setattr(digests, "_AT_ONCE", proof.layout.slot_bytes // 2)
    launched, launch = [], proof._module.launch
    monkeypatch.setattr(proof._module, "launch", lambda *given: launched.append(given[1]) or launch(*given))
    early = proof.begin(proof.address)
    for one in proof.layout.ranges:
        proof.read_ahead(early, [one], None)
    assert 1 <= len(launched) <= 2
    assert proof.regions(proof.address, early) == _true(proof)


def test_a_version_of_which_nothing_is_to_come_is_hashed_however_small_it_is(proof, monkeypatch):
    """As one that was taken from a trainer: a vote would wait for all of it."""
    monkeypatch.setattr(digests, "_AT_ONCE", 1 << 40)
    early, half = proof.begin(proof.address), len(proof.layout.ranges) // 2
    proof.read_ahead(early, proof.layout.ranges[:half], None)
    assert not proof._module.read
    proof.read_ahead(early, proof.layout.ranges[half:], None, last=True)
    assert proof._module.read
    assert proof.regions(proof.address, early) == _true(proof)


def test_what_waits_to_be_hashed_is_not_looked_at_with_every_part_that_comes(proof, monkeypatch):
    """The loop of a rank tells of each, beside its steps; a gigabyte has thousands."""
    monkeypatch.setattr(digests, "_AT_ONCE", 1 << 40)
    looks = []

    class Span(tuple):
        def __iter__(self):
            looks.append(self)
            return super().__iter__()

    early = proof.begin(proof.address)
    for at in range(100):
        proof.read_ahead(early, [Span((64 * at, 64))], None)
    assert len(looks) <= 200


def test_any_byte_that_is_wrong_when_it_is_there_counts(proof):
    live = Live("run", 1, 0, 1, version_digest(proof.layout, _true(proof)))
    for start, nbytes in proof.layout.ranges:
        proof.slot[start + nbytes - 1] ^= 1
        early = proof.begin(proof.address)
        proof.read_ahead(early, [(start, nbytes)], None)
        assert not proof.holds(proof.address, live, (), early)
        proof.slot[start + nbytes - 1] ^= 1
        assert proof.holds(proof.address, live, ())


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_was_hashed_of_another_filling_is_worth_nothing(proof, elsewhere):
    """Neither of the slot before it was filled anew, nor of another slot."""
    early = proof.begin(proof.address)
    proof.read_ahead(early, proof.layout.ranges, None)
    was = proof.slot
    if elsewhere:
        proof.slot = was.copy()
        proof.address = proof.slot.ctypes.data
    else:
        proof.begin(proof.address)
    proof.slot[:] = np.random.default_rng(5).integers(0, 256, proof.slot.size, np.uint8)
    assert proof.regions(proof.address, early) == _true(proof)
    before = proof._module.read
    if not elsewhere:
        proof.read_ahead(early, proof.layout.ranges, None)
    assert proof._module.read == before, "nobody waits for it any more"


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

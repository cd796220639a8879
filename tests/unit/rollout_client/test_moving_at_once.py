"""A little is moved in one call, planned once for all pushes that lie alike: each push still gets its own bytes."""

import subprocess
import sys

import numpy as np
import pytest

from rollout_client import copying
from rollout_client.copying import WIRE_DTYPE, Alike, move, slot_view, source_view
from rollout_client.digest import PIECE, digest_of
from rollout_client.protocol import Copy, Part
from rollout_client.tensors import Slice, Source, sources

SLOT = 1 << 16


@pytest.fixture(autouse=True)
def _compiled():
    if copying.prepare(120) is None:
        pytest.skip("no C compiler here")


def copy(part, size, src, dst, dtype="float32"):
    return Copy(part, (size,), src, (1,), dst, (1,), dtype)


def numbers(dtype, size, seed=0):
    wide = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    return (wide.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else wide.astype(WIRE_DTYPE[dtype])


def moved(alike, held, slot):
    """The digests of all copies."""
    shares = list(alike.move(held, slot))
    assert [first for first, *_ in shares] == [sum(len(d) for _, d, _ in shares[:i]) for i in range(len(shares))]
    return [digest for _, digests, _ in shares for digest in digests]


def test_the_store_hears_of_each_share_while_the_next_is_moved(monkeypatch):
    monkeypatch.setattr(copying, "SHARE", 400)
    tensors = [np.full(60, i, ">f4") for i in range(9)]
    held = sources({str(i): t for i, t in enumerate(tensors)})
    alike = Alike.of([copy(i, 60, 0, 64 * i) for i in range(9)], [s.part for s in held], SLOT)
    slot, seen = memoryview(bytearray(SLOT)), []
    for first, digests, nbytes in alike.move(held, slot):
        there = np.frombuffer(slot, np.float32)
        assert nbytes == 240 * len(digests) <= 480
        for number, digest in enumerate(digests, first):
            seen.append(number)
            assert digest == digest_of(there[64 * number :][:60].tobytes())
        assert not there[64 * (first + len(digests)) :].any(), "what follows is not moved yet"
        assert not any(source.located for source in held[first + len(digests) :]), "nor looked for"
    assert seen == list(range(9))


@pytest.mark.parametrize(("share", "count"), [(1 << 20, 1), (1000, 2), (400, 5)])
def test_no_share_is_much_smaller_than_the_others(monkeypatch, share, count):
    """A little that is left over would cost another message, and all that is done for each."""
    monkeypatch.setattr(copying, "SHARE", share)
    held = sources({str(i): np.full(60, i, np.float32) for i in range(9)})
    alike = Alike.of([copy(i, 60, 0, 64 * i) for i in range(9)], [s.part for s in held], SLOT)
    sizes = [nbytes for *_, nbytes in alike.move(held, memoryview(bytearray(SLOT)))]
    assert (len(sizes), sum(sizes)) == (count, 9 * 240)
    assert max(sizes) - min(sizes) <= 240, "by no more than one tensor"


def test_arrays_are_looked_up_together():
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    held = [whole, whole[1:3], whole.T, whole[:, :3], whole[0], np.empty((0, 3), np.float16), np.array(1, np.float32)]
    for array in held:
        array.flags.writeable = False
    found = copying.ready().addresses(held).tolist()
    assert found == [a.ctypes.data if a.flags.c_contiguous else 0 for a in held]
    assert copying.ready().addresses([]).tolist() == []


def test_arrays_that_were_looked_up_are_not_asked_one_by_one(monkeypatch):
    tensors = [np.full(60, i, np.float32) for i in range(9)]
    held = sources({str(i): t for i, t in enumerate(tensors)})
    alike = Alike.of([copy(i, 60, 0, 64 * i) for i in range(9)], [s.part for s in held], SLOT)
    monkeypatch.setattr(Source, "_address", lambda source: pytest.fail("this takes two microseconds each"))
    slot = memoryview(bytearray(SLOT))
    assert moved(alike, held, slot) == [digest_of(t.tobytes()) for t in tensors]
    assert [np.frombuffer(slot, np.float32)[64 * i] for i in range(9)] == list(range(9))


@pytest.mark.parametrize("dst", ["float32", "bfloat16"])
def test_bytes_and_digests_are_those_of_one_copy_after_the_other(dst):
    parts = [Part(name, dtype, (40, 25)) for name, dtype in zip("abc", ("float32", "bfloat16", "float16"), strict=True)]
    if dst == "float32":
        parts.append(Part("d", "float32", (40, 25)))
    copies = [copy(i, 300, 17 * i, 64 + 1024 * i, dst) for i in range(len(parts))]
    copies.append(copy(0, 1000 - 317, 317, 8192, dst))
    alike = Alike.of(copies, parts, SLOT)
    for seed in range(3):  # other tensors each time, where they are then
        tensors = [numbers(part.dtype, 1000, seed) for part in parts]
        named = [(part.name, tensor.reshape(40, 25)) for part, tensor in zip(parts, tensors, strict=True)]
        expected, slot = memoryview(bytearray(SLOT)), memoryview(bytearray(SLOT))
        digests = [
            move(source_view(tensors[c.part], c), parts[c.part].dtype, slot_view(expected, c), dst) for c in copies
        ]
        assert moved(alike, sources(named), slot) == digests
        assert slot == expected


def test_tensors_that_lie_otherwise_are_brought_into_order_first():
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    parts = [Part(name, "float32", (4, 3)) for name in ("turned", "swapped", "apart")]
    named = {"turned": a.T, "swapped": a.T.astype(">f4"), "apart": np.repeat(a.T, 2, axis=1)[:, ::2]}
    slot = memoryview(bytearray(SLOT))
    alike = Alike.of([copy(i, 12, 0, 16 * i) for i in range(3)], parts, SLOT)
    digests = moved(alike, sources(named), slot)
    assert digests == [digest_of(a.T.tobytes())] * 3
    for i in range(3):
        assert np.frombuffer(slot, np.float32)[16 * i :][:12].tolist() == a.T.reshape(-1).tolist()


def test_slices_are_as_large_as_they_are():
    whole = np.arange(20, dtype=np.float32)
    named = {"box": Slice(whole[:8].reshape(2, 4), (10, 4), offset=(2, 0)), "flat": Slice(whole[3:9], (20,), start=3)}
    held = sources(named)
    parts = [source.part for source in held]
    with pytest.raises(ValueError, match="leaves a buffer of 8"):
        Alike.of([copy(0, 9, 0, 0)], parts, SLOT)
    with pytest.raises(ValueError, match="leaves a buffer of 6"):
        Alike.of([copy(1, 2, 5, 0)], parts, SLOT)
    slot = memoryview(bytearray(SLOT))
    moved(Alike.of([copy(0, 8, 0, 0), copy(1, 6, 0, 8)], parts, SLOT), held, slot)
    assert np.frombuffer(slot, np.float32)[:14].tolist() == [*range(8), *range(3, 9)]


@pytest.mark.parametrize("wrong", [copy(0, 1, -1, 0), copy(0, 1, 0, -1), copy(0, 8, 0, SLOT // 4 - 7)])
def test_copies_that_leave_are_refused(wrong):
    with pytest.raises(ValueError, match="leaves a buffer"):
        Alike.of([wrong], [Part("a", "float32", (8,))], SLOT)


def test_what_is_not_in_one_piece_is_moved_otherwise():
    part, large = [Part("a", "float32", (8, 8))], [Part("a", "float32", (PIECE // 4 + 1,))]
    assert Alike.of([Copy(0, (8, 2), 0, (8, 1), 0, (2, 1), "float32")], part, SLOT) is None
    assert Alike.of([copy(0, PIECE // 4 + 1, 0, 0)], large, 2 * PIECE) is None
    assert Alike.of([copy(0, 8, 0, 0)], [Part("a", "int8", (8,))], SLOT) is None


def test_each_push_moves_what_it_holds_to_where_it_is_placed(store, publisher):
    """Through the same connection: alike, at other places, of other shapes, and with a tensor of another kind."""
    one = publisher(transport="shm")

    def pushed(version, copies, tensors):
        store.place(copies, slot=version % 2)
        one.push(tensors, version)
        return np.frombuffer(store.arena.slot(version % 2), np.float32)[:64].copy()

    a, b = (np.random.default_rng(seed).standard_normal(12).astype(np.float32) for seed in (1, 2))
    here, there = [copy(0, 12, 0, 0)], [copy(0, 12, 0, 32)]
    for version, tensor in enumerate((a, b, a), 1):
        assert pushed(version, here, {"w": tensor.reshape(3, 4)})[:12].tolist() == tensor.tolist()
        assert store.digests[0] == digest_of(tensor.tobytes())
    halves = a.astype(np.float16)
    assert pushed(4, here, {"w": halves.reshape(3, 4)})[:12].tolist() == halves.astype(np.float32).tolist()
    assert pushed(5, there, {"w": b.reshape(3, 4)})[32:44].tolist() == b.tolist()
    assert pushed(6, [copy(0, 6, 0, 32)], {"w": a[:6].reshape(3, 2)})[32:38].tolist() == a[:6].tolist()


TORCH = """
import numpy as np, torch
from rollout_client.tensors import sources
x = torch.arange(12, dtype=torch.float32).reshape(3, 4)
layer = torch.nn.Linear(4, 3)
named = {"x": x, "parameter": layer.weight, "bits": x.bfloat16(), "t": x.T, "wide": x.double(),
         "neg": torch._neg_view(x), "sparse": x.to_sparse()}
found = {name: source.address() for name, source in zip(named, sources(named))}
assert found["x"] == x.data_ptr() and found["parameter"] == layer.weight.data_ptr()
assert found["bits"] == named["bits"].data_ptr()
assert [found[name] for name in ("t", "wide", "neg", "sparse")] == [None] * 4
"""


def test_torch_tensors_are_read_where_they_lie():
    pytest.importorskip("torch", reason="torch is not installed here")
    subprocess.run([sys.executable, "-c", TORCH], check=True, timeout=120)

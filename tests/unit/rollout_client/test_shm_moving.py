import numpy as np
import pytest

from rollout_client import copying, shm_transport
from rollout_client.digest import PIECE, digest_of
from rollout_client.protocol import Copy
from rollout_client.shm_transport import TOGETHER_BYTES, Gathered, move_units, together, units
from rollout_client.tensors import Source, sources

MIB = 1 << 20


def content(size):
    return np.arange(-(-size // 8), dtype="<u8").view(np.uint8)[:size].view(np.float32)


def plain(elements, dst_offset=0, src_offset=0):
    return Copy(0, (elements,), src_offset, (1,), dst_offset, (1,), "float32")


class Slot:
    """Units over a slot that is large enough, numbered in the order in which they were made."""

    def __init__(self, nbytes):
        self.memory = memoryview(bytearray(nbytes))
        self.made = 0

    def units(self, source, *copies):
        numbered = list(enumerate(copies, self.made))
        self.made += len(copies)
        return units(source, numbered, self.memory)

    def floats(self):
        return np.frombuffer(self.memory, np.float32)


def batches(*sizes):
    """The copies that each thread moves at a time."""
    slot = Slot(sum(sizes) or 4)
    found = [slot.units(*sources({"w": content(size)}), plain(size // 4)) for size in sizes]
    return [[unit.number for unit in batch] for batch in together(unit for one in found for unit in one)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([4], [[0]]),
        ([TOGETHER_BYTES, TOGETHER_BYTES], [[0], [1]]),
        ([TOGETHER_BYTES // 2] * 5, [[0, 1], [2, 3], [4]]),
        ([4, TOGETHER_BYTES, 4, 4], [[0, 1], [2, 3]]),
        ([PIECE + MIB, MIB], [[0], [0, 1]]),
    ],
)
def test_small_copies_go_together_and_none_is_lost(sizes, expected):
    assert batches(*sizes) == expected


@pytest.fixture(params=["compiled", "numpy"])
def way(request, monkeypatch):
    if request.param == "compiled" and copying.prepare(120) is None:
        pytest.skip("no C compiler here")
    if request.param == "numpy":
        monkeypatch.setattr(copying, "ready", lambda: None)


@pytest.mark.parametrize("size", [PIECE - 4, PIECE, PIECE + 4, 2 * PIECE + 4])
@pytest.mark.usefixtures("way")
def test_a_large_copy_is_shared_by_threads(size):
    tensor = content(size)
    slot = Slot(size + 64)
    found = slot.units(*sources({"w": tensor}), plain(size // 4, dst_offset=16))
    assert len(found) == -(-size // PIECE)
    gathered, done = Gathered(), []
    for unit in reversed(found):
        assert not done
        done += [whole for moved in move_units([unit]) if (whole := gathered.add(moved))]
    assert done == [(0, digest_of(tensor.data), size)]
    assert slot.memory[64:] == memoryview(tensor).cast("B")
    assert not any(slot.memory[:64])


@pytest.mark.usefixtures("way")
def test_what_goes_together_is_moved_as_if_it_went_alone():
    """A plain copy, one that is cast, one with a transposed source and one of many pieces, in one batch."""
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    halves = np.arange(5, dtype=np.float16)
    large = content(PIECE + 8)
    held = sources({"plain": content(40), "cast": halves, "turned": rows.T, "large": large})
    slot = Slot(PIECE + 4096)
    made = [
        *slot.units(held[0], plain(4, 0), plain(6, 10, src_offset=4)),
        *slot.units(held[1], plain(5, 32)),
        *slot.units(held[2], Copy(0, (3, 2), 0, (2, 1), 48, (3, 1), "float32")),
        *slot.units(held[3], plain(large.size, 64)),
    ]
    gathered = Gathered()
    whole = [found for moved in move_units(made) if (found := gathered.add(moved))]
    done = {number: digest for number, digest, _ in whole}
    floats = slot.floats()
    turned = np.lib.stride_tricks.as_strided(floats[48:], (3, 2), (12, 4))
    expected = [content(40)[:4], content(40)[4:], halves.astype(np.float32), rows.T, large]
    places = [floats[:4], floats[10:16], floats[32:37], turned, floats[64 : 64 + large.size]]
    for number, (wanted, there) in enumerate(zip(expected, places, strict=True)):
        np.testing.assert_array_equal(there, wanted)
        assert done[number] == digest_of(np.ascontiguousarray(wanted).data)


def test_a_part_is_fetched_once_and_let_go_after_its_last_copy(monkeypatch):
    monkeypatch.setattr(shm_transport, "PIECE", 64)
    (source,) = sources({"w": content(256)})
    fetched, load = [], Source.load
    slot = Slot(1024)
    monkeypatch.setattr(Source, "load", lambda source: fetched.append(1) or load(source))
    found = slot.units(source, plain(40), plain(24, 100, src_offset=40))
    assert len(found) == 5
    for unit in found:
        assert unit.loaded.users > 0
        move_units([unit])
    assert fetched == [1]
    assert found[0].loaded._flat is None


@pytest.mark.parametrize("copy", [plain(4, 13), plain(4, -1), Copy(0, (4,), 0, (1,), 8, (3,), "float32")])
def test_a_copy_that_leaves_the_slot_is_found_before_any_is_begun(copy):
    with pytest.raises(ValueError, match="leaves a buffer of 16"):
        Slot(64).units(*sources({"w": content(64)}), copy)


def test_a_copy_that_leaves_its_tensor_is_refused():
    (unit,) = Slot(64).units(*sources({"w": content(8)}), plain(4))
    with pytest.raises(ValueError, match="leaves a buffer of 2"):
        move_units([unit])


def test_the_order_of_a_plans_copies_is_found_out_once():
    transport = shm_transport.ShmTransport.__new__(shm_transport.ShmTransport)
    transport._turns = None
    small = [Copy(part, (16,), 0, (1,), 64 - 16 * part, (1,), "float32") for part in range(2)]
    strided = Copy(2, (2, 2), 0, (2, 1), 80, (4, 1), "float32")
    copies = [*small, strided, Copy(3, (5 << 20,), 0, (1,), 4096, (1,), "float32")]
    found = transport._in_turn(copies)
    assert [(part, fit) for part, _, fit in found] == [(3, True), (1, True), (0, True), (2, False)]
    assert [numbered for _, numbered, _ in found] == [[(number, copies[number])] for number in (3, 1, 0, 2)]
    assert transport._in_turn(copies) is found
    assert [part for part, _, _ in transport._in_turn(small)] == [1, 0]

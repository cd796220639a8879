"""Duck-typed stand-ins for what Paddle and torch hand out: the frameworks' own attributes, nothing more."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.slices import local_slices
from rollout_client.tensors import Slice

WHOLE = np.arange(48, dtype=np.float32).reshape(8, 6)


def assemble(slices, shape=WHOLE.shape):
    """Every element from the slices of all ranks, and how often it came."""
    values, seen = np.zeros(shape, np.float32), np.zeros(shape, int)
    for piece in slices:
        box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.data.shape, strict=True))
        values[box] = piece.data
        seen[box] += 1
    return values, seen


def sharded_weight(box, *, flat=None):
    (low, high) = box
    local = WHOLE[tuple(slice(a, b) for a, b in zip(low, high, strict=True))]
    data = local if flat is None else local.reshape(-1)[flat]
    return SimpleNamespace(
        local_tensor=data,
        local_shape=local.shape,
        global_shape=[8, 6],
        global_offset=low,
        is_flattened=flat is not None,
        flattened_range=flat,
    )


def test_paddle_boxes():
    ranks = [sharded_weight(((0, 0), (8, 3))), sharded_weight(((0, 3), (8, 6)))]
    values, seen = assemble([s for w in ranks for _, s in local_slices({"w": w}, 0)])
    np.testing.assert_array_equal(values, WHOLE)
    assert (seen == 1).all()


@given(st.integers(0, 24), st.integers(0, 24))
def test_paddle_flattened_shards_of_a_box_are_boxes(a, b):
    """ZeRO on top of tensor parallelism: ranges of the flattened local box, cut anywhere."""
    a, b = sorted((a, b))
    left = ((0, 0), (8, 3))
    ranks = [sharded_weight(left, flat=slice(*cut)) for cut in ((0, a), (a, b), (b, 24))]
    ranks.append(sharded_weight(((0, 3), (8, 6))))
    values, seen = assemble([s for w in ranks for _, s in local_slices([("w", w)], 0)])
    np.testing.assert_array_equal(values, WHOLE)
    assert (seen == 1).all()


class DTensor:
    """Rows over the mesh's second axis, copies over its first."""

    shape = WHOLE.shape

    def __init__(self, coordinate, rows):
        kinds = (True, False)
        self.placements = [SimpleNamespace(is_replicate=lambda k=k: k) for k in kinds]
        self.device_mesh = SimpleNamespace(get_coordinate=lambda: coordinate)
        self._rows = rows

    def to_local(self):
        return WHOLE[self._rows]

    def __create_chunk_list__(self):
        return [SimpleNamespace(offsets=(self._rows.start, 0), sizes=self.to_local().shape)]


def test_torch_replicas_send_once_and_empty_shards_nothing():
    rows = [slice(0, 5), slice(5, 8), slice(8, 8)]
    mesh = [(copy, part) for copy in range(2) for part in range(3)]
    found = [s for c in mesh for _, s in local_slices({"w": DTensor(c, rows[c[1]])}, 0)]
    values, seen = assemble(found)
    np.testing.assert_array_equal(values, WHOLE)
    assert (seen == 1).all()
    assert list(local_slices({"w": DTensor(None, rows[0])}, 0)) == []


def test_torch_sharded_tensor():
    shards = [
        SimpleNamespace(tensor=WHOLE[a:b], metadata=SimpleNamespace(shard_offsets=[a, 0])) for a, b in ((0, 2), (2, 8))
    ]
    tensor = SimpleNamespace(local_shards=lambda: shards, size=lambda: WHOLE.shape)
    values, seen = assemble([s for _, s in local_slices({"w": tensor}, 3)])
    np.testing.assert_array_equal(values, WHOLE)
    assert (seen == 1).all()


@pytest.mark.parametrize(("rank", "sent"), [(0, ["plain", "mine"]), (1, ["mine"])])
def test_plain_tensors_are_sent_by_the_first_rank(rank, sent):
    state = {"plain": WHOLE, "mine": Slice(WHOLE, (16, 6), offset=(0, 0))}
    assert [name for name, _ in local_slices(state, rank)] == sent

"""A copy that is made of the base, of patches to it, and of bytes that came as they are."""

import numpy as np
import pytest

from rollout_client.digest import PIECE, digest_of
from rollout_client.patches import hasher, update
from rollout_client.protocol import Copy
from weight_manager.patched import WINDOW
from weight_manager.targets import Target

ELEMENTS = (2 * PIECE + 3 * WINDOW) // 2 + 77
COPY = Copy(0, (ELEMENTS,), 0, (1,), 0, (1,), "bfloat16")
SPAN = 2 << 20

pytestmark = pytest.mark.usefixtures("way")


@pytest.fixture
def target():
    base = np.random.default_rng(0).integers(0, 60000, ELEMENTS, np.uint16)
    slot = np.zeros(ELEMENTS, np.uint16)
    made = Target("w", COPY, memoryview(slot).cast("B"), memoryview(base).cast("B"))
    return made, slot, base


def send(target, offset, before, after):
    """What differs of one span."""
    gaps, values = update(before.copy(), after, after.size, hasher())
    frames = target.patched.patch(offset, after.nbytes, [gaps.nbytes, values.nbytes])
    target.received.add(offset, offset + after.nbytes)
    for frame, part in zip(frames, (gaps, values), strict=True):
        frame[:] = part.view(np.uint8).data


def test_every_byte_is_the_new_one_wherever_it_came_from(target):
    made, slot, base = target
    new = base.copy()
    for first in (
        0,
        3,
        9,
        PIECE // SPAN,
        2 * PIECE // SPAN,
    ):  # spans of patches, two beside each other at a piece's end
        piece = new[first * SPAN // 2 : (first + 1) * SPAN // 2]
        piece[::97] ^= 1
        send(made, first * SPAN, base[first * SPAN // 2 :][: piece.size], piece)
    plain = slice(5 * SPAN // 2 + 11, 6 * SPAN // 2 - 5)
    new[plain] = 7
    start, size = plain.start * 2, (plain.stop - plain.start) * 2
    made.received.add(start, start + size)
    made.patched.plain(start, size)
    made.destination(start, size)[:] = new[plain].tobytes()
    assert made.compute() == (digest_of(new.data), digest_of(new.data))
    assert np.array_equal(slot, new)


def test_a_patch_is_of_one_piece(target):
    assert target[0].patched.patch(PIECE - SPAN, SPAN, [1, 2]) is not None
    assert target[0].patched.patch(PIECE - SPAN + 2, SPAN, [1, 2]) is None


def test_a_patch_that_does_not_fit_is_said(target):
    made, _, _ = target
    frames = made.patched.patch(0, 64, [2, 2])
    frames[0][:] = bytes([255, 0])
    frames[1][:] = bytes(2)
    with pytest.raises(ValueError, match="does not fit"):
        made.compute()


@pytest.mark.parametrize(
    "copy", [Copy(0, (8,), 0, (1,), 1, (1,), "float32"), Copy(0, (9,), 0, (1,), 0, (1,), "float32")]
)
def test_a_copy_that_leaves_the_slot_is_refused(copy):
    with pytest.raises((TypeError, ValueError)):
        Target("w", copy, memoryview(bytearray(32)))

"""Do boxes cover a shape exactly once? Two ways to find out, against counting every element."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_manager import coverage
from weight_manager.coverage import Tiling, tile


def count(boxes, shape):
    covered = np.zeros(shape, int)
    for low, high in boxes:
        covered[tuple(slice(a, b) for a, b in zip(low, high, strict=True))] += 1
    return covered


def inside(covered, box):
    return covered[tuple(slice(a, b) for a, b in zip(*box, strict=True))]


@st.composite
def nearly_tilings(draw):
    """A shape cut into boxes at random, of which some are left out, said twice, or moved."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 8))):
        low, high = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(low[axis], high[axis]))
        near, far = list(high), list(low)
        near[axis] = far[axis] = at
        boxes += [box for box in ((low, tuple(near)), (tuple(far), high)) if np.all(np.less(*box))]
    for _ in range(draw(st.integers(0, 3))):
        i = draw(st.integers(0, len(boxes) - 1))
        if draw(st.booleans()):
            boxes.append(boxes[i])
        elif len(boxes) > 1:
            boxes.pop(i)
    return draw(st.permutations(boxes)), shape


@settings(max_examples=400)
@given(nearly_tilings(), st.sampled_from([coverage._corners, lambda boxes, shape: coverage._sweep(boxes, shape, 0)]))
def test_both_ways_agree_with_counting(case, way):
    boxes, shape = case
    covered, found = count(boxes, shape), way(boxes, shape)
    assert (found == Tiling()) == bool((covered == 1).all())
    if found.gap is not None:
        assert (inside(covered, found.gap) == 0).all()
    if found.overlap is not None:
        assert (inside(covered, found.overlap) > 1).all()


def grid(n):
    """n * n boxes, none of which is one range of bytes."""
    return [((2 * i, 3 * j), (2 * i + 2, 3 * j + 3)) for i in range(n) for j in range(n)], (2 * n, 3 * n)


def stairs(n):
    """n columns, each cut in two at a row of its own: every cut goes through all of them."""
    halves = [(((0, i), (i + 1, i + 1)), ((i + 1, i), (n + 1, i + 1))) for i in range(n)]
    return [box for pair in halves for box in pair], (n + 1, n)


@pytest.mark.parametrize("make", [lambda: grid(100), lambda: stairs(5000)], ids=["a grid", "stairs"])
def test_ten_thousand_boxes_are_a_matter_of_milliseconds(make):
    boxes, shape = make()
    began = time.process_time()
    assert tile(boxes, shape) == Tiling()
    assert time.process_time() - began < 0.25
    gap, again = boxes[4321], boxes[1234]
    missing = tile([box for box in boxes if box is not gap], shape)
    assert missing.overlap is None
    assert missing.gap is not None
    assert missing.gap[0] == gap[0]
    twice = tile([*boxes, again], shape)
    assert twice.gap is None
    assert twice.overlap is not None
    assert twice.overlap[0] == again[0]

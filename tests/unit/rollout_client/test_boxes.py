"""A range of a flattened tensor, as boxes: exactly its elements, in order, in as few boxes as that takes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.boxes import as_interval, flat_boxes


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_boxes_are_the_range_and_none_is_empty(sides, data):
    shape = tuple(sides)
    size = int(np.prod(shape))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(0, size))
    numbers = np.arange(size).reshape(shape)
    found = []
    for low, high in flat_boxes(start, stop, shape):
        part = numbers[tuple(slice(a, b) for a, b in zip(low, high, strict=True))].ravel().tolist()
        assert part, "a box without an element"
        assert as_interval((low, high), shape) == (part[0], part[-1] + 1)
        found.append(part)
    assert [number for part in found for number in part] == list(range(start, stop))
    assert len(found) <= 2 * len(shape) - 1

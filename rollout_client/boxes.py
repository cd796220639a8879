"""Boxes and flat ranges of tensors. A box is (start, stop) per axis, stop exclusive. Pure functions."""

from collections.abc import Iterator
from math import prod

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]


def strides_of(shape: Shape) -> Shape:
    """C-order strides, in elements."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def flat_boxes(start: int, stop: int, shape: Shape) -> Iterator[Box]:
    """The range [start, stop) of a flattened tensor as boxes: at most 2 * ndim - 1, in order."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop,)
        return
    row = prod(shape[1:])
    first, skipped = divmod(start, row)
    last, taken = divmod(stop, row)
    if first == last:
        yield from _in_row(first, skipped, taken, shape)
        return
    if skipped:
        yield from _in_row(first, skipped, row, shape)
        first += 1
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last, *shape[1:])
    yield from _in_row(last, 0, taken, shape)


def _in_row(row: int, start: int, stop: int, shape: Shape) -> Iterator[Box]:
    for low, high in flat_boxes(start, stop, shape[1:]):
        yield (row, *low), (row + 1, *high)


def as_interval(box: Box, shape: Shape) -> tuple[int, int] | None:
    """The flat range [start, stop) that the box is, or None if it is not one range."""
    low, high = box
    axis = 0
    while axis < len(shape) - 1 and high[axis] - low[axis] == 1:
        axis += 1
    for inner in range(axis + 1, len(shape)):
        if low[inner] != 0 or high[inner] != shape[inner]:
            return None
    start = sum(i * s for i, s in zip(low, strides_of(shape), strict=True))
    return start, start + prod(b - a for a, b in zip(low, high, strict=True))

"""Do these pieces tile a tensor exactly once? Exact, for any mix of boxes and flat ranges. Pure functions.

One-dimensional tilings, which is nearly all of them, are one sort. A few boxes are swept axis by axis, which finds all
of a gap and of an overlap and takes the square of their number. More of them are proven by their corners: how often a
point is covered is the sum, over all corners that lie at or before it on every axis, of + 1 for those with an even
number of far sides and - 1 for the others. So boxes cover a shape exactly once if and only if these signs add up,
corner by corner, to those of the shape itself; that is one sort again. The first corner that differs begins a cell
which is covered too often, or not at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

import numpy as np

from rollout_client.boxes import Box, Shape, as_interval, flat_boxes, strides_of

FEW = 200
"""Boxes that are swept: ten milliseconds at most."""


@dataclass(frozen=True)
class Tiling:
    """The first box that nothing covers and the first that is covered more than once, if any.

    Of many boxes whichever comes first, and of it a part.
    """

    gap: Box | None = None
    overlap: Box | None = None


def tile(boxes: Sequence[Box], shape: Shape) -> Tiling:
    """Whether non-empty boxes inside `shape` cover it exactly once."""
    intervals = [as_interval(box, shape) for box in boxes]
    known = [i for i in intervals if i is not None]
    if len(known) == len(boxes):
        flat = _sweep([((a,), (b,)) for a, b in known], (prod(shape),), 0)
        return Tiling(_unflatten(flat.gap, shape), _unflatten(flat.overlap, shape))
    return _sweep(boxes, shape, 0) if len(boxes) <= FEW else _corners(boxes, shape)


def _corners(boxes: Sequence[Box], shape: Shape) -> Tiling:
    places = np.array([*boxes, ((0,) * len(shape), shape)], np.int64)  # [box, near or far, axis]; the shape comes last
    strides = np.array(strides_of(tuple(n + 1 for n in shape)), np.int64)
    keys, signs = [], []
    for sides in product((0, 1), repeat=len(shape)):
        keys.append(sum(places[:, side, axis] * strides[axis] for axis, side in enumerate(sides)))
        sign = np.full(len(places), (-1) ** sum(sides))
        sign[-1] *= -1
        signs.append(sign)
    corners, numbers = np.unique(np.concatenate(keys), return_inverse=True)
    differ = np.bincount(numbers, np.concatenate(signs))  # exact: far fewer than 2**53
    wrong = np.flatnonzero(differ)
    if not len(wrong):
        return Tiling()
    start = tuple(int(corners[wrong[0]] // stride % (n + 1)) for stride, n in zip(strides, shape, strict=True))
    stop = tuple(
        int(np.min(cuts[cuts > low])) for low, cuts in zip(start, places.reshape(-1, len(shape)).T, strict=True)
    )
    cell = start, stop
    return Tiling(gap=cell) if differ[wrong[0]] < 0 else Tiling(overlap=cell)


def _sweep(boxes: Sequence[Box], shape: Shape, axis: int) -> Tiling:
    if axis == len(shape) - 1:
        return _line(boxes, shape)
    by_start = sorted(boxes, key=lambda box: box[0][axis])
    cuts = sorted({0, shape[axis], *(b[0][axis] for b in boxes), *(b[1][axis] for b in boxes)})
    gap = overlap = None
    active: list[Box] = []
    following = 0
    for low, high in pairwise(cuts):
        active = [box for box in active if box[1][axis] > low]
        while following < len(by_start) and by_start[following][0][axis] == low:
            active.append(by_start[following])
            following += 1
        slab = _sweep(active, shape, axis + 1)
        gap = gap or _with_axis(slab.gap, axis, low, high)
        overlap = overlap or _with_axis(slab.overlap, axis, low, high)
    return Tiling(gap, overlap)


def _line(boxes: Sequence[Box], shape: Shape) -> Tiling:
    axis, end = len(shape) - 1, 0
    gap = overlap = None
    for start, stop in sorted((box[0][axis], box[1][axis]) for box in boxes):
        if start > end and gap is None:
            gap = end, start
        if start < end and overlap is None:
            overlap = start, min(end, stop)
        end = max(end, stop)
    if end < shape[axis] and gap is None:
        gap = end, shape[axis]
    return Tiling(_last_axis(gap, shape), _last_axis(overlap, shape))


def _last_axis(found: tuple[int, int] | None, shape: Shape) -> Box | None:
    return found and (((0,) * (len(shape) - 1) + found[:1]), (shape[:-1] + found[1:]))


def _with_axis(box: Box | None, axis: int, low: int, high: int) -> Box | None:
    return box and ((*box[0][:axis], low, *box[0][axis + 1 :]), (*box[1][:axis], high, *box[1][axis + 1 :]))


def _unflatten(box: Box | None, shape: Shape) -> Box | None:
    return box and next(flat_boxes(box[0][0], box[1][0], shape))

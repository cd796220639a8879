"""Do these pieces tile a tensor exactly once? Exact, for any mix of boxes and flat ranges. Pure functions.

One-dimensional tilings, which is nearly all of them, are one sort; others are swept axis by axis.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from rollout_client.boxes import Box, Shape, as_interval, flat_boxes


@dataclass(frozen=True)
class Tiling:
    """The first box that nothing covers and the first that is covered more than once, if any."""

    gap: Box | None = None
    overlap: Box | None = None


def tile(boxes: Sequence[Box], shape: Shape) -> Tiling:
    """Whether non-empty boxes inside `shape` cover it exactly once."""
    intervals = [as_interval(box, shape) for box in boxes]
    known = [i for i in intervals if i is not None]
    if len(known) == len(boxes):
        flat = _sweep([((a,), (b,)) for a, b in known], (prod(shape),), 0)
        return Tiling(_unflatten(flat.gap, shape), _unflatten(flat.overlap, shape))
    return _sweep(boxes, shape, 0)


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

"""Lossless patches: which elements of a block differ, as gaps of one byte, and their new bits.

A gap is the number of unchanged elements before the next changed one; 255 stands for 255 unchanged ones with nothing
behind them. At one changed element in a hundred, a bfloat16 patch is a 66th of the block.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_client.native import kernels

Array = npt.NDArray[Any]
SKIP = 255
BITS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
"""Elements are compared and replaced as bits: a NaN equals itself, and -0.0 is not 0.0."""


def update(before: Array, after: Array, most: int) -> tuple[Array, Array] | None:
    """(gaps, values) of the patch that makes `before` equal `after`, which it does; flat, of the same unsigned dtype.

    None if there are more than `most` values: `before` is then neither of the two.
    """
    fast = kernels.ready()
    if fast is not None:
        return fast.difference(before, after, most)
    index = differing(before, after)
    if index.size > most:
        return None
    values = after[index]
    before[index] = values  # a hundredth of the bytes, not all of them
    return to_gaps(index), values


def differing(before: Array, after: Array) -> Array:
    """Indices of the elements whose bits differ; both flat, of the same unsigned dtype."""
    return np.flatnonzero(before != after)


def to_gaps(index: Array) -> Array:
    """Rising indices -> uint8 gaps."""
    between = np.diff(index, prepend=-1) - 1
    skips = between // SKIP
    gaps = np.full(index.size + int(skips.sum()), SKIP, np.uint8)
    gaps[np.cumsum(skips + 1) - 1] = between % SKIP
    return gaps


def apply(target: Array, gaps: Array, values: Array) -> bool:
    """Replace elements of a flat target in place. False if the patch does not fit: what it holds then is undefined."""
    fast = kernels.ready()
    if fast is not None:
        return fast.patch(target, gaps, values)
    here = gaps != SKIP
    steps = np.where(here, gaps.astype(np.int64) + 1, SKIP)
    index = (np.cumsum(steps) - 1)[here]
    if index.size != values.size or (index.size and index[-1] >= target.size):
        return False
    target[index] = values
    return True

"""Lossless patches: which elements of a block differ, as gaps of one byte, and their new bits.

A gap is the number of unchanged elements before the next changed one; 255 stands for 255 unchanged ones with nothing
behind them. At one changed element in a hundred, a bfloat16 patch is a 66th of the block.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from rollout_client import copying

Array = npt.NDArray[Any]
SKIP = 255
BITS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
"""Elements are compared and replaced as bits: a NaN equals itself, and -0.0 is not 0.0."""


def hasher() -> Any:
    """xxh3-64 of what comes, with `update(array)` and `intdigest()`: for `update` and `patched` below."""
    fast = copying.ready()
    return xxhash.xxh3_64() if fast is None else fast.hasher()


def update(before: Array, after: Array, most: int, into: Any) -> tuple[Array, Array] | None:
    """(gaps, values) of the patch that makes `before` equal `after`, which it does; flat, of the same unsigned dtype.

    None if there are more than `most` values: `before` is then neither of the two. `into` takes `after`.
    """
    fast = copying.ready()
    if fast is not None and isinstance(into, copying.Hasher):
        return fast.difference(before, after, most, into)
    into.update(after)
    index = differing(before, after)
    if index.size > most:
        return None
    values = after[index]
    before[index] = values  # a hundredth of the bytes, not all of them
    return to_gaps(index), values


def patched(target: Array, base: Array, gaps: Array, values: Array, into: Any) -> bool:
    """The base with a patch into the target; flat, of the same unsigned dtype. `into` takes what the target holds.

    False if the patch does not fit: what the target holds then is undefined.
    """
    fast = copying.ready()
    if fast is not None and isinstance(into, copying.Hasher):
        return fast.patched(target, base, gaps, values, into)
    target[...] = base
    fits = apply(target, gaps, values)
    into.update(target)
    return fits


def differing(before: Array, after: Array) -> Array:
    """Indices of the elements whose bits differ; both flat, of the same unsigned dtype."""
    return np.flatnonzero(before != after)


def to_gaps(index: Array) -> Array:
    """Rising indices as the gaps between them, uint8."""
    between = np.diff(index, prepend=-1) - 1
    skips = between // SKIP
    gaps = np.full(index.size + int(skips.sum()), SKIP, np.uint8)
    gaps[np.cumsum(skips + 1) - 1] = between % SKIP
    return gaps


def apply(target: Array, gaps: Array, values: Array) -> bool:
    """Replace elements of a flat target in place. False, and nothing done, if the patch does not fit it."""
    here = gaps != SKIP
    steps = np.where(here, gaps.astype(np.int64) + 1, SKIP)
    index = (np.cumsum(steps) - 1)[here]
    if index.size != values.size or (index.size and index[-1] >= target.size):
        return False
    target[index] = values
    return True

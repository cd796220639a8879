"""Whether weights are numbers: one that is NaN or infinite makes every answer of the model an error."""

from collections.abc import Sequence

import numpy as np

from weight_manager.layout import Array

BLOCK_BYTES = 256 << 10
"""Both passes over a block of bfloat16 find it in the core's cache."""
ENDS = 1024
_INFINITY = 0x7F80
"""Bits of bfloat16; NaN has more, with either sign."""


def all_finite(flat: Array) -> bool:
    """Of every element. flat: float32, or uint16 bits of bfloat16."""
    step = BLOCK_BYTES // flat.itemsize
    return all(_finite(flat[start : start + step]) for start in range(0, len(flat), step))


def ends_finite(flat: Array) -> bool:
    """Of the first and the last elements: costs nothing, and finds a training that has diverged."""
    return _finite(flat[:ENDS]) and _finite(flat[-ENDS:])


def all_ends_finite(views: Sequence[Array]) -> bool:
    """Of all of them, in one pass."""
    return _finite(np.concatenate([end for flat in views for end in (flat[:ENDS], flat[-ENDS:])]))


def _finite(block: Array) -> bool:
    if block.dtype == np.uint16:
        return bool(block.view(np.int16).max() < _INFINITY and block.max() < _INFINITY | 0x8000)
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.add.reduce(block)
    return bool(np.isfinite(total) or np.isfinite(block).all())  # large numbers may overflow the sum

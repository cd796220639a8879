"""Whether weights are numbers: one that is NaN or infinite makes every answer of the model an error."""

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from rollout_client.native.compiler import compiled
from weight_manager.layout import Array

log = logging.getLogger(__name__)

SOURCES = (Path(__file__).with_name("finite.c"),)

BLOCK_BYTES = 256 << 10
"""Both passes over a block of bfloat16 find it in the core's cache."""
ENDS = 1024
_INFINITY = 0x7F80
"""Bits of bfloat16; NaN has more, with either sign."""


def all_finite(flat: Array) -> bool:
    """Whether every element is finite. flat: contiguous, float32, or uint16 bits of bfloat16.

    The first use compiles its loop.
    """
    loop = _loop()
    if loop is not None:
        return bool(loop(flat.ctypes.data, flat.size, flat.itemsize))
    step = BLOCK_BYTES // flat.itemsize
    return all(_finite(flat[start : start + step]) for start in range(0, len(flat), step))


def ends_finite(flat: Array) -> bool:
    """Whether the first and the last elements are finite: costs nothing, and finds a training that has diverged."""
    return _finite(flat[:ENDS]) and _finite(flat[-ENDS:])


def all_ends_finite(views: Sequence[Array]) -> bool:
    """Whether the first and last elements of all views are finite, in one pass."""
    return _finite(np.concatenate([end for flat in views for end in (flat[:ENDS], flat[-ENDS:])]))


def ready() -> bool:
    """Whether `all_finite` needs no compiler any more."""
    return _loop.cache_info().currsize > 0


@lru_cache(maxsize=1)
def _loop() -> Callable[[int, int, int], int] | None:
    """None where there is no C compiler: numpy does it, several times as slowly."""
    try:
        loop = ctypes.CDLL(str(compiled("finite", SOURCES))).all_finite
    except OSError as error:
        log.info("weights are looked through by numpy: %s", error)
        return None
    loop.argtypes, loop.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64], ctypes.c_int64
    found: Callable[[int, int, int], int] = loop
    return found


def _finite(block: Array) -> bool:
    if block.dtype == np.uint16:
        return bool(block.view(np.int16).max() < _INFINITY and block.max() < _INFINITY | 0x8000)
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.add.reduce(block)
    return bool(np.isfinite(total) or np.isfinite(block).all())  # large numbers may overflow the sum

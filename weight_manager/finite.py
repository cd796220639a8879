"""Whether weights are numbers: one that is NaN or infinite makes every answer of the model an error."""

import ctypes
import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rollout_client.digest import digest_of
from rollout_client.native.compiler import compiled
from rollout_client.native.xxh3 import wheel_functions
from weight_manager.layout import Array

log = logging.getLogger(__name__)

SOURCES = (Path(__file__).with_name("finite.c"),)

BLOCK_BYTES = 256 << 10
"""Bytes of a block: so few that the second pass over a block of bfloat16 finds it in the core's cache."""
ENDS = 1024
_INFINITY = 0x7F80
"""Bits of bfloat16; NaN has more, with either sign."""


def all_finite(flat: Array) -> bool:
    """Whether every element is finite. flat: contiguous, float32, or uint16 bits of bfloat16.

    The first use compiles its loop.
    """
    loops = _loops()
    if loops is not None:
        return bool(loops.all_finite(flat.ctypes.data, flat.size, flat.itemsize))
    step = BLOCK_BYTES // flat.itemsize
    return all(_finite(flat[start : start + step]) for start in range(0, len(flat), step))


def prove_rows(
    flat: Array, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.uint64], bool]:
    """xxh3-64 of each row of `flat`, and `all_finite` of them together, in one pass over memory and one call.

    starts, sizes: [rows] in bytes, of whole elements, inside of it; none has more than `digest.PIECE`.
    """
    loops, digests = _loops(), np.empty(len(starts), np.uint64)
    if loops is not None:
        places = (array.ctypes.data for array in (flat, starts, sizes, digests))
        return digests, bool(loops.prove_rows(*places, len(starts), flat.itemsize, _hash()))
    spans = zip((starts // flat.itemsize).tolist(), (sizes // flat.itemsize).tolist(), strict=True)
    rows = [flat[start : start + size] for start, size in spans]
    digests[:] = [digest_of(row.data) for row in rows]
    return digests, all(all_finite(row) for row in rows)


def ends_finite(flat: Array) -> bool:
    """Whether the first and the last elements are finite: costs nothing, and finds a training that has diverged."""
    return _finite(flat[:ENDS]) and _finite(flat[-ENDS:])


def all_ends_finite(views: Sequence[Array]) -> bool:
    """Whether the first and last elements of all views are finite, in one pass."""
    return _finite(np.concatenate([end for flat in views for end in (flat[:ENDS], flat[-ENDS:])]))


def ready() -> bool:
    """Whether `all_finite` needs no compiler any more."""
    return _loops.cache_info().currsize > 0


@lru_cache(maxsize=1)
def _loops() -> ctypes.CDLL | None:
    """The compiled loops; None where there is no C compiler: numpy does the same, several times as slowly."""
    try:
        loops = ctypes.CDLL(str(compiled("finite", SOURCES)))
    except OSError as error:
        log.info("weights are looked through by numpy: %s", error)
        return None
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    loops.all_finite.argtypes, loops.all_finite.restype = [pointer, number, number], number
    loops.prove_rows.argtypes, loops.prove_rows.restype = [pointer] * 4 + [number] * 2 + [pointer], number
    return loops


@lru_cache(maxsize=1)
def _hash() -> int | None:
    """The address of xxh3-64 as C calls it. Raises OSError where the wheel does not show it."""
    return ctypes.cast(wheel_functions("64bits")[0], ctypes.c_void_p).value


def _finite(block: Array) -> bool:
    if block.dtype == np.uint16:
        return bool(block.view(np.int16).max() < _INFINITY and block.max() < _INFINITY | 0x8000)
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.add.reduce(block)
    return bool(np.isfinite(total) or np.isfinite(block).all())  # large numbers may overflow the sum

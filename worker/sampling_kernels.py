"""The compiled passes over a row of logits (sampling.c); without a C compiler numpy does the same, to the bit."""

import ctypes
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_client.native.compiler import compiled

log = logging.getLogger(__name__)

_HERE = Path(__file__).parent
SOURCES = (_HERE / "sampling.c", _HERE / "cpu" / "vectors.h")
_FLAGS = ("-ffp-contract=off",)
"""Or the bits would be those of one processor's fused multiply-adds, which numpy has not."""


class _Row(ctypes.Structure):
    _fields_ = [
        ("row", ctypes.c_void_p),
        ("scaled", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("vocab", ctypes.c_int64),
        ("inverse", ctypes.c_float),
        ("peak", ctypes.c_float),
        ("total", ctypes.c_double),
        ("norm", ctypes.c_double),
        ("finite", ctypes.c_int64),
    ]


class _Draws(ctypes.Structure):
    _fields_ = [
        ("logits", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("inverse", ctypes.c_void_p),
        ("greedy", ctypes.c_void_p),
        ("numbers", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("logprobs", ctypes.c_void_p),
        ("finite", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("vocab", ctypes.c_int64),
    ]


class SamplingKernels:
    """Entry points. Arrays are C-contiguous and not kept."""

    def __init__(self, library: Path) -> None:
        """Raises OSError if it cannot be loaded."""
        loaded = ctypes.CDLL(str(library))
        self._weigh = _typed(loaded.weigh, None, ctypes.POINTER(_Row))
        self._draw = _typed(loaded.draw, None, ctypes.POINTER(_Draws))
        self._largest = _typed(loaded.largest, ctypes.c_int64, *(ctypes.c_void_p, ctypes.c_int64) * 2)
        pointers = [ctypes.c_void_p] * 3
        self._uniforms = _typed(loaded.uniforms, None, *pointers, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int64)

    def weigh(
        self,
        row: npt.NDArray[np.float32],
        inverse: float,
        sums: npt.NDArray[np.float32],
        scaled: npt.NDArray[np.float32] | None = None,
        weights: npt.NDArray[np.float32] | None = None,
    ) -> tuple[float, float, float, bool]:
        """Peak, total weight, its logarithm, and whether all logits are finite; see `softmax.Softmax.weigh`."""
        asked = _Row(
            row.ctypes.data,
            None if scaled is None else scaled.ctypes.data,
            None if weights is None else weights.ctypes.data,
            sums.ctypes.data,
            len(row),
            inverse,
        )
        self._weigh(asked)
        return asked.peak, asked.total, asked.norm, bool(asked.finite)

    def draw(
        self,
        logits: npt.NDArray[np.float32],
        rows: npt.NDArray[np.int64],
        inverse: npt.NDArray[np.float32],
        greedy: npt.NDArray[np.bool_],
        numbers: npt.NDArray[np.float64],
        sums: npt.NDArray[np.float32],
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        """Token, logprob and finite of each row; see `inverse_cdf.RowSampler.draw`. Rows of logits may lie apart."""
        count = len(rows)
        tokens, logprobs, finite = np.empty(count, np.int64), np.empty(count, np.float64), np.empty(count, np.bool_)
        places = [
            array.ctypes.data for array in (logits, rows, inverse, greedy, numbers, tokens, logprobs, finite, sums)
        ]
        self._draw(_Draws(*places, count, logits.strides[0] // logits.itemsize, logits.shape[1]))
        return tokens, logprobs, finite

    def largest(self, values: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.intp]:
        """As `truncation.largest`."""
        ids = np.empty(min(count, len(values)), np.int64)
        return ids[: self._largest(values.ctypes.data, len(values), ids.ctypes.data, len(ids))]

    def uniforms(
        self,
        seeds: npt.NDArray[np.uint64],
        samples: npt.NDArray[np.uint64],
        positions: npt.NDArray[np.uint64],
        purpose: int,
    ) -> npt.NDArray[np.float64]:
        """As `random_streams.uniforms_of`."""
        out = np.empty(len(seeds), np.float64)
        places = [array.ctypes.data for array in (seeds, samples, positions)]
        self._uniforms(*places, purpose, out.ctypes.data, len(out))
        return out


def library() -> Path:
    """Compiled for this machine. Raises OSError when it cannot be made."""
    return compiled("sampling", SOURCES, _FLAGS)


def _typed(function: Any, result: Any, *arguments: Any) -> Any:
    function.argtypes, function.restype = arguments, result
    return function


@lru_cache(maxsize=1)
def load() -> SamplingKernels | None:
    """The kernels of this process; the first call may compile for a second. None where they cannot be made."""
    try:
        return SamplingKernels(library())
    except OSError as error:
        log.info("no compiled kernels, tokens are drawn by numpy: %s", error)
        return None

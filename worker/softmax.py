"""The softmax of a row of logits, on a CPU: its weights and logprobs, what top-k, top-p and min-p leave of it, and
where among the weights a uniform number lands.

Whatever draws a token or reports a logprob on a CPU has it from here, so that a token's logprob is the same number
whichever way it was drawn or scored. Every float32 operation is rounded by itself and additions have one order: a
block's 256 weights in 16 lanes, the lanes in halves, the blocks one after the other in float64. A uniform number is
looked up among the sums of the row's blocks, and inside one block.

With a C compiler (sampling.c) a row's softmax is one pass, and the plain draws of a step are one call for all rows;
without one numpy does the same, to the same bits.
"""

import ctypes
import logging
import math
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rollout_client.native.compiler import compiled
from worker.engine.base import Float32, Float64, Int64

Ids = npt.NDArray[np.intp]

log = logging.getLogger(__name__)

_HERE = Path(__file__).parent
SOURCES = (_HERE / "sampling.c", _HERE / "cpu" / "vectors.h")
_FLAGS = ("-ffp-contract=off",)
"""Compiler flags without which the bits would be those of one processor's fused multiply-adds, which numpy has not."""


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
        row: Float32,
        inverse: float,
        sums: Float32,
        scaled: Float32 | None = None,
        weights: Float32 | None = None,
    ) -> tuple[float, float, float, bool]:
        """Peak, total weight, its logarithm, and whether all logits are finite; see `Softmax.weigh`."""
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
        logits: Float32,
        rows: Int64,
        inverse: Float32,
        greedy: npt.NDArray[np.bool_],
        numbers: Float64,
        sums: Float32,
    ) -> tuple[Int64, Float64, npt.NDArray[np.bool_]]:
        """Token, logprob and finite of each row; see `sampler.RowSampler.draw`. Rows of logits may lie apart."""
        count = len(rows)
        tokens, logprobs, finite = np.empty(count, np.int64), np.empty(count, np.float64), np.empty(count, np.bool_)
        places = [
            array.ctypes.data for array in (logits, rows, inverse, greedy, numbers, tokens, logprobs, finite, sums)
        ]
        self._draw(_Draws(*places, count, logits.strides[0] // logits.itemsize, logits.shape[1]))
        return tokens, logprobs, finite

    def largest(self, values: Float32, count: int) -> Ids:
        """What the function `largest` finds."""
        ids = np.empty(min(count, len(values)), np.int64)
        return ids[: self._largest(values.ctypes.data, len(values), ids.ctypes.data, len(ids))]

    def uniforms(
        self,
        seeds: npt.NDArray[np.uint64],
        samples: npt.NDArray[np.uint64],
        positions: npt.NDArray[np.uint64],
        purpose: int,
    ) -> Float64:
        """What `random_streams.uniforms_of` returns."""
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


BLOCK = 256
"""Ids whose weights are added up together."""
_LANES = 16
_LEAST = np.float32(-87.0)
_MAGIC = np.float32(12582912.0)  # 1.5 * 2**23
_POLYNOMIAL = tuple(
    np.float32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
)


class Weighed(NamedTuple):
    """A row: its largest logit, the total of its weights and its logarithm, whether all logits are finite.

    The weights are relative to the largest logit, so the logprob of an id is its scaled logit minus `norm`. Where the
    largest is no finite number there are no weights.
    """

    peak: float
    total: float
    norm: float
    finite: bool


class Softmax:
    """Keeps the buffers of one row; one owner thread. They are those of the row weighed last."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab = vocab_size
        self.blocks: Float32 = np.zeros((-(-vocab_size // BLOCK), BLOCK), np.float32)  # weights, 0 past the vocabulary
        self.sums: Float32 = np.zeros(len(self.blocks), np.float32)  # of each block
        self.scaled: Float32 = np.zeros(vocab_size, np.float32)  # (logit - peak) * inverse

    @property
    def weights(self) -> Float32:
        """e ** scaled [vocab]; 0 below e**-87."""
        return self.blocks.reshape(-1)[: self._vocab]

    def weigh(self, row: Float32, inverse: float, *, whole: bool = True) -> Weighed:
        """Fill the buffers from a row of logits [vocab], -inf where masked. row: may be `scaled`.

        inverse: of the temperature, rounded to float32. whole=False: of the buffers only the sums need be right.
        """
        row = np.ascontiguousarray(row)
        kernels = load()
        if kernels is None:
            return self._weigh(row, np.float32(inverse))
        filled = (self.scaled, self.blocks) if whole else ()
        return Weighed(*kernels.weigh(row, inverse, self.sums, *filled))

    def _weigh(self, row: Float32, inverse: np.float32) -> Weighed:
        peak, low = row.max(), row.min()
        finite = bool(np.isfinite(peak) and np.isfinite(low))
        if not np.isfinite(peak):
            return Weighed(float(peak), 0.0, 0.0, finite)
        np.subtract(row, peak, out=self.scaled)
        self.scaled *= inverse
        self.weights[:] = exponentials(self.scaled)
        self.sums[:] = _sums(self.blocks)
        total = float(np.cumsum(self.sums, dtype=np.float64)[-1])
        return Weighed(float(peak), total, math.log(total), finite)


def exponentials(scaled: Float32) -> Float32:
    """e ** x for x <= 0, to 2 ulp, as sampling.c computes it; 0 below e**-87. Of what is no number, anything."""
    x = np.maximum(scaled, _LEAST)
    whole = (x * np.float32(1.44269504) + _MAGIC) - _MAGIC
    x -= whole * np.float32(0.693359375)
    x += whole * np.float32(2.12194440e-4)
    power = np.full_like(x, _POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        power *= x
        power += coefficient
    power *= x
    power *= x
    power += x
    power += np.float32(1.0)
    power *= ((whole.astype(np.int32) + 127) << 23).view(np.float32)
    power *= scaled >= _LEAST
    return power


def _sums(blocks: Float32) -> Float32:
    """Sums of blocks [..., BLOCK], added up in one order."""
    lanes = blocks.reshape(*blocks.shape[:-1], -1, _LANES)
    added = lanes[..., 0, :].copy()
    for i in range(1, lanes.shape[-2]):
        added += lanes[..., i, :]
    for half in (8, 4):
        added = added[..., :half] + added[..., half:]
    found: Float32 = (added[..., 0] + added[..., 1]) + (added[..., 2] + added[..., 3])
    return found


class Truncation(Protocol):
    """top_k, top_p and min_p, as `messages.SamplingParams` means them."""

    @property
    def top_k(self) -> int:
        """0 = off."""

    @property
    def top_p(self) -> float:
        """1 = off."""

    @property
    def min_p(self) -> float:
        """0 = off."""


class Cut(NamedTuple):
    """A `Truncation` and nothing else."""

    top_k: int
    top_p: float
    min_p: float


def truncates(cut: Truncation, vocab_size: int) -> bool:
    """Whether any of the three can close an id."""
    return 0 < cut.top_k < vocab_size or cut.top_p < 1.0 or cut.min_p > 0.0


def largest(values: Float32, count: int) -> Ids:
    """Ids of the `count` largest finite values [V], best first; of equal values the lower id is first."""
    kernels = load()
    if kernels is not None:
        return kernels.largest(np.ascontiguousarray(values), count)
    count = min(count, len(values))
    bound = np.partition(values, len(values) - count)[len(values) - count]
    ids = np.flatnonzero(values >= bound)  # more than count when values tie at the bound
    ids = ids[np.argsort(-values[ids], kind="stable")][:count]
    return ids[np.isfinite(values[ids])]


def open_ids(scaled: Float32, weights: Float32, total: float, cut: Truncation) -> Ids:
    """Ids left open, rising. In order: top-k, top-p of what that left, min-p. At least one id stays.

    scaled [V]: log-weights, maximum 0, -inf where masked. weights [V]: exp(scaled). total: their sum.
    """
    if 0 < cut.top_k < len(scaled):
        ids = np.sort(largest(scaled, cut.top_k))
        if cut.top_p < 1.0:
            ids = _nucleus(ids, weights, cut.top_p * float(weights[ids].sum(dtype=np.float64)))
    elif cut.top_p < 1.0:
        goal = cut.top_p * total
        ids = _nucleus(_heavy(scaled, weights, goal), weights, goal)
    else:
        return np.flatnonzero(weights >= np.float32(cut.min_p))
    return ids[weights[ids] >= np.float32(cut.min_p)]


def _heavy(scaled: Float32, weights: Float32, goal: float) -> Ids:
    """Ids near the maximum that hold at least `goal` weight between them, rising."""
    for depth in (4.0, 8.0, 16.0):
        ids = np.flatnonzero(scaled >= -depth)
        if weights[ids].sum(dtype=np.float64) >= goal:
            return ids
    return np.flatnonzero(weights)


def _nucleus(ids: Ids, weights: Float32, goal: float) -> Ids:
    """The fewest of `ids` (rising) whose weights reach `goal`; of equal weights the lower ids."""
    falling = np.sort(weights[ids])[::-1]
    reached = np.cumsum(falling, dtype=np.float64)
    count = min(int(np.searchsorted(reached, goal)) + 1, len(ids))
    bound = falling[count - 1]
    kept = weights[ids] > bound
    kept[np.flatnonzero(weights[ids] == bound)[: count - int(np.count_nonzero(kept))]] = True
    nucleus: Ids = ids[kept]
    return nucleus


def logprob(scaled: Float32, token: int, norm: float) -> float:
    """The logprob of a token, from what `Softmax.weigh` filled and returned."""
    return min(0.0, float(scaled[token]) - norm)


def locate(weights: Float32 | Float64, numbers: Float64) -> tuple[Int64, Float64]:
    """Per row [R, C]: the column a number in [0, 1] of the row's weight falls into, and where in [0, 1] of that column.

    A column without weight is never chosen. `walk` in sampling.c is the same for one row.
    """
    reached = np.cumsum(weights, axis=1, dtype=np.float64)
    total = reached[:, -1]
    goal = np.minimum(numbers * total, np.nextafter(total, 0.0))
    column = np.minimum((reached <= goal[:, None]).sum(axis=1), weights.shape[1] - 1)
    rows = np.arange(len(weights))
    weight = weights[rows, column].astype(np.float64)
    share = (goal - (reached[rows, column] - weight)) / weight
    return column, np.clip(share, 0.0, 1.0)

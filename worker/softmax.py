"""The softmax of a row of logits: weights, their sums over blocks of ids, their total and its logarithm.

Whatever draws a token or reports a logprob on a CPU has them from here, so that a token's logprob is the same number
whichever way it was drawn or scored. Every float32 operation is rounded by itself and additions have one order: a
block's 256 weights in 16 lanes, the lanes in halves, the blocks one after the other in float64. With compiled kernels
(sampling.c) it is one pass, without them a few dozen of numpy, to the same bits.
"""

import math
from typing import NamedTuple

import numpy as np

from worker import sampling_kernels
from worker.engine.base import Float32

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
        kernels = sampling_kernels.load()
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
    """Of each block [..., BLOCK], in one order."""
    lanes = blocks.reshape(*blocks.shape[:-1], -1, _LANES)
    added = lanes[..., 0, :].copy()
    for i in range(1, lanes.shape[-2]):
        added += lanes[..., i, :]
    for half in (8, 4):
        added = added[..., :half] + added[..., half:]
    found: Float32 = (added[..., 0] + added[..., 1]) + (added[..., 2] + added[..., 3])
    return found

"""Which ids top-k, top-p and min-p leave open. Exact, without sorting the vocabulary where few ids hold the weight."""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from worker import sampling_kernels
from worker.engine.base import Float32

Ids = npt.NDArray[np.intp]


class Truncation(Protocol):
    """The three, as `messages.SamplingParams` means them."""

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
    kernels = sampling_kernels.load()
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

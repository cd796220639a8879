"""Which ids top-k, top-p and min-p leave open. Exact, without sorting the vocabulary where few ids hold the weight."""

import numpy as np
import numpy.typing as npt

from worker.engine.base import Float32
from worker.messages import SamplingParams

Ids = npt.NDArray[np.intp]


def truncates(sampling: SamplingParams, vocab_size: int) -> bool:
    """Whether any of the three can close an id."""
    return 0 < sampling.top_k < vocab_size or sampling.top_p < 1.0 or sampling.min_p > 0.0


def largest(values: Float32, count: int) -> Ids:
    """Ids of the `count` largest finite values [V], best first; of equal values the lower id is first."""
    count = min(count, len(values))
    bound = np.partition(values, len(values) - count)[len(values) - count]
    ids = np.flatnonzero(values >= bound)  # more than count when values tie at the bound
    ids = ids[np.argsort(-values[ids], kind="stable")][:count]
    return ids[np.isfinite(values[ids])]


def open_ids(scaled: Float32, weights: Float32, total: float, sampling: SamplingParams) -> Ids:
    """Ids left open, rising. In order: top-k, top-p of what that left, min-p. At least one id stays.

    scaled [V]: log-weights, maximum 0, -inf where masked. weights [V]: exp(scaled). total: their sum.
    """
    if 0 < sampling.top_k < len(scaled):
        ids = np.sort(largest(scaled, sampling.top_k))
        if sampling.top_p < 1.0:
            ids = _nucleus(ids, weights, sampling.top_p * float(weights[ids].sum(dtype=np.float64)))
    elif sampling.top_p < 1.0:
        goal = sampling.top_p * total
        ids = _nucleus(_heavy(scaled, weights, goal), weights, goal)
    else:
        return np.flatnonzero(weights >= np.float32(sampling.min_p))
    return ids[weights[ids] >= np.float32(sampling.min_p)]


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

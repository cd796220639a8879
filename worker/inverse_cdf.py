"""Sampling a token of a row: a uniform number is looked up among the sums of the row's blocks, and inside one block.

Plain draws of a step are one call of C for all rows (sampling.c), where there is a compiler; a row that is cut by
top-k, top-p or min-p is drawn from the ids left open.
"""

from typing import NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt

from worker import sampling_kernels
from worker.engine.base import Float32, ForwardBatch, Int32
from worker.softmax import BLOCK, Softmax, Weighed
from worker.truncation import Cut, Ids, Truncation, open_ids, truncates

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

MOST_TOPS = 64
"""Of the likeliest ids of a row that a device reports."""


class Tops(NamedTuple):
    """Per row [R]: the likeliest ids, best first, their logprobs, and the rank of the id drawn (1 = the likeliest)."""

    ids: Int64
    logprobs: Float64
    ranks: Int64


class Drawn(NamedTuple):
    """Per row [R]: the id, its logprob, and whether all logits were finite (else the other two mean nothing)."""

    tokens: Int64
    logprobs: Float64
    finite: npt.NDArray[np.bool_]
    tops: Tops | None = None  # when a row asked for some


class Cuts(NamedTuple):
    """Per row [R]: top_k (0 = off), top_p (1 = off) and min_p (0 = off), as `truncation.open_ids` means them; and how
    many of the likeliest ids to report (None: of no row any).
    """

    top_k: Int32
    top_p: Float64
    min_p: Float32
    tops: Int32 | None = None

    def close(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """Per row, whether any of the three can close an id."""
        return ((self.top_k > 0) & (self.top_k < vocab_size)) | (self.top_p < 1.0) | (self.min_p > 0.0)


class Drawing(Protocol):
    """Tokens being drawn on a device."""

    def drawn(self) -> Drawn:
        """Wait for them."""
        ...

    def follow(self, batch: ForwardBatch, sources: Int32) -> "Logits":
        """Launch the next step at once: one row a sequence, row i goes on from the token drawn `sources[i]`-th."""
        ...


class Logits(Protocol):
    """Rows of logits [L, vocab] of a step on a device, perhaps still under way; rows asked for come as arrays."""

    @overload
    def __getitem__(self, rows: int) -> Float32: ...
    @overload
    def __getitem__(self, rows: slice) -> Float32: ...

    def begin(
        self,
        rows: Int64,
        inverse_temperature: Float32,
        greedy: npt.NDArray[np.bool_],
        numbers: Float64,
        cuts: Cuts,
    ) -> Drawing:
        """Begin to draw as `RowSampler.draw` does from an array, from what `cuts` leave open where not greedy."""
        ...

    def wait(self) -> None:
        """Until the step is through, and what has been begun to be drawn from it."""
        ...


class Spread(NamedTuple):
    """What a row's token is drawn from: its weights, which are in the buffers, of the ids left open (None: of all)."""

    weighed: Weighed
    ids: Ids | None


class RowSampler:
    """Keeps the buffers of one row; one owner thread. Logits are rows of float32, each of them C-contiguous."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab = vocab_size
        self.softmax = Softmax(vocab_size)

    def draw(
        self,
        logits: Float32,
        rows: Int64,
        inverse_temperature: Float32,
        greedy: npt.NDArray[np.bool_],
        numbers: Float64,
        cuts: Cuts | None = None,
    ) -> Drawn:
        """From softmax(logits[rows] * inverse_temperature), or what `cuts` leave open of it, by numbers in [0, 1).

        Where greedy, the most likely id.
        """
        count, kernels = len(rows), sampling_kernels.load()
        cut = np.zeros(count, np.bool_) if cuts is None else cuts.close(self._vocab) & ~greedy
        tokens, logprobs, finite = np.zeros(count, np.int64), np.zeros(count), np.ones(count, np.bool_)
        if kernels is None:
            alone = np.arange(count)
        else:
            alone, whole = np.flatnonzero(cut), np.flatnonzero(~cut)
            tokens[whole], logprobs[whole], finite[whole] = kernels.draw(
                logits, rows[whole], inverse_temperature[whole], greedy[whole], numbers[whole], self.softmax.sums
            )
        for i in alone.tolist():
            left = (
                Cut(int(cuts.top_k[i]), float(cuts.top_p[i]), float(cuts.min_p[i])) if cuts is not None else _EVERYTHING
            )
            spread = self.spread(logits[rows[i]], float(inverse_temperature[i]), left, greedy=bool(greedy[i]))
            finite[i] = spread.weighed.finite
            if finite[i]:
                tokens[i] = token = self.token(spread, numbers[i : i + 1])
                logprobs[i] = logprob(self.softmax.scaled, token, spread.weighed.norm)
        return Drawn(tokens, logprobs, finite)

    def spread(self, row: Float32, inverse_temperature: float, cut: Truncation, *, greedy: bool) -> Spread:
        """Fill the buffers from a row, -inf where masked. Nothing is drawn where its largest is no finite number."""
        weighed, ids = self.softmax.weigh(row, inverse_temperature), None
        scaled, weights = self.softmax.scaled, self.softmax.weights
        if np.isfinite(weighed.peak):
            if greedy:
                ids = np.array([scaled.argmax()])
            elif truncates(cut, self._vocab):
                ids = open_ids(scaled, weights, weighed.total, cut)
        return Spread(weighed, ids)

    def token(self, spread: Spread, number: Float64) -> int:
        """What a number [1] in [0, 1) draws from the row in the buffers."""
        if spread.ids is not None:
            return int(spread.ids[locate(self.softmax.weights[spread.ids][None], number)[0][0]])
        block, share = locate(self.softmax.sums[None], number)
        return int(block[0] * BLOCK + locate(self.softmax.blocks[block], share)[0][0])


_EVERYTHING = Cut(0, 1.0, 0.0)


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

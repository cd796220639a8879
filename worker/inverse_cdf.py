"""Sampling from whole rows of softmax weights, a cache-sized piece of the batch at a time.

A row of a large vocabulary passes through the core's cache once: peak, exponentials, and their sums over blocks.
The uniform number is then looked up among the blocks of all rows together, and inside one block per row, whose
weights are computed again because keeping every row's would cost more than they are worth.
"""

from typing import NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt

from worker.engine.base import Float32, ForwardBatch, Int32

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

_PIECE = 1 << 16
"""Logits handled at once: 256 KiB each of scaled logits and weights."""
_BLOCK = 256


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


class RowSampler:
    """Keeps buffers for one vocabulary; one owner thread."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab = vocab_size
        self._block = min(_BLOCK, vocab_size)
        blocks = -(-vocab_size // self._block)
        self._rows = max(1, _PIECE // vocab_size)
        self._scaled: Float32 = np.empty((self._rows, vocab_size), np.float32)
        self._weights: Float32 = np.zeros((self._rows, blocks, self._block), np.float32)  # the padding stays 0

    def draw(
        self,
        logits: Float32,
        rows: Int64,
        inverse_temperature: Float32,
        greedy: npt.NDArray[np.bool_],
        numbers: Float64,
    ) -> Drawn:
        """From softmax(logits[rows] * inverse_temperature) by numbers in [0, 1), or the most likely id where greedy."""
        count = len(rows)
        peaks, lows = np.empty(count, np.float32), np.empty(count, np.float32)
        sums = np.empty((count, self._weights.shape[1]), np.float32)
        best = np.zeros(count, np.int64)
        adjacent = bool((np.diff(rows) == 1).all())
        for start in range(0, count, self._rows):
            part = slice(start, start + self._rows)
            raw = logits[rows[start] : rows[start] + len(rows[part])] if adjacent else logits[rows[part]]
            if greedy[part].any():
                best[part] = raw.argmax(axis=1)
            peaks[part], lows[part] = raw.max(axis=1), raw.min(axis=1)
            scaled = np.subtract(raw, peaks[part, None], out=self._scaled[: len(raw)])
            if (inverse_temperature[part] != 1.0).any():
                scaled *= inverse_temperature[part, None]
            weights = self._weights[: len(raw)]
            np.exp(scaled, out=weights.reshape(len(raw), -1)[:, : self._vocab])
            weights.sum(axis=2, out=sums[part])
        block, share = locate(sums, numbers)
        columns = block[:, None] * self._block + np.arange(self._block)
        inside = columns < self._vocab
        near = logits[rows[:, None], np.where(inside, columns, 0)]
        offset, _ = locate(np.exp((near - peaks[:, None]) * inverse_temperature[:, None]) * inside, share)
        tokens = np.where(greedy, best, block * self._block + offset)
        chosen = (logits[rows, tokens] - peaks) * inverse_temperature
        norms = np.log(sums.sum(axis=1, dtype=np.float64))
        return Drawn(tokens, np.minimum(chosen - norms, 0.0), np.isfinite(peaks) & np.isfinite(lows))


def locate(weights: Float32 | Float64, numbers: Float64) -> tuple[Int64, Float64]:
    """Per row [R, C]: the column a number in [0, 1] of the row's weight falls into, and where in [0, 1] of that column.

    A column without weight is never chosen.
    """
    reached = np.cumsum(weights, axis=1, dtype=np.float64)
    total = reached[:, -1]
    goal = np.minimum(numbers * total, np.nextafter(total, 0.0))
    column = np.minimum((reached <= goal[:, None]).sum(axis=1), weights.shape[1] - 1)
    rows = np.arange(len(weights))
    weight = weights[rows, column].astype(np.float64)
    share = (goal - (reached[rows, column] - weight)) / weight
    return column, np.clip(share, 0.0, 1.0)

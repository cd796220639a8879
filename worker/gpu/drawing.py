"""A step's logits where they are: tokens are drawn there, and rows cross the bus only for those who ask.

The random numbers are the host's (random_streams.py), so a seed means the same as on a CPU.
"""

from collections.abc import Callable, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from worker.engine.base import MOST_TOPS, Cuts, Drawn, Float32, Float64, ForwardBatch, Int32, Int64, Logits, Tops
from worker.gpu.driver import U64, Driver, Handle, Int, Module

Flags = npt.NDArray[np.bool_]
_PIECE, _NEAR, _CUT = 256, 8192, 2  # as in kernels/sampling.cu
_DRAWN = np.dtype([("token", np.int32), ("logprob", np.float32), ("finite", np.int32), ("unused", np.int32)])


class Drawing:
    """Draws from one logits buffer, on the stream that fills it."""

    def __init__(
        self,
        driver: Driver,
        module: Module,
        stream: Handle,
        logits: int,
        vocab: int,
        rows: int,
        follow: Callable[[ForwardBatch, Int32], Logits],
        *,
        most: int = 4096,
    ) -> None:
        """rows: of the buffer. follow: launches a step that goes on from tokens drawn here. most: drawn at once; a
        prompt's n sequences draw from one row.
        """
        self._driver, self._module, self._stream = driver, module, stream
        self._logits, self._vocab, self._most = logits, vocab, most
        self.follow = follow
        self._fetched: Float32 = driver.pinned((rows, vocab), np.float32)
        # numbers and top-p (8 bytes each), then rows, inverse temperatures, how, top-k, min-p and tops (4 each)
        self._asked = driver.pinned(10 * most, np.int32)
        self._asked_there = driver.allocate(40 * most, "sampling")
        # ids and logprobs of the likeliest, then ranks
        self._tops = driver.pinned((2 * MOST_TOPS + 1) * most, np.int32)
        self._tops_there = driver.allocate(self._tops.nbytes, "sampling")
        self._tops_wanted = 0
        self._pieces = driver.allocate(8 * most * -(-vocab // _PIECE), "sampling")
        self._drawn = driver.pinned(most * _DRAWN.itemsize, np.uint8).view(_DRAWN)
        self._drawn_there = driver.allocate(_DRAWN.itemsize * most, "sampling")
        self._drawn_event = driver.event()
        self._sources = driver.pinned(most, np.int32)
        self._sources_there = driver.allocate(4 * most, "sampling")

    def logits(self, count: int) -> "DeviceLogits":
        """The first so many rows, as the step just launched leaves them."""
        return DeviceLogits(self, count)

    def begin(
        self, rows: Int64, inverse_temperature: Float32, greedy: Flags, numbers: Float64, cuts: Cuts
    ) -> "DeviceDrawing":
        """Launch the drawing of one token for each."""
        parts = [slice(start, start + self._most) for start in range(0, max(1, len(rows)), self._most)]
        before: list[Drawn] = []
        count = 0
        for at in parts:
            if count:
                before.append(self.finished([], count))
            count = self._launch(
                rows[at],
                inverse_temperature[at],
                greedy[at],
                numbers[at],
                _part(cuts, at),
            )
        return DeviceDrawing(self, before, count)

    def finished(self, before: Sequence[Drawn], count: int) -> Drawn:
        """Wait for the `count` launched last."""
        if count:
            self._driver.wait(self._drawn_event, event=True)
        found = self._drawn[:count]
        tokens, logprobs = found["token"].astype(np.int64), found["logprob"].astype(np.float64)
        last = Drawn(tokens, logprobs, found["finite"] != 0, self._likeliest(count) if self._tops_wanted else None)
        return last if not before else _joined([*before, last])

    def _likeliest(self, count: int) -> Tops:
        wanted, most = self._tops_wanted, self._tops_wanted * count
        ids = self._tops[:most].reshape(count, wanted).astype(np.int64)
        logprobs = self._tops[most : 2 * most].view(np.float32).reshape(count, wanted).astype(np.float64)
        return Tops(ids, logprobs, self._tops[2 * most : 2 * most + count].astype(np.int64))

    def wait(self, *, drawn: bool) -> None:
        """Wait until the step, or the drawing that was launched last, is through."""
        if drawn:
            self._driver.wait(self._drawn_event, event=True)
        else:
            self._driver.wait(self._stream)

    def feed(self, tokens: int, sources: Int32) -> None:
        """Write the tokens drawn `sources[i]`-th to the int32 array at `tokens`, on the device."""
        count = len(sources)
        self._sources[:count] = sources
        self._driver.to_device(self._sources_there, self._sources, self._stream, 4 * count)
        arguments = (U64(self._drawn_there), U64(self._sources_there), U64(tokens), Int(count))
        self._module.launch("feed", (-(-count // 256),), 256, self._stream, arguments)

    def fetch(self, start: int, count: int) -> Float32:
        """Rows in host memory that the next fetch of them reuses; waits for the step."""
        there = self._fetched[start : start + count]
        self._driver.to_host(there, self._logits + 4 * self._vocab * start, self._stream)
        self._driver.wait(self._stream)
        return there

    def _launch(self, rows: Int64, inverse_temperature: Float32, greedy: Flags, numbers: Float64, cuts: Cuts) -> int:
        count, asked, there = len(rows), self._asked, self._asked_there
        if not count:
            return 0
        cut = ~greedy & (((cuts.top_k > 0) & (cuts.top_k < self._vocab)) | (cuts.top_p < 1) | (cuts.min_p > 0))
        asked[: 2 * count] = numbers.view(np.int32)
        asked[2 * count : 4 * count] = cuts.top_p.view(np.int32)
        how = np.where(cut, _CUT, greedy)
        words = (
            *(rows, inverse_temperature.view(np.int32), how),
            *(cuts.top_k, cuts.min_p.view(np.int32), 0 if cuts.tops is None else cuts.tops),
        )
        for place, column in enumerate(words, start=4):
            asked[place * count : (place + 1) * count] = column
        self._driver.to_device(there, asked, self._stream, 40 * count)
        at_rows, hot, at_how, top_k, min_p, tops = (U64(there + 4 * count * place) for place in range(4, 10))
        numbers_there, top_p = U64(there), U64(there + 8 * count)
        logits, pieces, vocab = U64(self._logits), U64(self._pieces), Int(self._vocab)
        blocks = -(-self._vocab // _PIECE // 8) if count <= 32 else max(1, 2048 // count)
        launch, out = self._module.launch, U64(self._drawn_there)
        picks = (logits, at_rows, hot, at_how)
        launch("weigh", (blocks, count), 256, self._stream, (logits, at_rows, hot, pieces, vocab))
        launch("draw", (count,), 256, self._stream, (*picks, numbers_there, pieces, out, vocab))
        if cut.any():
            arguments = (*picks, top_k, top_p, min_p, numbers_there, pieces, out, vocab)
            launch("draw_cut", (count,), 1024, self._stream, arguments, shared=8 * _NEAR)
        wanted = self._tops_wanted = 0 if cuts.tops is None else int(cuts.tops.max())
        if wanted:
            most, base = wanted * count, self._tops_there
            found = (U64(base), U64(base + 4 * most), U64(base + 8 * most), Int(wanted), vocab)
            shared = 12 * -(-self._vocab // _PIECE)
            launch(
                "tops", (count,), 256, self._stream, (logits, at_rows, hot, tops, pieces, out, *found), shared=shared
            )
            self._driver.to_host(self._tops[: 2 * most + count], base, self._stream)
        self._driver.to_host(self._drawn[:count], self._drawn_there, self._stream)
        self._driver.record(self._drawn_event, self._stream)
        return count


def _part(cuts: Cuts, at: slice) -> Cuts:
    tops = None if cuts.tops is None else cuts.tops[at]
    return Cuts(cuts.top_k[at], cuts.top_p[at], cuts.min_p[at], tops)


def _joined(parts: Sequence[Drawn]) -> Drawn:
    tops = None
    if any(part.tops is not None for part in parts):
        width = max(part.tops.ids.shape[1] for part in parts if part.tops is not None)
        tops = Tops(
            *(np.concatenate(column) for column in zip(*(_widened(part, width) for part in parts), strict=True))
        )
    columns = [np.concatenate(column) for column in zip(*(part[:3] for part in parts), strict=True)]
    return Drawn(columns[0], columns[1], columns[2], tops)


def _widened(part: Drawn, width: int) -> Tops:
    count = len(part.tokens)
    tops = part.tops or Tops(np.zeros((count, 0), np.int64), np.zeros((count, 0)), np.zeros(count, np.int64))
    padding = ((0, 0), (0, width - tops.ids.shape[1]))
    return Tops(np.pad(tops.ids, padding), np.pad(tops.logprobs, padding), tops.ranks)


class DeviceDrawing:
    """`Drawing` of the `count` tokens launched last, and of those `before` them."""

    def __init__(self, drawing: Drawing, before: Sequence[Drawn], count: int) -> None:
        self._drawing, self._before, self._count = drawing, before, count

    def drawn(self) -> Drawn:
        """Wait for them."""
        return self._drawing.finished(self._before, self._count)

    def follow(self, batch: ForwardBatch, sources: Int32) -> Logits:
        """Launch the next step behind them."""
        assert not self._before, "so many rows are no decode step"
        return self._drawing.follow(batch, sources)


class DeviceLogits:
    """`Logits` of the step last launched; the next step takes their memory."""

    def __init__(self, drawing: Drawing, count: int) -> None:
        self._drawing, self._count, self._begun = drawing, count, False

    @overload
    def __getitem__(self, rows: int) -> Float32: ...
    @overload
    def __getitem__(self, rows: slice) -> Float32: ...
    def __getitem__(self, rows: int | slice) -> Float32:
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(self._count)
            return self._drawing.fetch(start, max(0, stop - start))
        found: Float32 = self._drawing.fetch(rows, 1)[0]
        return found

    def begin(
        self, rows: Int64, inverse_temperature: Float32, greedy: Flags, numbers: Float64, cuts: Cuts
    ) -> DeviceDrawing:
        """Begin to draw on the device."""
        self._begun = True
        return self._drawing.begin(rows, inverse_temperature, greedy, numbers, cuts)

    def wait(self) -> None:
        """Wait until the step is through, and what has been begun to be drawn from it; not for a step behind it."""
        self._drawing.wait(drawn=self._begun)

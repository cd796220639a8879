"""A step's logits where they are: tokens are drawn there, and rows cross the bus only for those who ask.

The random numbers are the host's (random_streams.py), so a seed means the same as on a CPU. A drawing is one upload and
a few kernels (kernels/sampling.cu), in the order of the host's sampler: edits (edits.py), temperature, cuts, the draw,
what is reported of it. What comes of it is fetched on a stream of its own, so that no step waits for the bus. What is
drawn from and what is reported of need not be the same: each row of logits under a temperature is a view. Views come in
this order: one for each pick, then those that are only reported of.
"""

from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from worker.engine.base import Cuts, Drawn, Extras, Float32, Float64, ForwardBatch, Int32, Int64, Logits, Tops
from worker.gpu.carrying import Carry, Courier
from worker.gpu.driver import U64, Driver, Handle, Int, Module
from worker.gpu.edits import EDIT, Packed, Packing

Flags = npt.NDArray[np.bool_]
_PIECE, _NEAR, _TILE = 256, 8192, 2048  # as in kernels/sampling.cu, as are the next two lines
_CUT = 2
_SOUND, _ALL_MASKED = 1, 2
_DRAWN = np.dtype([("token", np.int32), ("logprob", np.float32), ("state", np.int32), ("unused", np.int32)])
_REPORTED = 64
"""Cells for other ids' logprobs, for each of the picks drawn at once; fewer picks are where more ids are asked for."""
_ENTRIES = 1 << 18
"""Pairs of an id and what is told of it that one drawing has room for, at least: 64 new prompts of 4096 tokens."""


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
        carry: Carry,
        *,
        most: int = 4096,
    ) -> None:
        """rows: that steps fill; the buffer has as many again, for edited ones. follow: launches a step that goes on
        from tokens drawn here. carry: brings what is asked for. most: drawn at once; a prompt's n sequences draw from
        one row.
        """
        self._driver, self._module, self._stream = driver, module, stream
        self._logits, self._vocab, self._rows, self._most = logits, vocab, rows, most
        self.follow = follow
        self._fetched: Float32 = driver.pinned((rows, vocab), np.float32)
        sending = driver, carry, stream, driver.stream(urgent=True)
        self._asked = _Upload(*sending, (15 + _REPORTED) * most)
        entries = max(_ENTRIES, 4 * vocab)
        self._packing = Packing(rows, vocab, entries)
        self._edits = _Upload(*sending, (EDIT.itemsize // 4 + -(-vocab // 32)) * rows + 2 * entries)
        self._words_there = driver.allocate(4 * rows * vocab, "sampling")
        # other ids and their logprobs, then ranks
        self._cells = _REPORTED * most
        self._tops = driver.pinned(2 * self._cells + most, np.int32)
        self._tops_there = driver.allocate(self._tops.nbytes, "sampling")
        self._tops_wanted = 0
        self._reports = False
        self._pieces = driver.allocate(8 * 2 * most * -(-vocab // _PIECE), "sampling")
        self._drawn = driver.pinned(most * _DRAWN.itemsize, np.uint8).view(_DRAWN)
        self._drawn_there = driver.allocate(_DRAWN.itemsize * most, "sampling")
        self._fetching, self._to_fetch, self._drawn_event = driver.stream(urgent=True), driver.event(), driver.event()
        self._masks: Int32 = driver.pinned((rows, -(-vocab // 32)), np.int32)
        self._masks_there = driver.allocate(self._masks.nbytes, "sampling")
        self._marked: list[int] = []  # picks
        self._sources = _Upload(*sending, most)
        self._fed, self._fed_there = np.zeros(0, np.int32), U64(0)

    def logits(self, count: int, gather: "Callable[[Int64], None] | None" = None) -> "DeviceLogits":
        """The first so many rows, as the step just launched leaves them. gather: puts any of them, by number, to the
        front, where the buffer has not room for all.
        """
        return DeviceLogits(self, count, gather, self._rows)

    def begin(
        self,
        rows: Int64,
        inverse_temperature: Float32,
        greedy: Flags,
        numbers: Float64,
        cuts: Cuts,
        extras: Extras | None = None,
    ) -> "DeviceDrawing":
        """Launch the drawing of one token for each."""
        before: list[Drawn] = []
        at = 0
        while True:
            until = self._room(at, len(rows), _widths(extras))
            if extras is not None and any(extras.marked[at:until]):
                until = min(until, at + self._rows)
            sources, packed = rows[at:until], None
            if extras is not None and any(edits is not None for edits in extras.edits[at:until]):
                packed, sources = self._packing.pack(extras.edits[at:until], sources.tolist(), self._rows)
                until = at + len(sources)
            part = slice(at, until)
            some = Cuts(cuts.top_k[part], cuts.top_p[part], cuts.min_p[part])
            how = rows[part], sources, inverse_temperature[part], greedy[part], numbers[part], some
            count = self._launch(*how, _part(extras, part), packed)
            if until == len(rows):
                return DeviceDrawing(self, before, count)
            before.append(self.finished([], count))
            at = until

    def score(self, rows: Int64, inverse_temperature: Float32, tokens: Int64, tops: Sequence[int]) -> Drawn:
        """Logprob and rank of these tokens, in rows that nothing edits, and the likeliest beside them."""
        found: list[Drawn] = []
        at = 0
        while not found or at < len(rows):
            until = self._room(at, len(rows), tops)
            count, wanted = until - at, np.array(tops[at:until], np.int32)
            self._driver.wait(self._drawn_event, event=True)  # nothing is being written there, nor fetched
            self._marked = []
            self._drawn[:count] = 0
            self._drawn["token"][:count], self._drawn["state"][:count] = tokens[at:until], _SOUND
            self._driver.to_device(self._drawn_there, self._drawn, self._stream, _DRAWN.itemsize * count)
            send = self._asked.begin()
            views = send(rows[at:until]), send(inverse_temperature[at:until])
            shown, asked, none = send(np.arange(count)), send(wanted), send(np.zeros(count, np.int32))
            self._asked.send()
            self._weigh(views, count)
            self._report(views, (shown, asked, none, none), int(wanted.max(initial=0)), count)
            self._take(count)
            found.append(self.finished([], count))
            at = until
        return found[0] if len(found) == 1 else _joined(found)

    def finished(self, before: Sequence[Drawn], count: int) -> Drawn:
        """Wait for the `count` launched last."""
        if count:
            self._driver.wait(self._drawn_event, event=True)
        found = self._drawn[:count]
        tokens, logprobs = found["token"].astype(np.int64), found["logprob"].astype(np.float64)
        tops = self._found_tops(count) if self._reports else None
        masks: list[Int32 | None] | None = None
        if self._marked:
            masks = [None] * count
            for row, pick in enumerate(self._marked):
                masks[pick] = self._masks[row].copy()
        last = Drawn(tokens, logprobs, found["state"] == _SOUND, found["state"] == _ALL_MASKED, tops, masks)
        return last if not before else _joined([*before, last])

    def wait(self, *, drawn: bool) -> None:
        """Wait until the step, or the drawing that was launched last, is through."""
        if drawn:
            self._driver.wait(self._drawn_event, event=True)
        else:
            self._driver.wait(self._stream)

    def through(self, *, drawn: bool) -> bool:
        """Whether `wait` would return at once."""
        return self._driver.happened(self._drawn_event if drawn else self._stream, event=drawn)

    def feed(self, tokens: int, sources: Int32) -> None:
        """Write the tokens drawn `sources[i]`-th to the int32 array at `tokens`, on the device."""
        count = len(sources)
        if not np.array_equal(sources, self._fed):  # as a rule they are those of the step before
            self._fed = np.zeros(0, np.int32)  # until it is there
            self._fed_there = self._sources.begin()(sources)
            self._sources.send()
            self._fed = sources.copy()
        arguments = (U64(self._drawn_there), self._fed_there, U64(tokens), Int(count))
        self._module.launch("feed", (-(-count // 256),), 256, self._stream, arguments)

    def fetch(self, start: int, count: int) -> Float32:
        """Rows in host memory that the next fetch of them reuses; waits for the step."""
        there = self._fetched[start : start + count]
        self._driver.to_host(there, self._logits + 4 * self._vocab * start, self._stream)
        self._driver.wait(self._stream)
        return there

    def _room(self, at: int, end: int, widths: Sequence[int]) -> int:
        """Where the picks from `at` on that are drawn at once end."""
        until = min(end, at + self._most)
        width = max(widths[at:until], default=0)
        return min(until, at + self._cells // width) if width else until

    def _launch(
        self,
        rows: Int64,
        sources: Int64,
        inverse_temperature: Float32,
        greedy: Flags,
        numbers: Float64,
        cuts: Cuts,
        extras: Extras | None,
        packed: Packed | None,
    ) -> int:
        """sources: the rows that are drawn from, some of them edited."""
        count, self._reports, self._marked = len(rows), False, []
        if not count:
            return 0
        self._driver.wait_event(self._stream, self._drawn_event)  # what was drawn before is fetched by now
        if packed is not None:
            self._edit(packed)
        shown = np.full(count, -1, np.int32)
        wanted, others, given = np.zeros(count, np.int32), np.zeros(count, np.int32), np.zeros(0, np.int32)
        apart: Int64 = np.zeros(0, np.int64)  # picks whose reports are of another view
        marks = np.full(count, -1, np.int32)
        if extras is not None:
            lengths = np.array([len(ids) for ids in extras.others], np.int32)
            wanted = np.where(lengths > 0, -lengths, np.array(extras.tops, np.int32))
            others = np.cumsum(lengths, dtype=np.int32) - lengths
            given = np.array([i for ids in extras.others for i in ids], np.int32)
            apart = np.flatnonzero(extras.untouched)
            shown[wanted != 0] = np.flatnonzero(wanted)
            shown[apart] = count + np.arange(len(apart))
            self._marked = np.flatnonzero(extras.marked).tolist()
            marks[self._marked] = np.arange(len(self._marked))
        cut = ~greedy & cuts.close(self._vocab)
        send = self._asked.begin()
        numbers_there, top_p = send(numbers), send(cuts.top_p)
        views = (
            send(np.concatenate((sources, rows[apart]))),
            send(np.concatenate((inverse_temperature, np.ones(len(apart), np.float32)))),
        )
        how, top_k, min_p = send(np.where(cut, _CUT, greedy)), send(cuts.top_k), send(cuts.min_p)
        reported, marked = (send(shown), send(wanted), send(others), send(given)), send(marks)
        self._asked.send()
        launch, logits = self._module.launch, U64(self._logits)
        self._weigh(views, count + len(apart))
        picks, masks = (logits, *views, how), (marked, U64(self._masks_there))
        ends = (U64(self._pieces), U64(self._drawn_there), *masks, Int(self._rows), Int(self._vocab))
        launch("draw", (count,), 256, self._stream, (*picks, numbers_there, *ends))
        if cut.any():
            arguments = (*picks, top_k, top_p, min_p, numbers_there, *ends)
            launch("draw_cut", (count,), 1024, self._stream, arguments, shared=8 * _NEAR)
        if (shown >= 0).any():
            self._report(views, reported, int(abs(wanted).max()), count)
        self._take(count)
        return count

    def _edit(self, packed: Packed) -> None:
        """Launch what brings the seats up and makes the edited rows."""
        for seat, word in packed.resets:
            self._driver.fill_words(self._words_there + 4 * self._vocab * seat, self._vocab, word, self._stream)
        send = self._edits.begin()
        edits, masks = send(packed.edits.view(np.int32)), send(packed.masks)
        places, words, ids, addends = send(packed.places), send(packed.words), send(packed.ids), send(packed.addends)
        self._edits.send()
        launch, seats, entries = self._module.launch, U64(self._words_there), len(packed.places)
        if entries:
            launch("count", (-(-entries // 256),), 256, self._stream, (places, words, seats, Int(entries)))
        grid = (-(-self._vocab // _TILE), len(packed.edits))
        arguments = (U64(self._logits), edits, masks, ids, addends, seats, Int(self._vocab))
        launch("edit", grid, 256, self._stream, arguments)

    def _weigh(self, views: tuple[U64, U64], count: int) -> None:
        blocks = -(-self._vocab // _PIECE // 8) if count <= 32 else max(1, 2048 // count)
        arguments = (U64(self._logits), *views, U64(self._pieces), Int(self._rows), Int(self._vocab))
        self._module.launch("weigh", (blocks, count), 256, self._stream, arguments)

    def _report(self, views: tuple[U64, U64], asked: tuple[U64, U64, U64, U64], width: int, count: int) -> None:
        """asked: of each pick the view, what is wanted and where the ids that are given begin; and these."""
        self._reports, self._tops_wanted = True, width
        base, cells = self._tops_there, width * count
        found = (U64(base), U64(base + 4 * cells), U64(base + 8 * cells), Int(width))
        arguments = (
            *(U64(self._logits), *views, *asked, U64(self._pieces), U64(self._drawn_there)),
            *(*found, Int(self._rows), Int(self._vocab)),
        )
        shared = 12 * -(-self._vocab // _PIECE)
        self._module.launch("report", (count,), 256, self._stream, arguments, shared=shared)

    def _take(self, count: int) -> None:
        """Begin to fetch what was launched last."""
        driver, fetching = self._driver, self._fetching
        driver.record(self._to_fetch, self._stream)
        driver.wait_event(fetching, self._to_fetch)
        if self._marked:
            driver.to_host(self._masks[: len(self._marked)], self._masks_there, fetching)
        if self._reports:
            driver.to_host(self._tops[: (2 * self._tops_wanted + 1) * count], self._tops_there, fetching)
        driver.to_host(self._drawn[:count], self._drawn_there, fetching)
        driver.record(self._drawn_event, fetching)

    def _found_tops(self, count: int) -> Tops:
        width, cells = self._tops_wanted, self._tops_wanted * count
        ids = self._tops[:cells].reshape(count, width).astype(np.int64)
        logprobs = self._tops[cells : 2 * cells].view(np.float32).reshape(count, width).astype(np.float64)
        return Tops(ids, logprobs, self._tops[2 * cells : 2 * cells + count].astype(np.int64))


class _Upload:
    """Arrays packed into one buffer and carried at once."""

    def __init__(self, driver: Driver, carry: Carry, stream: Handle, beside: Handle, words: int) -> None:
        self._courier, self._used = Courier(driver, carry, stream, beside, words, "sampling"), 0

    def begin(self) -> Callable[[npt.NDArray[Any]], U64]:
        """Start again: what is returned puts an array and says its address there. Integers become int32."""
        (self._here, self._there), self._used = self._courier.begin(), 0
        return self._put

    def _put(self, array: npt.NDArray[Any]) -> U64:
        if array.dtype.kind in "ib":
            array = array.astype(np.int32, copy=False)
        flat, start = np.ascontiguousarray(array).reshape(-1).view(np.int32), self._used
        self._here[start : start + len(flat)] = flat
        self._used += len(flat)
        return U64(self._there + 4 * start)

    def send(self) -> None:
        """Carry what was put."""
        self._courier.send(self._used)


def _widths(extras: Extras | None) -> Sequence[int]:
    """Per pick, how many other ids' logprobs are reported."""
    if extras is None:
        return ()
    return [max(tops, len(ids)) for tops, ids in zip(extras.tops, extras.others, strict=True)]


def _part(extras: Extras | None, at: slice) -> Extras | None:
    if extras is None:
        return None
    return Extras(extras.edits[at], extras.tops[at], extras.others[at], extras.untouched[at], extras.marked[at])


def _joined(parts: Sequence[Drawn]) -> Drawn:
    tops = None
    if any(part.tops is not None for part in parts):
        width = max(part.tops.ids.shape[1] for part in parts if part.tops is not None)
        tops = Tops(
            *(np.concatenate(column) for column in zip(*(_widened(part, width) for part in parts), strict=True))
        )
    columns = [np.concatenate(column) for column in zip(*(part[:4] for part in parts), strict=True)]
    masks: list[Int32 | None] = [mask for part in parts for mask in part.masks or [None] * len(part.tokens)]
    return Drawn(columns[0], columns[1], columns[2], columns[3], tops, masks)


def _widened(part: Drawn, width: int) -> Tops:
    count = len(part.tokens)
    tops = part.tops or Tops(np.zeros((count, 0), np.int64), np.zeros((count, 0)), np.zeros(count, np.int64))
    padding = ((0, 0), (0, width - tops.ids.shape[1]))
    return Tops(np.pad(tops.ids, padding, constant_values=-1), np.pad(tops.logprobs, padding), tops.ranks)


class DeviceDrawing:
    """`Drawing` of the `count` tokens launched last, and of those `before` them."""

    def __init__(self, drawing: Drawing, before: Sequence[Drawn], count: int) -> None:
        self._drawing, self._before, self._count = drawing, before, count

    @property
    def whole(self) -> bool:
        """Whether all are drawn at once."""
        return not self._before

    def drawn(self) -> Drawn:
        """Wait for them."""
        return self._drawing.finished(self._before, self._count)

    def follow(self, batch: ForwardBatch, sources: Int32) -> Logits:
        """Launch the next step behind them."""
        assert self.whole, "so many rows are no decode step"
        return self._drawing.follow(batch, sources)


class DeviceLogits:
    """`Logits` of the step last launched; the next step takes their memory. most: rows that are there at once."""

    def __init__(self, drawing: Drawing, count: int, gather: Callable[[Int64], None] | None, most: int) -> None:
        self._drawing, self._count, self._gather, self._most, self._begun = drawing, count, gather, most, False

    @overload
    def __getitem__(self, rows: int) -> Float32: ...
    @overload
    def __getitem__(self, rows: slice) -> Float32: ...
    def __getitem__(self, rows: int | slice) -> Float32:
        if isinstance(rows, int):
            found: Float32 = self[rows : rows + 1][0]
            return found
        start, stop, _ = rows.indices(self._count)
        if self._gather is None:
            return self._drawing.fetch(start, max(0, stop - start))
        parts = []
        for at in range(start, stop, self._most):
            some = np.arange(at, min(stop, at + self._most))
            self._gather(some)
            parts.append(self._drawing.fetch(0, len(some)).copy())
        return np.concatenate(parts)

    def begin(
        self,
        rows: Int64,
        inverse_temperature: Float32,
        greedy: Flags,
        numbers: Float64,
        cuts: Cuts,
        extras: Extras | None = None,
    ) -> DeviceDrawing:
        """Begin to draw on the device."""
        self._begun = True
        if self._gather is not None:
            some, rows = np.unique(rows, return_inverse=True)
            assert len(some) <= self._most, "a step draws for no more sequences than it has seats"
            self._gather(some)
        return self._drawing.begin(rows, inverse_temperature, greedy, numbers, cuts, extras)

    def score(self, rows: Int64, inverse_temperature: Float32, tokens: Int64, tops: Sequence[int]) -> Drawn:
        """Logprobs and ranks of given tokens, on the device."""
        if self._gather is None:
            return self._drawing.score(rows, inverse_temperature, tokens, tops)
        parts = []
        for at in range(0, len(rows), self._most):
            part = slice(at, at + self._most)
            self._gather(rows[part])
            there = np.arange(len(rows[part]))
            parts.append(self._drawing.score(there, inverse_temperature[part], tokens[part], tops[part]))
        return _joined(parts)

    def wait(self) -> None:
        """Wait until the step is through, and what has been begun to be drawn from it; not for a step behind it."""
        self._drawing.wait(drawn=self._begun)

    def through(self) -> bool:
        """Whether `wait` would return at once."""
        return self._drawing.through(drawn=self._begun)

"""A device in numpy: memory by address, and the kernels of kernels/sampling.cu as what they are to compute.

It stands for `Driver` and `Module` where there is no device: it shows that addresses, orders and layouts are right.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from worker.gpu.drawing import _DRAWN
from worker.gpu.edits import EDIT
from worker.logit_edits import CLOSED, IN_PROMPT, TIMES
from worker.sampler import RowSampler
from worker.softmax import Cut, Softmax, largest, logprob

_CUT = 2
_NOT_FINITE, _SOUND, _ALL_MASKED = range(3)


class NumpyDevice:
    """Launches run at once, so events have always happened."""

    def __init__(self, nbytes: int = 96 << 20) -> None:
        self._memory = np.zeros(nbytes, np.uint8)
        self._used = 256

    def allocate(self, nbytes: int, what: str) -> int:
        address, self._used = self._used, (self._used + nbytes + 511) // 256 * 256
        assert self._used <= len(self._memory), what
        return address

    def at(self, address: int, dtype: Any, count: int) -> Any:
        size = np.dtype(dtype).itemsize
        return self._memory[address : address + count * size].view(dtype)

    def pinned(self, shape: Any, dtype: Any) -> Any:
        return np.zeros(shape, dtype)

    def event(self) -> None:
        return None

    def stream(self, *, urgent: bool = False) -> None:
        return None

    def wait_event(self, stream: None, event: None) -> None:
        """It has happened."""

    def record(self, event: None, stream: None) -> None:
        """It has happened."""

    def wait(self, what: None, *, event: bool = False) -> None:
        """It has happened."""

    def to_device(self, address: int, source: Any, stream: None, nbytes: int | None = None) -> None:
        flat = np.ascontiguousarray(source).reshape(-1).view(np.uint8)[:nbytes]
        self._memory[address : address + len(flat)] = flat

    def to_host(self, target: Any, address: int, stream: None) -> None:
        flat = target.reshape(-1).view(np.uint8)
        flat[:] = self._memory[address : address + len(flat)]

    def fill(self, address: int, nbytes: int, byte: int, stream: None) -> None:
        self._memory[address : address + nbytes] = byte

    def fill_words(self, address: int, count: int, word: int, stream: None) -> None:
        self.at(address, np.uint32, count)[:] = word


class NumpyModule:
    """Kernels by name, with the arguments of the real ones."""

    def __init__(self, device: NumpyDevice) -> None:
        self._at = device.at
        self.launched: list[str] = []

    def launch(
        self, name: str, grid: tuple[int, ...], threads: int, stream: None, arguments: Sequence[Any], shared: int = 0
    ) -> None:
        self.launched.append(name)
        with np.errstate(all="ignore"):
            getattr(self, name)(grid, *(argument.value for argument in arguments))

    def count(self, grid: Any, places: int, values: int, words: int, entries: int) -> None:
        at = self._at(places, np.int32, entries)
        self._at(words, np.uint32, int(at.max()) + 1)[at] = self._at(values, np.uint32, entries)

    def edit(
        self, grid: Any, logits: int, edits: int, masks: int, ids: int, addends: int, words: int, vocab: int
    ) -> None:
        tiles, count = grid
        assert tiles * 2048 >= vocab
        width = -(-vocab // 32)
        for e in self._at(edits, EDIT, count):
            row = self._row(logits, e["source"], vocab).copy()
            broken = ~np.isfinite(row)
            if e["mask"] >= 0:
                bits = self._at(masks + 4 * width * int(e["mask"]), np.uint8, 4 * width)
                row[~np.unpackbits(bits, count=vocab, bitorder="little").view(np.bool_)] = -np.inf
            first, end = int(e["first"]), int(e["end"])
            there = self._at(ids, np.int32, end)[first:]
            assert (np.diff(there) >= 0).all(), "a tile finds its own by halving"
            np.add.at(row, there, self._at(addends, np.float32, end)[first:])
            if e["seat"] >= 0:
                seen = self._at(words + 4 * vocab * int(e["seat"]), np.uint32, vocab)
                row[seen & CLOSED != 0] = -np.inf
                if e["repetition"] != 1:
                    known = seen & (IN_PROMPT | TIMES) != 0
                    row[known] = np.where(row > 0, row / e["repetition"], row * e["repetition"])[known]
                times = (seen & TIMES).astype(np.float32)
                row[times > 0] -= (e["presence"] + e["frequency"] * times)[times > 0]
            row[broken] = np.nan
            self._row(logits, e["target"], vocab)[:] = row

    def weigh(self, grid: Any, logits: int, rows: int, hot: int, pieces: int, whole: int, vocab: int) -> None:
        """The kernels after it weigh for themselves."""

    def draw(self, grid: Any, *arguments: int) -> None:
        logits, rows, hot, how, numbers, _, out, marked, masks, whole, vocab = arguments
        self._draw(grid[0], (logits, rows, hot, how), None, (numbers, out, whole, vocab), (marked, masks))

    def draw_cut(self, grid: Any, *arguments: int) -> None:
        logits, rows, hot, how, top_k, top_p, min_p, numbers, _, out, marked, masks, whole, vocab = arguments
        self._draw(
            grid[0], (logits, rows, hot, how), (top_k, top_p, min_p), (numbers, out, whole, vocab), (marked, masks)
        )

    def _draw(self, count: int, picks: Any, cuts: Any, ends: Any, marks: Any) -> None:
        (logits, rows, hot, how), (numbers, out, whole, vocab), (marked, masks) = picks, ends, marks
        sampler, found = RowSampler(vocab), self._at(out, _DRAWN, count)
        at, inverse, ways = (
            self._at(rows, np.int32, count),
            self._at(hot, np.float32, count),
            self._at(how, np.int32, count),
        )
        for i in np.flatnonzero((ways == _CUT) == (cuts is not None)).tolist():
            row, cut = self._row(logits, at[i], vocab), Cut(0, 1.0, 0.0)
            if cuts is not None:
                kinds = (np.int32, np.float64, np.float32)
                cut = Cut(*(self._at(a, kind, count)[i].item() for a, kind in zip(cuts, kinds, strict=True)))
            state = self._state(row, at[i] >= whole)
            found[i] = (0, 0.0, state, 0)
            if state == _SOUND:
                spread = sampler.spread(row, float(inverse[i]), cut, greedy=ways[i] == 1)
                token = sampler.token(spread, self._at(numbers, np.float64, count)[i : i + 1])
                found[i] = (token, logprob(sampler.softmax.scaled, token, spread.weighed.norm), _SOUND, 0)
                mark, width = int(self._at(marked, np.int32, count)[i]), -(-vocab // 32)
                if mark >= 0:
                    left = np.zeros(32 * width, np.bool_)
                    left[np.flatnonzero(row > -np.inf) if spread.ids is None else spread.ids] = True
                    self._at(masks + 4 * width * mark, np.uint8, 4 * width)[:] = np.packbits(left, bitorder="little")

    def report(self, grid: Any, *arguments: int) -> None:
        logits, rows, hot, shown, wanted, others, given, _, drawn, ids, logprobs, ranks, most, whole, vocab = arguments
        (count,) = grid
        view = self._at(shown, np.int32, count)
        found = self._at(drawn, _DRAWN, count)
        for i in np.flatnonzero((view >= 0) & (found["state"] == _SOUND)).tolist():
            source = self._at(rows, np.int32, view[i] + 1)[-1]
            row, softmax = self._row(logits, source, vocab), Softmax(vocab)
            state = self._state(row, source >= whole)
            if state != _SOUND:
                found["state"][i] = state
                continue
            norm = softmax.weigh(row, float(self._at(hot, np.float32, view[i] + 1)[-1])).norm
            token, many = int(found["token"][i]), int(self._at(wanted, np.int32, count)[i])
            found["logprob"][i] = logprob(softmax.scaled, token, norm)
            start = int(self._at(others, np.int32, count)[i])
            chosen = largest(softmax.scaled, many) if many > 0 else self._at(given, np.int32, start - many)[start:]
            told = self._at(ids, np.int32, count * most).reshape(count, most)[i]
            told[: abs(many)] = -1
            told[: len(chosen)] = chosen
            of_told = self._at(logprobs, np.float32, count * most).reshape(count, most)[i]
            of_told[: len(chosen)] = [max(-9999.0, logprob(softmax.scaled, int(c), norm)) for c in chosen]
            rank = np.count_nonzero(softmax.scaled > softmax.scaled[token]) + 1
            self._at(ranks, np.int32, count)[i] = rank

    def feed(self, grid: Any, drawn: int, sources: int, tokens: int, count: int) -> None:
        at = self._at(sources, np.int32, count)
        self._at(tokens, np.int32, count)[:] = self._at(drawn, _DRAWN, int(at.max()) + 1)["token"][at]

    def _row(self, logits: int, row: Any, vocab: int) -> Any:
        return self._at(logits + 4 * vocab * int(row), np.float32, vocab)

    @staticmethod
    def _state(row: Any, edited: Any) -> int:
        if np.isnan(row).any() or (not edited and not np.isfinite(row).all()):
            return _NOT_FINITE
        return _SOUND if np.isfinite(row.max()) else _ALL_MASKED

"""A step's logits where they are: tokens are drawn there, and rows cross the bus only for those who ask.

The random numbers are the host's (random_streams.py), so a seed means the same as on a CPU.
"""

from typing import overload

import numpy as np
import numpy.typing as npt

from worker.engine.base import Float32
from worker.gpu.driver import U64, Driver, Handle, Int, Module
from worker.inverse_cdf import Drawn, Float64, Int64, RowSampler

_PIECE = 256
_DRAWN = np.dtype([("token", np.int32), ("logprob", np.float32), ("finite", np.int32), ("unused", np.int32)])


class HostLogits:
    """`Logits` that are an array."""

    def __init__(self, rows: Float32) -> None:
        self._rows = rows

    @overload
    def __getitem__(self, rows: int) -> Float32: ...
    @overload
    def __getitem__(self, rows: slice) -> Float32: ...
    def __getitem__(self, rows: int | slice) -> Float32:
        found: Float32 = self._rows[rows]
        return found

    def draw(self, rows: Int64, inverse_temperature: Float32, greedy: npt.NDArray[np.bool_], numbers: Float64) -> Drawn:
        """On the host."""
        return RowSampler(self._rows.shape[1]).draw(self._rows, rows, inverse_temperature, greedy, numbers)


class Drawing:
    """Draws from one logits buffer of so many rows, on the stream that fills it."""

    def __init__(
        self, driver: Driver, module: Module, stream: Handle, logits: int, vocab: int, rows: int, most: int = 4096
    ) -> None:
        """most: tokens drawn at once; a prompt's n sequences draw from one row."""
        self._driver, self._module, self._stream = driver, module, stream
        self._logits, self._vocab, self._most = logits, vocab, most
        self._fetched: Float32 = driver.pinned((rows, vocab), np.float32)
        # numbers (8 bytes each), then rows, inverse temperatures and greedy flags (4 each)
        self._asked = driver.pinned(5 * most, np.int32)
        self._asked_there = driver.allocate(20 * most, "sampling")
        self._pieces = driver.allocate(8 * most * -(-vocab // _PIECE), "sampling")
        self._drawn_there = driver.allocate(_DRAWN.itemsize * most, "sampling")
        self._drawn = driver.pinned(most * _DRAWN.itemsize, np.uint8).view(_DRAWN)

    def logits(self, count: int) -> "DeviceLogits":
        """The first so many rows, as the step just launched leaves them."""
        return DeviceLogits(self, count)

    def draw(self, rows: Int64, inverse_temperature: Float32, greedy: npt.NDArray[np.bool_], numbers: Float64) -> Drawn:
        """One token for each; waits for it, and so for the step."""
        parts = [
            self._draw(rows[at], inverse_temperature[at], greedy[at], numbers[at])
            for at in (slice(start, start + self._most) for start in range(0, len(rows), self._most))
        ]
        return parts[0] if len(parts) == 1 else Drawn(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def fetch(self, start: int, count: int) -> Float32:
        """Rows in host memory that the next fetch of them reuses; waits for the step."""
        there = self._fetched[start : start + count]
        self._driver.to_host(there, self._logits + 4 * self._vocab * start, self._stream)
        self._driver.wait(self._stream)
        return there

    def _draw(
        self, rows: Int64, inverse_temperature: Float32, greedy: npt.NDArray[np.bool_], numbers: Float64
    ) -> Drawn:
        count, asked, there = len(rows), self._asked, self._asked_there
        asked[: 2 * count] = numbers.view(np.int32)
        asked[2 * count : 3 * count] = rows
        asked[3 * count : 4 * count] = inverse_temperature.view(np.int32)
        asked[4 * count : 5 * count] = greedy
        self._driver.to_device(there, asked, self._stream, 20 * count)
        at_rows, hot, cold = (U64(there + 4 * count * n) for n in (2, 3, 4))
        logits, pieces, vocab = U64(self._logits), U64(self._pieces), Int(self._vocab)
        blocks = -(-self._vocab // _PIECE // 8) if count <= 32 else max(1, 2048 // count)
        launch = self._module.launch
        launch("weigh", (blocks, count), 256, self._stream, (logits, at_rows, hot, pieces, vocab))
        out = U64(self._drawn_there)
        arguments = (logits, at_rows, hot, cold, U64(there), pieces, out, vocab)
        launch("draw", (count,), 256, self._stream, arguments)
        found = self._drawn[:count]
        self._driver.to_host(found, self._drawn_there, self._stream)
        self._driver.wait(self._stream)
        return Drawn(
            found["token"].astype(np.int64), found["logprob"].astype(np.float64), found["finite"].astype(np.bool_)
        )


class DeviceLogits:
    """`Logits` of the step last launched; the next step takes their memory."""

    def __init__(self, drawing: Drawing, count: int) -> None:
        self._drawing, self._count = drawing, count

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

    def draw(self, rows: Int64, inverse_temperature: Float32, greedy: npt.NDArray[np.bool_], numbers: Float64) -> Drawn:
        """On the device."""
        return self._drawing.draw(rows, inverse_temperature, greedy, numbers)

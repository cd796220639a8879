"""What steps and drawings need of the host, carried to the device by a kernel, beside the step before.

By a copy engine a step's few kilobytes came after the parts of the next version that its rank had begun to copy: each
step took as much longer as those take on the bus. A kernel reads the pinned memory itself, and waits for single reads.
Where a push takes all of the bus, to the host or from it, each of those takes a tenth of a millisecond and more. So
nothing on the steps' own stream crosses the bus: a `Courier` brings what the next step needs while the one before it
computes, and what is drawn is fetched on a stream of its own (drawing.py).
"""

from typing import Protocol

import numpy as np

from worker.engine.base import Int32
from worker.gpu.compiler import compiled, kernels
from worker.gpu.driver import U64, Array, Driver, Handle, Int, Module

_THREADS, _MOST_BLOCKS = 256, 64


class Carry(Protocol):
    """Something that copies as `Driver.to_device` does, from pinned memory only."""

    def __call__(self, address: int, source: Array, stream: Handle, nbytes: int) -> None:
        """Copy so many bytes of a pinned host array, done when the stream says so; a multiple of 4."""
        ...

    def within(self, address: int, source: int, stream: Handle, nbytes: int) -> None:
        """The same from the device's own memory."""
        ...


class Carrier:
    """Carries by a kernel of its own module. Raises CudaError, OSError without NVRTC."""

    def __init__(self, driver: Driver) -> None:
        self._module = Module(driver, compiled(kernels("carry"), {}, driver.capability))
        self._module.load("carry")  # its first launch may be where nothing can be loaded

    def __call__(self, address: int, source: Array, stream: Handle, nbytes: int) -> None:
        """As `Carry` has it."""
        self.within(address, source.ctypes.data, stream, nbytes)

    def within(self, address: int, source: int, stream: Handle, nbytes: int) -> None:
        """As `Carry` has it."""
        words = nbytes // 4
        if words:
            blocks = min(-(-words // _THREADS), _MOST_BLOCKS)
            arguments = (U64(address), U64(source), Int(words))
            self._module.launch("carry", (blocks,), _THREADS, stream, arguments)


class Courier:
    """Brings int32 arrays to the device, for what one stream is given: two pinned buffers in turn and device memory for
    each, so that one is filled and carried while the other is read.
    """

    def __init__(self, driver: Driver, carry: Carry, stream: Handle, beside: Handle, words: int, what: str) -> None:
        """beside: another stream, which carries. words: that are brought at once, at most. what: for an error about
        memory.
        """
        self._driver, self._carry, self._stream, self._beside = driver, carry, stream, beside
        self._here: list[Int32] = [driver.pinned(words, np.int32) for _ in range(2)]
        self._there = [driver.allocate(4 * words, what) for _ in range(2)]
        self._carried = [driver.event() for _ in range(2)]
        self._read = [driver.event() for _ in range(2)]
        self._turn = 0

    def begin(self) -> tuple[Int32, int]:
        """An array to be filled, and where it will be on the device. What reads the one before has been launched."""
        self._driver.record(self._read[self._turn], self._stream)
        self._turn ^= 1
        self._driver.wait(self._carried[self._turn], event=True)
        return self._here[self._turn], self._there[self._turn]

    def send(self, words: int) -> None:
        """Carry so many of it: there for what the stream is given from now on."""
        turn, driver = self._turn, self._driver
        driver.wait_event(self._beside, self._read[turn])
        self._carry(self._there[turn], self._here[turn], self._beside, 4 * words)
        driver.record(self._carried[turn], self._beside)
        driver.wait_event(self._stream, self._carried[turn])

"""What steps and drawings need of the host, carried to the device by a kernel.

By a copy engine a step's few kilobytes came after the parts of the next version that its rank had begun to copy: each
step took as much longer as those take on the bus. A kernel reads the pinned memory itself, and waits for single reads.
"""

from typing import Protocol

from worker.gpu.compiler import compiled, kernels
from worker.gpu.driver import U64, Array, Driver, Handle, Int, Module

_THREADS, _MOST_BLOCKS = 256, 64


class Carry(Protocol):
    """Something that copies as `Driver.to_device` does, from pinned memory only."""

    def __call__(self, address: int, source: Array, stream: Handle, nbytes: int) -> None:
        """Copy so many bytes of a pinned host array, done when the stream says so; a multiple of 4."""
        ...


class Carrier:
    """Carries by a kernel of its own module. Raises CudaError, OSError without NVRTC."""

    def __init__(self, driver: Driver) -> None:
        self._module = Module(driver, compiled(kernels("carry"), {}, driver.capability))
        self._module.load("carry")  # its first launch may be where nothing can be loaded

    def __call__(self, address: int, source: Array, stream: Handle, nbytes: int) -> None:
        """As `Carry` has it."""
        words = nbytes // 4
        if words:
            blocks = min(-(-words // _THREADS), _MOST_BLOCKS)
            arguments = (U64(address), U64(source.ctypes.data), Int(words))
            self._module.launch("carry", (blocks,), _THREADS, stream, arguments)

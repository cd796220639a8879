"""Sums over ranks by a kernel of our own, for few numbers: of a decode step's rows, which NCCL needs 6 us and more for.

GPUs of one host write into each other's memory (kernels/peers.cu). A launch is like any other of a step: what follows
fetches its weights meanwhile, and it is captured with it. NCCL carries the rest, and looks after the ranks: what ends
its sums ends these.
"""

from collections.abc import Callable

import numpy as np

from worker.gpu.compiler import compiled, kernels
from worker.gpu.driver import U64, CudaError, Driver, Handle, Int, Module, Pointer

ROOM = 1 << 18
"""Numbers of one sum, at most."""
FEW = ROOM
"""Numbers that a kernel of our own sums faster than NCCL, at most."""
_CELL, _STATE = 8, 16
_THREADS, _MOST_BLOCKS = 256, 128


class PeerSums:
    """Of one rank. All ranks make theirs together, and ask for the same sums in the same order."""

    def __init__(self, driver: Driver, rank: int, size: int, gather: Callable[[bytes], list[bytes]]) -> None:
        """gather: every rank's bytes, in rank order, on all. Raises CudaError on all ranks where one cannot reach
        another's memory.
        """
        self._driver, self._rank, self._size = driver, rank, size
        own, failure, stream = b"", "", driver.stream()
        try:
            self._module = Module(driver, compiled(kernels("follow", "peers"), {"ROOM": ROOM}, driver.capability))
            self._module.load("sum_ranks")
            self._ended = driver.pinned(1, np.int32)
            self._ended[0] = 0
            nbytes = 2 * size * ROOM * _CELL
            needs = nbytes, 8 * size, _STATE
            room, self._rooms, self._turns = (driver.allocate(n, "sums over the ranks") for n in needs)
            driver.fill(room, nbytes, 0, stream)
            driver.fill(self._turns, _STATE, 0, stream)
            driver.wait(stream)
            own = driver.handle_of(room)
        except (CudaError, OSError) as error:
            failure = str(error)
        handles = gather(own)
        try:
            if all(handles):
                others = (room if other == rank else driver.open_handle(handle) for other, handle in enumerate(handles))
                driver.to_device(self._rooms, np.fromiter(others, np.uint64), stream)
                driver.wait(stream)
        except CudaError as error:
            failure = str(error)
        if failures := [why.decode() for why in gather(failure.encode()) if why]:
            raise CudaError(failures[0])

    def sum(self, address: int, count: int, stream: Handle) -> None:
        """Queue the sum of so many float32 numbers over the ranks, in place."""
        blocks = min(max(-(-count // _THREADS), 1), _MOST_BLOCKS)
        arguments = (
            *(U64(address), U64(self._rooms), U64(self._turns), Pointer(self._ended.ctypes.data)),
            *(Int(self._size), Int(self._rank), Int(count)),
        )
        self._module.launch("sum_ranks", (blocks,), _THREADS, stream, arguments)

    def end(self) -> None:
        """Nobody is waited for any more; what sums leave behind from now on is nothing."""
        self._ended[0] = 1

"""The digest of a version as it lies in device memory, computed there (rollout_client/cuda_hash.py).

What the store has proved is the arena's slot. A rank votes on its own copy of it, so that is what is read here.
"""

import numpy as np
import xxhash

from rollout_client.cuda_hash import SOURCE, THREADS, TINY
from rollout_client.digest import PIECE, joined
from weight_manager.layout import ITEMSIZE, Layout, version_digest
from worker.gpu.compiler import compiled
from worker.gpu.driver import Driver, Module, Pointer
from worker.gpu.weights import Placement

_WORD = 8
"""Bytes on whose boundary the kernel reads."""


class DeviceDigests:
    """Digests of whole versions in slots of one placement. One thread at a time."""

    def __init__(self, driver: Driver, layout: Layout, where: Placement) -> None:
        """Every region of the layout lies in the placement: tp is 1. Raises CudaError, OSError without NVRTC."""
        self._driver, self._layout = driver, layout
        self._stream = driver.stream()
        self._module = Module(driver, compiled(SOURCE, {}, driver.capability))
        self._pieces: list[tuple[int, int]] = []  # offset in the slot and bytes
        self._ends: list[int] = []  # of each region's pieces
        for region in layout.regions:
            nbytes = int(np.prod(region.shape)) * ITEMSIZE[layout.manifest.dtype]
            run = next(run for run in reversed(where.runs) if run.source <= region.offset)
            start = run.target + region.offset - run.source
            self._pieces += [(start + at, min(PIECE, nbytes - at)) for at in range(0, nbytes, PIECE)]
            self._ends.append(len(self._pieces))
        count = len(self._pieces)
        self._table = driver.pinned((count, 2), np.uint64)
        self._out = driver.pinned(count, np.uint64)
        self._tiny = driver.pinned((count, TINY), np.uint8)

    def version(self, address: int) -> str:
        """The digest of the slot that begins there; 16 hex digits, as `layout.version_digest`."""
        self._driver.enter()
        for row, (start, nbytes) in enumerate(self._pieces):
            self._table[row] = address + start, 0 if start % _WORD else nbytes
        arguments = [Pointer(array.ctypes.data) for array in (self._table, self._out, self._tiny)]
        self._module.launch("xxh3", (len(self._pieces),), THREADS, self._stream, arguments)
        self._driver.wait(self._stream)
        found = [self._piece(row, address) for row in range(len(self._pieces))]
        starts = [0, *self._ends[:-1]]
        return version_digest(self._layout, [joined(found[a:b]) for a, b in zip(starts, self._ends, strict=True)])

    def _piece(self, row: int, address: int) -> int:
        start, nbytes = self._pieces[row]
        if start % _WORD:
            fetched = np.empty(nbytes, np.uint8)
            self._driver.to_host(fetched, address + start, self._stream)
            self._driver.wait(self._stream)
            return int(xxhash.xxh3_64_intdigest(fetched.data))
        if nbytes <= TINY:  # the kernel only fetches those
            return int(xxhash.xxh3_64_intdigest(self._tiny[row, :nbytes].tobytes()))
        return int(self._out[row])

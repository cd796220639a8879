"""The digest of a version as it lies in device memory, computed there (rollout_client/cuda_hash.py).

What the store has proved is the arena's slot. A rank votes on its own copy of it, so that is what is read here.
"""

from itertools import pairwise

import numpy as np
import xxhash

from rollout_client.cuda_hash import SOURCE, THREADS, TINY
from rollout_client.digest import joined
from weight_manager.layout import Layout, version_digest
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
        starts, self._sizes, first = layout.stretches
        runs = np.array([(run.source, run.target) for run in where.runs], np.int64)
        at = np.searchsorted(runs[:, 0], starts, "right") - 1
        self._starts = starts + runs[at, 1] - runs[at, 0]  # in a device slot
        bounds = first.tolist()
        self._first = bounds[:-1]
        self._several = [(region, *span) for region, span in enumerate(pairwise(bounds)) if span[1] > span[0] + 1]
        self._odd = np.flatnonzero(self._starts % _WORD)  # not read by the kernel
        self._small = np.flatnonzero((self._sizes <= TINY) & (self._starts % _WORD == 0))  # only fetched by it
        count = len(starts)
        self._table = driver.pinned((count, 2), np.uint64)
        self._table[:, 1] = np.where(self._starts % _WORD, 0, self._sizes)
        self._out = driver.pinned(count, np.uint64)
        self._tiny = driver.pinned((count, TINY), np.uint8)

    def version(self, address: int) -> str:
        """The digest of the slot that begins there; 16 hex digits, as `layout.version_digest`."""
        self._driver.enter()
        self._table[:, 0] = self._starts + address
        arguments = [Pointer(array.ctypes.data) for array in (self._table, self._out, self._tiny)]
        self._module.launch("xxh3", (len(self._starts),), THREADS, self._stream, arguments)
        self._driver.wait(self._stream)
        pieces: list[int] = self._out.tolist()
        for row in self._small.tolist():
            pieces[row] = xxhash.xxh3_64_intdigest(self._tiny[row, : self._sizes[row]].tobytes())
        for row in self._odd.tolist():
            fetched = np.empty(int(self._sizes[row]), np.uint8)
            self._driver.to_host(fetched, address + int(self._starts[row]), self._stream)
            self._driver.wait(self._stream)
            pieces[row] = xxhash.xxh3_64_intdigest(fetched.data)
        regions = [pieces[row] for row in self._first]
        for region, start, stop in self._several:
            regions[region] = joined(pieces[start:stop])
        return version_digest(self._layout, regions)

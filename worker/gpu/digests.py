"""The digest of a version as it lies in device memory, computed there (rollout_client/cuda_hash.py).

What the store has proved is the arena's slot. A rank votes on its own copy of it, so that is what is read here. A rank
that has all of a version compares with its digest; one of several compares its own regions with what the store says
of them.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import numpy as np
import numpy.typing as npt
import xxhash

from rollout_client.cuda_hash import SOURCE, THREADS, TINY
from rollout_client.digest import joined, piece_spans
from weight_manager.layout import EVERY_RANK, ITEMSIZE, Layout, Stretches, version_digest
from weight_manager.messages import Live
from worker.gpu.compiler import compiled
from worker.gpu.driver import Driver, Handle, Module, Pointer
from worker.gpu.weights import Placement, joined_spans

_WORD = 8
"""Bytes on whose boundary the kernel reads."""
_AT_ONCE = 1 << 30
"""Bytes that are hashed at once while a version arrives, at least: a thread block takes a third of a millisecond for
its 16 MiB, and the steps beside it as much longer, however few blocks there are.
"""


class Early:
    """Pieces of one slot that were hashed while it was filled. Once anything else is written there, it says nothing."""

    def __init__(self, address: int, pieces: int) -> None:
        self.address = address
        self.done = np.zeros(pieces, np.bool_)
        self.waiting: list[tuple[int, int]] = []  # (offset in the arena's slot, bytes) that were copied and not hashed
        self.waiting_bytes = 0


class DeviceDigests:
    """Digests of what slots of one rank's placement hold. One thread at a time."""

    def __init__(self, driver: Driver, layout: Layout, where: Placement, rank: int = 0) -> None:
        """rank: whose regions lie in the placement. Raises CudaError, OSError without NVRTC."""
        self._driver, self._layout = driver, layout
        self._stream = driver.stream()
        self._module = Module(driver, compiled(SOURCE, {}, driver.capability))
        self._own = [at for at, region in enumerate(layout.regions) if region.rank in (rank, EVERY_RANK)]
        starts, self._sizes, first = layout.stretches if layout.tp == 1 else _stretches(layout, rank)
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
        self._out = driver.pinned(count, np.uint64)
        self._tiny = driver.pinned((count, TINY), np.uint8)
        self._spans = starts, starts + self._sizes  # in the arena's slot, rising
        self._plain = (self._sizes > TINY) & (self._starts % _WORD == 0)
        self._early: Early | None = None
        self._early_table = driver.pinned((count, 2), np.uint64)
        self._early_table[:, 1] = np.where(self._plain, self._sizes, 0)
        self._early_out = driver.pinned(count, np.uint64)
        self._copied = driver.event()

    def holds(self, address: int, live: Live, regions: Sequence[int], early: Early | None = None) -> bool:
        """Whether the slot that begins there holds what the rank reads of this version. regions: digests of all of the
        version's, known to be its; not looked at where the rank has all of it. early: what has been hashed of it.
        """
        if self._layout.tp == 1:
            return self.version(address, early) == live.digest
        return self.regions(address, early) == [regions[at] for at in self._own]

    def begin(self, address: int) -> Early:
        """The slot that begins there is filled anew; what was hashed of another filling is worth nothing any more."""
        self.settle()  # it reads the table
        self._early_table[:, 0] = self._starts + address
        self._early = Early(address, len(self._starts))
        return self._early

    def read_ahead(
        self, early: Early, spans: Sequence[tuple[int, int]], copying: Handle, *, last: bool = False
    ) -> None:
        """Hash what was copied, behind the copies; returns at once. spans: (offset, bytes) of the arena's slot, given
        to the stream `copying` since the last call, each byte once. last: nothing is to come, so it is hashed however
        little it is. What was copied in parts is left for `holds`.
        """
        early.waiting += spans
        early.waiting_bytes += sum(nbytes for _, nbytes in spans)
        if early is not self._early or not (last or early.waiting_bytes >= _AT_ONCE):
            return
        waiting, early.waiting, early.waiting_bytes = joined_spans(early.waiting), [], 0
        self._driver.enter()
        self._driver.record(self._copied, copying)
        self._driver.wait_event(self._stream, self._copied)
        starts, ends = self._spans
        for start, nbytes in waiting:
            first, stop = int(np.searchsorted(starts, start)), int(np.searchsorted(ends, start + nbytes, "right"))
            if first < stop:
                early.done[first:stop] = self._plain[first:stop]
                part = self._early_table[first:stop], self._early_out[first:stop]
                arguments = [Pointer(array.ctypes.data) for array in (*part, self._tiny)]  # none of them is tiny
                self._module.launch("xxh3", (stop - first,), THREADS, self._stream, arguments)

    def settle(self) -> None:
        """Wait until nothing of a slot is hashed any more: its memory may be given back."""
        self._driver.enter()
        self._driver.wait(self._stream)

    def version(self, address: int, early: Early | None = None) -> str:
        """The digest of the slot that begins there, where it holds all regions; 16 hex digits, as
        `layout.version_digest`.
        """
        return version_digest(self._layout, self.regions(address, early))

    def regions(self, address: int, early: Early | None = None) -> list[int]:
        """The digests of the rank's regions in the slot that begins there, in layout order. early: as in `holds`."""
        self._driver.enter()
        known = early.done if early is not None and early is self._early and early.address == address else None
        if known is not None and known.all():  # a launch less, which beside another process is a turn on the GPU less
            self._driver.wait(self._stream)
            return self._joined(self._early_out.tolist())
        sizes = np.where(self._starts % _WORD, 0, self._sizes)  # of 0 bytes nothing is read
        self._table[:, 0], self._table[:, 1] = self._starts + address, sizes if known is None else sizes * ~known
        buffers = self._table, self._out, self._tiny
        pieces = hashed(self._driver, self._module, self._stream, *buffers, self._small.tolist())
        for row in [] if known is None else np.flatnonzero(known).tolist():
            pieces[row] = int(self._early_out[row])
        for row in self._odd.tolist():
            fetched = np.empty(int(self._sizes[row]), np.uint8)
            self._driver.to_host(fetched, address + int(self._starts[row]), self._stream)
            self._driver.wait(self._stream)
            pieces[row] = xxhash.xxh3_64_intdigest(fetched.data)
        return self._joined(pieces)

    def _joined(self, pieces: Sequence[int]) -> list[int]:
        """The digests of regions, of those of their pieces."""
        regions = [pieces[row] for row in self._first]
        for region, start, stop in self._several:
            regions[region] = joined(pieces[start:stop])
        return regions


def hashed(
    driver: Driver,
    module: Module,
    stream: Handle,
    table: npt.NDArray[np.uint64],
    out: npt.NDArray[np.uint64],
    tiny: npt.NDArray[np.uint8],
    small: Sequence[int],
) -> list[int]:
    """xxh3-64 of pieces of device memory; waits for it. module: of cuda_hash.py's SOURCE. table: [pieces, 2], address
    and bytes of each. out: [pieces] and tiny: [pieces, TINY], for the kernel to write to; pinned, as the table is.
    small: pieces of up to TINY bytes, which the kernel only fetches.
    """
    arguments = [Pointer(array.ctypes.data) for array in (table, out, tiny)]
    module.launch("xxh3", (len(table),), THREADS, stream, arguments)
    driver.wait(stream)
    found: list[int] = out.tolist()
    for row in small:
        found[row] = xxhash.xxh3_64_intdigest(tiny[row, : int(table[row, 1])].tobytes())
    return found


def _stretches(layout: Layout, rank: int) -> Stretches:
    """As `Layout.stretches`, of what a rank reads."""
    size = ITEMSIZE[layout.manifest.dtype]
    own = [region for region in layout.regions if region.rank in (rank, EVERY_RANK)]
    cut = [piece_spans(region.offset, prod(region.shape) * size) for region in own]
    starts, sizes = np.array([one for pieces in cut for one in pieces], np.int64).T.copy()
    return Stretches(starts, sizes, np.cumsum([0, *map(len, cut)], dtype=np.int64))

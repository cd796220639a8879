"""What of a staged slot is good to forward, in the order in which it became so. Pure bookkeeping.

One log per session, append-only; every store below reads it at its own pace (`Cursor`). The slot itself is
the buffer, so a slow reader costs no memory and a late one can start at the beginning.
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from weight_manager.intervals import Intervals
from weight_manager.layout import ITEMSIZE, Layout


class GoodBytes(NamedTuple):
    """Bytes [offset, offset + size) of a region are good."""

    region: int
    offset: int
    size: int


class Claim(NamedTuple):
    """The digest of a region, once all of it has been logged."""

    region: int
    digest: int


class Stream:
    """The log of one session."""

    def __init__(self, layout: Layout) -> None:
        itemsize = ITEMSIZE[layout.manifest.dtype]
        self.starts = [r.offset for r in layout.regions]
        self.sizes = [prod(r.shape) * itemsize for r in layout.regions]
        self.log: list[GoodBytes | Claim] = []
        self.logged = 0  # bytes
        self._sent = [Intervals() for _ in self.sizes]
        self._proven = [0] * len(self.sizes)
        self._claimed = [False] * len(self.sizes)

    def arrived(self, start: int, size: int) -> None:
        """Bytes [start, start + size) of the slot are there; each byte is reported once. Within one region."""
        region = bisect.bisect_right(self.starts, start) - 1
        offset = start - self.starts[region]
        if size and self._sent[region].add(offset, offset + size):
            self._good(GoodBytes(region, offset, size))

    def proven(self, start: int, size: int, digest: int | None, *, contiguous: bool) -> None:
        """A copy of this many bytes that begins at `start` was compared in place.

        A region is good as a whole once all its copies are; contiguous ones need not wait for the others.
        """
        region = bisect.bisect_right(self.starts, start) - 1
        self._proven[region] += size
        if contiguous:
            self._fill(region, start - self.starts[region], size)
        if self._proven[region] == self.sizes[region]:
            self._fill(region, 0, self.sizes[region])
            if digest is not None and contiguous and size == self.sizes[region]:
                self.claim(region, digest)

    def claim(self, region: int, digest: int) -> None:
        """Every byte of the region is logged and this is its digest. Idempotent."""
        if not self._claimed[region]:
            self._claimed[region] = True
            self.log.append(Claim(region, digest))

    def finish(self, digests: Sequence[int]) -> None:
        """The slot is complete, whatever way it was filled: log what is still missing."""
        for region, digest in enumerate(digests):
            self._fill(region, 0, self.sizes[region])
            self.claim(region, digest)

    def _fill(self, region: int, offset: int, size: int) -> None:
        for start, stop in self._sent[region].gaps(offset, offset + size):
            self._sent[region].add(start, stop)
            self._good(GoodBytes(region, start, stop - start))

    def _good(self, good: GoodBytes) -> None:
        self.log.append(good)
        self.logged += good.size


@dataclass
class Cursor:
    """How far one reader is. sent: bytes in all."""

    item: int = 0
    within: int = 0
    sent: int = 0

    def read(self, stream: Stream, room: int, largest: int) -> Iterator[GoodBytes | list[Claim]]:
        """What may go out now: `GoodBytes` of at most `largest` bytes, `room` bytes in all, and claims between them."""
        log = stream.log
        while self.item < len(log):
            entry = log[self.item]
            if isinstance(entry, Claim):
                claims = []
                while self.item < len(log) and isinstance(claim := log[self.item], Claim):
                    claims.append(claim)
                    self.item += 1
                yield claims
                continue
            size = min(entry.size - self.within, largest, room)
            if size <= 0:
                return
            good = GoodBytes(entry.region, entry.offset + self.within, size)
            self.within += size
            self.sent += size
            room -= size
            if self.within == entry.size:
                self.item, self.within = self.item + 1, 0
            yield good

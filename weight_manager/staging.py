"""Bytes of one push session in its slot: where each may go, which have come, which have been checked.

Nothing here knows sockets or leases. Copies are numbered over all trainer ranks in the order they joined.
"""

import bisect
from collections.abc import Iterable, Sequence
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from rollout_client.page_sums import both_digests
from rollout_client.protocol import Copy
from weight_manager.errors import PushRefused
from weight_manager.layout import VIEW_DTYPE, region_views
from weight_manager.manifest import ITEMSIZE, Layout

BATCH_BYTES = 32 << 20
"""Checks are handed to threads in pieces of about this size."""


class Target:
    """Where one copy lands in the slot."""

    __slots__ = ("_scratch", "_view", "by_sums", "digest", "name", "nbytes", "received", "start", "written")

    def __init__(self, name: str, copy: Copy, slot: memoryview) -> None:
        dtype = VIEW_DTYPE[copy.dst_dtype]
        strides = tuple(s * dtype.itemsize for s in copy.dst_strides)
        self.name = name
        self.start = copy.dst_offset * dtype.itemsize
        self._view: npt.NDArray[Any] = np.ndarray(copy.shape, dtype, slot, self.start, strides)
        self._scratch: npt.NDArray[Any] | None = None
        self.nbytes = prod(copy.shape) * dtype.itemsize
        self.received = Intervals()
        self.written = False
        self.by_sums = False  # its trainer sends a digest of page sums
        self.digest: int | None = None  # xxh3-64, once it has been found to match

    @property
    def contiguous(self) -> bool:
        """One run of bytes in the slot."""
        return self._view.flags.c_contiguous

    @property
    def span(self) -> tuple[int, int]:
        """(offset, bytes) in the slot; of contiguous targets only."""
        return self.start, self.nbytes

    def destination(self, offset: int, size: int) -> memoryview:
        """Where these bytes of the copy are received: the slot itself, or scratch for a strided target."""
        if self.contiguous:
            array = self._view
        else:
            if self._scratch is None:
                self._scratch = np.empty(self._view.shape, self._view.dtype)
            array = self._scratch
        return array.reshape(-1).view(np.uint8).data[offset : offset + size]

    @property
    def scattered(self) -> bool:
        """Received in scratch: `compute` still has to write it into the slot."""
        return self._scratch is not None

    def compute(self) -> tuple[int, int]:
        """xxh3-64 of what the slot holds, in the copy's C order, and the digest that its trainer must have sent.

        Scatters scratch into the slot first.
        """
        if self._scratch is not None:
            self._view[...] = self._scratch
            self._scratch = None
        whole = self._view if self.contiguous else np.ascontiguousarray(self._view)
        if self.by_sums:
            return both_digests(whole)
        digest = xxhash.xxh3_64_intdigest(whole.reshape(-1).data)
        return digest, digest


class Intervals:
    """Disjoint [start, stop) ranges, merged where they touch."""

    __slots__ = ("_starts", "_stops")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> bool:
        """False, and nothing added, if any of it is there already."""
        if start == stop:
            return True
        i = bisect.bisect_right(self._starts, start)
        if (i > 0 and self._stops[i - 1] > start) or (i < len(self._starts) and self._starts[i] < stop):
            return False
        joins_left = i > 0 and self._stops[i - 1] == start
        joins_right = i < len(self._starts) and self._starts[i] == stop
        if joins_left and joins_right:
            self._stops[i - 1] = self._stops.pop(i)
            self._starts.pop(i)
        elif joins_left:
            self._stops[i - 1] = stop
        elif joins_right:
            self._starts[i] = start
        else:
            self._starts.insert(i, start)
            self._stops.insert(i, stop)
        return True

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """What of [start, stop) is not there."""
        found = []
        i = max(bisect.bisect_right(self._starts, start) - 1, 0)
        for begin, end in zip(self._starts[i:], self._stops[i:], strict=True):
            if begin >= stop or start >= stop:
                break
            if begin > start:
                found.append((start, begin))
            start = max(start, end)
        if start < stop:
            found.append((start, stop))
        return found

    def covers(self, size: int) -> bool:
        """[0, size) is all there."""
        return size == 0 or (self._starts == [0] and self._stops == [size])


Check = list[tuple[Target, int]]
"""Targets and the digests their bytes must have."""


class Staging:
    """One session's copies. Methods raise PushRefused for what ends the session."""

    def __init__(self, layout: Layout, slot: memoryview, *, chunked: bool) -> None:
        """chunked: bytes come as chunks, and `written` demands all of them; else trainers write by themselves."""
        self.layout = layout
        self.slot = slot
        self.chunked = chunked
        self.targets: list[Target] = []
        self.total_bytes = 0
        self.received_bytes = 0
        self.verified_bytes = 0
        self.checking = 0  # checks handed out and not yet back
        self._digests: dict[tuple[int, int], int] = {}  # (offset, bytes) -> what was verified there

    def add(self, copies: Sequence[Copy], names: Sequence[str]) -> int:
        """Copies of a trainer rank that joined, and the tensor each belongs to; returns the first's number."""
        first = len(self.targets)
        self.targets += [Target(name, copy, self.slot) for name, copy in zip(names, copies, strict=True)]
        self.total_bytes += sum(t.nbytes for t in self.targets[first:])
        return first

    def destinations(self, number: int, offset: int, sizes: Sequence[int]) -> list[memoryview]:
        """Buffers for a chunk's payload frames; marks them as received."""
        target = self.targets[number]
        stop = offset + sum(sizes)
        if not self.chunked:
            raise PushRefused("bad_message", "chunks were sent to a shared-memory session", [target.name])
        if offset < 0 or min(sizes, default=0) < 0 or stop > target.nbytes:
            span = f"bytes {offset} to {stop} of {target.nbytes}"
            raise PushRefused("bad_message", f"{target.name}: a chunk holds {span}", [target.name])
        if target.written or not target.received.add(offset, stop):
            raise PushRefused("duplicate_tensor", f"{target.name}: bytes {offset} to {stop} came twice", [target.name])
        self.received_bytes += stop - offset
        views = []
        for size in sizes:
            views.append(target.destination(offset, size))
            offset += size
        return views

    def written(self, digests: Iterable[tuple[int, int]], sums: Iterable[tuple[int, int]] = ()) -> list[Check]:
        """The trainer says these copies are complete: what to check, in pieces for threads.

        digests: (copy, xxh3-64). sums: (copy, digest of its page sums).
        """
        checks: list[Check] = []
        room = 0
        claims = chain(((*claim, False) for claim in digests), ((*claim, True) for claim in sums))
        for number, digest, by_sums in claims:
            target = self.targets[number]
            if target.written:
                raise PushRefused("duplicate_tensor", f"{target.name} was reported complete twice", [target.name])
            if self.chunked and not target.received.covers(target.nbytes):
                raise PushRefused("missing_tensor", f"{target.name} is not complete, bytes are missing", [target.name])
            target.written, target.by_sums = True, by_sums
            if room <= 0:
                checks.append([])
                room = BATCH_BYTES
            checks[-1].append((target, digest))
            room -= target.nbytes
        self.checking += len(checks)
        return checks

    def checked(self, check: Check, wrong: Sequence[str]) -> None:
        """A thread is done with a check, and has noted each target's digest."""
        self.checking -= 1
        if wrong:
            message = f"the bytes in the slot are not the trainer's: {', '.join(wrong)}"
            raise PushRefused("checksum_mismatch", message, wrong)
        for target, _ in check:
            assert target.digest is not None
            self.verified_bytes += target.nbytes
            if target.contiguous:
                self._digests[target.span] = target.digest

    def forget(self) -> None:
        """The session is over; only the sums are of interest still."""
        self.targets.clear()
        self._digests.clear()

    def unwritten(self, first: int, count: int) -> list[str]:
        """Tensors of which a copy in this range has not been reported complete."""
        return list(dict.fromkeys(t.name for t in self.targets[first : first + count] if not t.written))

    def region_digests(self) -> list[int]:
        """xxh3-64 of every region; hashes what no single verified copy covers. Run it in a thread."""
        views = region_views(self.layout, self.slot)
        itemsize = ITEMSIZE[self.layout.manifest.dtype]
        digests = []
        for region, view in zip(self.layout.regions, views, strict=True):
            known = self._digests.get((region.offset, prod(region.shape) * itemsize))
            digests.append(xxhash.xxh3_64_intdigest(view.data) if known is None else known)
        return digests


def run_check(check: Check) -> list[str]:
    """In a thread: names of the tensors whose bytes in the slot differ from their digest."""
    wrong: list[str] = []
    for target, claimed in check:
        digest, expected = target.compute()
        if expected == claimed:
            target.digest = digest
        elif target.name not in wrong:
            wrong.append(target.name)
    return wrong

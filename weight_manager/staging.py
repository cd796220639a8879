"""Bytes of one push session in its slot: where each may go, which have come, which have been checked.

Nothing here knows sockets or leases. Copies are numbered over all trainer ranks in the order they joined.
"""

import threading
from collections.abc import Iterable, Sequence
from itertools import chain
from math import prod

from rollout_client.digest import digest_of
from rollout_client.protocol import Copy
from weight_manager.errors import PushRefused
from weight_manager.finite import all_finite, ends_finite
from weight_manager.layout import region_views
from weight_manager.manifest import ITEMSIZE, Layout
from weight_manager.target import Target

BATCH_BYTES = 4 << 20
"""Checks are handed to threads in pieces of about this size."""


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
        self._receiving = threading.Lock()  # data connections ask for destinations from threads of their own
        self.checking = 0  # checks handed out and not yet back
        self._digests: dict[tuple[int, int], int] = {}  # (offset, bytes) -> what was verified there

    def add(self, copies: Sequence[Copy], names: Sequence[str], base: memoryview | None = None) -> int:
        """Copies of a trainer rank that joined, and the tensor each belongs to; returns the first's number.

        base: the slot that its patches are against.
        """
        first = len(self.targets)
        self.targets += [Target(name, copy, self.slot, base) for name, copy in zip(names, copies, strict=True)]
        self.total_bytes += sum(t.nbytes for t in self.targets[first:])
        return first

    def destinations(self, number: int, offset: int, sizes: Sequence[int], span: int = 0) -> list[memoryview]:
        """Buffers for a chunk's payload frames, which are filled before anything else happens. span: of a patch."""
        with self._receiving:
            return self._destinations(number, offset, sizes, span)

    def expect(self, number: int, offset: int, size: int) -> memoryview:
        """The buffer of bytes that a thread is going to receive; a copy is not complete before they have `arrived`."""
        with self._receiving:
            (place,) = self._destinations(number, offset, [size], 0)
            self.targets[number].arriving += size
            return place

    def arrived(self, number: int, size: int) -> None:
        """All of them are there."""
        with self._receiving:
            if number < len(self.targets):  # else the session is over
                self.targets[number].arriving -= size

    def _destinations(self, number: int, offset: int, sizes: Sequence[int], span: int) -> list[memoryview]:
        if number >= len(self.targets):
            raise PushRefused("aborted", "the session is over")
        target = self.targets[number]
        stop = offset + (span or sum(sizes))
        if not self.chunked:
            raise PushRefused("bad_message", "chunks were sent to a shared-memory session", [target.name])
        if offset < 0 or span < 0 or min(sizes, default=0) < 0 or stop > target.nbytes:
            where = f"bytes {offset} to {stop} of {target.nbytes}"
            raise PushRefused("bad_message", f"{target.name}: a chunk holds {where}", [target.name])
        if target.written or not target.received.add(offset, stop):
            raise PushRefused("duplicate_tensor", f"{target.name}: bytes {offset} to {stop} came twice", [target.name])
        self.received_bytes += sum(sizes)
        if span:
            frames = target.patch(offset, span, sizes)
            if frames is None:
                raise PushRefused("bad_message", f"{target.name}: a patch of sizes {sizes} fits nothing", [target.name])
            return frames
        target.plain(offset, stop - offset)
        views = []
        for size in sizes:
            views.append(target.destination(offset, size))
            offset += size
        return views

    def written(self, digests: Iterable[tuple[int, int]], sums: Iterable[tuple[int, int]] = ()) -> list[Check]:
        """The trainer says these copies are complete: what to check, in pieces for threads.

        digests: (copy, digest). sums: (copy, digest of its page sums).
        """
        checks: list[Check] = []
        room = 0
        claims = chain(((*claim, False) for claim in digests), ((*claim, True) for claim in sums))
        for number, digest, by_sums in claims:
            if not 0 <= number < len(self.targets):
                raise PushRefused("bad_message", f"copy {number} is none of the {len(self.targets)} placed")
            target = self.targets[number]
            if target.written:
                raise PushRefused("duplicate_tensor", f"{target.name} was reported complete twice", [target.name])
            if self.chunked and not target.complete:
                raise PushRefused("missing_tensor", f"{target.name} is not complete, bytes are missing", [target.name])
            target.written, target.by_sums = True, by_sums
            if target.nbytes > BATCH_BYTES:
                checks.insert(0, [(target, digest)])  # by itself: several threads share it
                continue
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
        """Digest of every region; hashes what no single verified copy covers. Run it in a thread."""
        views = region_views(self.layout, self.slot)
        itemsize = ITEMSIZE[self.layout.manifest.dtype]
        digests = []
        for region, view in zip(self.layout.regions, views, strict=True):
            known = self._digests.get((region.offset, prod(region.shape) * itemsize))
            digests.append(digest_of(view.data) if known is None else known)
        return digests

    def non_finite(self, *, every: bool) -> list[str]:
        """Parameters with elements that are NaN or infinite; those at the ends of a region, unless `every`."""
        look = all_finite if every else ends_finite
        views = zip(self.layout.regions, region_views(self.layout, self.slot), strict=True)
        return list(dict.fromkeys(region.name for region, view in views if not look(view)))


def run_check(check: Check) -> list[str]:
    """In a thread: names of the tensors whose bytes in the slot differ from their digest."""
    wrong: list[str] = []
    for target, claimed in check:
        try:
            digest, expected = target.compute()
        except ValueError:
            wrong.append(target.name)
            continue
        if expected == claimed:
            target.digest = digest
        elif target.name not in wrong:
            wrong.append(target.name)
    return wrong

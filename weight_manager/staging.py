"""Bytes of one push session in its slot: where each may go, which have come, and whether they are the trainer's.

Nothing here knows sockets, threads or leases. A `Target` (targets.py) is one copy; copies are numbered over all trainer
ranks in the order they joined. `Staging` keeps the books; checker.py has threads do what would hold the loop.
"""

import threading
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from rollout_client.digest import digest_of
from rollout_client.protocol import Copy
from weight_manager import finite
from weight_manager.errors import PushRefused
from weight_manager.finite import all_ends_finite, all_finite, ends_finite
from weight_manager.layout import Layout, region_digests, region_views, slot_array
from weight_manager.targets import Check, Target
from weight_manager.together import Int64, Laid, Together, UInt64

AT_ONCE_BYTES = 32 << 20
"""Slots of so few are named in the loop, in a millisecond or two, as are those of which nothing is left to be hashed: a
thread would have to be woken for it, and the loop after it.
"""
BATCH_BYTES = 4 << 20
"""Checks are handed to threads in pieces of about this size."""


class Staging:
    """One session's copies. Methods raise PushRefused for what ends the session."""

    def __init__(self, layout: Layout, slot: memoryview, *, chunked: bool) -> None:
        """chunked: bytes come as chunks, and `written` demands all of them; else trainers write by themselves."""
        self.layout = layout
        self.slot = slot
        self.chunked = chunked
        self.together: Together | None = None  # what there is of copies, while they are looked at in shares
        self._targets: list[Target] = []
        self.total_bytes = 0
        self.received_bytes = 0
        self.verified_bytes = 0
        self._receiving = threading.Lock()  # data connections ask for destinations from threads of their own
        self.checking = 0  # checks handed out and not yet back
        self._digests: dict[tuple[int, int], int] = {}  # (offset, bytes) -> what was verified there
        self._finite: set[tuple[int, int]] = set()  # (offset, bytes) of numbers: at its ends, or all if there are few
        self.little = layout.slot_bytes <= AT_ONCE_BYTES  # looked through whole, and at once

    @property
    def targets(self) -> list[Target]:
        """Every copy by itself. Whoever asks for them has all that follows looked at one by one."""
        together, self.together = self.together, None
        if together is not None:
            self._targets = [
                Target(*one, self.slot) for one in zip(together.laid.names, together.laid.copies, strict=True)
            ]
            for number in np.flatnonzero(together.written).tolist():
                self._targets[number].written = True
            for number, pieces in together.pieces.items():
                self._targets[number].pieces = pieces
            self._take_over(together, np.flatnonzero(together.proven).tolist())
        return self._targets

    def _take_over(self, together: Together, numbers: Iterable[int]) -> None:
        """What was found of these copies, which are proven."""
        for number in numbers:
            target = self._targets[number]
            target.digest = self._digests[target.span] = int(together.digests[number])
            if together.finite:
                self._finite.add(target.span)

    def lay(self, laid: Laid) -> None:
        """The copies of a push, if no other trainer rank adds some, and bytes are not received here: in shares."""
        self.together = Together(laid)
        self.total_bytes = int(laid.sizes.sum())

    def add(self, copies: Sequence[Copy], names: Sequence[str], base: memoryview | None = None) -> int:
        """Copies of a trainer rank that joined, and the tensor each belongs to; returns the first's number.

        base: the slot that its patches are against.
        """
        first = len(self.targets)
        self._targets += [Target(name, copy, self.slot, base) for name, copy in zip(names, copies, strict=True)]
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
        """Bytes that were expected by a thread are in their place."""
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
            frames = target.patched.patch(offset, span, sizes) if target.patched is not None else None
            if frames is None:
                raise PushRefused("bad_message", f"{target.name}: a patch of sizes {sizes} fits nothing", [target.name])
            return frames
        if target.patched is not None:
            target.patched.plain(offset, stop - offset)
        views = []
        for size in sizes:
            views.append(target.destination(offset, size))
            offset += size
        return views

    def target(self, number: int) -> Target:
        """A copy by its number. Raises PushRefused where there is none."""
        if not 0 <= number < len(self.targets):
            raise PushRefused("bad_message", f"copy {number} is none of the {len(self.targets)} placed")
        return self.targets[number]

    def written(self, digests: Iterable[tuple[int, int]], sums: Iterable[tuple[int, int]] = ()) -> list[Check]:
        """The trainer says these copies are complete: what to check, in pieces for threads.

        digests: (copy, digest). sums: (copy, digest of its page sums).
        """
        checks: list[Check] = []
        room = 0
        claims = chain(((*claim, False) for claim in digests), ((*claim, True) for claim in sums))
        for number, digest, by_sums in claims:
            target = self.target(number)
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

    def claimed(self, claims: Iterable[tuple[int, int]]) -> list[int] | None:
        """The digest of every region as (copy, digest) say it; None if some region is not one copy in one piece.
        Nothing is checked.
        """
        found = dict(claims)
        if self.together is not None:
            spans = dict(enumerate(self.together.laid.spans))
        else:
            spans = {number: target.span for number, target in enumerate(self._targets) if target.contiguous}
        of_span = {spans[number]: digest for number, digest in found.items() if number in spans}
        if any(one not in of_span for one in self.layout.ranges):
            return None
        return [of_span[one] for one in self.layout.ranges]

    def compared(self, together: Together, numbers: Int64, claimed: UInt64, found: UInt64) -> None:
        """Threads have hashed a share of copies."""
        self.checking -= 1
        wrong = together.compare(numbers, claimed, found)
        if wrong:
            raise mismatch(wrong)
        self.verified_bytes += int(together.laid.sizes[numbers].sum())
        if self.slot:
            together.look(self.slot, numbers.tolist())
            if self.together is not together:  # the rest is looked at one by one
                self._take_over(together, numbers.tolist())

    def checked(self, check: Check, wrong: Sequence[str]) -> None:
        """A thread is done with a check, and has noted each target's digest."""
        self.checking -= 1
        if wrong:
            raise mismatch(wrong)
        for target, _ in check:
            assert target.digest is not None
            self.verified_bytes += target.nbytes
            if target.contiguous:
                self._digests[target.span] = target.digest
                look = all_finite if self.little else ends_finite
                if (finite.ready() or not self.little) and target.passes(look):
                    self._finite.add(target.span)  # now, while what follows still arrives

    def forget(self) -> None:
        """The session is over; only the sums are of interest still. Its memory may go: an adapter's arena is gone when
        its last view is.
        """
        self.together = None
        self._targets.clear()
        self._digests.clear()
        self._finite.clear()
        self.slot = memoryview(b"")

    def unwritten(self, first: int, count: int) -> list[str]:
        """Tensors of which a copy in this range has not been reported complete."""
        if self.together is not None:
            return self.together.unwritten()
        return list(dict.fromkeys(t.name for t in self.targets[first : first + count] if not t.written))

    def region_digests(self) -> list[int]:
        """Digest of every region; hashes what no single verified copy covers. Run it in a thread."""
        if self.together is not None:
            return self.together.region_digests(self.layout.ranges, self.slot)
        if not self._digests:
            return region_digests(self.layout, self.slot)
        found = ((self._digests.get(one), one) for one in self.layout.ranges)
        return [
            digest_of(self.slot[start : start + nbytes]) if known is None else known for known, (start, nbytes) in found
        ]

    @property
    def digested(self) -> bool:
        """`region_digests` has nothing to hash."""
        if self.together is not None:
            return self.together.whole
        return all(one in self._digests for one in self.layout.ranges)

    def non_finite(self, *, every: bool) -> list[str]:
        """Parameters with elements that are NaN or infinite; with `every` all are looked at, else those at the ends of
        each region. Run it in a thread.
        """
        together, at_ends = self.together, self.little or not every
        if at_ends and together is not None and together.finite and together.whole:
            return []
        if at_ends and self._finite.issuperset(self.layout.ranges):
            return []
        views = region_views(self.layout, self.slot)
        if all_finite(slot_array(self.layout, self.slot)) if every else all_ends_finite(views):
            return []
        look = all_finite if every else ends_finite
        named = zip(self.layout.regions, views, strict=True)
        return list(dict.fromkeys(region.name for region, view in named if not look(view)))


def mismatch(wrong: Sequence[str]) -> PushRefused:
    """What ends a session whose slot holds something else in these tensors."""
    message = f"the bytes in the slot are not the trainer's: {', '.join(wrong)}"
    return PushRefused("checksum_mismatch", message, list(wrong))

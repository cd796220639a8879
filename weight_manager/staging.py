"""Bytes of one push session in its slot: where each may go, which have come, and whether they are the trainer's.

Nothing here knows sockets or leases. A `Target` is one copy; copies are numbered over all trainer ranks in the order
they joined. `Staging` keeps the books. `Checker` has threads do what would hold the loop (digests, scattering, tensors
carried over from the live slot), and handles in the loop what they find. A result that comes back after its session has
ended only lets the slot go.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from math import prod
from typing import NamedTuple

import numpy as np

from rollout_client import copying
from rollout_client.copying import Kernels
from rollout_client.digest import digest_of, joined, piece_spans
from rollout_client.page_sums import both_digests
from rollout_client.protocol import Copy
from weight_manager import finite
from weight_manager.background import Background
from weight_manager.errors import PushRefused
from weight_manager.finite import all_ends_finite, all_finite, ends_finite
from weight_manager.intervals import Intervals
from weight_manager.layout import ITEMSIZE, VIEW_DTYPE, Array, Layout, region_digests, region_views, slot_array
from weight_manager.metrics import Counters
from weight_manager.patched import Patched
from weight_manager.slots import Slots
from weight_manager.together import Laid, Proven, Together

log = logging.getLogger(__name__)


class Target:
    """Where one copy lands in the slot, which of its bytes have come, and what they are then."""

    __slots__ = (
        *("_copy", "_held_view", "_scratch", "_slot", "arriving", "by_sums", "contiguous", "digest", "name"),
        *("nbytes", "patched", "pieces", "_received", "start", "streamed", "written"),
    )

    def __init__(self, name: str, copy: Copy, slot: memoryview, base: memoryview | None = None) -> None:
        """base: a slot whose bytes are taken where none are received. Raises ValueError or TypeError for a copy that
        leaves the slot.
        """
        itemsize = ITEMSIZE[copy.dst_dtype]
        self.name = name
        self.start = copy.dst_offset * itemsize
        self.nbytes = prod(copy.shape) * itemsize
        self._copy, self._slot = copy, slot
        self._held_view: Array | None = None  # a push has hundreds of copies, and most are only hashed
        plain = copy.dst_strides == (1,) and 0 <= self.start <= slot.nbytes - self.nbytes
        self.contiguous = plain or self._view.flags.c_contiguous
        """Whether the copy is one run of bytes in the slot."""
        self._scratch: Array | None = None
        self.patched = None if base is None else Patched(self._in(base))
        self._received: Intervals | None = None  # of those that receive any
        self.arriving = 0  # of those, bytes that are not there yet
        self.written = False
        self.by_sums = False  # its trainer sends a digest of page sums
        self.digest: int | None = None  # once it has been found to match
        self.pieces: Pieces | None = None  # of one that is hashed while it arrives
        self.streamed: int | None = None  # of the bytes in their place, taken as each was received

    @property
    def received(self) -> Intervals:
        """Its bytes that have come in chunks."""
        if self._received is None:
            self._received = Intervals()
        return self._received

    @property
    def span(self) -> tuple[int, int]:
        """(offset, bytes) in the slot; of contiguous targets only."""
        return self.start, self.nbytes

    def passes(self, look: Callable[[Array], bool]) -> bool:
        """What `look` says of the elements of a contiguous one, flat, as they lie in the slot."""
        dtype = VIEW_DTYPE[self._copy.dst_dtype]
        return look(np.frombuffer(self._slot, dtype, self.nbytes // dtype.itemsize, self.start))

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
        """`compute` still has to write into the slot: from scratch, from the base, or patches."""
        return self._scratch is not None or self.patched is not None

    @property
    def complete(self) -> bool:
        """Whether every byte of the copy is there."""
        return not self.arriving and (self.patched is not None or self.received.covers(self.nbytes))

    def parts(self) -> list[tuple[int, int]]:
        """(offset, bytes) in the slot of what threads may hash apart from each other (digest.py); none if it has to be
        computed as a whole.
        """
        if self.scattered or self.by_sums or self.streamed is not None or not self.contiguous:
            return []
        return piece_spans(self.start, self.nbytes)

    def compute(self) -> tuple[int, int]:
        """Digest of what the slot holds, in the copy's C order, and the digest that its trainer must have sent.

        Takes the rest from the base, applies patches and scatters scratch into the slot first. Raises ValueError for
        a patch that does not fit.
        """
        if self.streamed is not None and not self.scattered:
            return self.streamed, self.streamed
        filled = None
        if self.patched is not None:
            filled = self.patched.fill(np.frombuffer(self.destination(0, self.nbytes), np.uint8))
            if filled is None:
                raise ValueError(f"a patch of {self.name} does not fit it")
            self.patched = None
        if self._scratch is not None:
            self._view[...] = self._scratch
            self._scratch = None
        whole = self._view if self.contiguous else np.ascontiguousarray(self._view)
        if self.by_sums:
            return both_digests(whole)
        if filled is None or not self.contiguous:
            filled = digest_of(whole.reshape(-1).data)
        return filled, filled

    @property
    def _view(self) -> Array:
        if self._held_view is None:
            self._held_view = self._in(self._slot)
        return self._held_view

    def _in(self, slot: memoryview) -> Array:
        dtype = VIEW_DTYPE[self._copy.dst_dtype]
        strides = tuple(stride * dtype.itemsize for stride in self._copy.dst_strides)
        return np.ndarray(self._copy.shape, dtype, slot, self.start, strides)


class Pieces:
    """A large copy's bytes, hashed piece by piece as its trainer says that they have arrived."""

    def __init__(self, target: Target) -> None:
        self._spans = piece_spans(target.start, target.nbytes)
        self._digests: dict[int, int | None] = {}  # of the piece that begins there; None = it is being hashed
        self.check: Check | None = None  # once the copy is complete, until it has been compared

    def take(self, start: int, nbytes: int) -> list[tuple[int, int]]:
        """Pieces that lie within these bytes and were not taken before: to be hashed now."""
        some = [one for one in self._spans if start <= one[0] and sum(one) <= start + nbytes]
        fresh = [one for one in some if one[0] not in self._digests]
        self._digests.update((at, None) for at, _ in fresh)
        return fresh

    def hashed(self, spans: Sequence[tuple[int, int]], digests: Sequence[int]) -> None:
        """These were taken."""
        self._digests.update((at, digest) for (at, _), digest in zip(spans, digests, strict=True))

    @property
    def joined(self) -> int | None:
        """The digest of the whole; None while a piece's is not known."""
        digests = [self._digests.get(at) for at, _ in self._spans]
        known = [digest for digest in digests if digest is not None]
        return joined(known) if len(known) == len(digests) else None


AT_ONCE_BYTES = 32 << 20
"""Slots of so few are named in the loop, in a millisecond or two, as are those of which nothing is left to be hashed: a
thread would have to be woken for it, and the loop after it.
"""
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
            for number in np.flatnonzero(together.proven).tolist():
                target = self._targets[number]
                target.written, target.digest = True, int(together.digests[number])
                self._digests[target.span] = int(together.digests[number])
                if together.finite:
                    self._finite.add(target.span)
        return self._targets

    def lay(self, laid: Laid) -> None:
        """The copies of a push, if no other trainer rank adds some, and bytes are not received here: in shares. Those
        of a large one become `targets` with the first word of them, and not while its trainer waits for a place.
        """
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
            laid = self.together.laid
            spans = dict(enumerate(zip(laid.starts.tolist(), laid.sizes.tolist(), strict=True)))
        else:
            spans = {number: target.span for number, target in enumerate(self._targets) if target.contiguous}
        of_span = {spans[number]: digest for number, digest in found.items() if number in spans}
        if any(one not in of_span for one in self.layout.ranges):
            return None
        return [of_span[one] for one in self.layout.ranges]

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
        if self.together is not None and self.together.finite and self.together.whole:
            return []
        if (self.little or not every) and self._finite.issuperset(self.layout.ranges):
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


def run_check(check: Check) -> list[str]:
    """Names of the tensors whose bytes in the slot differ from their digest. Runs in a thread."""
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


class Told(NamedTuple):
    """Whom a session's checks tell, in the loop, whether it has ended or not.

    refused: bytes are wrong, or could not be checked. in_place: (offset, bytes) in the slot, that are there, checked or
    not; a large copy's may be told of part by part and once more when it is complete. verified: these copies are the
    trainer's. named: the digest of every region, and parameters that are NaN or infinite, once `Checker.name` was asked
    for.
    """

    refused: Callable[[PushRefused], None]
    in_place: Callable[[list[tuple[int, int]]], None]
    verified: Callable[[Iterable[Proven]], None]
    named: Callable[[list[int], list[str]], None]


class Checker:
    """Checks one session's bytes in the slot, on threads: copies against the digests that were sent, and whether
    weights are numbers.
    """

    def __init__(
        self, staging: Staging, slot: int, *, background: Background, slots: Slots, counters: Counters, told: Told
    ) -> None:
        """slot: the number of the one that is filled."""
        self._staging = staging
        self._slot = slot
        self._background = background
        self._slots = slots
        self._counters = counters
        self._told = told

    def written(self, digests: Iterable[tuple[int, int]], sums: Iterable[tuple[int, int]] = ()) -> int:
        """The trainer says these copies are complete: compare digests while the rest still arrives. Returns their
        bytes. Arguments and what it raises: `Staging.written`.
        """
        together, fast = self._staging.together if self._staging.little else None, copying.ready()
        if together is not None and fast is not None and not sums:
            return self._look(together, fast, digests)
        checks = self._staging.written(digests, sums)
        plain = [target for check in checks if not _writes(check) for target, _ in check]
        self._tell_in_place(plain)
        runs: list[tuple[Check, list[list[tuple[int, int]]]]] = []
        for check in checks:
            parts = [target.parts() for target, _ in check]
            if not all(parts):
                self._run(lambda check=check: run_check(check), check, writes=_writes(check))  # type: ignore[misc]
            elif check[0][0].pieces is not None:  # a large one, by itself
                self._read_rest(check, check[0][0].pieces)
            else:
                runs.append((check, parts))
        if runs:
            self._read(runs)
        return sum(target.nbytes for check in checks for target, _ in check)

    def arrived(self, pieces: Iterable[tuple[int, int, int]]) -> None:
        """The trainer says that these bytes of copies, which it has yet to complete, are in the slot: (copy, offset in
        it, bytes). Those that digests are made of whole are hashed now, what that is worth is known once the copy is
        complete. Raises PushRefused for bytes outside their copy.
        """
        spans: list[tuple[int, int]] = []
        for number, offset, size in pieces:
            target = self._staging.target(number)
            if not 0 <= offset < offset + size <= target.nbytes:
                where = f"bytes {offset} to {offset + size} of {target.nbytes}"
                raise PushRefused("bad_message", f"{target.name}: {where} are said to be there", [target.name])
            if target.contiguous and not target.scattered:
                spans.append((target.start + offset, size))
                if not (self._staging.chunked or target.written or target.nbytes <= BATCH_BYTES):
                    self._read_ahead(target, *spans[-1])
        if spans:
            self._told.in_place(spans)

    def carry(self, names: Sequence[str], live: memoryview) -> None:
        """Take these tensors (canonical names) from the live version's slot. It stays live while a session runs."""
        layout = self._staging.layout
        views = zip(layout.regions, *(region_views(layout, slot) for slot in (live, self._staging.slot)), strict=True)
        wanted = frozenset(names)
        pairs = [(source, target) for region, source, target in views if region.name in wanted]

        def copy() -> list[str]:
            for source, target in pairs:
                target[...] = source
            return []

        self._staging.checking += 1
        self._run(copy, [], writes=True)

    def name(self, *, every: bool) -> None:
        """Digest what no single check has covered, and see whether the weights are numbers. every: look at all."""
        staging = self._staging

        def work() -> tuple[list[int], list[str]]:
            return staging.region_digests(), staging.non_finite(every=every)

        little = staging.layout.slot_bytes <= AT_ONCE_BYTES and finite.ready()
        if not little and (every or not staging.digested):
            self._background.submit(work, lambda found: self._told.named(*found), self._broken)
            return
        try:
            found = work()
        except Exception as error:
            self._broken(error)
        else:
            self._told.named(*found)

    def _look(self, together: Together, fast: Kernels, claims: Iterable[tuple[int, int]]) -> int:
        """Compare a share at once."""
        staging, (numbers, claimed) = self._staging, together.claimed(claims)
        starts, sizes = together.laid.starts[numbers], together.laid.sizes[numbers]
        self._told.in_place(list(zip(starts.tolist(), sizes.tolist(), strict=True)))
        wrong, nbytes = together.check(fast, staging.slot, numbers, claimed), int(sizes.sum())
        if wrong:
            self._counters.add("checksum_mismatches")
            self._told.refused(mismatch(wrong))
            return nbytes
        staging.verified_bytes += nbytes
        self._counters.add("bytes_verified", nbytes)
        self._told.verified(together.found(numbers))
        return nbytes

    def _read(self, runs: Sequence[tuple[Check, list[list[tuple[int, int]]]]]) -> None:
        """What only has to be hashed: all threads share it, and the loop hears of it once."""

        def done(digests: list[int]) -> None:
            left = iter(digests)
            for check, parts in runs:
                wrong = []
                for (target, claimed), spans in zip(check, parts, strict=True):
                    target.digest = joined([next(left) for _ in spans])
                    if target.digest != claimed:
                        wrong.append(target.name)
                self._checked(check, wrong)

        flat = [span for _, parts in runs for spans in parts for span in spans]
        self._background.digests(self._staging.slot, flat, done, self._broken)

    def _read_ahead(self, target: Target, start: int, nbytes: int) -> None:
        """Hash what there is of a copy that is not complete, while threads may have nothing else to do."""
        target.pieces = target.pieces or Pieces(target)
        self._read_pieces(target.pieces, target.pieces.take(start, nbytes))

    def _read_rest(self, check: Check, pieces: Pieces) -> None:
        """A copy that was hashed in part is complete: hash the rest."""
        ((target, _),) = check
        pieces.check = check
        self._read_pieces(pieces, pieces.take(target.start, target.nbytes))
        self._compare(pieces)

    def _read_pieces(self, pieces: Pieces, spans: list[tuple[int, int]]) -> None:
        def done(digests: list[int]) -> None:
            pieces.hashed(spans, digests)
            self._compare(pieces)

        if spans:
            self._background.digests(self._staging.slot, spans, done, self._broken)

    def _compare(self, pieces: Pieces) -> None:
        """Once the copy is complete and all of it is hashed, whatever came last."""
        check, digest = pieces.check, pieces.joined
        if check is not None and digest is not None:
            pieces.check = None
            ((target, claimed),) = check
            target.digest = digest
            self._checked(check, [] if digest == claimed else [target.name])

    def _run(self, work: Callable[[], list[str]], check: Check, *, writes: bool) -> None:
        """writes: the slot may not be given away before this has stopped, whatever becomes of the session."""

        def done(wrong: list[str]) -> None:
            if writes:
                self._slots.leave(self._slot)
                self._tell_in_place([target for target, _ in check])
            self._checked(check, wrong)

        def failed(error: BaseException) -> None:
            if writes:
                self._slots.leave(self._slot)
            self._broken(error)

        if writes:
            self._slots.enter(self._slot)
        self._background.submit(work, done, failed)

    def _tell_in_place(self, targets: Sequence[Target]) -> None:
        spans = [target.span for target in targets if target.contiguous]
        if spans:
            self._told.in_place(spans)

    def _checked(self, check: Check, wrong: list[str]) -> None:
        before = self._staging.verified_bytes
        try:
            self._staging.checked(check, wrong)
        except PushRefused as refusal:
            self._counters.add("checksum_mismatches")
            self._told.refused(refusal)
            return
        self._counters.add("bytes_verified", self._staging.verified_bytes - before)
        self._told.verified(Proven(t.start, t.nbytes, t.digest, t.contiguous) for t, _ in check)

    def _broken(self, error: BaseException) -> None:
        if not self._staging.slot:
            return  # the session ended under it
        log.error("checking the weights failed", exc_info=error)
        self._told.refused(PushRefused("internal", f"checking the weights failed: {error!r}"))


def _writes(check: Check) -> bool:
    """Whether checking these targets puts bytes into their place first."""
    return any(target.scattered for target, _ in check)

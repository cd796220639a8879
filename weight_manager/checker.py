"""Has threads do what would hold the loop while a push comes in: digests of what is in the slot, scattering, tensors
that are carried over from the live slot. What they find is handled in the loop. A result that comes back after its
session has ended only lets the slot go.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rollout_client import copying
from rollout_client.copying import Kernels
from rollout_client.digest import PIECE, joined
from weight_manager import finite
from weight_manager.background import Background
from weight_manager.errors import PushRefused
from weight_manager.layout import region_views
from weight_manager.metrics import Counters
from weight_manager.pieces import Pieces
from weight_manager.slots import Slots
from weight_manager.staging import BATCH_BYTES, Staging, mismatch
from weight_manager.targets import Check, Target, run_check
from weight_manager.together import Int64, Proven, Together, UInt64

log = logging.getLogger(__name__)


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
        together, fast = None if sums else self._staging.together, copying.ready()
        if together is not None and not self._staging.little:
            return self._share(together, digests)
        if together is not None and fast is not None and not together.laid.pieced:
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
                self._read_rest(check[0][0].pieces, *check[0][0].span, self._comparing(check))
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
        together = None if self._staging.little else self._staging.together
        for number, offset, size in pieces:
            if together is not None:
                name, start, nbytes = together.named(number)
                _check_inside(name, offset, size, nbytes)
                spans.append((start + offset, size))
                if nbytes > BATCH_BYTES and not together.written[number]:
                    ahead = together.pieces_of(number)
                    self._read_pieces(ahead, ahead.take(*spans[-1]))
                continue
            target = self._staging.target(number)
            _check_inside(target.name, offset, size, target.nbytes)
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

        if not (staging.little and finite.ready()) and (every or not staging.digested):
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

    def _share(self, together: Together, claims: Iterable[tuple[int, int]]) -> int:
        """Have threads look at a share: all of them, and the loop hears of it once; of copies that have several pieces,
        or of which some were hashed already, by themselves.
        """
        staging, laid, (numbers, claimed) = self._staging, together.laid, together.claimed(claims)
        if not len(numbers):
            return 0
        sizes = laid.sizes[numbers]
        self._told.in_place([laid.spans[number] for number in numbers.tolist()])
        order = np.argsort(-sizes, kind="stable")  # who takes the last one is not to be late with it
        apart = [number for number in numbers.tolist() if number in together.pieces or laid.spans[number][1] > PIECE]
        if apart:
            mine = np.isin(numbers, apart)
            staging.checking += len(apart)
            for at in np.flatnonzero(mine).tolist():
                self._read_whole(together, numbers[at : at + 1], claimed[at : at + 1])
            order = order[~mine[order]]
        if len(order):
            staging.checking += 1
            numbers, claimed = numbers[order], claimed[order]

            def done(found: list[int]) -> None:
                self._compared(together, numbers, claimed, np.array(found, np.uint64))

            flat = [laid.spans[number] for number in numbers.tolist()]
            self._hash(flat, done)
        return int(sizes.sum())

    def _read_whole(self, together: Together, one: Int64, claimed: UInt64) -> None:
        """A copy of several pieces is complete."""
        number = int(one[0])

        def compare(digest: int) -> None:
            self._compared(together, one, claimed, np.array([digest], np.uint64))

        self._read_rest(together.pieces_of(number), *together.laid.spans[number], compare)

    def _compared(self, together: Together, numbers: Int64, claimed: UInt64, found: UInt64) -> None:
        self._concluded(
            lambda: self._staging.compared(together, numbers, claimed, found), lambda: together.found(numbers)
        )

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
        self._hash(flat, done)

    def _comparing(self, check: Check) -> Callable[[int], None]:
        """What is done with the digest of a check's one target."""
        ((target, claimed),) = check

        def compare(digest: int) -> None:
            target.digest = digest
            self._checked(check, [] if digest == claimed else [target.name])

        return compare

    def _read_ahead(self, target: Target, start: int, nbytes: int) -> None:
        """Hash what there is of a copy that is not complete, while threads may have nothing else to do."""
        target.pieces = target.pieces or Pieces(target.start, target.nbytes)
        self._read_pieces(target.pieces, target.pieces.take(start, nbytes))

    def _read_rest(self, pieces: Pieces, start: int, nbytes: int, compare: Callable[[int], None]) -> None:
        """A copy that was hashed in part is complete: hash the rest. compare: told its digest."""
        pieces.compare = compare
        self._read_pieces(pieces, pieces.take(start, nbytes))
        self._compare(pieces)

    def _read_pieces(self, pieces: Pieces, spans: list[tuple[int, int]]) -> None:
        def done(digests: list[int]) -> None:
            pieces.hashed(spans, digests)
            self._compare(pieces)

        if spans:
            self._hash(spans, done)

    def _hash(self, spans: Sequence[tuple[int, int]], done: Callable[[list[int]], None]) -> None:
        """Have threads do it. What was looked at before of the same message may have ended the session."""
        if self._staging.slot:
            self._background.digests(self._staging.slot, spans, done, self._broken)

    def _compare(self, pieces: Pieces) -> None:
        """Once the copy is complete and all of it is hashed, whatever came last."""
        compare, digest = pieces.compare, pieces.joined
        if compare is not None and digest is not None:
            pieces.compare = None
            compare(digest)

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
        self._concluded(
            lambda: self._staging.checked(check, wrong),
            lambda: (Proven(t.start, t.nbytes, t.digest, t.contiguous) for t, _ in check),
        )

    def _concluded(self, note: Callable[[], None], proven: Callable[[], Iterable[Proven]]) -> None:
        """Have the staging note what a thread has found, and tell of it. proven: what that is, if nothing differed."""
        before = self._staging.verified_bytes
        try:
            note()
        except PushRefused as refusal:
            self._counters.add("checksum_mismatches")
            self._told.refused(refusal)
            return
        self._counters.add("bytes_verified", self._staging.verified_bytes - before)
        self._told.verified(proven())

    def _broken(self, error: BaseException) -> None:
        if not self._staging.slot:
            return  # the session ended under it
        log.error("checking the weights failed", exc_info=error)
        self._told.refused(PushRefused("internal", f"checking the weights failed: {error!r}"))


def _check_inside(name: str, offset: int, size: int, nbytes: int) -> None:
    if not 0 <= offset < offset + size <= nbytes:
        where = f"bytes {offset} to {offset + size} of {nbytes}"
        raise PushRefused("bad_message", f"{name}: {where} are said to be there", [name])


def _writes(check: Check) -> bool:
    """Whether checking these targets puts bytes into their place first."""
    return any(target.scattered for target, _ in check)

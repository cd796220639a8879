"""CUDA tensors into the staged slot by DMA: no copy by a CPU, and a digest that starts in the GPU's memory.

 1. Copies into a slot that the driver has registered run at the link's full speed (cuda_slots.py).
 2. Two streams of our own wait for the caller's current stream: copies start after the kernels that make the
    weights and before any that follow.
 3. As a rule every tensor is copied from where it lies, and lies where it lay at the last push (`Lying`): then nothing
    is looked up again, and all of it is hashed (cuda_hash.py) on the other stream while the store looks for a place.
    Where a rank computes on the same GPU, that divides its time between the two processes, and each launch, however
    small, takes a slice of about a millisecond from its steps: so there is one. Copies begin before anything else is
    done.
 4. Else casts and transposed or strided pieces are made dense on the GPU, on the copy stream, batch by batch, and
    hashed many batches at once.
 5. Batch by batch, as copies and digests are done, the digests go to the store, which computes its own from the slot.
    Batches are small, so the store is never far behind the copies.
 6. Ranks on GPUs of this host may copy every piece as well, from the trainer's memory into their own (offers.py), while
    the copies to the host are under way.
 7. A version that may go live from ranks' memory (`Placement.ahead`) is copied there first, hashed meanwhile, and goes
    to the arena once the store has been asked to make it live. So is one of which pieces have to be made: they are kept
    until ranks have copied them.
 8. All streams are idle before the slot's writer lock is let go, whatever happened.

torch is never imported here: whoever hands in its tensors has done so.
"""

import contextlib
import ctypes
import logging
import sys
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from rollout_client.cuda_batch import Batch
from rollout_client.cuda_hash import CudaHash, CudaSums, Hashing
from rollout_client.cuda_pieces import (
    TOGETHER_BYTES,
    Job,
    Lying,
    Piece,
    batches,
    in_place,
    made,
    nbytes_of,
    piece_of,
    start_of,
)
from rollout_client.cuda_slots import PinnedSlots, Place
from rollout_client.offers import Offers
from rollout_client.own_memory import Run
from rollout_client.protocol import Copy
from rollout_client.tensors import Source
from rollout_client.transport import Reporter

log = logging.getLogger(__name__)

MADE_BYTES = 512 << 20
"""Device memory for tensors that are cast or made dense, about: no more are made before the first have arrived."""
AHEAD = 6
"""Batches that stay started beyond the one that is reported: the copies, half a millisecond a batch, never wait for a
word to the store, and the store and ranks that copy from it (ADR 21) are not far behind them.
"""
COMMIT_S = 0.03
"""A version that goes live from ranks' memory is waited for so long before its way into the arena begins: a commit
takes twice as long beside copies and checks. One that waits for sequences to end is not waited for.
"""


class _Hashed(NamedTuple):
    """Pieces [first, stop) of a push, hashed until the event `through`."""

    first: int
    stop: int
    digesting: Hashing
    through: Any


class _Foreseen(NamedTuple):
    """What was begun of a push before the store has answered, which `settle` forgets at its end. of: its first part."""

    of: object
    lying: Lying
    hashed: list[_Hashed]


class CudaCopier:
    """Keeps what it has found out from push to push. Used by one thread at a time."""

    def __init__(self) -> None:
        self._torch: Any = sys.modules["torch"]
        self._streams: dict[Any, tuple[Any, Any, Any]] = {}
        self._digesters: dict[Any, CudaHash | CudaSums] = {}
        self._driver: Any = ctypes.CDLL("libcuda.so.1")
        self._slots = PinnedSlots(self._torch, self._driver)
        self._offers: dict[Any, Offers] = {}  # by device
        self._before: Lying | None = None  # the last push
        self._foreseen: _Foreseen | None = None
        copy = self._driver.cuMemcpyDtoHAsync_v2
        copy.argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p

    def stage(
        self,
        slot: int,
        memory: memoryview,
        writable: Callable[[], AbstractContextManager[object]],
        jobs: Sequence[Job],
        reporter: Reporter,
        ranks: tuple[Sequence[str], int] = ((), 0),
        *,
        ahead: bool = False,
    ) -> int:
        """Copy and report every job; returns how many ranks have copied it into their memory too. What they have mapped
        of a GPU is let go once a push comes from elsewhere.

        memory: of the slot. writable: makes it that for this process's CPUs as well, which a device writes without once
        the slot is registered. jobs: as `can_copy` accepts them, in the order of `in_order`. ranks: their sockets, and
        the slot's write epoch; for a version that is here whole, used if it lies on one device. ahead: have ranks copy
        first, the version may go live from there. Raises what Reporter.turn raises, ValueError for an impossible copy,
        RuntimeError from CUDA.
        """
        devices = dict.fromkeys(source.on_gpu.device for source, _ in jobs)
        self.keep_only(devices if len(devices) == 1 else ())
        if len(devices) == 1:
            (device,) = devices
            return self._stage_from(device, slot, memory, writable, jobs, reporter, ranks, ahead=ahead)
        self._foreseen = None
        for device in devices:
            mine = [job for job in jobs if job[0].on_gpu.device == device]
            self._stage_from(device, slot, memory, writable, mine, reporter)
        return 0

    def foresee(self, jobs: Sequence[Job]) -> None:
        """Begin to hash what is about to be staged, if it lies where it lay; the store looks for a place yet. Raises
        RuntimeError from CUDA.
        """
        self._foreseen = None
        if self._before is not None and self._before.holds(jobs):
            device = jobs[0][0].on_gpu.device
            with self._torch.cuda.device(device):
                self._foreseen = _Foreseen(jobs[0][0].part, self._before, self._hash(device, self._before))

    def settle(self) -> None:
        """Wait for what was begun of a push that came to nothing: what it reads may be freed then, or written to. A
        device that has failed is for its next user to find.
        """
        foreseen, self._foreseen = self._foreseen, None
        with contextlib.suppress(RuntimeError):
            for some in foreseen.hashed if foreseen is not None else ():
                some.through.synchronize()

    def keep_only(self, devices: Collection[Any] = ()) -> None:
        """Have ranks unmap what they copied from on all other devices: nothing of the next push lies there."""
        for device in set(self._offers).difference(devices):
            self._offers[device].close()

    def unshare(self) -> None:
        """Have ranks unmap what they copy from, and wait until they have."""
        for offers in self._offers.values():
            offers.close(wait=True)

    def close(self) -> None:
        """Unregister; call before the mappings go. Idempotent."""
        self.keep_only()
        self._slots.close()

    def _stage_from(
        self,
        device: Any,
        slot: int,
        memory: memoryview,
        writable: Callable[[], AbstractContextManager[object]],
        jobs: Sequence[Job],
        reporter: Reporter,
        ranks: tuple[Sequence[str], int] = ((), 0),
        *,
        ahead: bool = False,
    ) -> int:
        """The same of jobs whose tensors lie on one device."""
        torch, (copying, summing, _) = self._torch, self._streams_of(device)
        with torch.cuda.device(device), torch.no_grad(), contextlib.ExitStack() as held:
            lying, hashed = self._look(device, jobs)
            first = lying.batches[0][0] if lying is not None else _first_of(jobs)
            place = held.enter_context(self._slots.place(slot, memory, writable, device, copying, first))
            held.callback(summing.synchronize)
            held.callback(copying.synchronize)
            copying.wait_stream(torch.cuda.current_stream(device))
            offers = self._offers.setdefault(device, Offers(self._driver)) if ranks[0] else None

            def show() -> None:
                if offers is not None:
                    offers.begin(ranks[0], slot, ranks[1])
                    held.callback(offers.end)

            if lying is None or (ahead and offers is not None):
                show()
                known = self._offer(device, jobs, lying, hashed, reporter, offers, ahead=ahead) if offers else None
                if lying is None:
                    self._copy_made(device, place, jobs, reporter, known)
                else:
                    self._copy(place, lying, reporter, known)
            else:

                def begin() -> list[_Hashed]:
                    found = hashed or self._hash(device, lying)
                    show()
                    if offers is not None:
                        self._making_is_done(device)
                        offers.take(lying.runs, last=True, through=False)
                    return found

                self._copy(place, lying, reporter, None, begin, offers)
            return offers.taken() if offers is not None else 0

    def _look(self, device: Any, jobs: Sequence[Job]) -> tuple[Lying | None, list[_Hashed]]:
        """Where the tensors lie, if nothing of them has to be made; and what is hashed of them already."""
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is not None and foreseen.of is jobs[0][0].part:
            return foreseen.lying, foreseen.hashed
        if self._before is None or not self._before.holds(jobs):
            digester = self._digester(device)
            self._before = None if digester.sums else Lying.of(self._torch, jobs)
        return self._before, []

    def _copy(
        self,
        place: Place,
        lying: Lying,
        reporter: Reporter,
        known: dict[int, int] | None,
        begin: Callable[[], list[_Hashed]] = list,
        offers: Offers | None = None,
    ) -> None:
        """Copy what lies as it is to be. known: the digest of each copy; else `begin`, which is called once the first
        copies are on their way, says who computes them. offers: to ranks that have been asked to copy by then.
        """
        waiting: deque[Batch] = deque()
        at, hashed = 0, deque[_Hashed]()
        for pieces in lying.batches:
            batch = Batch(pieces)
            batch.send(place)
            if known is not None:
                batch.proven_as(known)
            else:
                hashed = hashed or deque(begin())
                if at >= hashed[0].stop:
                    hashed.popleft()
                batch.proven_by(hashed[0].digesting, at - hashed[0].first, hashed[0].through)
            at += len(pieces)
            waiting.append(batch)
            waiting[0].tell(reporter)  # ranks begin to copy: starting all of them takes milliseconds
            if offers is not None:
                reporter.taken = reporter.taken or offers.copied_from()
            if known is not None:
                reporter.turn()  # the version may be live by now
            while len(waiting) > AHEAD and waiting[0].done():
                _report(waiting, reporter)
        while waiting:
            _report(waiting, reporter)

    def _copy_made(
        self, device: Any, place: Place, jobs: Sequence[Job], reporter: Reporter, known: dict[int, int] | None
    ) -> None:
        """Copy what has to be made first, some of it. known: the digest of each copy, if they need not be computed."""
        (copying, summing, _), digester = self._streams_of(device), self._digester(device)
        summing.wait_stream(self._torch.cuda.current_stream(device))
        waiting: deque[Batch] = deque()
        started: list[Batch] = []  # and not hashed yet
        begun = False  # the store begins to check when it has the first digests
        for some in batches(jobs):
            batch = Batch.made_of(self._torch, copying, some)
            batch.send(place)
            waiting.append(batch)
            started.append(batch)
            waiting[0].tell(reporter)
            if known is not None:
                reporter.turn()
            much = sum(one.nbytes for one in started) >= TOGETHER_BYTES
            first = not begun and len(waiting) == AHEAD
            if first or much or sum(one.made for one in started) >= MADE_BYTES // 2:
                self._prove(started, summing, digester, known)
                started.clear()
                begun = True
            while (len(waiting) > AHEAD and waiting[0].done()) or sum(one.made for one in waiting) > MADE_BYTES:
                _report(waiting, reporter)
        self._prove(started, summing, digester, known)
        while waiting:
            _report(waiting, reporter)

    def _offer(
        self,
        device: Any,
        jobs: Sequence[Job],
        lying: Lying | None,
        hashed: list[_Hashed],
        reporter: Reporter,
        offers: Offers,
        *,
        ahead: bool,
    ) -> dict[int, int] | None:
        """Have ranks copy everything before the host does. Returns the digest of each copy; None: they are page sums.
        hashed: what is hashed already of what lies as it is to be.
        """
        if lying is not None:
            hashed = hashed or self._hash(device, lying)
            self._making_is_done(device)
            offers.take(lying.runs, last=True, through=False)
            found: dict[int, int] = {}
            for some in hashed:
                some.through.synchronize()
                digests = some.digesting.digests(0, some.stop - some.first)
                found |= dict(zip(lying.numbers[some.first : some.stop], digests, strict=True))
            offers.taken()
        else:
            found = self._offer_made(device, jobs, offers)
        if ahead and offers.whole and found:
            reporter.go_ahead(list(found.items()))
            reporter.pause_for_live(COMMIT_S)
        return found or None

    def _offer_made(self, device: Any, jobs: Sequence[Job], offers: Offers) -> dict[int, int]:
        """The same of what has to be made, in parts that are kept until ranks have copied them. Returns nothing where
        digests are page sums, which those of parameters are not made of.
        """
        torch, digester = self._torch, self._digester(device)
        _, summing, making = self._streams_of(device)
        for stream in summing, making:
            stream.wait_stream(torch.cuda.current_stream(device))
        pieces = [(number, source, copy) for source, copies in jobs for number, copy in copies]
        found: dict[int, int] = {}
        done = 0
        try:
            while done < len(pieces):
                with torch.cuda.stream(making):
                    group = self._some(pieces[done:])
                numbers, tensors = [number for number, _, _ in group], [tensor for _, tensor, _ in group]
                done += len(group)
                if not digester.sums:
                    summing.wait_stream(making)
                    with torch.cuda.stream(summing):
                        digesting = digester.start(tensors, summing)
                making.synchronize()
                placed = [piece_of(number, tensor, copy) for number, tensor, copy in group]
                runs = [Run(piece.start, piece.address, piece.nbytes) for piece in placed]
                offers.take(runs, last=done == len(pieces), through=True)
                summing.synchronize()
                if not digester.sums:
                    found |= dict(zip(numbers, digesting.digests(0, len(numbers)), strict=True))
                offers.taken()
        finally:
            summing.synchronize()
            making.synchronize()
        return found

    def _some(self, pieces: "Sequence[tuple[int, Source, Copy]]") -> "list[tuple[int, Any, Copy]]":
        """(number, contiguous tensor, copy) of the first ones: of all, unless much has to be made of them."""
        group, fresh = [], 0
        for number, source, copy in pieces:
            tensor = in_place(self._torch, source.on_gpu, copy)
            if tensor is None:
                tensor = made(self._torch, source.on_gpu, copy)
                fresh += nbytes_of(copy)
            group.append((number, tensor, copy))
            if fresh >= MADE_BYTES:
                break
        return group

    def _hash(self, device: Any, lying: Lying) -> list[_Hashed]:
        """Begin to hash all of it."""
        summing, digester, found, at = self._streams_of(device)[1], self._digester(device), list[_Hashed](), 0
        assert not isinstance(digester, CudaSums)
        summing.wait_stream(self._torch.cuda.current_stream(device))
        with self._torch.cuda.stream(summing):
            for spans in lying.together:
                digesting = digester.start_at(spans, summing)
                found.append(_Hashed(at, at + len(spans), digesting, summing.record_event()))
                at += len(spans)
        return found

    def _prove(
        self, some: Collection[Batch], summing: Any, digester: CudaHash | CudaSums, known: dict[int, int] | None
    ) -> None:
        """Start what else the GPU does with these batches, which are on their way to the host."""
        if not some:
            return
        if known is not None:
            for batch in some:
                batch.proven_as(known)
            return
        with self._torch.cuda.stream(summing):
            for batch in some:
                if batch.ready is not None:
                    summing.wait_event(batch.ready)
            digesting = digester.start([tensor for batch in some for tensor in batch.tensors], summing)
            through, first = summing.record_event(), 0
            for batch in some:
                batch.proven_by(digesting, first, through, sums=digester.sums)
                first += len(batch.tensors)

    def _making_is_done(self, device: Any) -> None:
        """Wait for the kernels that make the weights: another process is to read them."""
        making = self._streams_of(device)[2]
        making.wait_stream(self._torch.cuda.current_stream(device))
        making.synchronize()

    def _streams_of(self, device: Any) -> tuple[Any, Any, Any]:
        """For copies to the host, for digests, and for what has to be made for ranks."""
        if device not in self._streams:
            stream = self._torch.cuda.Stream
            self._streams[device] = stream(device), stream(device), stream(device)
        return self._streams[device]

    def _digester(self, device: Any) -> CudaHash | CudaSums:
        """What computes digests on the current device."""
        if device not in self._digesters:
            try:
                self._digesters[device] = CudaHash(self._torch)
            except Exception as error:  # whatever a torch without a compiler, or without this entry, raises
                log.warning("no hash kernel, pushes are proved by page sums and checked at half the speed: %s", error)
                self._digesters[device] = CudaSums(self._torch)
        return self._digesters[device]


def _report(waiting: deque[Batch], reporter: Reporter) -> None:
    """Wait for the first of these, and tell the store."""
    waiting[0].wait(reporter)
    waiting.popleft().report(reporter)


def _first_of(jobs: Sequence[Job]) -> Piece:
    """Where the first of them goes."""
    number, copy = jobs[0][1][0]
    return Piece(number, 0, start_of(copy), nbytes_of(copy))

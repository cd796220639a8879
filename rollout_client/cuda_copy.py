"""CUDA tensors into the staged slot by DMA: no copy by a CPU, and a digest that starts in the GPU's memory.

 1. The slot's mapping is registered with the driver once (cudaHostRegister); copies into it then run at the
    link's full speed and beside everything else, whether this process's CPUs may write there or not. A slot whose
    memory the store gave back and took anew since then would receive nothing: the driver still holds the old pages.
    So each push first sends a few random bytes down the same way, and registers anew if they do not arrive.
 2. Two streams of our own wait for the caller's current stream: copies start after the kernels that make the
    weights and before any that follow.
 3. Casts and transposed or strided pieces are made dense on the GPU, on the copy stream, batch by batch.
 4. The other stream hashes the same tensors (cuda_hash.py), many batches of them at once: where a rank computes on
    the same GPU, that divides its time between the two processes, and each launch, however small, takes a slice of
    about a millisecond from its steps. Batch by batch, as copies and digests are done, the digests go to the store,
    which computes its own from the slot. Batches are small, so the store is never far behind the copies.
 5. Ranks on GPUs of this host may copy every piece as well, from the trainer's memory into their own (offers.py), while
    the copies to the host are under way.
 6. A version that may go live from ranks' memory (`Placement.ahead`) is copied there first, hashed meanwhile, and goes
    to the arena once the store has been asked to make it live. So is one of which pieces have to be made: they are kept
    until ranks have copied them.
 7. All streams are idle before the slot's writer lock is let go, whatever happened.

torch is never imported here: whoever hands in its tensors has done so.
"""

import contextlib
import ctypes
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any

import numpy as np

from rollout_client.cuda_hash import CudaHash, CudaSums, Hashing, Summing
from rollout_client.offers import Offers
from rollout_client.own_memory import Run
from rollout_client.protocol import Copy
from rollout_client.tensors import Source
from rollout_client.transport import Reporter

log = logging.getLogger(__name__)

BATCH_BYTES = 32 << 20, 64 << 20
"""A push is cut into about this many bytes, at least and at most: small enough for the store to check early."""
BATCHES = 32
LAST_BYTES = 8 << 20
"""Batches become smaller towards the end, down to this: what is left to be done after the last copy is that batch's."""
TOGETHER_BYTES = 2 << 30
"""Batches of about so much are hashed in one launch."""
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
MARKS, MARK_BYTES = 64, 16
"""Random marks that are sent to the device at once, and bytes of each."""
PORTABLE = 0x01
"""cudaHostRegisterPortable: pinned for every device of this process."""
PART_BYTES = 16 << 20
"""A larger tensor is copied in parts of this size, each of which the store is told of: a rank that copies what has
arrived (ADR 21) would else begin with a model's largest tensor when all of it is there, and end as much later.
"""
Job = tuple[Source, list[tuple[int, Copy]]]


def can_copy(copies: Sequence[tuple[int, Copy]]) -> bool:
    """Whether a CUDA tensor's copies land in one piece each; any other tensor goes by the CPU."""
    return all(dense(copy.shape, copy.dst_strides) for _, copy in copies)


def turn(copies: Sequence[tuple[int, Copy]]) -> tuple[bool, int]:
    """Where a tensor comes: large ones first, which the store checks longest, and all as they lie in the slot, so that
    what has arrived there lies in one piece and a rank takes it in one copy.
    """
    small = sum(_nbytes(copy) for _, copy in copies) <= PART_BYTES
    return small, min(copy.dst_offset * _itemsize(copy.dst_dtype) for _, copy in copies)


def dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements in C order are neighbours in memory."""
    step = 1
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and stride != step:
            return False
        step *= n
    return True


class CudaCopier:
    """Keeps slots registered from push to push. Used by one thread at a time."""

    def __init__(self) -> None:
        self._torch: Any = sys.modules["torch"]
        self._pinned: dict[int, int] = {}  # slot -> address
        self._refused: set[int] = set()
        self._streams: dict[Any, tuple[Any, Any, Any]] = {}
        self._digesters: dict[Any, CudaHash | CudaSums] = {}
        self._marks: dict[Any, _Marks] = {}
        self._driver: Any = ctypes.CDLL("libcuda.so.1")
        self._offers: dict[Any, Offers] = {}  # by device
        self._as_before: _AsTheyLie | None = None
        self._foreseen: tuple[object, Hashing] | None = None  # of which push, and what was begun of it
        copy = self._driver.cuMemcpyDtoHAsync_v2
        copy.argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p

    def pin(self, slot: int, memory: memoryview, device: Any) -> None:
        """Register the slot's mapping. A driver that refuses is told of once; copies then work, but slower."""
        if slot in self._pinned or slot in self._refused:
            return
        started = time.monotonic()
        address = np.frombuffer(memory, np.uint8).ctypes.data
        code = int(self._torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, PORTABLE))
        if code:
            self._refused.add(slot)
            self._forget_error(device)
            log.warning(
                "cannot pin weight slot %d (CUDA error %d): copies into it will be several times slower", *(slot, code)
            )
            return
        self._pinned[slot] = address
        log.info("pinned weight slot %d, %.2f GB in %.2f s", slot, memory.nbytes / 1e9, time.monotonic() - started)

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
        of a GPU is let go once a push comes from elsewhere, which one without jobs does.

        memory: of the slot. writable: makes it that for this process's CPUs as well, which a device writes without once
        the slot is registered. jobs: as `can_copy` accepts them, in the order of `turn`. ranks: their sockets, and the
        slot's write epoch; for a version that is here whole, used if it lies on one device. ahead: have ranks copy
        first, the version may go live from there. Raises what Reporter.turn raises, ValueError for an impossible copy,
        RuntimeError from CUDA.
        """
        devices = dict.fromkeys(source.on_gpu.device for source, _ in jobs)
        offers, known = None, None
        for other in self._offers if len(devices) != 1 else set(self._offers).difference(devices):
            self._offers[other].close()  # nothing of this push can be copied from what is mapped of it
        if ranks[0] and len(devices) == 1:
            (device,) = devices
            offers = self._offers.setdefault(device, Offers(self._driver))
        with contextlib.ExitStack() as held:
            if offers is not None:
                held.enter_context(self._torch.cuda.device(device))
                offers.begin(ranks[0], slot, ranks[1])
                held.callback(offers.end)
                known = self._offer(device, jobs, reporter, offers, ahead=ahead)
            for device in devices:
                mine = [job for job in jobs if job[0].on_gpu.device == device]
                self._stage_from(device, slot, memory, writable, mine, reporter, known)
            return offers.taken() if offers is not None else 0

    def foresee(self, jobs: Sequence[Job]) -> None:
        """Begin to hash what is about to be staged for ranks, if it lies where it lay; the store looks for a place yet.
        Raises RuntimeError from CUDA.
        """
        known, self._foreseen = self._as_before, None
        if known is None or not known.holds(jobs):
            return
        device = jobs[0][0].on_gpu.device
        digester, summing = self._digester(device), self._streams_of(device)[1]
        if not isinstance(digester, CudaSums):
            summing.wait_stream(self._torch.cuda.current_stream(device))
            with self._torch.cuda.device(device), self._torch.cuda.stream(summing):
                self._foreseen = jobs[0][0].part, digester.start_at(known.spans, summing)

    def unshare(self) -> None:
        """Have ranks unmap what they copy from, and wait until they have."""
        for offers in self._offers.values():
            offers.close(wait=True)

    def close(self) -> None:
        """Unregister; call before the mappings go. Idempotent."""
        for offers in self._offers.values():
            offers.close()
        for slot in list(self._pinned):
            self._unpin(slot)
        self._refused.clear()

    def _stage_from(
        self,
        device: Any,
        slot: int,
        memory: memoryview,
        writable: Callable[[], AbstractContextManager[object]],
        jobs: list[Job],
        reporter: Reporter,
        known: dict[int, int] | None,
    ) -> None:
        """Copy the tensors of one device into the slot."""
        with self._torch.cuda.device(device), self._torch.no_grad(), contextlib.ExitStack() as held:
            if slot in self._pinned and not self._arrives(memory, device, jobs[0][1][0][1]):
                log.info("weight slot %d has new memory: pinning it again", slot)
                self._unpin(slot)
            if slot not in self._pinned:
                held.enter_context(writable())
                self.pin(slot, memory, device)
            self._stage(memory, device, jobs, reporter, known)

    def _stage(
        self,
        memory: memoryview,
        device: Any,
        jobs: list[Job],
        reporter: Reporter,
        known: dict[int, int] | None = None,
    ) -> None:
        """known: the digest of each copy, if they need not be computed."""
        torch = self._torch
        copying, summing, _ = self._streams_of(device)
        for stream in copying, summing:
            stream.wait_stream(torch.cuda.current_stream(device))
        try:
            digester, place = self._digester(device), _Place(memory, self._driver, copying)
            waiting: deque[_Batch] = deque()
            started: list[_Batch] = []  # and not hashed yet
            digested = 0  # batches that are
            coming, hashed = deque(_batches(jobs)), deque[_Batch]()  # hashed: are being, and not on their way yet
            while coming or hashed:
                batch = hashed.popleft() if hashed else _Batch(torch, copying, coming.popleft())
                batch.send(place)
                waiting.append(batch)
                started += [] if batch.proven else [batch]
                waiting[0].tell(reporter)  # ranks begin to copy: starting all of them takes milliseconds
                if known is not None:
                    reporter.turn()  # the version may be live by now
                first = len(waiting) == AHEAD and digested == 0  # the store begins to check when it has these digests
                much = sum(one.nbytes for one in started) >= TOGETHER_BYTES
                if first or much or sum(one.made for one in started) >= MADE_BYTES // 2:
                    self._prove(started, summing, digester, known)
                    digested += len(started)
                    started.clear()
                if digested and not started and not hashed and not batch.made and known is None:
                    hashed += self._next(coming, copying)
                    self._prove([one for one in hashed if not one.made], summing, digester, known)
                while (len(waiting) > AHEAD and waiting[0].done()) or sum(one.made for one in waiting) > MADE_BYTES:
                    self._report(waiting, reporter)
            self._prove(started, summing, digester, known)
            while waiting:
                self._report(waiting, reporter)
        finally:
            copying.synchronize()
            summing.synchronize()

    def _next(self, coming: "deque[list[Job]]", copying: Any) -> "list[_Batch]":
        """Batches to be hashed in one launch before they are copied: beside a rank that computes, that waits for the
        GPU's turns longer than copying takes. Up to the first of which something has to be made.
        """
        found: list[_Batch] = []
        while coming and not (found and found[-1].made) and sum(one.nbytes for one in found) < TOGETHER_BYTES:
            found.append(_Batch(self._torch, copying, coming.popleft()))
        return found

    def _report(self, waiting: "deque[_Batch]", reporter: Reporter) -> None:
        """Wait for the first of these, and tell the store."""
        waiting[0].wait(reporter)
        waiting.popleft().report(reporter)

    def _offer(
        self, device: Any, jobs: Sequence[Job], reporter: Reporter, offers: Offers, *, ahead: bool
    ) -> dict[int, int] | None:
        """Have ranks copy everything. Returns the digest of each copy if it was waited for: if the version is to go
        live from there, or has to be made for it; None: the answers are outstanding, or digests are page sums.
        """
        torch, digester = self._torch, self._digester(device)
        found: dict[int, int] = {}
        _, summing, making = self._streams_of(device)
        for stream in summing, making:
            stream.wait_stream(torch.cuda.current_stream(device))
        known = self._as_before if self._as_before is not None and self._as_before.holds(jobs) else None
        self._as_before, (whose, foreseen) = known, self._foreseen or (None, None)
        self._foreseen = None
        pieces = [] if known else [(number, source, copy) for source, copies in jobs for number, copy in copies]
        done, last = 0, False
        try:
            while not last:
                if known is not None:  # as a rule: nothing is to be made, and all lies where it was
                    numbers, runs, tensors, made, last = known.numbers, known.runs, [], 0, True
                else:
                    with torch.no_grad(), torch.cuda.stream(making):
                        group, made = self._some(pieces[done:])
                    numbers, tensors = [number for number, _, _ in group], [tensor for _, tensor, _ in group]
                    runs = [_run(tensor, copy) for _, tensor, copy in group]
                    last = done + len(group) == len(pieces)
                    if not made and not done and last:
                        self._as_before = _AsTheyLie.of(jobs, numbers, runs)
                    done += len(group)
                wait = ahead or made > 0 or not last or bool(found)
                if wait and not digester.sums:
                    summing.wait_stream(making)  # for those that had to be made
                    with torch.cuda.stream(summing):
                        if known is None or isinstance(digester, CudaSums):
                            digesting = digester.start(tensors, summing)
                        elif foreseen is not None and whose is jobs[0][0].part:
                            digesting = foreseen
                        else:
                            digesting = digester.start_at(known.spans, summing)
                making.synchronize()
                offers.take(runs, last=last, through=made > 0 or not last)
                if not wait:
                    return None
                summing.synchronize()
                if not digester.sums:  # those of parameters are needed, and page sums are none
                    found |= dict(zip(numbers, digesting.digests(0, len(numbers)), strict=True))
                offers.taken()
            if ahead and offers.whole and found:
                reporter.go_ahead(list(found.items()))
                reporter.pause_for_live(COMMIT_S)
        finally:
            summing.synchronize()
            making.synchronize()
        return found or None

    def _some(self, pieces: "Sequence[tuple[int, Source, Copy]]") -> "tuple[list[tuple[int, Any, Copy]], int]":
        """(number, contiguous tensor, copy) of the first ones: of all, unless much has to be made of them; and how many
        bytes that is.
        """
        group, made = [], 0
        for number, source, copy in pieces:
            tensor, new = _dense(self._torch, source.on_gpu, copy)
            group.append((number, tensor, copy))
            made += new * _nbytes(copy)
            if made >= MADE_BYTES:
                break
        return group, made

    def _prove(
        self,
        batches: "Collection[_Batch]",
        summing: Any,
        digester: CudaHash | CudaSums,
        known: dict[int, int] | None,
    ) -> None:
        """Start what else the GPU does with these batches, which are on their way to the host."""
        if not batches:
            return
        if known is not None:
            for batch in batches:
                batch.proven_as(known)
            return
        with self._torch.cuda.stream(summing):
            for batch in batches:
                if batch.ready is not None:
                    summing.wait_event(batch.ready)
            digesting = digester.start([tensor for batch in batches for tensor in batch.tensors], summing)
            through, first = summing.record_event(), 0
            for batch in batches:
                batch.proven_by(digesting, first, through, sums=digester.sums)
                first += len(batch.tensors)

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

    def _arrives(self, memory: memoryview, device: Any, copy: Copy) -> bool:
        """Whether what the device writes into the slot is seen by this process, and so by all others.

        copy: where it is tried; its place is this push's to fill.
        """
        start, nbytes = copy.dst_offset * _itemsize(copy.dst_dtype), min(_nbytes(copy), MARK_BYTES)
        stream = self._streams_of(device)[0]
        if device not in self._marks:
            self._marks[device] = _Marks(self._torch, device)
        mark, sent = self._marks[device].next()
        _Place(memory, self._driver, stream).send(sent, copy, nbytes)
        stream.synchronize()
        return bytes(memory[start : start + nbytes]) == mark[:nbytes]

    def _unpin(self, slot: int) -> None:
        code = int(self._torch.cuda.cudart().cudaHostUnregister(self._pinned.pop(slot)))
        if code:
            log.warning("cannot unpin weight slot %d: CUDA error %d", slot, code)

    def _forget_error(self, device: Any) -> None:
        """The runtime remembers a failed call and lets torch's next kernel raise it: let it be one of ours."""
        with contextlib.suppress(RuntimeError):
            self._torch.zeros(1, device=device)


class _AsTheyLie:
    """Where the tensors of a push lie of which nothing had to be made. It keeps none of them."""

    def __init__(self, jobs: Sequence[Job], numbers: list[int], runs: list[Run]) -> None:
        self.numbers, self.runs = numbers, runs
        self.spans = tuple((run.address, run.nbytes) for run in runs)
        self._copies = [copies for _, copies in jobs]
        self._tensors = [_lies(source.on_gpu) for source, _ in jobs]

    @classmethod
    def of(cls, jobs: Sequence[Job], numbers: list[int], runs: list[Run]) -> "_AsTheyLie | None":
        """None for what does not lie on a word's boundary, and is hashed elsewhere."""
        return None if any(run.address % 8 for run in runs) else cls(jobs, numbers, runs)

    def holds(self, jobs: Sequence[Job]) -> bool:
        """Whether these are to be copied to the same places, and lie where those lay."""
        return (
            len(jobs) == len(self._copies)
            and all(copies is known for (_, copies), known in zip(jobs, self._copies, strict=True))
            and [_lies(source.on_gpu) for source, _ in jobs] == self._tensors
        )


def _lies(tensor: Any) -> tuple[int, Any, bool]:
    return tensor.data_ptr(), tensor.dtype, tensor.is_contiguous()


class _Marks:
    """Random bytes in the device's memory, for one push each: to send them there takes as long as a turn on the GPU."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch, self._device, self._left = torch, device, 0

    def next(self) -> tuple[bytes, Any]:
        """Bytes that were not used before, and where they lie on the device."""
        if not self._left:
            self._bytes, self._left = os.urandom(MARKS * MARK_BYTES), MARKS
            self._there = self._torch.frombuffer(bytearray(self._bytes), dtype=self._torch.uint8).to(self._device)
            self._torch.cuda.current_stream(self._device).synchronize()
        self._left -= 1
        part = slice(MARK_BYTES * self._left, MARK_BYTES * (self._left + 1))
        return self._bytes[part], self._there[part]


class _Place:
    """The slot as the driver writes to it."""

    def __init__(self, memory: memoryview, driver: Any, stream: Any) -> None:
        self.stream = stream
        self._dma, self._bytes, self._queue = driver.cuMemcpyDtoHAsync_v2, memory.nbytes, stream.cuda_stream
        self._start = np.frombuffer(memory, np.uint8).ctypes.data

    def send(self, piece: Any, copy: Copy, nbytes: int, offset: int = 0) -> None:
        """Queue the copy of a contiguous CUDA tensor's bytes from `offset` on. Raises ValueError, RuntimeError from
        the driver.
        """
        start = copy.dst_offset * _itemsize(copy.dst_dtype) + offset
        if start < 0 or start + nbytes > self._bytes:
            raise ValueError(f"{nbytes} bytes at {start} leave a slot of {self._bytes}")
        code = self._dma(self._start + start, piece.data_ptr() + offset, nbytes, self._queue)
        if code:
            raise RuntimeError(f"cuMemcpyDtoHAsync failed: CUDA error {code}")


class _Batch:
    """Some jobs that are copied together; `send` starts that. What is read stays alive with it.

    tensors: what is copied, contiguous. ready: when those that had to be made are there; None: there are none such.
    """

    def __init__(self, torch: Any, copying: Any, jobs: Sequence[Job]) -> None:
        """copying: the stream that makes what has to be made, and is to copy."""
        self._torch = torch
        self._digesting: Hashing | Summing | None = None
        self._known: list[int] | None = None
        self._numbers: list[tuple[int, int]] = []  # copy, bytes
        self._parts: deque[tuple[Any, int, int, int]] = deque()  # event, copy, offset in it, bytes: of large tensors
        self.tensors: list[Any] = []
        self._places: list[Copy] = []
        self._events: list[Any] = []
        self.made = 0  # bytes of those that had to be made
        with torch.cuda.stream(copying):
            for source, copies in jobs:
                for number, copy in copies:
                    piece, new = _dense(torch, source.on_gpu, copy)
                    self.made += new * _nbytes(copy)
                    self.tensors.append(piece)
                    self._places.append(copy)
                    self._numbers.append((number, _nbytes(copy)))
            self.ready = copying.record_event() if self.made else None

    def send(self, place: _Place) -> None:
        """Start its copies to the host."""
        with self._torch.cuda.stream(place.stream):
            for (number, nbytes), tensor, copy in zip(self._numbers, self.tensors, self._places, strict=True):
                self._send(place, number, tensor, copy, nbytes)
            self._events.append(place.stream.record_event())

    @property
    def proven(self) -> bool:
        """Its digests are known, or on their way."""
        return self._digesting is not None or self._known is not None

    @property
    def nbytes(self) -> int:
        """Of all its tensors."""
        return sum(nbytes for _, nbytes in self._numbers)

    def proven_by(self, digesting: Hashing | Summing, first: int, through: Any, *, sums: bool) -> None:
        """Its tensors are being hashed, from the `first` of these on, until the event `through`."""
        self._digesting, self._first, self._sums = digesting, first, sums
        self._events.append(through)

    def proven_as(self, known: dict[int, int]) -> None:
        """The digests of its copies are known."""
        self._known, self._sums = [known[number] for number, _ in self._numbers], False

    def done(self) -> bool:
        """Whether everything of it has arrived."""
        return self.proven and all(event.query() for event in self._events)

    def tell(self, reporter: Reporter) -> None:
        """Tell the store which parts of large tensors have arrived since it was told last."""
        told = len(self._parts)
        while self._parts and self._parts[0][0].query():
            reporter.arrived(*self._parts.popleft()[1:])
        if len(self._parts) < told:
            reporter.flush()

    def wait(self, reporter: Reporter) -> None:
        """Wait until everything of the batch has arrived. The store hears of parts meanwhile."""
        while self._parts:
            self._parts[0][0].synchronize()
            self.tell(reporter)
        for event in self._events:
            event.synchronize()

    def report(self, reporter: Reporter) -> None:
        """Once it is done: tell the store, and hear what it has to say."""
        if self._known is not None:
            digests = self._known
        else:
            assert self._digesting is not None
            digests = self._digesting.digests(self._first, self._first + len(self._numbers))
        for (number, nbytes), digest in zip(self._numbers, digests, strict=True):
            reporter.moved(nbytes)
            reporter.written(number, digest, nbytes, sums=self._sums)
        reporter.flush()
        reporter.turn()

    def _send(self, place: _Place, number: int, tensor: Any, copy: Copy, nbytes: int) -> None:
        """Queue the copy into the slot; a large one part by part."""
        for offset in range(0, nbytes, PART_BYTES):
            size = min(PART_BYTES, nbytes - offset)
            place.send(tensor, copy, size, offset)
            if nbytes > PART_BYTES:
                self._parts.append((place.stream.record_event(), number, offset, size))


def _dense(torch: Any, whole: Any, copy: Copy) -> tuple[Any, bool]:
    """What the copy takes, contiguous, in the slot's dtype and the copy's C order; and whether it had to be made,
    or is the tensor or a view of it.
    """
    dtype = getattr(torch, copy.dst_dtype)
    made = not whole.is_contiguous()
    as_it_is = whole.dtype == dtype and (copy.shape, copy.src_offset, copy.src_strides) == (
        (whole.numel(),),
        0,
        (1,),
    )
    if as_it_is and not made:
        return whole, False
    flat = (whole.contiguous() if made else whole).detach().view(-1)
    last = copy.src_offset + sum((n - 1) * s for n, s in zip(copy.shape, copy.src_strides, strict=True))
    if min(copy.shape, default=1) < 1 or min(copy.src_offset, *copy.src_strides) < 0 or last >= flat.numel():
        raise ValueError(f"a copy of {copy.shape} at {copy.src_offset} leaves a tensor of {flat.numel()}")
    if dense(copy.shape, copy.src_strides):
        piece = flat[copy.src_offset : last + 1]
    else:
        offset = flat.storage_offset() + copy.src_offset
        piece, made = flat.as_strided(copy.shape, copy.src_strides, offset).reshape(-1), True
    return (piece, made) if piece.dtype == dtype else (piece.to(dtype), True)


def _run(tensor: Any, copy: Copy) -> Run:
    """Where the bytes of a contiguous tensor belong."""
    return Run(copy.dst_offset * _itemsize(copy.dst_dtype), tensor.data_ptr(), _nbytes(copy))


def _batches(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    low, high = BATCH_BYTES
    left = sum(source.nbytes for source, _ in jobs)
    limit = min(max(left // BATCHES, low), high)
    batch: list[Job] = []
    size = 0
    for job in jobs:
        batch.append(job)
        size += job[0].nbytes
        if size >= min(limit, max(left // 2, LAST_BYTES)):
            yield batch
            left -= size
            batch, size = [], 0
    if batch:
        yield batch


def _nbytes(copy: Copy) -> int:
    return prod(copy.shape) * _itemsize(copy.dst_dtype)


def _itemsize(dtype: str) -> int:
    return 4 if dtype == "float32" else 2

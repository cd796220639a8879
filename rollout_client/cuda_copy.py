"""CUDA tensors into the staged slot by DMA: no copy by a CPU, and a digest that starts in the GPU's memory.

 1. The slot's mapping is registered with the driver once (cudaHostRegister); copies into it then run at the
    link's full speed and beside everything else. A slot whose memory the store gave back and took anew since
    then would receive nothing: the driver still holds the old pages. So each push first sends a few random
    bytes down the same way, and registers anew if they do not arrive.
 2. Two streams of our own wait for the caller's current stream: copies start after the kernels that make the
    weights and before any that follow.
 3. Casts and transposed or strided pieces are made dense on the GPU, on the copy stream, one at a time.
 4. The other stream adds up the pages of the same tensors (page_sums.py). Batch by batch, as copies and sums
    are done, the digests go to the store, which computes its own from the slot and xxh3 beside it.
 5. Both streams are idle before the slot's writer lock is let go, whatever happened.

torch is never imported here: whoever hands in its tensors has done so.
"""

import contextlib
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from rollout_client.page_sums import PAGE, digest_of_sums, pages
from rollout_client.protocol import Copy
from rollout_client.tensors import Source
from rollout_client.transport import Reporter

log = logging.getLogger(__name__)

BATCH_BYTES = 16 << 20, 256 << 20
"""A push is cut into about this many bytes, at least and at most: small enough for the store to check early."""
BATCHES = 16
PORTABLE = 0x01
"""cudaHostRegisterPortable: pinned for every device of this process."""
Job = tuple[Source, list[tuple[int, Copy]]]


def can_copy(source: Source, copies: Sequence[tuple[int, Copy]]) -> bool:
    """Whether it is a CUDA tensor whose copies land in one piece each; any other goes by the CPU."""
    return source.on_gpu is not None and all(dense(copy.shape, copy.dst_strides) for _, copy in copies)


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
        self._streams: dict[Any, tuple[Any, Any]] = {}
        self._host_sums: Any = None

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

    def stage(self, slot: int, memory: memoryview, jobs: Sequence[Job], reporter: Reporter) -> None:
        """Copy and report every job. jobs: largest first, as `can_copy` accepts them.

        Raises what Reporter.turn raises, ValueError for an impossible copy, RuntimeError from CUDA.
        """
        devices = dict.fromkeys(source.on_gpu.device for source, _ in jobs)
        for device in devices:
            mine = [job for job in jobs if job[0].on_gpu.device == device]
            with self._torch.cuda.device(device), self._torch.no_grad():
                self.pin(slot, memory, device)
                self._stage(slot, memory, device, mine, reporter)

    def close(self) -> None:
        """Unregister; call before the mappings go. Idempotent."""
        for slot in list(self._pinned):
            self._unpin(slot)
        self._refused.clear()
        self._host_sums = None

    def _stage(self, slot: int, memory: memoryview, device: Any, jobs: list[Job], reporter: Reporter) -> None:
        torch = self._torch
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        copying, summing = self._streams[device]
        for stream in copying, summing:
            stream.wait_stream(torch.cuda.current_stream(device))
        room = sum(pages(_nbytes(copy)) for _, copies in jobs for _, copy in copies)
        if self._host_sums is None or self._host_sums.numel() < room:
            self._host_sums = torch.empty(room, dtype=torch.int64, pin_memory=True)
        try:
            if slot in self._pinned and not self._arrives(memory, copying, device, jobs[0][1][0][1]):
                log.info("weight slot %d has new memory: pinning it again", slot)
                self._unpin(slot)
                self.pin(slot, memory, device)
            waiting: deque[_Batch] = deque()
            start = 0
            for batch in _batches(jobs):
                waiting.append(_Batch(torch, memory, device, copying, summing, self._host_sums[start:], batch))
                start += waiting[-1].pages
                while waiting and waiting[0].done():
                    waiting.popleft().report(reporter)
            while waiting:
                waiting[0].wait()
                waiting.popleft().report(reporter)
        finally:
            copying.synchronize()
            summing.synchronize()

    def _arrives(self, memory: memoryview, stream: Any, device: Any, copy: Copy) -> bool:
        """Whether what the device writes into the slot is seen by this process, and so by all others.

        copy: where it is tried; its place is this push's to fill.
        """
        size = _itemsize(copy.dst_dtype)
        place = memory[copy.dst_offset * size :][: min(_nbytes(copy), 16)]
        mark = os.urandom(len(place))
        with self._torch.cuda.stream(stream):
            sent = self._torch.frombuffer(bytearray(mark), dtype=self._torch.uint8).to(device)
            self._torch.frombuffer(place, dtype=self._torch.uint8).copy_(sent, non_blocking=True)
        stream.synchronize()
        return bytes(place) == mark

    def _unpin(self, slot: int) -> None:
        code = int(self._torch.cuda.cudart().cudaHostUnregister(self._pinned.pop(slot)))
        if code:
            log.warning("cannot unpin weight slot %d: CUDA error %d", slot, code)

    def _forget_error(self, device: Any) -> None:
        """The runtime remembers a failed call and lets torch's next kernel raise it: let it be one of ours."""
        with contextlib.suppress(RuntimeError):
            self._torch.zeros(1, device=device)


@dataclass(frozen=True)
class _Piece:
    number: int
    nbytes: int
    first: int  # of its sums


class _Batch:
    """Some jobs that are under way; making one starts it."""

    def __init__(
        self, torch: Any, memory: memoryview, device: Any, copying: Any, summing: Any, host: Any, jobs: list[Job]
    ) -> None:
        """host: pinned int64, room for this batch's sums at its start."""
        self._torch = torch
        self._pieces: list[_Piece] = []
        self._flats: dict[str, Any] = {}
        self._memory = memory
        tensors = []
        made = False
        self.pages = 0
        with torch.cuda.stream(copying):
            for source, copies in jobs:
                flat = source.on_gpu.detach()
                if not flat.is_contiguous():
                    flat, made = flat.contiguous(), True
                flat = flat.view(-1)
                for number, copy in copies:
                    piece = self._dense(flat, copy)
                    made = made or piece.data_ptr() != flat.data_ptr()
                    self._target(copy, piece.numel()).copy_(piece, non_blocking=True)
                    tensors.append(piece)
                    self._pieces.append(_Piece(number, _nbytes(copy), self.pages))
                    self.pages += pages(_nbytes(copy))
            self._copied = copying.record_event()
        with torch.cuda.stream(summing):
            if made:
                summing.wait_event(self._copied)
            sums = torch.empty(self.pages, dtype=torch.int64, device=device)
            for piece, tensor in zip(self._pieces, tensors, strict=True):
                self._add_up(tensor, sums[piece.first : piece.first + pages(piece.nbytes)])
                tensor.record_stream(summing)
            self._sums = host[: self.pages]
            self._sums.copy_(sums, non_blocking=True)
            self._summed = summing.record_event()

    def done(self) -> bool:
        """Whether everything of it has arrived."""
        return bool(self._copied.query() and self._summed.query())

    def wait(self) -> None:
        """Until it is done."""
        self._copied.synchronize()
        self._summed.synchronize()

    def report(self, reporter: Reporter) -> None:
        """Once it is done: tell the store, and hear what it has to say."""
        sums = self._sums.numpy()
        for piece in self._pieces:
            reporter.moved(piece.nbytes)
            digest = digest_of_sums(sums[piece.first : piece.first + pages(piece.nbytes)])
            reporter.written(piece.number, digest, piece.nbytes, sums=True)
        reporter.turn()

    def _dense(self, flat: Any, copy: Copy) -> Any:
        """[n] on the device in the slot's dtype, in the copy's C order. A view of `flat` where it can be."""
        dtype = getattr(self._torch, copy.dst_dtype)
        last = copy.src_offset + sum((n - 1) * s for n, s in zip(copy.shape, copy.src_strides, strict=True))
        if min(copy.shape, default=1) < 1 or min(copy.src_offset, *copy.src_strides) < 0 or last >= flat.numel():
            raise ValueError(f"a copy of {copy.shape} at {copy.src_offset} leaves a tensor of {flat.numel()}")
        if dense(copy.shape, copy.src_strides):
            piece = flat[copy.src_offset : last + 1]
        else:
            offset = flat.storage_offset() + copy.src_offset
            piece = flat.as_strided(copy.shape, copy.src_strides, offset).reshape(-1)
        return piece if piece.dtype == dtype else piece.to(dtype)

    def _target(self, copy: Copy, count: int) -> Any:
        """[count] of the slot."""
        flat = self._flats.get(copy.dst_dtype)
        if flat is None:
            flat = self._torch.frombuffer(self._memory, dtype=getattr(self._torch, copy.dst_dtype))
            self._flats[copy.dst_dtype] = flat
        if copy.dst_offset < 0 or copy.dst_offset + count > flat.numel():
            raise ValueError(f"{count} elements at {copy.dst_offset} leave a slot of {flat.numel()}")
        return flat[copy.dst_offset : copy.dst_offset + count]

    def _add_up(self, tensor: Any, sums: Any) -> None:
        torch = self._torch
        if tensor.data_ptr() % 8:
            tensor = tensor.clone()  # words must lie on their own boundary
        raw = tensor.view(torch.uint8)
        whole = raw.numel() // PAGE * PAGE
        if whole:
            torch.sum(raw[:whole].view(torch.int64).view(-1, PAGE // 8), dim=1, out=sums[: whole // PAGE])
        if whole == raw.numel():
            return
        rest = raw[whole:]
        if rest.numel() % 8:
            padded = torch.zeros(PAGE, dtype=torch.uint8, device=raw.device)
            padded[: rest.numel()] = rest
            rest = padded
        torch.sum(rest.view(torch.int64).view(1, -1), dim=1, out=sums[-1:])


def _batches(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    low, high = BATCH_BYTES
    limit = min(max(sum(source.nbytes for source, _ in jobs) // BATCHES, low), high)
    batch: list[Job] = []
    size = 0
    for job in jobs:
        batch.append(job)
        size += job[0].nbytes
        if size >= limit:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _nbytes(copy: Copy) -> int:
    return prod(copy.shape) * _itemsize(copy.dst_dtype)


def _itemsize(dtype: str) -> int:
    return 4 if dtype == "float32" else 2

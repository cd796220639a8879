"""A trainer's memory, mapped by a rank that copies from it (rollout_client/device_slots.py has the words).

Mapped once and kept from push to push, which is what makes a push take no longer than its copies. The rank only reads
there: nothing of the rank's is reachable by the trainer. What lies there may be anything at any time, also while it is
copied; what counts is the digest of the copy.

Who has memory mapped keeps it allocated: it outlives the trainer's free and the trainer's death, until it is unmapped.

Ranks that share a model map and unmap only where no sum is under way on their device (`Quiet`): such a call may wait
for all that a device does, and a sum waits for other ranks.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_client.device_slots import ROW, Segment
from worker.gpu.compiler import compiled, kernels
from worker.gpu.driver import U64, CudaError, Driver, Handle, Module, Pointer
from worker.gpu.weights import Run, parts_of

log = logging.getLogger(__name__)

Quiet = Callable[[], AbstractContextManager[object]]
"""Around calls of the driver that get or give back memory."""

Pieces = npt.NDArray[np.uint64]
"""[pieces, 3]: address of what is copied, where it goes in a device slot, bytes."""

_PIECE = 256 << 10
"""Bytes that one block of the kernel copies."""
_THREADS = 256
_ELEMENT = 2
"""Bytes of the smallest number, on whose boundary everything lies."""


class _Mapped(NamedTuple):
    """handle: of memory that came as a descriptor; None: it was opened by its own."""

    address: int
    nbytes: int
    handle: int | None


class TrainerMemory:
    """What one connection has shown, in the thread that serves it."""

    def __init__(self, driver: Driver, runs: Sequence[Run], quiet: Quiet = contextlib.nullcontext) -> None:
        """runs: how the arena's slot lies in a device slot of this rank."""
        self._driver, self._runs, self._quiet = driver, runs, quiet
        self._shown: dict[int, tuple[Segment, int | None]] = {}  # not mapped yet; and its descriptor
        self._mapped: dict[int, _Mapped] = {}
        self._rows: dict[int, bytes] = {}
        self._whole: set[int] = set()  # tables of which no more rows are to come
        self._pieces: dict[int, Pieces] = {}

    @property
    def mapped(self) -> bool:
        """Anything is."""
        return bool(self._mapped)

    def show(self, segments: Iterable[Segment], fds: list[int]) -> None:
        """Of what may be named from now on. fds: become this object's. Raises ValueError for what is shown wrongly."""
        left = list(fds)
        try:
            for one in segments:
                if one.id in self._shown or one.id in self._mapped or one.nbytes <= 0:
                    raise ValueError(f"segment {one.id} of {one.nbytes} bytes is shown twice, or is none")
                if not one.handle and not left:
                    raise ValueError(f"no descriptor came with segment {one.id}")
                self._shown[one.id] = one, None if one.handle else left.pop(0)
        finally:
            for fd in left:
                os.close(fd)

    def tell(self, table: int, rows: bytes, *, more: bool) -> None:
        """The rows of a table, or the next of these."""
        self._pieces.pop(table, None)
        self._rows[table] = (b"" if table in self._whole else self._rows.get(table, b"")) + rows
        self._whole.add(table)
        if more:
            self._whole.remove(table)

    def hide(self, segments: Iterable[int]) -> None:
        """Unmap these; no copy from there is under way."""
        self._pieces.clear()
        over = list(segments)
        with self._quiet() if self._mapped.keys() & over else contextlib.nullcontext():
            for one in over:
                self._close(one)

    def pieces(self, table: int) -> Pieces:
        """What this rank is to copy of a table, mapped. Raises ValueError for rows that name what was not shown or are
        not of whole elements, CudaError where it cannot be mapped.
        """
        if table not in self._whole:
            raise ValueError(f"table {table} was not told of")
        if table not in self._pieces:
            raw = self._rows[table]
            if len(raw) % (8 * ROW):
                raise ValueError("half a row")
            began, known = time.monotonic(), len(self._mapped)
            rows = np.frombuffer(raw, "<i8").reshape(-1, ROW).tolist()
            all_mapped = all(segment in self._mapped for _, _, segment, _ in rows)
            with contextlib.nullcontext() if all_mapped else self._quiet():
                self._pieces[table] = self._cut(rows)
            if fresh := len(self._mapped) - known:
                log.info("mapped %d allocations of a trainer in %.1f ms", fresh, 1e3 * (time.monotonic() - began))
        return self._pieces[table]

    def close(self) -> None:
        """Unmap everything; no copy from there is under way. Idempotent."""
        self.hide([*self._shown, *self._mapped])

    def _cut(self, rows: list[list[int]]) -> Pieces:
        found: list[tuple[int, int, int]] = []
        for start, nbytes, segment, offset in rows:
            if (start | nbytes | offset) % _ELEMENT:  # a kernel that reads across a word's boundary loses the device
                raise ValueError(f"{nbytes} bytes from {offset} to {start} are no whole elements")
            for target, skipped, size in parts_of(self._runs, start, nbytes):
                mapped = self._open(segment)
                if offset < 0 or nbytes <= 0 or offset + nbytes > mapped.nbytes:
                    raise ValueError(f"{nbytes} bytes at {offset} leave a segment of {mapped.nbytes}")
                source = mapped.address + offset + skipped
                found += [(source + at, target + at, min(_PIECE, size - at)) for at in range(0, size, _PIECE)]
        return np.array(found, np.uint64).reshape(-1, 3)

    def _open(self, segment: int) -> _Mapped:
        if segment in self._mapped:
            return self._mapped[segment]
        if segment not in self._shown:
            raise ValueError(f"segment {segment} was not shown")
        one, fd = self._shown[segment]
        if fd is None:
            address = self._driver.open_handle(one.handle)
            try:
                # Not as the trainer says: a read beyond its end loses the device, and the weights that are served.
                there = self._driver.room_at(address)
                if there < one.nbytes:
                    raise ValueError(f"segment {segment} has {there} bytes, and not {one.nbytes}")
            except (CudaError, ValueError):
                self._driver.close_handle(address)
                raise
            mapped = _Mapped(address, one.nbytes, None)
        else:  # the driver maps no more than there is
            handle = self._driver.adopt(fd)
            try:
                address = self._driver.reserve(one.nbytes)
                try:
                    self._driver.map(address, one.nbytes, handle)
                except CudaError:
                    self._driver.unreserve(address, one.nbytes)
                    raise
            except CudaError:
                self._driver.release(handle)
                raise
            os.close(fd)
            mapped = _Mapped(address, one.nbytes, handle)
        del self._shown[segment]
        self._mapped[segment] = mapped
        return mapped

    def _close(self, segment: int) -> None:
        _, fd = self._shown.pop(segment, (None, None))
        if fd is not None:
            os.close(fd)
        mapped = self._mapped.pop(segment, None)
        if mapped is None:
            return
        with contextlib.suppress(CudaError):  # a device that is lost has it unmapped
            if mapped.handle is None:
                self._driver.close_handle(mapped.address)
            else:
                self._driver.unmap(mapped.address, mapped.nbytes, mapped.handle)
                self._driver.unreserve(mapped.address, mapped.nbytes)


class Puller:
    """Copies pieces by a kernel: hundreds of copies, each of which the host would have to ask for, in one launch."""

    def __init__(self, driver: Driver, quiet: Quiet = contextlib.nullcontext) -> None:
        """Raises CudaError, OSError without NVRTC."""
        self._driver, self._quiet = driver, quiet
        self._module = Module(driver, compiled(kernels("pull"), {}, driver.capability))
        self._module.load("pull")  # its first launch may be where nothing can be loaded
        self._table = driver.pinned((0, 3), np.uint64)

    def memory(self, runs: Sequence[Run]) -> TrainerMemory:
        """For a trainer that has connected. runs: how the arena's slot lies in a device slot of this rank."""
        return TrainerMemory(self._driver, runs, self._quiet)

    def start(self, pieces: Pieces, slot: int, stream: Handle) -> None:
        """Begin to copy these into the slot that begins there; the last call's are through."""
        if not len(pieces):
            return
        if len(pieces) > len(self._table):
            with self._quiet():
                self._table = self._driver.pinned((2 * len(pieces), 3), np.uint64)
        self._table[: len(pieces)] = pieces
        arguments = Pointer(self._table.ctypes.data), U64(slot)
        self._module.launch("pull", (len(pieces),), _THREADS, stream, arguments)

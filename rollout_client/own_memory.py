"""Memory of this process on a GPU, by what another process can map it with.

An allocation of cudaMalloc, which torch's allocator cuts tensors from, has a handle (cuIpcGetMemHandle). Memory that
was mapped to addresses (torch's expandable segments) has a file descriptor for each mapping. Addresses come again after
memory was freed, with other memory behind them: what an address was found to be is believed only as long as the driver
gives the allocation there the same number.
"""

import ctypes
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rollout_client.device_memory import CudaCallFailed, call
from rollout_client.device_slots import ROW

_BUFFER_ID, _HAS_HANDLE, _MAPPING_BYTES, _MAPPING_BASE, _BLOCK_ID = 7, 10, 18, 19, 20  # CU_POINTER_ATTRIBUTE_*
_FILE_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class Run(NamedTuple):
    """Bytes at an address of this process that belong to `start` of the arena's slot."""

    start: int
    address: int
    nbytes: int


class Allocation(NamedTuple):
    """id: of this object, never used again. number: the driver's for it. handle: b"" = it has a descriptor instead."""

    id: int
    base: int
    nbytes: int
    number: int
    handle: bytes


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class OwnMemory:
    """What is known of allocations. A context is current whenever it is used; one thread at a time."""

    def __init__(self, cuda: Any) -> None:
        """cuda: NVIDIA's driver library."""
        self._cuda = cuda
        self._found: list[Allocation] = []  # by address
        self._bases: list[int] = []
        self._made = 0
        self._last: tuple[list[Run], tuple[bytes, list[Allocation]]] | None = None  # runs, and what came of them

    def look_again(self) -> None:
        """Forget what is not there any more, or is other memory by now."""
        there = [one for one in self._found if self._number(one.base, bool(one.handle)) == one.number]
        if len(there) < len(self._found):
            self._found, self._bases, self._last = there, [one.base for one in there], None

    def rows(self, runs: Iterable[Run]) -> tuple[bytes, list[Allocation]]:
        """The rows of `Rows`, and the allocations that they name. Raises CudaCallFailed for memory that nobody else
        can map.
        """
        runs = list(runs)
        if self._last is not None and self._last[0] == runs:  # as a rule: the same tensors, where they were
            return self._last[1]
        rows: list[tuple[int, int, int, int]] = []
        named: dict[int, Allocation] = {}
        for start, address, nbytes in runs:
            done = 0
            while done < nbytes:
                one = self._at(address + done)
                named[one.id] = one
                offset = address + done - one.base
                size = min(nbytes - done, one.nbytes - offset)
                rows.append((start + done, size, one.id, offset))
                done += size
        self._last = runs, (np.array(rows, "<i8").reshape(-1, ROW).tobytes(), list(named.values()))
        return self._last[1]

    def descriptors(self, allocations: Sequence[Allocation]) -> list[int]:
        """File descriptors of those that have no handle, in order; to be closed. Raises CudaCallFailed."""
        handle, fd, fds = ctypes.c_uint64(), ctypes.c_int(), []
        for one in allocations:
            if one.handle:
                continue
            call(self._cuda, "cuMemRetainAllocationHandle", ctypes.byref(handle), ctypes.c_void_p(one.base))
            try:
                arguments = ctypes.byref(fd), handle, _FILE_DESCRIPTOR, ctypes.c_uint64(0)
                call(self._cuda, "cuMemExportToShareableHandle", *arguments)
            finally:
                self._cuda.cuMemRelease(handle)
            fds.append(fd.value)
        return fds

    def _at(self, address: int) -> Allocation:
        at = bisect_right(self._bases, address) - 1
        if at >= 0 and address < self._found[at].base + self._found[at].nbytes:
            return self._found[at]
        found = self._find(address)
        at = bisect_right(self._bases, found.base)
        self._found.insert(at, found)
        self._bases.insert(at, found.base)
        return found

    def _find(self, address: int) -> Allocation:
        if self._attribute(_HAS_HANDLE, address):
            base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
            call(
                self._cuda,
                "cuMemGetAddressRange_v2",
                *(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)),
            )
            call(self._cuda, "cuIpcGetMemHandle", ctypes.byref(handle), base)
            where, nbytes, raw = base.value, size.value, bytes(handle.reserved)
        else:
            where, nbytes, raw = self._attribute(_MAPPING_BASE, address), self._attribute(_MAPPING_BYTES, address), b""
        number = self._number(where, bool(raw))
        if number is None or not where <= address < where + nbytes:
            raise CudaCallFailed(f"the driver does not say what memory lies at {address:#x}")
        self._made += 1
        return Allocation(self._made, where, nbytes, number, raw)

    def _number(self, base: int, has_handle: bool) -> int | None:
        """The driver's number of the allocation that is at an address now, which no other has while this process lives;
        None: there is none.
        """
        try:
            return self._attribute(_BUFFER_ID if has_handle else _BLOCK_ID, base)
        except CudaCallFailed:
            return None

    def _attribute(self, which: int, address: int) -> int:
        value = ctypes.c_uint64()
        call(self._cuda, "cuPointerGetAttribute", ctypes.byref(value), which, ctypes.c_uint64(address))
        return value.value

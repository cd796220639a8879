"""A device whose memory is memfds, mapped by rank, trainer and whoever else is given a descriptor or a handle.

What stays with whom, what outlives whom and whose writes arrive where is the kernel's doing, as it is the driver's on a
GPU.
"""

import ctypes
import mmap
import os
from itertools import count
from pathlib import Path
from types import SimpleNamespace

from weight_manager.layout import region_digests, version_digest
from worker.gpu.driver import CudaError
from worker.gpu.trainer_memory import TrainerMemory

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_LIBC.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t


def _mmap(address: int | None, nbytes: int, fd: int) -> int:
    kind = (mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) | (0x10 if address else 0)  # fixed
    return _LIBC.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, kind, fd, 0)


class MemfdDriver:
    """The rank's driver."""

    page = 4096
    can_share = True

    def __init__(self):
        self.copied, self.registered = 0, {}
        self.mapped = set()  # addresses with memory behind them
        self.opened = {}  # allocations of trainers that are mapped: bytes by address
        self.busy = False  # what streams were given is not through
        self.stale = {}  # pages that it holds of a mapping that has others now

    def enter(self): ...
    def stream(self): ...
    def wait(self, stream): ...

    def happened(self, stream, *, event):
        return not self.busy

    def open_handle(self, handle):
        pid, fd, name = handle.rstrip(b"\0").decode().split(":")
        path = Path(f"/proc/{pid}/fd/{fd}")
        try:
            if name not in str(path.readlink()):
                raise CudaError("cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE")  # another's by now
            opened = os.open(path, os.O_RDWR)
        except OSError:
            raise CudaError("cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE") from None
        nbytes = os.fstat(opened).st_size
        address = _mmap(None, nbytes, opened)
        os.close(opened)
        self.opened[address] = nbytes
        return address

    def room_at(self, address):
        return self.opened[address]

    def close_handle(self, address):
        _LIBC.munmap(address, self.opened.pop(address))

    def adopt(self, fd):
        return os.dup(fd)

    def release(self, handle):
        os.close(handle)

    def unreserve(self, address, nbytes):
        _LIBC.munmap(address, nbytes)

    def reserve(self, nbytes):
        return _mmap(None, nbytes, -1)

    def create(self, nbytes, *, shared=False):
        if shared and not self.can_share:
            raise CudaError("cuMemCreate: CUDA_ERROR_NOT_SUPPORTED")
        fd = os.memfd_create("device")
        os.ftruncate(fd, nbytes)
        return fd

    def export(self, handle):
        return os.dup(handle)

    def map(self, address, nbytes, handle):
        if nbytes > os.fstat(handle).st_size:
            raise CudaError("cuMemMap: CUDA_ERROR_INVALID_VALUE")
        _mmap(address, nbytes, handle)
        self.mapped.add(address)

    def unmap(self, address, nbytes, handle):
        _mmap(address, nbytes, -1)
        self.mapped.remove(address)
        os.close(handle)

    def register(self, address, nbytes, *, read_only):
        assert read_only
        assert address % 4096 == nbytes % 4096 == 0
        self.registered[address] = nbytes

    def unregister(self, address):
        del self.registered[address]
        self.stale.pop(address, None)

    def to_host(self, target, address, stream):
        ctypes.memmove(target.ctypes.data, address, target.nbytes)

    def from_address(self, address, source, nbytes, stream):
        self.copied += nbytes
        for start, pages in self.stale.items():
            if start <= source < start + pages.nbytes:
                source += pages.ctypes.data - start
                break
        ctypes.memmove(address, source, nbytes)


class MemfdPuller:
    """The kernel's stand-in."""

    def __init__(self, driver):
        self._driver, self.pulled = driver, 0

    def memory(self, runs):
        return TrainerMemory(self._driver, runs)

    def start(self, pieces, slot, stream):
        for source, target, nbytes in pieces.tolist():
            ctypes.memmove(slot + target, source, nbytes)
            self.pulled += nbytes


class MemfdCuda:
    """What trainers, and whoever copies into the arena, call of the driver. has_handles: of memory that `allocate`
    makes; else it has descriptors, as torch's expandable segments.
    """

    _names = count(1)

    def __init__(self, *, has_handles=True):
        self._has_handles = has_handles
        self._allocations = {}  # base -> bytes, descriptor, name

    def allocate(self, nbytes, at=None):
        """Memory of this trainer; its address. at: where there was some before."""
        name = f"own-{next(self._names)}-"
        fd = os.memfd_create(name)
        os.ftruncate(fd, nbytes)
        base = _mmap(at, nbytes, fd)
        self._allocations[base] = nbytes, fd, name
        return base

    def free(self, base):
        nbytes, fd, _ = self._allocations.pop(base)
        _mmap(base, nbytes, -1)  # the addresses are not given to anybody else
        os.close(fd)

    def _of(self, address):
        at = [base for base, (nbytes, *_) in self._allocations.items() if base <= address < base + nbytes]
        return (at[0], *self._allocations[at[0]]) if at else None

    def cuPointerGetAttribute(self, value, which, address):  # noqa: N802
        if (found := self._of(address.value)) is None:
            return 1
        base, nbytes, _, name = found
        number = int(name.split("-")[1])
        value._obj.value = {7: number, 20: number, 10: int(self._has_handles), 18: nbytes, 19: base}[which]
        return 0

    def cuMemGetAddressRange_v2(self, base, nbytes, address):  # noqa: N802
        if (found := self._of(address.value)) is None:
            return 1
        base._obj.value, nbytes._obj.value = found[:2]
        return 0

    def cuIpcGetMemHandle(self, handle, base):  # noqa: N802
        _, fd, name = self._allocations[base.value]
        said = f"{os.getpid()}:{fd}:{name}".encode()
        ctypes.memmove(ctypes.addressof(handle._obj), said, len(said))
        return 0

    def cuMemRetainAllocationHandle(self, handle, address):  # noqa: N802
        handle._obj.value = os.dup(self._allocations[address.value][1])
        return 0

    def cuMemExportToShareableHandle(self, fd, handle, kind, flags):  # noqa: N802
        fd._obj.value = os.dup(handle.value)
        return 0

    def cuCtxGetDevice(self, device):  # noqa: N802
        return 0

    def cuMemImportFromShareableHandle(self, handle, fd, kind):  # noqa: N802
        handle._obj.value = os.dup(fd.value)
        return 0

    def cuMemAddressReserve(self, address, nbytes, *_):  # noqa: N802
        address._obj.value = _mmap(None, nbytes.value, -1)
        return 0

    def cuMemMap(self, address, nbytes, offset, handle, flags):  # noqa: N802
        _mmap(address.value, nbytes.value, handle.value)
        return 0

    def cuMemSetAccess(self, *_):  # noqa: N802
        return 0

    def cuMemRelease(self, handle):  # noqa: N802
        os.close(handle.value)
        return 0

    def cuMemUnmap(self, address, nbytes):  # noqa: N802
        _mmap(address.value, nbytes.value, -1)
        return 0

    def cuMemAddressFree(self, address, nbytes):  # noqa: N802
        return _LIBC.munmap(address.value, nbytes.value)

    def cuInit(self, flags):  # noqa: N802
        return 0

    def cuDeviceGetCount(self, count):  # noqa: N802
        count._obj.value = 1
        return 0

    def cuDeviceGet(self, device, ordinal):  # noqa: N802
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):  # noqa: N802
        return 0

    def cuCtxSetCurrent(self, context):  # noqa: N802
        return 0

    def cuMemcpyDtoH_v2(self, target, source, nbytes):  # noqa: N802
        ctypes.memmove(target.value, source.value, nbytes.value)
        return 0


class HostDigests:
    """The kernel's stand-in: the same digests, by the host, and of each region when it is asked for."""

    def __init__(self, layout):
        self.layout, self.computed, self.early = layout, 0, None
        self.reading = False  # what was begun may still be read

    def settle(self):
        self.reading = False

    def begin(self, address):
        self.settle()
        self.early = SimpleNamespace(address=address, digests={})
        return self.early

    def read_ahead(self, early, spans, copying, *, last=False):
        assert early is self.early
        self.reading = True
        memory = (ctypes.c_ubyte * self.layout.slot_bytes).from_address(early.address)
        found = region_digests(self.layout, memoryview(memory))
        for number, (start, nbytes) in enumerate(self.layout.ranges):
            if any(low <= start and start + nbytes <= low + size for low, size in spans):
                assert number not in early.digests, "each byte once"
                early.digests[number] = found[number]

    def version(self, address):
        self.settle()
        self.computed += 1
        memory = (ctypes.c_ubyte * self.layout.slot_bytes).from_address(address)
        return version_digest(self.layout, region_digests(self.layout, memoryview(memory)))

    def holds(self, address, live, regions, early=None):
        if early is None:
            return self.version(address) == live.digest
        self.settle()
        self.computed += 1
        assert (early, early.address) == (self.early, address)
        memory = (ctypes.c_ubyte * self.layout.slot_bytes).from_address(address)
        found = dict(enumerate(region_digests(self.layout, memoryview(memory)))) | early.digests
        return version_digest(self.layout, list(found.values())) == live.digest

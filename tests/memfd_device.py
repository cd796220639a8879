"""A device whose memory is memfds, mapped by rank, trainer and whoever else is given a descriptor.

What is lent, what stays with whom and whose writes arrive where is the kernel's doing, as it is the driver's on a GPU.
"""

import ctypes
import mmap
import os
from types import SimpleNamespace

from weight_manager.layout import region_digests, version_digest
from worker.gpu.driver import CudaError

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
        self.stale = {}  # pages that it holds of a mapping that has others now

    def enter(self): ...
    def stream(self): ...
    def wait(self, stream): ...

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
        _mmap(address, nbytes, handle)

    def unmap(self, address, nbytes, handle):
        _mmap(address, nbytes, -1)
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


class MemfdCuda:
    """What the trainer calls of the driver."""

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

    def cuMemcpyDtoDAsync_v2(self, target, source, nbytes, stream):  # noqa: N802
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

    def read_ahead(self, early, spans, copying):
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

"""Memory of a GPU that another process has made, mapped here: what a file descriptor of it stands for.

A descriptor that `cuMemExportToShareableHandle` has given keeps the memory allocated for as long as anybody holds it or
has it mapped, also when the process that made the memory is dead. Who only holds it needs no CUDA.
"""

import ctypes
from typing import Any

_FILE_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_DEVICE, _READ_WRITE = 1, 3  # CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE


class CudaCallFailed(RuntimeError):
    """A call of NVIDIA's driver failed; the message has its name and code."""


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("type", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int))


class MappedMemory:
    """The memory, mapped on the current CUDA device until `unmap`."""

    def __init__(self, cuda: Any, fd: int, nbytes: int) -> None:
        """cuda: NVIDIA's driver library. A context is current. fd stays the caller's. Raises CudaCallFailed."""
        self._cuda, self._nbytes, self.address = cuda, nbytes, 0
        handle, address, device = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_int()
        call(cuda, "cuCtxGetDevice", ctypes.byref(device))
        call(cuda, "cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), _FILE_DESCRIPTOR)
        try:
            call(cuda, "cuMemAddressReserve", ctypes.byref(address), _size(nbytes), _size(0), _u64(0), _u64(0))
            try:
                call(cuda, "cuMemMap", address, _size(nbytes), _size(0), handle, _u64(0))
            except CudaCallFailed:
                cuda.cuMemAddressFree(address, _size(nbytes))
                raise
        finally:
            cuda.cuMemRelease(handle)  # the mapping keeps the memory
        self.address = address.value
        access = _Access(_DEVICE, device.value, _READ_WRITE)
        try:
            call(cuda, "cuMemSetAccess", address, _size(nbytes), ctypes.byref(access), _size(1))
        except CudaCallFailed:
            self.unmap()
            raise

    def unmap(self) -> None:
        """No copy is under way. Idempotent. Raises CudaCallFailed."""
        address, self.address = self.address, 0
        if address:
            call(self._cuda, "cuMemUnmap", _u64(address), _size(self._nbytes))
            call(self._cuda, "cuMemAddressFree", _u64(address), _size(self._nbytes))


def call(cuda: Any, name: str, *arguments: Any) -> None:
    """Raises CudaCallFailed."""
    code = getattr(cuda, name)(*arguments)
    if code:
        raise CudaCallFailed(f"{name}: CUDA error {code}")


def _u64(value: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(value)


def _size(value: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(value)

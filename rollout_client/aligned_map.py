"""Mappings that huge pages fit into: address and file offset agree modulo 2 MiB.

`mmap.mmap` leaves the address to the kernel, which aligns large mappings for anonymous memory only. A mapping that is
off by a page can use none of a file's huge pages: every 4 KiB of a slot then has a page-table entry of its own to be
filled when it is mapped, and to be looked up whenever the weights are streamed through.
"""

import ctypes
import mmap
import os
import weakref

HUGE = 2 << 20
"""Bytes in a huge page."""
_RESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
_MAP_FIXED = 0x10
_MADV_COLLAPSE, _MADV_POPULATE_WRITE = 25, 23
"""Values of Linux's MADV_COLLAPSE and MADV_POPULATE_WRITE, which Python's mmap module does not name yet."""
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_aligned(fd: int, length: int, offset: int, *, write: bool) -> memoryview:
    """Map a range of a shared file, prefaulted. It is unmapped with its last view. Raises OSError.

    offset: a multiple of HUGE.
    """
    base = _map(None, length + HUGE, 0, _RESERVE, -1, 0)
    start = -(-base // HUGE) * HUGE
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
    try:
        _map(start, length, protection, mmap.MAP_SHARED | mmap.MAP_POPULATE | _MAP_FIXED, fd, offset)
    except OSError:
        _libc.munmap(base, length + HUGE)
        raise
    used = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
    for spare, count in ((base, start - base), (start + used, base + HUGE + length - start - used)):
        if count >= mmap.PAGESIZE:
            _libc.munmap(spare, count)
    array = (ctypes.c_ubyte * length).from_address(start)
    weakref.finalize(array, _libc.munmap, start, used).atexit = False
    view = memoryview(array).cast("B")
    return view if write else view.toreadonly()


def collapse(view: memoryview) -> bool:
    """Put huge pages behind these bytes of a mapping made above and writable, whatever the system's default for
    shared memory is. False where the kernel cannot (before 6.1) or has none to give; nothing else changes then.
    """
    start = ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
    return bool(_libc.madvise(start, len(view) // HUGE * HUGE, _MADV_COLLAPSE) == 0)


def protect(view: memoryview, *, write: bool) -> None:
    """Whether the processor lets this process write into a mapping, which was made writable; pages stay as they are.

    view: all of it. Raises OSError.
    """
    start = ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
    if _libc.mprotect(start, len(view), mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)):
        raise _last_error()


def populate(address: int, length: int) -> None:
    """Have the pages of a writable mapping made; Python's lock is free. Raises OSError: EINVAL before Linux 5.14."""
    if _libc.madvise(address, length, _MADV_POPULATE_WRITE):
        raise _last_error()


def _map(address: int | None, length: int, protection: int, flags: int, fd: int, offset: int) -> int:
    start = _libc.mmap(address, length, protection, flags, fd, offset)
    if start is None or start == _FAILED:
        raise _last_error()
    return int(start)


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))

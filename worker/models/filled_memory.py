"""Memory straight from the system, whose pages are made beside what runs."""

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from worker.memory import memory_available

log = logging.getLogger(__name__)

MADV_POPULATE_WRITE = 23
"""Python has no name for it yet."""
_PIECE = 2 << 20
"""Bytes at a time, one huge page: as long as it takes, nobody can map or unmap memory."""
_SPARE = 256 << 20
"""Bytes that are left to others: who takes the last has the system end a process, maybe another's."""
_THREAD = "kv-fill"


def mapped(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros that go back to the system when they are let go. Raises OSError.

    From the heap, which start-up tuning tells to keep what is freed, zeroing a gigabyte took a second. Cells are used
    in any order, so huge pages matter; shared mappings (Python's default) do not get them.
    """
    nbytes = prod(shape) * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)


def fill_in(arrays: Sequence[npt.NDArray[Any]]) -> None:
    """Have the pages of `mapped` arrays made from now on, with half of one core, until they are let go.

    Made as they are used, they had every 64th step of 16 sequences take three times as long; made before anything is
    served, 3 GB added 4 s to a start, and as much to every resume.
    """
    pieces = [(weakref.ref(array), array.ctypes.data, array.nbytes) for array in arrays]
    threading.Thread(target=_fill, args=(pieces,), name=_THREAD, daemon=True).start()


def wait_until_filled(timeout_s: float) -> None:
    """Until no memory of this process is filled in any more. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise TimeoutError(f"memory is still filled in after {timeout_s:g} s")


def _fill(arrays: Sequence[tuple["weakref.ref[npt.NDArray[Any]]", int, int]]) -> None:
    """An array is held for one piece at a time, so that whoever lets it go gives its memory back."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise  # Python's own keeps its lock meanwhile
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for array, address, nbytes in arrays:
        for start in range(0, nbytes, _PIECE):
            held = array()
            if held is None:
                break
            began = time.monotonic()
            if memory_available() < _SPARE:
                log.warning("this machine's memory is nearly used up: lower worker.num_blocks, or steps may end here")
                return
            if madvise(address + start, min(_PIECE, nbytes - start), MADV_POPULATE_WRITE):
                if ctypes.get_errno() != errno.EINVAL:  # Linux before 5.14 does not know it
                    log.warning("the KV cache is not filled in: %s", os.strerror(ctypes.get_errno()))
                return
            del held
            time.sleep(time.monotonic() - began)

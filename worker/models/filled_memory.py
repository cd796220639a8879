"""Memory straight from the system, whose pages are made beside what runs."""

import contextlib
import errno
import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_client.aligned_map import HUGE, populate
from worker.memory import memory_available

log = logging.getLogger(__name__)

_SPARE = 256 << 20
"""Bytes that are left to others: who takes the last has the system end a process, maybe another's."""
_SHARE, _BUSY_SHARE = 0.5, 0.1
"""Shares of one core, while the machine has half a core to spare and while it has not: steps and trainers go first."""
_WINDOW_S = 0.2
FILLING, FILLED = "filling in", "filled in:"
"""Logged, one after the other; what is measured in between is slower."""


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
    """Have the pages of `mapped` arrays made from now on, with a core that has nothing to do, until they are let go.

    Made as they are used, they had every 64th step of 16 sequences take three times as long; made before anything is
    served, 3 GB added 4 s to a start, and as much to every resume.
    """
    try:
        _Filling(arrays).start()
    except RuntimeError as error:
        log.warning("the KV cache is filled in as it is used: %s", error)


def to_come() -> int:
    """Bytes of this process that are mapped and will be filled in: nobody else may count on them."""
    return sum(thread.left for thread in threading.enumerate() if isinstance(thread, _Filling))


def wait_until_filled(timeout_s: float) -> None:
    """Until no memory of this process is filled in any more. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    for thread in threading.enumerate():
        if isinstance(thread, _Filling):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise TimeoutError(f"memory is still filled in after {timeout_s:g} s")


class _Pace:
    """Sleeps after each piece, as long as the machine's other work asks for."""

    def __init__(self) -> None:
        self._share = _SHARE
        self._since, self._idle_s = time.monotonic(), _idle_s()

    def rest(self, took: float) -> None:
        """A piece took so many seconds."""
        time.sleep(took / self._share - took)
        now = time.monotonic()
        if now >= self._since + _WINDOW_S:
            idle = _idle_s()
            spare = (idle - self._idle_s) / (now - self._since)
            self._share = _SHARE if spare >= 0.5 else _BUSY_SHARE
            self._since, self._idle_s = now, idle


def _idle_s() -> float:
    """Seconds for which cores had nothing to do, of all since the machine started; what is not known counts as much."""
    try:
        return float(Path("/proc/stat").read_text().split(maxsplit=5)[4]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.monotonic()


class _Filling(threading.Thread):
    """Holds an array for one piece at a time, so that whoever lets it go gives its memory back."""

    def __init__(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        super().__init__(name="kv-fill", daemon=True)
        self._arrays = [(weakref.ref(array), array.ctypes.data, array.nbytes) for array in arrays]
        self._done = [0] * len(arrays)

    @property
    def left(self) -> int:
        """Bytes, of arrays that somebody still holds."""
        both = zip(self._arrays, self._done, strict=True)
        return sum(nbytes - done for (array, _, nbytes), done in both if array() is not None)

    def run(self) -> None:
        """Says when it begins and when it has ended, and why if that is early."""
        began, gib = time.monotonic(), sum(nbytes for *_, nbytes in self._arrays) / 2**30
        log.info("%s %.1f GiB of KV cache beside what runs", FILLING, gib)
        try:
            self._fill()
        except (OSError, MemoryError) as error:
            log.warning("the KV cache is filled in as it is used: %s", error)
        log.info("%s %.1f of %.1f GiB in %.1f s", FILLED, sum(self._done) / 2**30, gib, time.monotonic() - began)

    def _fill(self) -> None:
        """A huge page at a time: as long as one takes, nobody can map or unmap memory."""
        pace = _Pace()
        for index, (array, address, nbytes) in enumerate(self._arrays):
            for start in range(0, nbytes, HUGE):
                held = array()
                if held is None:
                    return
                began = time.monotonic()
                if memory_available() < _SPARE:
                    raise MemoryError("the last memory is left to others; a lower worker.num_blocks takes less")
                size = min(HUGE, nbytes - start)
                try:
                    populate(address + start, size)
                except OSError as error:
                    if error.errno == errno.EINVAL:  # this kernel does not know it
                        return
                    raise
                del held
                self._done[index] += size
                pace.rest(time.monotonic() - began)

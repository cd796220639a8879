"""Sums over the ranks of a replica in memory that they share (shared_sums.c): a tenth of what gloo takes for them.

The ranks of a replica are processes of one host, started by one supervisor. The first makes a segment without a name,
the others open it through /proc, so that nothing of it can be left behind. Who waits looks for some microseconds, then
sleeps until the other wakes it, and looks every now and then whether the other lives.
"""

import ctypes
import logging
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_client.native.compiler import compiled

log = logging.getLogger(__name__)

Float32 = npt.NDArray[np.float32]
SOURCES = (Path(__file__).with_suffix(".c"),)
MOST_RANKS = 64
LIMIT_S = 30.0
"""The longest wait for another rank within a sum: as long as gloo's."""
_LOOK_S = 0.1
_SPIN_S = 10e-6
_TOKEN_AT, _TOKEN = 16, 16
"""Where the segment's first bytes say which it is: a rank that sees other processes under /proc would open anything."""
_LATE = "{} did not come to a sum within {:g} s"
_WHY = ("", "{} is gone", _LATE, "a rank has given up on a sum", "{} is at another sum")
"""By what the calls return."""


class _Place(ctypes.Structure):
    _fields_ = [
        ("shared", ctypes.c_void_p),
        ("ranks", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("limit_ns", ctypes.c_int64),
        ("look_ns", ctypes.c_int64),
        ("spin_ns", ctypes.c_int64),
        ("at_fault", ctypes.c_int64),
        ("round", ctypes.c_uint32),
        ("pidfds", ctypes.c_int32 * MOST_RANKS),
    ]


def library() -> ctypes.CDLL:
    """The compiled sums. Raises OSError where there is no C compiler."""
    loaded = _loaded()
    if isinstance(loaded, str):
        raise OSError(loaded)
    return loaded


@lru_cache(maxsize=1)
def _loaded() -> ctypes.CDLL | str:
    """Or why not. Tried once: a compiler may fail after minutes, for which `meet` must not keep the others waiting."""
    try:
        loaded = ctypes.CDLL(str(compiled("shared_sums", SOURCES)))
    except OSError as error:
        return str(error)
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    loaded.new_segment.argtypes, loaded.new_segment.restype = [], number
    loaded.segment_bytes.argtypes, loaded.segment_bytes.restype = [number], number
    loaded.sum.argtypes, loaded.sum.restype = [pointer, pointer, number], number
    loaded.gather.argtypes, loaded.gather.restype = [pointer, pointer, number, number, pointer], number
    return loaded


def get_ready() -> None:
    """Compile them where that can be done; `meet` says why not."""
    _loaded()


class SharedSums:
    """`collectives.Sums` of one rank, in a segment that all have mapped. pids: of all ranks' processes."""

    def __init__(self, fd: int, rank: int, pids: Sequence[int], limit_s: float = LIMIT_S) -> None:
        """Raises OSError where it cannot be mapped, or one of the processes is gone."""
        self._library, self._limit_s = library(), limit_s
        self._memory = mmap.mmap(fd, bytes_of(len(pids)))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        times = (round(seconds * 1e9) for seconds in (limit_s, _LOOK_S, _SPIN_S))
        self._place = _Place(address, len(pids), rank, *times, pidfds=(-1,) * MOST_RANKS)
        try:
            for number, pid in enumerate(pids):
                if number != rank:
                    self._place.pidfds[number] = os.pidfd_open(pid)
        except OSError:
            self.close()
            raise
        self._at = ctypes.addressof(self._place)

    def close(self) -> None:
        """Let go of the others; nothing is summed any more."""
        for pidfd in self._place.pidfds[: self._place.ranks]:
            if pidfd >= 0:
                os.close(pidfd)
        self._memory.close()

    def in_place(self, array: Float32, *, in_a_tree: bool) -> Callable[[], None]:
        """As `collectives.Sums` says: always in a tree."""
        assert array.dtype == np.float32
        assert array.flags.c_contiguous
        address = array.ctypes.data

        def run() -> None:
            self._sum(address, array.size)

        return run

    def of_tensor(self, tensor: Any) -> None:
        """As `collectives.Sums` says."""
        assert tensor.is_contiguous()
        assert tensor.element_size() == 4
        self._sum(tensor.data_ptr(), tensor.size)

    def gathered(self, array: Float32) -> Float32:
        """As `collectives.Sums` says."""
        own = np.ascontiguousarray(array)
        rows, columns = own.shape
        found = np.empty((rows, self._place.ranks * columns), own.dtype)
        row = columns * own.itemsize
        self._require(self._library.gather(self._at, own.ctypes.data, rows, row, found.ctypes.data))
        return found

    def prove(self) -> None:
        """As `collectives.Sums` says."""
        one = np.ones(1, np.float32)
        self._sum(one.ctypes.data, one.size)

    def _sum(self, address: int, count: int) -> None:
        self._require(self._library.sum(self._at, address, count))

    def _require(self, found: int) -> None:
        if found:
            raise RuntimeError(_WHY[found].format(f"rank {self._place.at_fault}", self._limit_s))


def bytes_of(ranks: int) -> int:
    """Of a segment."""
    return int(library().segment_bytes(ranks))


def meet(rank: int, pids: Sequence[int], gather: Callable[[bytes], list[bytes]]) -> SharedSums | None:
    """The sums of this rank; None on every rank where one of them cannot, which each says in its log.

    pids: of all ranks' processes. gather: every rank's bytes, in rank order, on all.
    """
    token, fd, sums, why = secrets.token_bytes(_TOKEN), -1, None, ""
    try:
        if rank == 0:
            fd = _segment(len(pids), token)
    except OSError as error:
        why = str(error)
    try:
        place = gather(f"{fd} ".encode() + token if rank == 0 else b"")[0].split(b" ", 1)
        try:
            if rank:
                fd = _opened(pids[0], int(place[0]), place[1])
            sums = None if why else SharedSums(fd, rank, pids)
        except OSError as error:
            why = str(error)
        whys = [data.decode() for data in gather(why.encode())]
    finally:
        if fd >= 0:
            os.close(fd)
    if any(whys):
        said = "; ".join(f"rank {number}: {why}" for number, why in enumerate(whys) if why)
        log.warning("the matrices' sums go over gloo, several times as slowly: %s", said)
        if sums is not None:
            sums.close()
        return None
    return sums


def _segment(ranks: int, token: bytes) -> int:
    """A descriptor of a new one, of zeros and this token. Raises OSError."""
    size = bytes_of(ranks)
    fd = int(library().new_segment())
    if fd < 0:
        raise OSError(-fd, os.strerror(-fd))
    try:
        os.posix_fallocate(fd, 0, size)  # no memory: now, and not at the first write to a page of it
        os.pwrite(fd, token, _TOKEN_AT)
    except OSError:
        os.close(fd)
        raise
    return fd


def _opened(pid: int, theirs: int, token: bytes) -> int:
    """A descriptor of our own of the segment that another process has. Raises OSError."""
    path = f"/proc/{pid}/fd/{theirs}"
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if os.pread(fd, _TOKEN, _TOKEN_AT) == token:
        return fd
    os.close(fd)
    raise OSError(f"{path} is something else here")

"""The sums of a replica whose ranks have a GPU each: one NCCL communicator, by ctypes.

A communicator is made by all ranks together, from an id that rank 0 draws and the signal group (gloo, never shut)
carries. Shutting it gives its device memory back, about half a gigabyte; restarting makes another one. Its address in a
captured graph does not survive that, so graphs are captured again after a restart.

NCCL waits for ever: for a rank that does not come, and inside a sum for one that was killed. So every call is made in
time or is given up, and a watchdog looks at the other ranks' processes, at NCCL's own errors, and at how long the sums
that a stream was given are under way. Aborting the communicator ends the kernels that wait, those of graphs too; the
group is dead then, and the replica is started again whole. What an aborted sum leaves behind is nothing: whoever has
waited for one asks `check`.
"""

import contextlib
import ctypes
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from worker.gpu.driver import CudaError, Driver, Handle, Int, Pointer, Size
from worker.gpu.libraries import load
from worker.orders import GroupDead

log = logging.getLogger(__name__)

NAME = "tp"
INT32, FLOAT32, BFLOAT16 = 2, 7, 9
"""ncclDataType_t."""
_SUM = 0
_SUCCESS, _IN_PROGRESS = 0, 7
_SOON_S = 0.0002
"""Seconds between two looks at sums whose end is waited for: a thread that waits in the driver could not give up."""
_LOOK_S = 0.05
"""Seconds between two looks of the watchdog at a communicator whose sum is under way."""
_NO_MULTICAST = "NCCL_NVLS_ENABLE"
"""NVLink's multicast can take GPUs of a host that others share out of service: it is off unless it is asked for."""


class _Id(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = (("bytes", ctypes.c_ubyte * 128),)


class NcclGroups:
    """`worker.orders.Groups` of one rank. Calls come from one thread, but for `quiet`; the watchdog has its own."""

    def __init__(
        self,
        driver: Driver,
        rank: int,
        size: int,
        *,
        exchange: Callable[[bytes], bytes],
        pids: Sequence[int],
        deadline_s: float,
        library: Any = None,
    ) -> None:
        """exchange: gives every rank what rank 0 gave, over the signal group. pids: of all ranks, in their order.

        deadline_s: for a sum, and for the ranks to meet. Raises OSError without NCCL, GroupDead, CudaError.
        """
        os.environ.setdefault(_NO_MULTICAST, "0")
        self._driver, self._rank, self._size, self._exchange = driver, rank, size, exchange
        self._nccl = library or load("libnccl.so.2", "nvidia-nccl-cu13", "gpu-tp")
        self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
        self._deadline_s = deadline_s
        self._ends: list[Callable[[], None]] = []  # what else ends sums that will not end by themselves
        self._comm: Pointer | None = None
        self._dead = ""
        self._inside: float | None = None  # since when the host is in calls that may wait for other ranks
        self._since: float | None = None  # when a stream was given the last sums, until they are seen to be through
        self._last = driver.event()  # behind them
        self._lock = threading.Lock()  # of the communicator's end, and of what is under way
        self._launching = threading.RLock()  # who has it launches sums, or wants none to begin
        self._element = 0
        self._peers = {os.pidfd_open(pid): number for number, pid in enumerate(pids) if number != rank}
        self.restart()
        threading.Thread(target=self._watch, name="nccl", daemon=True).start()

    def restart(self) -> list[str]:
        """Make the communicator with all other ranks, if it is not there. Raises GroupDead, CudaError."""
        self.check()
        if self._comm is not None:
            return []
        mine, comm = _Id(), Pointer()
        if self._rank == 0:
            self._call("ncclGetUniqueId", ctypes.byref(mine))
        drawn = _Id.from_buffer_copy(self._exchange(bytes(mine.bytes)))
        self._in_time("ncclCommInitRank", ctypes.byref(comm), self._size, drawn, self._rank)
        self._comm = comm
        return [NAME]

    def shutdown(self) -> list[str]:
        """Give its device memory back. No sum is under way. Raises GroupDead, CudaError; repeatable."""
        if self._comm is None:
            return []
        self._in_time("ncclCommFinalize", self._comm)
        with self._lock:
            comm, self._comm = self._comm, None
            self._since = None
        if comm is not None:  # else it was aborted meanwhile
            self._in_time("ncclCommDestroy", comm)
        return [NAME]

    def all_reduce(self, address: int, count: int, dtype: int, stream: Handle) -> None:
        """Queue the sum of so many elements over all ranks, in place. Raises GroupDead, CudaError."""
        where = Pointer(address)
        self._call("ncclAllReduce", where, where, Size(count), dtype, _SUM, self._up(), stream)

    def all_gather(self, source: int, target: int, count: int, dtype: int, stream: Handle) -> None:
        """Queue all ranks' `count` elements one after the other, in rank order. Raises GroupDead, CudaError."""
        self._call("ncclAllGather", Pointer(source), Pointer(target), Size(count), dtype, self._up(), stream)

    def broadcast(self, address: int, count: int, dtype: int, stream: Handle) -> None:
        """Queue the copy of rank 0's elements to all ranks, in place. Raises GroupDead, CudaError."""
        where = Pointer(address)
        self._call("ncclBroadcast", where, where, Size(count), dtype, 0, self._up(), stream)

    def also_end(self, end: Callable[[], None]) -> None:
        """Call this as well when sums will not end by themselves; at once if that has been found already."""
        self._ends.append(end)
        if self._dead:
            end()

    def launched(self, stream: Handle) -> None:
        """A stream has been given sums, or graphs with them: they are looked after. Raises GroupDead, CudaError."""
        self.check()
        with self._lock:
            self._driver.record(self._last, stream)
            self._since = time.monotonic()

    def check(self) -> None:
        """After waiting for a stream. Raises GroupDead if its sums were ended, and what they left is nothing."""
        if self._dead:
            raise GroupDead(self._dead)

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Around launches of sums, which may keep the host waiting for other ranks: a first one, captured or not,
        connects them. May be within another. Raises GroupDead if they were ended.
        """
        with self._launching:
            outer, self._inside = self._inside, self._inside or time.monotonic()
            try:
                yield
            finally:
                self._inside = outer
        self.check()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Around calls of the driver that may wait for all that the device does, and hold others up meanwhile, the
        watchdog's among them: no sum is under way on this device, and none is launched. What this rank has launched
        the others launch too, whatever else they wait for, so it ends. In any thread. Raises GroupDead, CudaError.
        """
        with self._launching:
            while not self._through():
                time.sleep(_SOON_S)
            yield

    def _through(self) -> bool:
        """No sum is under way. Raises GroupDead, CudaError."""
        self.check()
        with self._lock:
            if self._since is not None and self._driver.happened(self._last):
                self._since = None
            return self._since is None

    def _up(self) -> Pointer:
        if self._comm is None:
            raise GroupDead(self._dead or "the group of the matrices' sums is shut")
        return self._comm

    def prove(self) -> None:
        """Sum one element over all ranks, after a failed step. Raises GroupDead if that fails, too."""
        self.check()
        self._driver.enter()
        stream = self._driver.stream()
        try:
            with self.under_way():
                self.all_reduce(self._one(stream), 1, FLOAT32, stream)
                self._driver.wait(stream)
        except CudaError as error:
            raise GroupDead(f"the group of the matrices' sums is dead: {error}") from error

    def _one(self, stream: Handle) -> int:
        if not self._element:
            self._element = self._driver.allocate(4, "the sum that is tried")
        self._driver.fill(self._element, 4, 0, stream)
        return self._element

    def _watch(self) -> None:
        """End sums that will not end by themselves."""
        poll = select.poll()
        for fd in self._peers:
            poll.register(fd, select.POLLIN)
        self._driver.enter()
        while not self._dead:
            gone = [self._peers[fd] for fd, _ in poll.poll(_LOOK_S * 1000)]
            why = f"the process of rank {gone[0]} is gone" if gone else self._wrong()
            if why:
                self._abort(why)

    def _wrong(self) -> str:
        """Why sums will not end, as far as this rank can see; "" if they may."""
        now, late = time.monotonic(), f"a sum over the ranks took more than {self._deadline_s:g} s"
        inside = self._inside  # the loop's thread goes on meanwhile
        if inside is not None and now - inside > self._deadline_s:
            return late
        with self._lock:
            if self._comm is None:
                return ""
            state = Int()
            try:
                self._call("ncclCommGetAsyncError", self._comm, ctypes.byref(state))
                if state.value not in (_SUCCESS, _IN_PROGRESS):
                    return f"NCCL: {self._text(state.value)}"
                if self._since is not None and self._driver.happened(self._last):
                    self._since = None
            except CudaError as error:
                return str(error)
            return late if self._since is not None and now - self._since > self._deadline_s else ""

    def _abort(self, why: str) -> None:
        with self._lock:
            self._dead = why
            comm, self._comm = self._comm, None
        for end in list(self._ends):
            end()
        if comm is not None:
            log.error("ending the sums over the ranks: %s", why)
            self._driver.enter()
            self._nccl.ncclCommAbort(comm)

    def _in_time(self, name: str, *arguments: Any) -> None:
        """A call that waits for other ranks. Its thread is left behind if they do not come; the process ends then."""
        result: list[BaseException | None] = []

        def run() -> None:
            try:
                self._driver.enter()
                self._call(name, *arguments)
                result.append(None)
            except BaseException as error:
                result.append(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        end = time.monotonic() + self._deadline_s
        while thread.is_alive() and time.monotonic() < end and not self._dead:
            thread.join(_LOOK_S)
        if not result:
            self._dead = self._dead or f"{name}: not all ranks came within {self._deadline_s:g} s"
            raise GroupDead(self._dead)
        if result[0] is not None:
            raise result[0]

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._nccl, name)(*arguments)
        if code:
            raise CudaError(f"{name}: {self._text(code)}", code)

    def _text(self, code: int) -> str:
        text = self._nccl.ncclGetErrorString(code)
        return text.decode() if text else str(code)

"""Straight into the memory of ranks on this host's GPUs: the trainer's side, and the words that both sides use.

 1. [STORE]   `Placement.devices`: a socket of each replica that may have a slot to lend.
 2. [TRAINER] connects and sends `Ask`: which slot of the arena, in which write epoch, it is about to fill.
 3. [RANK]    `Grant`, with the memory of the device slot that it does not compute with as a file descriptor; or `No`.
 4. [TRAINER] maps it, and copies every tensor there as well as into the arena's slot. Once all is there it unmaps the
              memory and says `Filled`.
 5. [RANK]    `Taken`. When the store asks it to prepare that very slot in that very epoch, it computes the version's
              digest from its device memory, and votes yes if it is the one that the store proved.

A connection that ends before `Filled` leaves memory that a stopped or dying process may still write to: the rank lets
it go and puts other memory behind the same addresses. So does a rank that is asked to prepare anything else meanwhile.
Nothing that goes wrong here fails a push: the arena's slot holds the version in any case, and a rank copies that.

The store asks for memory as well, once a rank has proved a version in it that is to be live before the arena has it:

 6. [STORE]   connects and sends `Keep`, with slot and epoch of the version, when it asks the rank to prepare it.
 7. [RANK]    `Grant`, with the memory, as soon as it has proved it; or `No`. The store maps nothing, it holds the
              descriptor, and with it the memory, until the arena has the version.
"""

import contextlib
import ctypes
import logging
import os
import socket
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout_client.device_memory import CudaCallFailed, MappedMemory, call

log = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""Seconds that an answer of a rank is waited for, which may be copying another version."""
LONGEST = 1 << 20
"""Most bytes of a message."""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """[TRAINER] I am about to fill this slot of the arena."""

    slot: int
    write_epoch: int


class Keep(msgspec.Struct, frozen=True, tag="keep"):
    """[STORE] you have proved what this slot of the arena is to hold in this epoch: let me hold the memory, too.

    patience_s: wait so long for the proof, which is under way.
    """

    slot: int
    write_epoch: int
    patience_s: float = 0.0


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """[RANK] fill this too, or hold it; a file descriptor comes with it.

    nbytes: of the memory. runs: (start in the arena's slot, start in the memory, bytes), rising.
    """

    nbytes: int
    runs: list[tuple[int, int, int]]


class No(msgspec.Struct, frozen=True, tag="no"):
    """[RANK] not now."""

    why: str


class Filled(msgspec.Struct, frozen=True, tag="filled"):
    """[TRAINER] every byte is there, and the memory is not mapped here any more."""


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """[RANK] it is kept for the commit."""


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Ask | Filled | Keep).decode
decode_answer = msgspec.msgpack.Decoder(Grant | No | Taken).decode


def socket_of(run_dir: Path, replica: int) -> Path:
    """Where rank 0 of a replica listens, if it has device memory to lend."""
    return run_dir / f"device-{replica}.sock"


class NotLent(RuntimeError):
    """A rank's memory cannot be filled; why."""


class LentSlot:
    """One rank's memory, mapped on the current CUDA device from `open` to `close`."""

    def __init__(self, path: str, cuda: Any) -> None:
        """cuda: NVIDIA's driver library. A context is current."""
        self.path, self._cuda = path, cuda
        self._memory: MappedMemory | None = None
        self._runs: list[tuple[int, int, int]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(PATIENCE_S)

    def open(self, slot: int, write_epoch: int) -> None:
        """Ask for it and map it. Raises NotLent."""
        fds: list[int] = []
        try:
            self._socket.connect(self.path)
            self._socket.send(encode(Ask(slot, write_epoch)))
            raw, fds, _, _ = socket.recv_fds(self._socket, LONGEST, 1)
            answer = decode_answer(raw)
            if not isinstance(answer, Grant) or not fds:
                raise NotLent(answer.why if isinstance(answer, No) else f"an answer of {type(answer).__name__}")
            self._runs = answer.runs
            self._memory = MappedMemory(self._cuda, fds[0], answer.nbytes)
        except (OSError, msgspec.DecodeError) as error:
            raise NotLent(f"no answer: {error}") from error
        except CudaCallFailed as error:
            raise NotLent(str(error)) from error
        finally:
            for fd in fds:
                os.close(fd)

    def send(self, source: int, start: int, nbytes: int, stream: int) -> None:
        """Queue a copy of device memory to where `start` of the arena's slot lies in it. Raises NotLent."""
        at = bisect_right(self._runs, start, key=lambda run: run[0]) - 1
        if self._memory is None or at < 0 or start + nbytes > self._runs[at][0] + self._runs[at][2]:
            raise NotLent(f"{nbytes} bytes at {start} are not in one piece there")
        target = ctypes.c_uint64(self._memory.address + self._runs[at][1] + start - self._runs[at][0])
        size, queue = ctypes.c_size_t(nbytes), ctypes.c_void_p(stream)
        try:
            call(self._cuda, "cuMemcpyDtoDAsync_v2", target, ctypes.c_uint64(source), size, queue)
        except CudaCallFailed as error:
            raise NotLent(str(error)) from error

    def filled(self) -> None:
        """All copies are through: say so. Raises NotLent if the memory was taken back meanwhile."""
        self._unmap()
        try:
            self._socket.send(encode(Filled()))
            answer = decode_answer(self._socket.recv(LONGEST))
        except (OSError, msgspec.DecodeError) as error:
            raise NotLent(f"taken back: {error}") from error
        if not isinstance(answer, Taken):
            raise NotLent(answer.why if isinstance(answer, No) else "an answer that was not asked for")

    def close(self) -> None:
        """Unmap and hang up; no copy is under way. Idempotent."""
        with contextlib.suppress(NotLent):  # the process keeps the mapping, nobody else is concerned
            self._unmap()
        self._socket.close()

    def _unmap(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            try:
                memory.unmap()
            except CudaCallFailed as error:
                raise NotLent(str(error)) from error


class LentSlots:
    """The slots of all ranks that lend theirs, for one push. One that fails is left out, and told of."""

    def __init__(self, paths: Sequence[str], slot: int, write_epoch: int) -> None:
        """Arguments as `Placement` has them: sockets of ranks, the slot and its write epoch."""
        self._paths, self._key = paths, (slot, write_epoch)
        self._slots: list[LentSlot] = []
        self._good: list[LentSlot] = []

    def open(self, cuda: Any) -> None:
        """Map every slot that is lent, on the current CUDA device."""
        for path in self._paths:
            lent = LentSlot(path, cuda)
            self._slots.append(lent)
            try:
                lent.open(*self._key)
                self._good.append(lent)
            except NotLent as error:
                self._without(lent, error)

    def send(self, source: int, start: int, nbytes: int, stream: int) -> None:
        """Copy into each, as `LentSlot.send` does."""
        for lent in list(self._good):
            try:
                lent.send(source, start, nbytes, stream)
            except NotLent as error:
                self._without(lent, error)

    @property
    def whole(self) -> bool:
        """No rank was left out."""
        return len(self._good) == len(self._paths) > 0

    def filled(self) -> int:
        """Tell every rank that all bytes of the version have arrived. Returns how many ranks have it now."""
        for lent in list(self._good):
            try:
                lent.filled()
            except NotLent as error:
                self._without(lent, error)
        return len(self._good)

    def close(self) -> None:
        """Unmap everything; no copy is under way. Idempotent."""
        for lent in self._slots:
            lent.close()
        self._slots, self._good = [], []

    def _without(self, lent: LentSlot, error: NotLent) -> None:
        self._good = [other for other in self._good if other is not lent]
        log.warning("%s is not filled from here, it copies the arena's slot: %s", lent.path, error)

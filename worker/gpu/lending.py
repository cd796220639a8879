"""A rank's spare device slot: who fills it, and the proof before it is used.

It is filled in one of three ways, each for one thing: the `Prepare` of the very slot of the arena and write epoch that
it was filled for.

    lent      a trainer on this host writes into it (rollout_client/device_slots.py), one at a time
    ahead     this rank copies from the arena's slot what has arrived there, while the rest does
    at last   it copies what is not there by then

Whatever the way, what counts is the digest of the device's memory: it is the version's, or the rank votes no. Memory
that a trainer has not said to be filled may still be written to, by a process that was stopped or is dying: it is let
go of, and other memory comes behind the same addresses.
"""

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from rollout_client.device_slots import LONGEST, Ask, Filled, Grant, Keep, No, Taken, decode_request, encode
from weight_manager.dynamic_weight_manager import Spans, Views
from weight_manager.messages import Live
from worker.gpu.digests import DeviceDigests, Early
from worker.gpu.driver import CudaError
from worker.gpu.weights import Ahead, DeviceSlots, Staged

log = logging.getLogger(__name__)

_ACCEPT_AGAIN_S = 0.1

Key = tuple[int, int]
"""A slot of the arena and its write epoch: one push session."""


@dataclass(frozen=True)
class _Loan:
    """A slot that a trainer writes into, or has filled."""

    key: Key
    slot: int
    connection: socket.socket


@dataclass(frozen=True)
class _Arriving:
    """What was copied ahead of a version, and hashed of that."""

    ahead: Ahead
    early: Early


@dataclass(frozen=True)
class _Part:
    """Bytes that may be copied ahead. turn: of `Lending`, when they were told of."""

    turn: int
    key: Key
    memory: memoryview
    spans: Spans

    @property
    def base(self) -> int:
        """Address of the arena's slot."""
        return np.frombuffer(self.memory, np.uint8).ctypes.data


class Lending:
    """Stages versions. `stage`, `copy_ahead` and `withdraw` are the rank's; trainers have a thread each, and so have
    copies ahead that do not begin at once.
    """

    def __init__(self, slots: DeviceSlots, digests: DeviceDigests, refusal: str = "") -> None:
        """refusal: why trainers get nothing here, "" = they may."""
        self._slots, self._digests, self._refusal = slots, digests, refusal
        self._lock = threading.Lock()
        self._proven = threading.Condition(self._lock)
        self._loan: _Loan | None = None
        self._filled: _Loan | None = None
        self._arriving: _Arriving | None = None
        self._proved: tuple[Key, int] | None = None  # the last version that was staged, and its slot
        self._turn = 0  # moves when parts told of before are of no use any more, and may not even be mapped
        self._parts: queue.SimpleQueue[_Part] = queue.SimpleQueue()
        self._copying: threading.Thread | None = None

    def listen(self, path: Path) -> None:
        """Serve trainers at `path`, in a thread, for as long as the process lives. A system that cannot is no error."""
        path.unlink(missing_ok=True)  # of a predecessor
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(8)
        except OSError as error:
            log.warning("no trainer can fill this rank's memory: %s: %s", path, error)
            listener.close()
            return
        threading.Thread(target=self._accept, args=(listener,), name="lending", daemon=True).start()

    def stage(self, live: Live, views: Views, regions: Sequence[int] = ()) -> Staged:
        """This version in a device slot, proved. views: of the arena's slot, as in DeviceSlots.stage. regions: as in
        DeviceDigests.holds.

        Raises ValueError when the device does not hold what was copied, DeviceMemoryError.
        """
        with self._lock:
            staged = self._stage(live, views, regions)
            self._proved = (live.slot, live.write_epoch), staged.slot
            self._proven.notify_all()
            return staged

    def copy_ahead(self, key: Key, memory: memoryview, spans: Spans) -> None:
        """Begin to copy these bytes of the arena's slot, unless a trainer fills the device's; returns at once.

        Whatever takes long is a thread's: pinning, memory for the slot, waiting for whoever has the lock. Else they
        are begun here, in some ten microseconds: a thread would take Python's lock from the caller, who computes, a few
        times for each call.
        """
        part = _Part(self._turn, key, memory, spans)
        if self._parts.empty() and self._lock.acquire(blocking=False):
            try:
                slot = self._slots.spare
                if slot is None or self._slots.ready(slot, part.base):
                    self._copy_or_warn(part)
                    return
            finally:
                self._lock.release()
        if self._copying is None:
            self._copying = threading.Thread(target=self._copy_parts, name="copying", daemon=True)
            self._copying.start()
        self._parts.put(part)

    def withdraw(self) -> None:
        """The rank gives its weights up: nothing that was lent or copied counts, and nothing reads the arena."""
        with self._lock:
            self._turn += 1
            self._filled = self._proved = None
            self._drop_ahead()
            self._take_back()

    def _stage(self, live: Live, views: Views, regions: Sequence[int]) -> Staged:
        self._turn += 1
        filled, self._filled = self._filled, None
        arriving, self._arriving = self._arriving, None
        if filled is not None and self._is_for(filled, live):
            staged = self._slots.hold(filled.slot)
            if self._holds(staged, live, regions):
                log.debug("version %d came from the trainer's GPU", live.version)
                return staged
            log.warning("version %d as its trainer wrote it to the device is not itself: copied again", live.version)
            del staged
        self._take_back()
        if arriving is not None and not self._goes_on(arriving.ahead, (live.slot, live.write_epoch)):
            arriving = None
        staged = self._slots.stage(views, None if arriving is None else arriving.ahead)
        if self._holds(staged, live, regions, None if arriving is None else arriving.early):
            return staged
        if self._slots.pinned.let_go() or arriving is not None:  # the driver may have held pages of before
            staged = self._slots.stage(views)
            if self._holds(staged, live, regions):
                return staged
        raise ValueError(f"the device does not hold version {live.version}: its digest differs")

    def _copy_parts(self) -> None:
        while True:
            part = self._parts.get()
            with self._lock:
                self._copy_or_warn(part)

    def _copy_or_warn(self, part: _Part) -> None:
        try:
            self._copy(part)
        except CudaError as error:  # `stage` meets it again, and answers for it
            log.warning("could not copy ahead: %s", error)
            with contextlib.suppress(CudaError):  # a device that is lost
                self._drop_ahead()

    def _copy(self, part: _Part) -> None:
        slot = self._slots.spare
        if part.turn != self._turn or self._loan is not None or self._filled is not None or slot is None:
            return
        arriving = self._arriving
        if arriving is None or not self._goes_on(arriving.ahead, part.key):
            arriving = _Arriving(Ahead(part.key, slot), self._digests.begin(self._slots.regions[slot].address))
            self._arriving = arriving
        fresh = self._slots.copy_ahead(arriving.ahead, part.base, part.spans)
        self._digests.read_ahead(arriving.early, fresh, self._slots.stream)

    def _goes_on(self, ahead: Ahead, key: Key) -> bool:
        """Whether it is of this version, and lies where nothing else does."""
        return (ahead.key, ahead.slot) == (key, self._slots.spare)

    def _drop_ahead(self) -> None:
        """What was copied ahead is of no use, and it is neither copied nor hashed any more: its memory may go, and who
        reads memory that is gone loses the whole device.
        """
        if self._arriving is not None:
            self._arriving = None
            self._slots.settle()
            self._digests.settle()

    def _is_for(self, filled: _Loan, live: Live) -> bool:
        return filled.key == (live.slot, live.write_epoch) and self._slots.spare == filled.slot

    def _holds(self, staged: Staged, live: Live, regions: Sequence[int], early: Early | None = None) -> bool:
        return self._digests.holds(self._slots.regions[staged.slot].address, live, regions, early)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:  # as where no descriptor is left, which is not for ever
                log.warning("a trainer's connection could not be taken: %s", error)
                time.sleep(_ACCEPT_AGAIN_S)
                continue
            threading.Thread(target=self._serve, args=(connection,), name="lending", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while raw := connection.recv(LONGEST):
                    match decode_request(raw):
                        case Ask(slot, write_epoch):
                            self._lend(connection, (slot, write_epoch))
                        case Keep(slot, write_epoch, patience_s):
                            self._share(connection, (slot, write_epoch), patience_s)
                        case Filled():
                            connection.send(encode(self._take(connection)))
            except (OSError, msgspec.DecodeError) as error:
                log.info("a trainer's connection ended: %s", error)
            finally:
                with self._lock:
                    if self._loan is not None and self._loan.connection is connection:
                        self._take_back()

    def _lend(self, connection: socket.socket, key: Key) -> None:
        if self._refusal:
            connection.send(encode(No(self._refusal)))
            return
        with self._lock:
            self._take_back()  # of a session that is over, as the store has one at a time
            self._drop_ahead()
            self._filled, slot = None, self._slots.spare
            if slot is None:
                idle = (
                    "nothing is served yet" if self._slots.bound is None else "a commit may still go back to its spare"
                )
                connection.send(encode(No(idle)))
                return
            region = self._slots.regions[slot]
            try:
                self._slots.enter()
                region.fill()
                fd = region.lend()
            except CudaError as error:
                connection.send(encode(No(str(error))))
                return
            self._loan = _Loan(key, slot, connection)
            self._grant(connection, slot, fd)

    def _share(self, connection: socket.socket, key: Key, patience_s: float) -> None:
        """Let the store hold the memory of a version that was proved there and that nothing is copied over; wait so
        long for the proof.
        """
        with self._proven:
            self._proven.wait_for(lambda: self._proved is not None and self._proved[0] == key, patience_s)
            proved, slot = self._proved or (None, None)
            if slot is None or proved != key or slot == self._slots.spare:
                connection.send(encode(No("nothing is proved here of that slot and epoch")))
                return
            try:
                self._slots.enter()
                fd = self._slots.regions[slot].lend()
            except CudaError as error:
                connection.send(encode(No(str(error))))
                return
            self._grant(connection, slot, fd)

    def _grant(self, connection: socket.socket, slot: int, fd: int) -> None:
        """fd: of the slot's memory; closed here."""
        runs = [(run.source, run.target, run.nbytes) for run in self._slots.runs]
        try:
            socket.send_fds(connection, [encode(Grant(self._slots.regions[slot].nbytes, runs))], [fd])
        finally:
            os.close(fd)

    def _take(self, connection: socket.socket) -> Taken | No:
        with self._lock:
            if self._loan is None or self._loan.connection is not connection:
                return No("the memory was taken back")
            self._filled, self._loan = self._loan, None
            return Taken()

    def _take_back(self) -> None:
        """Whoever was lent a slot may write on, into memory that is nobody's."""
        loan, self._loan = self._loan, None
        if loan is not None:
            with contextlib.suppress(OSError):
                loan.connection.shutdown(socket.SHUT_RDWR)
            self._slots.enter()
            self._slots.regions[loan.slot].empty()

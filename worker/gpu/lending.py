"""A rank's staged device slot, lent to trainers on this host, and proved before it is used.

The rank's side of rollout_client/device_slots.py. One trainer at a time writes, into the slot that nothing is computed
with. What it has filled is used for one thing: the `Prepare` of the very slot and write epoch that it named, and only
if the digest of the device's memory is the version's. Memory that it has not said to be filled may still be written to,
by a process that was stopped or is dying: it is let go of, and other memory comes behind the same addresses.
"""

import contextlib
import logging
import os
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollout_client.device_slots import LONGEST, Ask, Grant, No, Taken, decode_request, encode
from weight_manager.dynamic_weight_manager import Views
from weight_manager.messages import Live
from worker.gpu.digests import DeviceDigests
from worker.gpu.driver import CudaError
from worker.gpu.weights import DeviceSlots, Staged

log = logging.getLogger(__name__)

Key = tuple[int, int]
"""A slot of the arena and its write epoch: one push session."""


@dataclass(frozen=True)
class _Loan:
    """A slot that a trainer writes into, or has filled."""

    key: Key
    slot: int
    connection: socket.socket


class Lending:
    """Stages versions, lent slots among them. `stage` and `withdraw` are the rank's, trainers have a thread each."""

    def __init__(self, slots: DeviceSlots, digests: DeviceDigests) -> None:
        self._slots, self._digests = slots, digests
        self._lock = threading.Lock()
        self._loan: _Loan | None = None
        self._filled: _Loan | None = None

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

    def stage(self, live: Live, views: Views) -> Staged:
        """This version in a device slot, proved. views: of the arena's slot, as in DeviceSlots.stage.

        Raises ValueError when the device does not hold what was copied, DeviceMemoryError.
        """
        with self._lock:
            filled, self._filled = self._filled, None
            if filled is not None and self._is_for(filled, live):
                staged = self._slots.hold(filled.slot)
                if self._holds(staged, live):
                    log.debug("version %d came from the trainer's GPU", live.version)
                    return staged
                log.warning(
                    "version %d as its trainer wrote it to the device is not itself: copied again", live.version
                )
                del staged
            self._take_back()
            staged = self._slots.stage(views)
            if self._holds(staged, live):
                return staged
            if self._slots.pinned.let_go():  # the driver may have held pages that the slot had before
                staged = self._slots.stage(views)
                if self._holds(staged, live):
                    return staged
            raise ValueError(f"the device does not hold version {live.version}: its digest differs")

    def withdraw(self) -> None:
        """The rank gives its weights up: nothing that was lent counts."""
        with self._lock:
            self._filled = None
            self._take_back()

    def _is_for(self, filled: _Loan, live: Live) -> bool:
        return filled.key == (live.slot, live.write_epoch) and self._slots.spare == filled.slot

    def _holds(self, staged: Staged, live: Live) -> bool:
        return self._digests.version(self._slots.regions[staged.slot].address) == live.digest

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._serve, args=(connection,), name="lending", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while raw := connection.recv(LONGEST):
                    if isinstance(request := decode_request(raw), Ask):
                        self._lend(connection, (request.slot, request.write_epoch))
                    else:
                        connection.send(encode(self._take(connection)))
            except (OSError, msgspec.DecodeError) as error:
                log.info("a trainer's connection ended: %s", error)
            finally:
                with self._lock:
                    if self._loan is not None and self._loan.connection is connection:
                        self._take_back()

    def _lend(self, connection: socket.socket, key: Key) -> None:
        with self._lock:
            self._take_back()  # of a session that is over, as the store has one at a time
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
            runs = [(run.source, run.target, run.nbytes) for run in self._slots.runs]
            try:
                socket.send_fds(connection, [encode(Grant(region.nbytes, runs))], [fd])
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

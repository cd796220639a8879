"""A rank's spare device slot: who fills it, and the proof before it is used.

It is filled in one of three ways, each for one thing: the `Prepare` of the very slot of the arena and write epoch that
it was filled for.

    taken     this rank copies from a trainer's memory on this host (rollout_client/device_slots.py), one trainer's
    ahead     it copies from the arena's slot what has arrived there, while the rest does
    at last   it copies what is not there by then

Nobody else can write into it. Whatever the way, what counts is the digest of the device's memory: it is the version's,
or the rank votes no.
"""

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from rollout_client.device_slots import (
    LONGEST,
    MOST_SEGMENTS,
    Grant,
    Hide,
    Keep,
    No,
    Rows,
    Show,
    Take,
    Taken,
    decode_request,
    encode,
)
from weight_manager.dynamic_weight_manager import Spans, Views
from weight_manager.messages import Live
from worker.gpu.digests import DeviceDigests, Early
from worker.gpu.driver import CudaError
from worker.gpu.trainer_memory import Puller, TrainerMemory
from worker.gpu.weights import Ahead, DeviceSlots, Staged
from worker.orders import GroupDead

log = logging.getLogger(__name__)

_ACCEPT_AGAIN_S = 0.1
_SPARE_S, _LOOK_FOR_SPARE_S = 0.05, 0.0005
"""A trainer may hear that its version is live, and push the next, while the last steps of the one before still read the
slot: it is waited for so long, which is less than a copy by way of the arena takes longer. Looked for this often.
"""
_LONGEST_COPY_S = 10.0
"""A copy from a trainer's memory takes milliseconds; what it may do while that trainer dies is the driver's."""
_LOOK_S = 0.0001
"""A copy's end is looked for this often: a thread that waits in the driver could not give up."""

Key = tuple[int, int]
"""A slot of the arena and its write epoch: one push session."""


@dataclass
class _Incoming:
    """A slot that is filled from a trainer's memory. By whom, and what is hashed of it; whole: nothing is to come."""

    key: Key
    slot: int
    trainer: "_Trainer"
    early: Early
    whole: bool = False


@dataclass(frozen=True)
class _Trainer:
    """A connection, and what was shown over it."""

    connection: socket.socket
    memory: TrainerMemory


@dataclass(frozen=True)
class _Arriving:
    """What was copied ahead of a version, and hashed of that."""

    ahead: Ahead
    early: Early


@dataclass(frozen=True)
class _Part:
    """Bytes that may be copied ahead. turn: of `Filling`, when they were told of."""

    turn: int
    key: Key
    memory: memoryview
    spans: Spans

    @property
    def base(self) -> int:
        """Address of the arena's slot."""
        return np.frombuffer(self.memory, np.uint8).ctypes.data


class Filling:
    """Stages versions. `stage`, `copy_ahead` and `withdraw` are the rank's; trainers have a thread each, and so have
    copies ahead that do not begin at once.
    """

    def __init__(self, slots: DeviceSlots, digests: DeviceDigests, puller: Puller, *, whole: bool = True) -> None:
        """whole: it is all of the model, and not what one of several ranks has of it."""
        self._slots, self._digests, self._puller, self._whole = slots, digests, puller, whole
        self._lock = threading.Lock()
        self._proven = threading.Condition(self._lock)
        self._trainers: set[_Trainer] = set()
        self._taken: _Incoming | None = None
        self._endless = False  # a copy that was waited for too long may still write into the spare slot
        self._left: list[TrainerMemory] = []  # by trainers that are gone; `_end` unmaps it
        self._arriving: _Arriving | None = None
        self._proved: tuple[Key, int] | None = None  # the last version that was staged, and its slot
        self._turn = 0  # moves when parts told of before are of no use any more, and may not even be mapped
        self._parts: queue.SimpleQueue[_Part] = queue.SimpleQueue()
        self._copying: threading.Thread | None = None
        self._asked: Callable[[], None] = lambda: None

    def listen(self, path: Path, asked: Callable[[], None] = lambda: None) -> None:
        """Serve trainers at `path`, in a thread, for as long as the process lives. A system that cannot is no error.
        asked: called, in another one, as one wants its memory copied.
        """
        self._asked = asked
        path.unlink(missing_ok=True)  # of a predecessor
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(8)
        except OSError as error:
            log.warning("nothing is taken from trainers' GPUs: %s: %s", path, error)
            listener.close()
            return
        threading.Thread(target=self._accept, args=(listener,), name="trainers", daemon=True).start()

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
        """Begin to copy these bytes of the arena's slot, unless they come from a trainer's; returns at once.

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
            copying = threading.Thread(target=self._copy_parts, name="copying", daemon=True)
            try:
                copying.start()
            except RuntimeError as error:
                log.warning("could not copy ahead: %s", error)
                return
            self._copying = copying
        self._parts.put(part)

    def withdraw(self) -> None:
        """The rank gives its weights up: nothing is bound and nothing that was copied counts, nothing reads the arena,
        and nothing of a trainer's stays mapped. Raises ValueError as `_end`; its slots are as they were then.
        """
        with self._lock:  # also while the slots are emptied: a trainer that asks would have one filled meanwhile
            self._turn += 1
            self._proved = None
            self._drop()
            self._slots.bind(None)
            for trainer in self._trainers:
                with contextlib.suppress(OSError):
                    trainer.connection.shutdown(socket.SHUT_RDWR)  # its thread unmaps

    def _stage(self, live: Live, views: Views, regions: Sequence[int]) -> Staged:
        self._turn += 1
        if self._taken is not None or self._endless:
            self._end()
        taken, self._taken = self._taken, None
        arriving, self._arriving = self._arriving, None
        if taken is not None and self._is_for(taken, live):
            staged = self._slots.hold(taken.slot)
            if self._holds(staged, live, regions, taken.early):
                log.debug("version %d came from the trainer's GPU", live.version)
                return staged
            log.warning("version %d as it came from its trainer's GPU is not itself: copied again", live.version)
            del staged
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
                self._drop()

    def _copy(self, part: _Part) -> None:
        slot = self._slots.spare
        if part.turn != self._turn or self._taken is not None or self._endless or slot is None:
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

    def _drop(self) -> None:
        """What was copied is of no use, and it is neither copied nor hashed any more: its memory may go, and who reads
        memory that is gone loses the whole device. Raises ValueError as `_end`.
        """
        if self._taken is not None or self._endless:
            self._end()
        if self._arriving is not None or self._taken is not None:
            self._arriving = self._taken = None
            self._slots.settle()
            self._digests.settle()

    def _is_for(self, taken: _Incoming, live: Live) -> bool:
        return taken.whole and taken.key == (live.slot, live.write_epoch) and self._slots.spare == taken.slot

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
            try:
                threading.Thread(target=self._serve, args=(connection,), name="trainer", daemon=True).start()
            except RuntimeError as error:  # no thread is left, which is not for ever either
                log.warning("a trainer's connection could not be served: %s", error)
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        trainer = _Trainer(connection, self._puller.memory(self._slots.runs))
        with connection:
            try:
                with self._lock:
                    self._trainers.add(trainer)
                self._slots.enter()
                while self._hear(trainer):
                    pass
            except (OSError, msgspec.DecodeError, ValueError, CudaError, GroupDead) as error:
                log.info("a trainer's connection ended: %s", error)
            finally:
                with self._lock, contextlib.suppress(CudaError, ValueError, GroupDead):
                    self._trainers.discard(trainer)
                    self._left.append(trainer.memory)
                    if any(memory.mapped for memory in self._left):
                        self._end()
                    self._unmap_left()
                    if self._taken is not None and self._taken.trainer is trainer and not self._taken.whole:
                        self._taken = None

    def _hear(self, trainer: _Trainer) -> bool:
        """The next message; False: there is none any more. Raises what ends the connection."""
        connection = trainer.connection
        raw, fds, _, _ = socket.recv_fds(connection, LONGEST, MOST_SEGMENTS)
        try:
            message = decode_request(raw) if raw else None
            if isinstance(message, Show):
                own, fds = fds, []
                trainer.memory.show(message.segments, own)
        finally:
            for fd in fds:
                os.close(fd)
        match message:
            case Rows(table, rows, more):
                trainer.memory.tell(table, rows, more=more)
            case Hide(segments):
                with self._lock:
                    self._end()
                    trainer.memory.hide(segments)
            case Take():
                connection.send(encode(self._take(trainer, message)))
            case Keep(slot, write_epoch, patience_s):
                answer, own = self._share((slot, write_epoch), patience_s)
                try:
                    socket.send_fds(connection, [encode(answer)], own)
                finally:
                    for fd in own:
                        os.close(fd)
        return message is not None

    def _take(self, trainer: _Trainer, asked: Take) -> Taken | No:
        """Copy from a trainer's memory. It is waited for here, or where the slot is used and memory unmapped."""
        self._asked()
        try:
            pieces = trainer.memory.pieces(asked.table)  # the first time, this maps them
            self._wait_for_spare()
            with self._lock:
                taken = self._begun(trainer, asked)
                if isinstance(taken, No):
                    return taken
                self._puller.start(pieces, self._slots.regions[taken.slot].address, self._slots.stream)
                if asked.through:
                    self._end()
                if asked.last:
                    self._digests.read_ahead(taken.early, self._slots.spans, self._slots.stream, last=True)
                    taken.whole = True
                return Taken()
        except (CudaError, ValueError) as error:
            return No(str(error))

    def _wait_for_spare(self) -> None:
        end = time.monotonic() + _SPARE_S
        while self._slots.bound is not None and self._slots.spare is None and time.monotonic() < end:
            time.sleep(_LOOK_FOR_SPARE_S)

    def _begun(self, trainer: _Trainer, asked: Take) -> _Incoming | No:
        """The slot to fill."""
        key, slot = (asked.slot, asked.write_epoch), self._slots.spare
        taken = self._taken
        if not asked.first:
            self._end()  # what is under way is read from the table that the next copies are written to
            goes_on = taken is not None and (taken.trainer, taken.key, taken.slot) == (trainer, key, slot)
            return taken if goes_on and taken is not None and not taken.whole else No("another push has begun since")
        self._drop()  # of a session that is over, as the store has one at a time
        if slot is None:
            idle = "nothing is served yet" if self._slots.bound is None else "a commit may still go back to its spare"
            return No(idle)
        region = self._slots.regions[slot]
        region.fill()
        self._taken = _Incoming(key, slot, trainer, self._digests.begin(region.address))
        return self._taken

    def _end(self) -> None:
        """Wait until no copy is under way, and unmap what was left to that. Raises ValueError where it takes too long:
        the spare slot may be written to then, and a trainer's memory read, until it has ended after all.
        """
        self._slots.enter()
        end = time.monotonic() + (0.0 if self._endless else _LONGEST_COPY_S)
        while not self._slots.idle:
            if time.monotonic() >= end:
                self._endless, self._taken = True, None
                raise ValueError(f"a copy from a trainer's memory did not end within {_LONGEST_COPY_S:g} s")
            time.sleep(_LOOK_S)
        self._endless = False
        self._unmap_left()

    def _unmap_left(self) -> None:
        while self._left:
            self._left.pop().close()

    def _share(self, key: Key, patience_s: float) -> tuple[Grant | No, list[int]]:
        """What a store is answered that wants to hold the memory of a version which was proved there and over which
        nothing is copied, and its descriptor, to be closed; waits so long for the proof.
        """
        if not self._whole:
            return No("this rank has a part of the model"), []
        with self._proven:
            self._proven.wait_for(lambda: self._proved is not None and self._proved[0] == key, patience_s)
            proved, slot = self._proved or (None, None)
            if slot is None or proved != key or slot == self._slots.spare:
                return No("nothing is proved here of that slot and epoch"), []
            region = self._slots.regions[slot]
            try:
                self._slots.enter()
                fd = region.lend()
            except CudaError as error:
                return No(str(error)), []
        return Grant(region.nbytes, [(run.source, run.target, run.nbytes) for run in self._slots.runs]), [fd]

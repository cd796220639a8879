"""Same host: the trainer writes into the staged slot itself, one copy in all.

Tensors in a GPU's memory are copied by the GPU (cuda_copy.py). A few threads move all others, largest
first; the thread that owns the channel reports what they finish. The writer lock is held from before the
first byte until no thread and no GPU can write any more: a trainer that is stopped in between keeps the store
from giving the slot away (slot_lock.py).
"""

import queue
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Event

from rollout_client import slot_lock
from rollout_client.cuda_copy import CudaCopier, can_copy
from rollout_client.device_slots import LentSlots
from rollout_client.errors import ArenaError, SessionLost
from rollout_client.moving import Gathered, Moved, Unit, move_units, together, units
from rollout_client.protocol import Copy, Placement, Welcome
from rollout_client.staged_slot import TrainerArena
from rollout_client.tensors import Source
from rollout_client.transport import Reporter, Transport, by_part, moving_threads

INLINE_BYTES = 4 << 20
"""Less than this is moved without threads."""
LISTEN_S = 0.005
"""The store is listened to this often, not after every batch: what is done beside copying is taken from the copies."""
Job = tuple[int, list[tuple[int, Copy]]]
"""A part and its numbered copies."""


class ShmTransport(Transport):
    """Writes through a mapping of the arena that is kept from push to push, writable while it does (staged_slot.py)."""

    name = "shm"

    def __init__(self, arena: TrainerArena, threads: int | None = None) -> None:
        """threads: that move tensors, None = one per core this process may use, at most four."""
        self._arena = arena
        self._cuda: CudaCopier | None = None
        self.filled = 0
        """Ranks whose device memory the last push has filled."""
        self._threads = threads or moving_threads()
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="push")

    @classmethod
    def reach(cls, welcome: Welcome, threads: int | None = None) -> "ShmTransport | None":
        """The transport if the store's arena is on this host and may be written, else None."""
        try:
            arena = TrainerArena(welcome.arena_path)
        except (ArenaError, OSError):
            return None
        if arena.nonce != welcome.arena_nonce:
            arena.close()
            return None
        return cls(arena, threads)

    def serves(self, welcome: Welcome) -> bool:
        """Whether the store still uses the arena that is mapped here."""
        return bool(self._arena.nonce == welcome.arena_nonce)

    def stage(self, placement: Placement, sources: Sequence[Source], reporter: Reporter) -> None:
        """See Transport. Raises ArenaError if the placement does not fit the arena."""
        number = self._arena.slot_at(placement.slot_offset)
        if placement.slot_bytes != self._arena.slot_bytes:
            raise ArenaError(f"a slot of {placement.slot_bytes} bytes is not one of {self._arena.path}")
        self._arena.slot(number)  # mapped now, if it has got its memory since
        span = placement.slot_offset, placement.slot_bytes
        if not slot_lock.lock_shared(self._arena.fd, *span):
            raise SessionLost("unknown_session", "the store has taken the slot back", retryable=True)
        try:
            if self._arena.write_epoch(number) != placement.write_epoch:
                raise SessionLost("unknown_session", "the slot has been given to another session", retryable=True)
            jobs = sorted(by_part(placement.copies), key=lambda item: -sources[item[0]].nbytes)
            on_gpu: list[tuple[Source, list[tuple[int, Copy]]]] = []
            others: list[Job] = []
            for part, copies in jobs:
                if can_copy(sources[part], copies):
                    on_gpu.append((sources[part], copies))
                else:
                    others.append((part, copies))
            with self._arena.staging(number) as slot:
                self.filled = 0
                if on_gpu:
                    self._cuda = self._cuda or CudaCopier()
                    key = number, placement.write_epoch
                    lent = LentSlots(placement.devices, *key) if not others else None
                    self.filled = self._cuda.stage(number, slot, on_gpu, reporter, lent)
                self._move_all(others, slot, sources, reporter)
        finally:
            slot_lock.unlock(self._arena.fd, *span)
        reporter.flush()

    def close(self) -> None:
        """Stop the threads, unpin and unmap."""
        self._pool.shutdown()
        if self._cuda is not None:
            self._cuda.close()
        self._arena.close()

    def _move_all(self, parts: Sequence[Job], slot: memoryview, sources: Sequence[Source], reporter: Reporter) -> None:
        every = [unit for part, copies in parts for unit in units(sources[part], copies, slot)]
        if sum(unit.target.nbytes for unit in every) < INLINE_BYTES:
            for moved in move_units(every):
                reporter.moved(moved.nbytes)
                reporter.written(moved.copy, moved.digest, moved.nbytes)
            reporter.turn()
            return
        stop = Event()
        finished: queue.SimpleQueue[list[Moved] | Future[None]] = queue.SimpleQueue()
        batches: queue.SimpleQueue[list[Unit]] = queue.SimpleQueue()
        for batch in together(every):
            batches.put(batch)
        del every  # what has been moved need not be kept
        pieces = Gathered()
        futures = [self._pool.submit(self._put_all, batches, finished, stop) for _ in range(self._threads)]
        try:
            for future in futures:
                future.add_done_callback(finished.put)
            running, due = len(futures), 0.0
            while running:
                try:
                    event = finished.get(timeout=reporter.patience_s)
                except queue.Empty:
                    reporter.turn()
                    continue
                if isinstance(event, Future):
                    running -= 1
                    event.result()
                    continue
                for moved in event:
                    done = pieces.add(moved)
                    reporter.moved(moved.nbytes)
                    if done is not None:
                        reporter.written(*done)
                if time.monotonic() >= due:
                    reporter.turn()
                    due = time.monotonic() + LISTEN_S
        finally:
            stop.set()
            _wait_for(futures)

    def _put_all(
        self,
        batches: "queue.SimpleQueue[list[Unit]]",
        finished: "queue.SimpleQueue[list[Moved] | Future[None]]",
        stop: Event,
    ) -> None:
        """Batch after batch until there are no more."""
        while not stop.is_set():
            try:
                batch = batches.get_nowait()
            except queue.Empty:
                return
            finished.put(move_units(batch))


def _wait_for(threads: "Sequence[Future[None]]") -> None:
    """Until none can write any more, whoever interrupts: what they write into is let go of after this."""
    interrupted: BaseException | None = None
    while True:
        try:
            wait(threads)
            break
        except BaseException as error:  # a batch takes milliseconds
            interrupted = error
    if interrupted is not None:
        raise interrupted

"""The transport of a trainer on the store's host: it writes into the staged slot itself, one copy in all.

A trainer keeps its mappings of the arena from push to push, as page tables of gigabytes take long to fill. What it
staged last time is served now, so a stray write through an old mapping (a bug in a kernel of its own, a tensor that was
freed) would be served as well. `TrainerArena` makes it a crash of the trainer instead, by SIGSEGV: only the slot that
is being staged can be written, and only while it is. Changing what a mapping allows walks its page tables: 0.1 ms for
540 MB in huge pages, which the store moves the arena into after its start, and some 25 ms without them (Linux before
6.1, or huge_pages off), twice in a push. A GPU that has registered a slot writes into it whatever the mapping allows:
pushes from one change nothing there.

Tensors in a GPU's memory are copied by the GPU (cuda_copy.py). A few threads move all others, largest first: several
small copies at a time, or pieces of a large one. The thread that owns the channel reports what they finish. The writer
lock is held from before the first byte until no thread and no GPU can write any more: a trainer that is stopped in
between keeps the store from giving the slot away (slot_lock.py).
"""

import contextlib
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from threading import Event
from typing import NamedTuple

from rollout_client import slot_lock
from rollout_client.aligned_map import protect
from rollout_client.arena_file import ArenaFile
from rollout_client.copying import Alike, Array, move_all, slot_view, source_view
from rollout_client.cuda_copy import CudaCopier
from rollout_client.cuda_pieces import can_copy, in_order
from rollout_client.digest import PIECE, joined
from rollout_client.errors import ArenaError, SessionLost
from rollout_client.protocol import Copy, Placement
from rollout_client.tensors import Source
from rollout_client.transport import Reporter, Transport, by_part, moving_threads


class TrainerArena(ArenaFile):
    """`slot` is readable; `staging` makes one slot writable for a while. One thread at a time."""

    def __init__(self, path: str | Path) -> None:
        """Maps every slot that has memory. Raises ArenaError if `path` is no arena, OSError if it cannot be mapped."""
        super().__init__(path, write=True)
        try:
            for slot in range(self.slots):
                if self.backed(slot):
                    self.slot(slot)  # page tables now, not in the middle of the first push
        except BaseException:
            self.close()
            raise

    def slot(self, slot: int) -> memoryview:
        """A slot's bytes, read-only; see ArenaFile."""
        known = slot in self._maps
        view = super().slot(slot)
        if not known:
            protect(view, write=False)
        return view.toreadonly()

    @contextlib.contextmanager
    def staging(self, slot: int) -> Iterator[memoryview]:
        """The slot's bytes, writable until the end of the block, however that comes. Nothing may write after it."""
        self.slot(slot)
        view = self._maps[slot]
        protect(view, write=True)
        try:
            yield view
        finally:
            protect(view, write=False)


TOGETHER_BYTES = 8 << 20
"""Less than this is not worth a thread's waking, nor Python's lock: small copies are moved several at a time."""


class Moved(NamedTuple):
    """A copy, or one of the pieces of a large one, that is in its place; and the digest of it."""

    copy: int
    digest: int
    nbytes: int
    piece: int = 0
    of: int = 1


class Gathered:
    """Collects the digests of a copy's pieces until all are there."""

    def __init__(self) -> None:
        self._pieces: dict[int, dict[int, Moved]] = {}

    def add(self, moved: Moved) -> tuple[int, int, int] | None:
        """(copy, digest, bytes) once all of it is there."""
        if moved.of == 1:
            return moved.copy, moved.digest, moved.nbytes
        held = self._pieces.setdefault(moved.copy, {})
        held[moved.piece] = moved
        if len(held) < moved.of:
            return None
        del self._pieces[moved.copy]
        ordered = [held[index] for index in range(moved.of)]
        return moved.copy, joined([piece.digest for piece in ordered]), sum(piece.nbytes for piece in ordered)


class Loaded:
    """A source's elements: fetched by the first that needs them, and let go after the last."""

    def __init__(self, source: Source) -> None:
        self.dtype = source.part.dtype
        self.users = 0
        self._source = source
        self._flat: Array | None = None
        self._lock = threading.Lock()

    def flat(self) -> Array:
        """The elements in C order."""
        with self._lock:
            if self._flat is None:
                self._flat = self._source.load()
            return self._flat

    def leave(self) -> None:
        """A user of the elements is done with them."""
        with self._lock:
            self.users -= 1
            if not self.users:
                self._flat = None


class Unit(NamedTuple):
    """A copy, or a piece of a large one; target: its elements in the slot, from the copy's element `start` on."""

    number: int
    copy: Copy
    loaded: Loaded
    target: Array
    start: int
    piece: int
    of: int


def units(source: Source, copies: Sequence[tuple[int, Copy]], slot: memoryview) -> list[Unit]:
    """The units of one part, which is fetched once for all of them. Raises ValueError if a copy leaves the slot."""
    loaded = Loaded(source)
    found = []
    for number, copy in copies:
        target = slot_view(slot, copy)
        step = PIECE // target.itemsize
        if copy.src_strides == copy.dst_strides == (1,) and target.size > step:
            starts = range(0, target.size, step)
            pieces = [target[start : start + step] for start in starts]
            found += [
                Unit(number, copy, loaded, piece, start, index, len(starts))
                for index, (start, piece) in enumerate(zip(starts, pieces, strict=True))
            ]
        else:
            found.append(Unit(number, copy, loaded, target, 0, 0, 1))
    loaded.users = len(found)
    return found


def together(every: Iterable[Unit]) -> Iterator[list[Unit]]:
    """What a thread moves at a time."""
    held: list[Unit] = []
    size = 0
    for unit in every:
        held.append(unit)
        size += unit.target.nbytes
        if size >= TOGETHER_BYTES:
            yield held
            held, size = [], 0
    if held:
        yield held


def move_units(batch: Sequence[Unit]) -> list[Moved]:
    """Move all units of a batch. Raises ValueError for a copy that leaves its tensor."""
    runs = []
    for unit in batch:
        source = source_view(unit.loaded.flat(), unit.copy)
        if unit.of > 1:
            source = source[unit.start : unit.start + unit.target.size]
        runs.append((source, unit.loaded.dtype, unit.target, unit.copy.dst_dtype))
    digests = move_all(runs)
    for unit in batch:
        unit.loaded.leave()
    return [
        Moved(unit.number, digest, unit.target.nbytes, unit.piece, unit.of)
        for unit, digest in zip(batch, digests, strict=True)
    ]


INLINE_BYTES = 4 << 20
"""Less than this is moved without threads."""
AT_ONCE_BYTES = 64 << 20
"""Less than this is moved in a few calls, if it all lies in whole pieces: milliseconds."""
LISTEN_S = 0.005
"""The store is listened to this often, not after every batch: what is done beside copying is taken from the copies."""
Job = tuple[int, list[tuple[int, Copy]]]
"""A part of the trainer's, and its copies with their numbers."""
Turn = tuple[int, list[tuple[int, Copy]], bool]
"""The same, and whether a GPU can move them."""


class ShmTransport(Transport):
    """Writes through a mapping of the arena that is kept from push to push, writable while it does."""

    name = "shm"

    def __init__(self, arena: TrainerArena, threads: int | None = None) -> None:
        """threads: that move tensors, None = one per core this process may use, at most four."""
        self._arena = arena
        self._cuda: CudaCopier | None = None
        self._alike: Alike | None = None  # of the last small push
        self._turns: tuple[list[Copy], list[Turn]] | None = None  # of the last copies
        self.filled = 0
        """Ranks whose device memory the last push has filled."""
        self._threads = threads or moving_threads()
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="push")

    @classmethod
    def reach(cls, path: str, nonce: bytes, threads: int | None = None) -> "ShmTransport | None":
        """The transport if the store's arena is on this host and may be written, else None. nonce: at its head."""
        try:
            arena = TrainerArena(path)
        except (ArenaError, OSError):
            return None
        if arena.nonce != nonce:
            arena.close()
            return None
        return cls(arena, threads)

    def serves(self, nonce: bytes) -> bool:
        """Whether the arena that is mapped here is that one."""
        return bool(self._arena.nonce == nonce)

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
            if not self._moved_at_once(placement, sources, number, reporter):
                self._move_apart(placement, sources, number, reporter)
        finally:
            slot_lock.unlock(self._arena.fd, *span)
        reporter.flush()

    def foresee(self, copies: list[Copy], sources: Sequence[Source]) -> None:
        """What can be done of a push from a GPU while the store looks for its place. copies: of its plan. Raises
        RuntimeError from CUDA.
        """
        if self._cuda is None or self._turns is None or self._turns[0] is not copies:
            return
        if all(source.on_gpu is not None for source in sources):
            self._cuda.foresee([(sources[part], numbered) for part, numbered, _ in self._turns[1]])

    def settle(self) -> None:
        """The push is over, whatever has become of it: nothing reads the trainer's memory any more after this."""
        if self._cuda is not None:
            self._cuda.settle()

    def unshare(self) -> None:
        """Have ranks unmap this process's memory."""
        if self._cuda is not None:
            self._cuda.unshare()

    def close(self) -> None:
        """Stop the threads, unpin and unmap."""
        self._pool.shutdown()
        if self._cuda is not None:
            self._cuda.close()
        self._arena.close()

    def _moved_at_once(self, placement: Placement, sources: Sequence[Source], number: int, reporter: Reporter) -> bool:
        """Move a little, such as an adapter, in a few calls; False if that cannot be done."""
        if sum(source.nbytes for source in sources) > AT_ONCE_BYTES or any(s.on_gpu is not None for s in sources):
            return False
        parts = [source.part for source in sources]
        if self._alike is None or not self._alike.fits(placement.copies, parts):
            self._alike = Alike.of(placement.copies, parts, int(self._arena.slot_bytes))
        if self._alike is None:
            return False
        self.filled = 0
        if self._cuda is not None:
            self._cuda.keep_only()
        with self._arena.staging(number) as slot:
            for first, digests, nbytes in self._alike.move(sources, slot):
                reporter.all_written(enumerate(digests, first), nbytes)
        reporter.turn()
        return True

    def _move_apart(self, placement: Placement, sources: Sequence[Source], number: int, reporter: Reporter) -> None:
        """Have the GPU move what lies there, and threads the rest."""
        on_gpu: list[tuple[Source, list[tuple[int, Copy]]]] = []
        others: list[Job] = []
        for part, copies, fit in self._in_turn(placement.copies):
            if fit and sources[part].on_gpu is not None:
                on_gpu.append((sources[part], copies))
            else:
                others.append((part, copies))
        others.sort(key=lambda job: -sources[job[0]].nbytes)
        self.filled = 0
        if on_gpu:
            self._cuda = self._cuda or CudaCopier()
        if self._cuda is not None:
            ranks = placement.devices if not others else [], placement.write_epoch
            memory, writable = self._arena.slot(number), partial(self._arena.staging, number)
            ahead = placement.ahead and not others
            self.filled = self._cuda.stage(number, memory, writable, on_gpu, reporter, ranks, ahead=ahead)
        if others:
            with self._arena.staging(number) as slot:
                self._move_all(others, slot, sources, reporter)

    def _in_turn(self, copies: list[Copy]) -> list[Turn]:
        """Every part, in the order in which a GPU moves them. Pushes under one plan have one list of copies, of which
        this is found out once.
        """
        if self._turns is None or self._turns[0] is not copies:
            ordered = in_order(list(by_part(copies)))
            self._turns = copies, [(part, numbered, can_copy(numbered)) for part, numbered in ordered]
        return self._turns[1]

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
        """Move batch after batch until there are no more. Runs in a thread."""
        while not stop.is_set():
            try:
                batch = batches.get_nowait()
            except queue.Empty:
                return
            finished.put(move_units(batch))


def _wait_for(threads: "Sequence[Future[None]]") -> None:
    """Wait until no thread can write any more, whoever interrupts: what they write into is let go of after this."""
    interrupted: BaseException | None = None
    while True:
        try:
            wait(threads)
            break
        except BaseException as error:  # a batch takes milliseconds
            interrupted = error
    if interrupted is not None:
        raise interrupted

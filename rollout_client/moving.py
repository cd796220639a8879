"""Work for the threads that write into the slot: several small copies at a time, or pieces of a large one."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rollout_client.copying import Array, move_all, slot_view, source_view
from rollout_client.digest import PIECE, joined
from rollout_client.protocol import Copy
from rollout_client.tensors import Source

TOGETHER_BYTES = 8 << 20
"""Less than this is not worth a thread's waking, nor Python's lock: small copies are moved several at a time."""


class Moved(NamedTuple):
    """A copy that is in its place, or one of the pieces that it was parted into, with the digest of that."""

    copy: int
    digest: int
    nbytes: int
    piece: int = 0
    of: int = 1


class Gathered:
    """Pieces, until a copy has all of its."""

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
        """In C order."""
        with self._lock:
            if self._flat is None:
                self._flat = self._source.load()
            return self._flat

    def leave(self) -> None:
        """One user less."""
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
    """Of one part, which is fetched once for all of them. Raises ValueError for a copy that leaves the slot."""
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
    """All of them. Raises ValueError for a copy that leaves its tensor."""
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

"""Work for the threads that write into the slot: parts, several small ones at a time, or pieces of a large one."""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from rollout_client.copying import Array, move, slot_view, source_view
from rollout_client.digest import PIECE, joined
from rollout_client.protocol import Copy
from rollout_client.tensors import Source

SHARED_BYTES = 4 * PIECE
"""Copies from this size on are shared."""
TOGETHER_BYTES = 8 << 20
"""Less than this is not worth a thread's waking: small copies are moved several at a time."""
Work = Callable[[], list["Moved"]]


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


def tasks(source: Source, copies: list[tuple[int, Copy]], slot: memoryview, stop: threading.Event) -> list[Work]:
    """Of one part, each for one thread. Its copies stay together, but for one large copy of neighbours."""
    number, copy = copies[0]
    plain = copy.src_strides == copy.dst_strides == (1,)
    if len(copies) > 1 or not plain or source.nbytes < SHARED_BYTES:
        return [lambda: move_part(source, copies, slot, stop)]
    target = slot_view(slot, copy)
    step = PIECE // target.itemsize
    starts = range(0, target.size, step)
    loaded = Loaded(source)

    def piece(index: int, start: int) -> list[Moved]:
        if stop.is_set():
            return []
        here = target[start : start + step]
        flat = source_view(loaded.flat(), copy)[start : start + step]
        digest = move(flat, source.part.dtype, here, copy.dst_dtype)
        return [Moved(number, digest, here.nbytes, index, len(starts))]

    return [lambda i=i, start=start: piece(i, start) for i, start in enumerate(starts)]  # type: ignore[misc]


def together(works: Iterable[tuple[Work, int]]) -> Iterator[Work]:
    """Works with their bytes, the small ones several to one."""
    held: list[Work] = []
    size = 0
    for work, nbytes in works:
        held.append(work)
        size += nbytes
        if size >= TOGETHER_BYTES:
            yield _one_after_the_other(held)
            held, size = [], 0
    if held:
        yield _one_after_the_other(held)


def _one_after_the_other(works: list[Work]) -> Work:
    return lambda: [moved for work in works for moved in work()]


class Loaded:
    """A source's elements, fetched once by whichever thread comes first."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._flat: Array | None = None
        self._lock = threading.Lock()

    def flat(self) -> Array:
        """In C order."""
        with self._lock:
            if self._flat is None:
                self._flat = self._source.load()
            return self._flat


def move_part(source: Source, copies: list[tuple[int, Copy]], slot: memoryview, stop: threading.Event) -> list[Moved]:
    """Copy after copy until told to stop; those that were done."""
    done: list[Moved] = []
    if stop.is_set():
        return done
    flat = source.load()
    for number, copy in copies:
        if stop.is_set():
            break
        target = slot_view(slot, copy)
        digest = move(source_view(flat, copy), source.part.dtype, target, copy.dst_dtype)
        done.append(Moved(number, digest, target.nbytes))
    return done

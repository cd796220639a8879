"""Which bytes of CUDA tensors go where in the slot, in which order and in which batches. Nothing is copied here.

`Lying` is a push of which nothing has to be made: every piece is copied from where it lies. From push to push it is the
same one, as long as all of them lie where they lay.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from rollout_client.own_memory import Run
from rollout_client.protocol import Copy
from rollout_client.tensors import Source

BATCH_BYTES = 64 << 20
"""A push is cut into about this many bytes: small enough for the store to check early, and not too many for its loop,
which is late for the last ones otherwise.
"""
LAST_BYTES = 8 << 20
"""Batches become smaller towards the end, to a quarter of what is left and down to this: so threads have hashed each by
the time that the next has landed, and what is left to be done after the last copy is that batch's.
"""
LARGE_BYTES = 16 << 20
"""Tensors of more go first."""
PART_BYTES = 32 << 20
"""A larger tensor is copied in parts of this size, each of which the store is told of: a rank that copies what has
arrived (ADR 21) would else begin with a model's largest tensor when all of it is there, and end as much later.
"""
TOGETHER_BYTES = 2 << 30
"""Batches of about so much are hashed in one launch."""
TAIL_BYTES, TAIL_SIZES = 24 << 20, (256 << 10, 2 << 20)
"""The end of a push, of tensors of these sizes: one of the store's threads hashes a tensor, or 16 MiB of it, and takes
eight times as long as it takes to arrive.
"""

Numbered = list[tuple[int, Copy]]
"""Copies of one part, with their numbers."""
Job = tuple[Source, Numbered]


class Piece(NamedTuple):
    """A contiguous copy: its number, the address that it is read from, its first byte in the slot, and how many."""

    number: int
    address: int
    start: int
    nbytes: int


class Lying:
    """A push whose pieces are copied from where they lie. It keeps no tensor.

    batches: what is copied together, in order. together: (address, bytes) of what is hashed together, whole batches.
    numbers and runs: of all pieces, in the order of batches.
    """

    def __init__(self, jobs: Sequence[Job], pieces: Sequence[Piece]) -> None:
        left = iter(pieces)
        self.batches = [[next(left) for _, copies in batch for _ in copies] for batch in batches(jobs)]
        self.together = [tuple((piece.address, piece.nbytes) for piece in some) for some in _launches(self.batches)]
        self.numbers = [piece.number for piece in pieces]
        self.runs = [Run(piece.start, piece.address, piece.nbytes) for piece in pieces]
        self._copies = [copies for _, copies in jobs]
        self._tensors = [_lies(source.on_gpu) for source, _ in jobs]

    @classmethod
    def of(cls, torch: Any, jobs: Sequence[Job]) -> "Lying | None":
        """None where something has to be made, or does not lie on a word's boundary, on which it could be hashed.
        Raises ValueError for a copy that leaves its tensor.
        """
        found = []
        for source, copies in jobs:
            for number, copy in copies:
                piece = in_place(torch, source.on_gpu, copy)
                if piece is None or piece.data_ptr() % 8:
                    return None
                found.append(piece_of(number, piece, copy))
        return cls(jobs, found)

    def holds(self, jobs: Sequence[Job]) -> bool:
        """Whether these are to be copied to the same places, and lie where those lay."""
        return (
            len(jobs) == len(self._copies)
            and all(copies is known for (_, copies), known in zip(jobs, self._copies, strict=True))
            and [_lies(source.on_gpu) for source, _ in jobs] == self._tensors
        )


def _lies(tensor: Any) -> tuple[int, Any, bool]:
    return tensor.data_ptr(), tensor.dtype, tensor.is_contiguous()


def can_copy(copies: Numbered) -> bool:
    """Whether a CUDA tensor's copies land in one piece each; any other tensor goes by the CPU."""
    return all(dense(copy.shape, copy.dst_strides) for _, copy in copies)


def in_order(parts: Sequence[tuple[int, Numbered]]) -> list[tuple[int, Numbered]]:
    """Parts as a GPU copies them: large ones first, which the store checks longest, and all as they lie in the slot, so
    that what has arrived there lies in one piece and a rank takes it in one copy; but for some small ones, which are
    last, so that the store has little to check once all is there.
    """
    ordered = sorted(parts, key=lambda part: turn(part[1]))
    tail: list[int] = []
    left, (least, most) = TAIL_BYTES, TAIL_SIZES
    for at in range(len(ordered) - 1, -1, -1):
        size = _size(ordered[at][1])
        if least <= size <= min(most, left):
            tail.append(at)
            left -= size
    last = set(tail)
    return [part for at, part in enumerate(ordered) if at not in last] + [ordered[at] for at in reversed(tail)]


def turn(copies: Numbered) -> tuple[bool, int]:
    """Where a part comes, if none is kept for the end."""
    return _size(copies) <= LARGE_BYTES, min(start_of(copy) for _, copy in copies)


def _size(copies: Numbered) -> int:
    return sum(nbytes_of(copy) for _, copy in copies)


def batches(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    """Jobs that are copied together."""
    left = sum(source.nbytes for source, _ in jobs)
    batch: list[Job] = []
    size = 0
    for job in jobs:
        batch.append(job)
        size += job[0].nbytes
        if size >= min(BATCH_BYTES, max(left // 4, LAST_BYTES)):
            yield batch
            left -= size
            batch, size = [], 0
    if batch:
        yield batch


def _launches(of: Sequence[Sequence[Piece]]) -> Iterator[list[Piece]]:
    held: list[Piece] = []
    for batch in of:
        held += batch
        if sum(piece.nbytes for piece in held) >= TOGETHER_BYTES:
            yield held
            held = []
    if held:
        yield held


def dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements in C order are neighbours in memory."""
    step = 1
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and stride != step:
            return False
        step *= n
    return True


def in_place(torch: Any, whole: Any, copy: Copy) -> Any:
    """What the copy takes, contiguous in its C order, as it lies in the tensor; None if it has to be made. Raises
    ValueError for a copy that leaves the tensor.
    """
    if not whole.is_contiguous() or whole.dtype != getattr(torch, copy.dst_dtype):
        return None
    if (copy.shape, copy.src_offset, copy.src_strides) == ((whole.numel(),), 0, (1,)):
        return whole
    last = _last(whole, copy)
    return whole.detach().view(-1)[copy.src_offset : last + 1] if dense(copy.shape, copy.src_strides) else None


def made(torch: Any, whole: Any, copy: Copy) -> Any:
    """The same in memory of its own, in the slot's dtype. Raises ValueError."""
    dtype = getattr(torch, copy.dst_dtype)
    flat = whole.contiguous().detach().view(-1)
    last = _last(flat, copy)
    if dense(copy.shape, copy.src_strides):
        piece = flat[copy.src_offset : last + 1]
    else:
        offset = flat.storage_offset() + copy.src_offset
        piece = flat.as_strided(copy.shape, copy.src_strides, offset).reshape(-1)
    return piece.to(dtype)


def _last(whole: Any, copy: Copy) -> int:
    """The last element that the copy takes of a contiguous tensor."""
    last = copy.src_offset + sum((n - 1) * s for n, s in zip(copy.shape, copy.src_strides, strict=True))
    if min(copy.shape, default=1) < 1 or min(copy.src_offset, *copy.src_strides) < 0 or last >= whole.numel():
        raise ValueError(f"a copy of {copy.shape} at {copy.src_offset} leaves a tensor of {whole.numel()}")
    return last


def piece_of(number: int, tensor: Any, copy: Copy) -> Piece:
    """A contiguous tensor that is what the copy takes."""
    return Piece(number, tensor.data_ptr(), start_of(copy), nbytes_of(copy))


def start_of(copy: Copy) -> int:
    """Its first byte in the slot."""
    return copy.dst_offset * _itemsize(copy.dst_dtype)


def nbytes_of(copy: Copy) -> int:
    """Its bytes there."""
    return prod(copy.shape) * _itemsize(copy.dst_dtype)


def _itemsize(dtype: str) -> int:
    return 4 if dtype == "float32" else 2

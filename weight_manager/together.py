"""Copies of a push that lie each in one piece: looked at together, a share of them in a few calls.

A version is hundreds of copies, and a trainer pushes the same ones again and again. What Python does for each by itself
takes longer than hashing an adapter's bytes, and of a model the loop is behind its trainer at the end. `Laid` is what
all pushes of one plan have in common, `Together` what one push has come to. Both are used by the store's loop alone. A
share of a small push it hashes itself: that takes less than to wake a thread for it and to hear of it.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_client.copying import Kernels
from rollout_client.digest import PIECE, digest_of
from rollout_client.protocol import Copy
from weight_manager import finite
from weight_manager.errors import PushRefused
from weight_manager.layout import ITEMSIZE, VIEW_DTYPE, Layout
from weight_manager.pieces import Pieces

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]


class Proven(NamedTuple):
    """A copy whose bytes in the slot are its trainer's: its first byte, bytes, and their digest."""

    start: int
    nbytes: int
    digest: int | None
    contiguous: bool


class Laid(NamedTuple):
    """names, starts, sizes: [copies] tensor, first byte in the slot, bytes; spans: both of these again. of_region:
    [regions] the copy that is all of a region, -1 where none is. pieced: some have more than one of the pieces that
    digests are made of.
    """

    copies: list[Copy]
    names: list[str]
    starts: Int64
    sizes: Int64
    of_region: Int64
    spans: list[tuple[int, int]]
    pieced: bool

    @classmethod
    def of(cls, copies: list[Copy], names: list[str], layout: Layout) -> "Laid | None":
        """None if some copy is strided, or not inside the slot."""
        dtype = layout.manifest.dtype
        size = ITEMSIZE[dtype]
        if not copies or any(copy.dst_strides != (1,) or copy.dst_dtype != dtype for copy in copies):
            return None
        starts, sizes = (size * np.array([(c.dst_offset, c.shape[0]) for c in copies], np.int64)).T.copy()
        if starts.min() < 0 or (starts + sizes).max() > layout.slot_bytes:
            return None
        spans = list(zip(starts.tolist(), sizes.tolist(), strict=True))
        at = {one: number for number, one in enumerate(spans)}
        of_region = np.array([at.get(one, -1) for one in layout.ranges], np.int64)
        return cls(copies, names, starts, sizes, of_region, spans, bool(sizes.max() > PIECE))


class Together:
    """written, digests: [copies] reported complete; found in the slot, once they are the trainer's. finite: all of them
    that were looked at are numbers, and all were looked at: whole, or of a large version at their ends. pieces: of
    those that are hashed while they arrive, by number.
    """

    def __init__(self, laid: Laid) -> None:
        self.laid = laid
        self.written = np.zeros(len(laid.names), np.bool_)
        self.proven = np.zeros(len(laid.names), np.bool_)
        self.digests = np.zeros(len(laid.names), np.uint64)
        self.finite = True
        self.pieces: dict[int, Pieces] = {}

    def named(self, number: int) -> tuple[str, int, int]:
        """Tensor, first byte and bytes of a copy. Raises PushRefused where there is none."""
        if not 0 <= number < len(self.laid.names):
            raise PushRefused("bad_message", f"copy {number} is none of the {len(self.laid.names)} placed")
        return self.laid.names[number], *self.laid.spans[number]

    def pieces_of(self, number: int) -> Pieces:
        """A copy that is hashed piece by piece."""
        if number not in self.pieces:
            self.pieces[number] = Pieces(*self.laid.spans[number])
        return self.pieces[number]

    def claimed(self, claims: Iterable[tuple[int, int]]) -> tuple[Int64, UInt64]:
        """(copies, digests) that a trainer says are complete. Raises PushRefused for a copy that is none, or came
        twice, and for what is no digest.
        """
        held = list(claims)
        try:
            digests = np.array([digest for _, digest in held], np.uint64)
        except OverflowError as error:
            raise PushRefused("bad_message", "a digest has 64 bits") from error
        numbers = np.array([number for number, _ in held], np.int64)
        wrong = (numbers < 0) | (numbers >= len(self.written))
        if wrong.any():
            what = f"copy {numbers[wrong][0]} is none of the {len(self.written)} placed"
            raise PushRefused("bad_message", what)
        written = self.written.copy()
        written[numbers] = True
        if np.count_nonzero(written) < np.count_nonzero(self.written) + len(numbers):
            twice = self.written[numbers]
            name = self.laid.names[numbers[twice][0] if twice.any() else _repeated(numbers)]
            raise PushRefused("duplicate_tensor", f"{name} was reported complete twice", [name])
        self.written = written
        return numbers, digests

    def check(self, fast: Kernels, slot: memoryview, numbers: Int64, claimed: UInt64) -> list[str]:
        """Compare what lies in the slot, and see whether it is numbers; names of the tensors that differ."""
        starts, sizes = self.laid.starts[numbers], self.laid.sizes[numbers]
        look = self.finite and finite.ready()  # else a thread compiles it, once all is there
        if look:
            dtype = VIEW_DTYPE[self.laid.copies[0].dst_dtype]
            found, self.finite = finite.prove_rows(np.frombuffer(slot, dtype), starts, sizes)
        else:
            found, self.finite = fast.digests(np.frombuffer(slot, np.uint8), starts, sizes), False
        return self.compare(numbers, claimed, found)

    def look(self, slot: memoryview, numbers: Sequence[int]) -> None:
        """See whether the ends of these copies are numbers."""
        dtype = VIEW_DTYPE[self.laid.copies[0].dst_dtype]
        flat, size = np.frombuffer(slot, dtype), dtype.itemsize
        spans = ((start // size, nbytes // size) for start, nbytes in (self.laid.spans[number] for number in numbers))
        self.finite = self.finite and finite.all_ends_finite([flat[start : start + count] for start, count in spans])

    def compare(self, numbers: Int64, claimed: UInt64, found: UInt64) -> list[str]:
        """Note the digests of copies as they were found in the slot; names of the tensors whose are not as claimed."""
        same = found == claimed
        self.digests[numbers[same]] = found[same]
        self.proven[numbers[same]] = True
        return list(dict.fromkeys(self.laid.names[number] for number in numbers[~same].tolist()))

    def found(self, numbers: Int64) -> Iterator[Proven]:
        """These copies, which are proven."""
        rows = (self.laid.starts, self.laid.sizes, self.digests)
        for start, size, digest in zip(*(row[numbers].tolist() for row in rows), strict=True):
            yield Proven(start, size, digest, contiguous=True)

    @property
    def whole(self) -> bool:
        """Every region is a copy that is proven."""
        return bool((self.laid.of_region >= 0).all() and self.proven.all())

    def region_digests(self, ranges: Sequence[tuple[int, int]], slot: memoryview) -> list[int]:
        """Digest of every region; hashes what no single proven copy covers."""
        if self.whole:
            digests: list[int] = self.digests[self.laid.of_region].tolist()
            return digests
        return [
            int(self.digests[number]) if number >= 0 and self.proven[number] else digest_of(slot[start : start + size])
            for number, (start, size) in zip(self.laid.of_region.tolist(), ranges, strict=True)
        ]

    def unwritten(self) -> list[str]:
        """Tensors of which a copy has not been reported complete."""
        if self.written.all():
            return []
        return list(dict.fromkeys(self.laid.names[number] for number in np.flatnonzero(~self.written).tolist()))


def _repeated(numbers: Int64) -> int:
    values, counts = np.unique(numbers, return_counts=True)
    return int(values[counts > 1][0])

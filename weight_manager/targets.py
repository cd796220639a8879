"""One copy of a push: where it lands in the slot, which of its bytes have come, and whether they are its trainer's."""

from collections.abc import Callable
from math import prod

import numpy as np

from rollout_client.digest import digest_of, piece_spans
from rollout_client.page_sums import both_digests
from rollout_client.protocol import Copy
from weight_manager.intervals import Intervals
from weight_manager.layout import ITEMSIZE, VIEW_DTYPE, Array
from weight_manager.patched import Patched
from weight_manager.pieces import Pieces


class Target:
    """Where one copy lands in the slot, which of its bytes have come, and what they are then."""

    __slots__ = (
        *("_copy", "_held_view", "_scratch", "_slot", "arriving", "by_sums", "contiguous", "digest", "name"),
        *("nbytes", "patched", "pieces", "_received", "start", "streamed", "written"),
    )

    def __init__(self, name: str, copy: Copy, slot: memoryview, base: memoryview | None = None) -> None:
        """base: a slot whose bytes are taken where none are received. Raises ValueError or TypeError for a copy that
        leaves the slot.
        """
        itemsize = ITEMSIZE[copy.dst_dtype]
        self.name = name
        self.start = copy.dst_offset * itemsize
        self.nbytes = prod(copy.shape) * itemsize
        self._copy, self._slot = copy, slot
        self._held_view: Array | None = None  # a push has hundreds of copies, and most are only hashed
        plain = copy.dst_strides == (1,) and 0 <= self.start <= slot.nbytes - self.nbytes
        self.contiguous = plain or self._view.flags.c_contiguous
        """Whether the copy is one run of bytes in the slot."""
        self._scratch: Array | None = None
        self.patched = None if base is None else Patched(self._in(base))
        self._received: Intervals | None = None  # of those that receive any
        self.arriving = 0  # of those, bytes that are not there yet
        self.written = False
        self.by_sums = False  # its trainer sends a digest of page sums
        self.digest: int | None = None  # once it has been found to match
        self.pieces: Pieces | None = None  # of one that is hashed while it arrives
        self.streamed: int | None = None  # of the bytes in their place, taken as each was received

    @property
    def received(self) -> Intervals:
        """Its bytes that have come in chunks."""
        if self._received is None:
            self._received = Intervals()
        return self._received

    @property
    def span(self) -> tuple[int, int]:
        """(offset, bytes) in the slot; of contiguous targets only."""
        return self.start, self.nbytes

    def passes(self, look: Callable[[Array], bool]) -> bool:
        """What `look` says of the elements of a contiguous one, flat, as they lie in the slot."""
        dtype = VIEW_DTYPE[self._copy.dst_dtype]
        return look(np.frombuffer(self._slot, dtype, self.nbytes // dtype.itemsize, self.start))

    def destination(self, offset: int, size: int) -> memoryview:
        """Where these bytes of the copy are received: the slot itself, or scratch for a strided target."""
        if self.contiguous:
            array = self._view
        else:
            if self._scratch is None:
                self._scratch = np.empty(self._view.shape, self._view.dtype)
            array = self._scratch
        return array.reshape(-1).view(np.uint8).data[offset : offset + size]

    @property
    def scattered(self) -> bool:
        """`compute` still has to write into the slot: from scratch, from the base, or patches."""
        return self._scratch is not None or self.patched is not None

    @property
    def complete(self) -> bool:
        """Whether every byte of the copy is there."""
        return not self.arriving and (self.patched is not None or self.received.covers(self.nbytes))

    def parts(self) -> list[tuple[int, int]]:
        """(offset, bytes) in the slot of what threads may hash apart from each other (digest.py); none if it has to be
        computed as a whole.
        """
        if self.scattered or self.by_sums or self.streamed is not None or not self.contiguous:
            return []
        return piece_spans(self.start, self.nbytes)

    def compute(self) -> tuple[int, int]:
        """Digest of what the slot holds, in the copy's C order, and the digest that its trainer must have sent.

        Takes the rest from the base, applies patches and scatters scratch into the slot first. Raises ValueError for
        a patch that does not fit.
        """
        if self.streamed is not None and not self.scattered:
            return self.streamed, self.streamed
        filled = None
        if self.patched is not None:
            filled = self.patched.fill(np.frombuffer(self.destination(0, self.nbytes), np.uint8))
            if filled is None:
                raise ValueError(f"a patch of {self.name} does not fit it")
            self.patched = None
        if self._scratch is not None:
            self._view[...] = self._scratch
            self._scratch = None
        whole = self._view if self.contiguous else np.ascontiguousarray(self._view)
        if self.by_sums:
            return both_digests(whole)
        if filled is None or not self.contiguous:
            filled = digest_of(whole.reshape(-1).data)
        return filled, filled

    @property
    def _view(self) -> Array:
        if self._held_view is None:
            self._held_view = self._in(self._slot)
        return self._held_view

    def _in(self, slot: memoryview) -> Array:
        dtype = VIEW_DTYPE[self._copy.dst_dtype]
        strides = tuple(stride * dtype.itemsize for stride in self._copy.dst_strides)
        return np.ndarray(self._copy.shape, dtype, slot, self.start, strides)


Check = list[tuple[Target, int]]
"""Targets and the digests their bytes must have."""


def run_check(check: Check) -> list[str]:
    """Names of the tensors whose bytes in the slot differ from their digest. Runs in a thread."""
    wrong: list[str] = []
    for target, claimed in check:
        try:
            digest, expected = target.compute()
        except ValueError:
            wrong.append(target.name)
            continue
        if expected == claimed:
            target.digest = digest
        elif target.name not in wrong:
            wrong.append(target.name)
    return wrong

"""Where one copy of a push lands in the slot, what of it has come, and what its bytes are then."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_client import patches
from rollout_client.digest import PIECE, digest_of, joined, pieces
from rollout_client.page_sums import both_digests
from rollout_client.patches import BITS
from rollout_client.protocol import Copy
from weight_manager.intervals import Intervals
from weight_manager.layout import VIEW_DTYPE

WINDOW = 1 << 20
"""Bytes that are taken from the base and hashed at a time, so that they stay in the core's cache."""
Patch = tuple[memoryview, memoryview]
"""Gaps and values (rollout_client/patches.py)."""
NOTHING: Patch = (memoryview(b""), memoryview(b""))


class Target:
    """Where one copy lands in the slot."""

    __slots__ = (
        *("_base", "_patches", "_plain", "_scratch", "_view"),
        *("arriving", "by_sums", "digest", "name", "nbytes", "received", "start", "streamed", "written"),
    )

    def __init__(self, name: str, copy: Copy, slot: memoryview, base: memoryview | None = None) -> None:
        """base: a slot whose bytes are taken where none are received."""
        dtype = VIEW_DTYPE[copy.dst_dtype]
        strides = tuple(s * dtype.itemsize for s in copy.dst_strides)
        self.name = name
        self.start = copy.dst_offset * dtype.itemsize
        self._view: npt.NDArray[Any] = np.ndarray(copy.shape, dtype, slot, self.start, strides)
        self._scratch: npt.NDArray[Any] | None = None
        self._base = None if base is None else np.ndarray(copy.shape, dtype, base, self.start, strides)
        self._patches: list[tuple[int, int, Patch]] = []  # offset, span
        self._plain = Intervals()  # of a target with a base: what came as it is
        self.nbytes = prod(copy.shape) * dtype.itemsize
        self.received = Intervals()
        self.arriving = 0  # of those, bytes that are not there yet
        self.written = False
        self.by_sums = False  # its trainer sends a digest of page sums
        self.digest: int | None = None  # once it has been found to match
        self.streamed: int | None = None  # of the bytes in their place, taken as each was received

    @property
    def contiguous(self) -> bool:
        """One run of bytes in the slot."""
        return self._view.flags.c_contiguous

    @property
    def span(self) -> tuple[int, int]:
        """(offset, bytes) in the slot; of contiguous targets only."""
        return self.start, self.nbytes

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
        return self._scratch is not None or self._base is not None

    @property
    def complete(self) -> bool:
        """Nothing is missing."""
        return not self.arriving and (self._base is not None or self.received.covers(self.nbytes))

    def plain(self, offset: int, size: int) -> None:
        """These bytes come as they are."""
        if self._base is not None:
            self._plain.add(offset, offset + size)

    def patch(self, offset: int, span: int, sizes: Sequence[int]) -> list[memoryview] | None:
        """Where a patch's gaps and values are received; None if there can be no such patch."""
        item = self._view.itemsize
        if self._base is None or offset % item or span % item or len(sizes) != 2:
            return None
        if offset // PIECE != (offset + span - 1) // PIECE:
            return None
        gaps, values = sizes
        if not 0 < values <= span or values % item or not 0 < gaps <= span // item:
            return None
        frames = memoryview(bytearray(gaps)), memoryview(bytearray(values))
        self._patches.append((offset, span, frames))
        return list(frames)

    def _fill(self, base: npt.NDArray[Any]) -> int:
        """What was not received from the base, with the patches. Digest of it all, each window taken while hot.

        Raises ValueError for a patch that does not fit.
        """
        bits = BITS[self._view.itemsize]
        flat = np.frombuffer(self.destination(0, self.nbytes), np.uint8)
        source = np.ascontiguousarray(base).reshape(-1).view(np.uint8)
        digests: list[int] = []
        state, room = patches.hasher(), PIECE
        for start, stop, (gaps, values) in self._windows():
            came = self._plain.gaps(start, stop) != [(start, stop)]
            patch = np.frombuffer(gaps, np.uint8), np.frombuffer(values, bits)
            if came:
                state.update(flat[start:stop])
            elif not patches.patched(flat[start:stop].view(bits), source[start:stop].view(bits), *patch, state):
                raise ValueError(f"a patch of {self.name} does not fit it")
            room -= stop - start
            if not room or stop == self.nbytes:
                digests.append(state.intdigest())
                state, room = patches.hasher(), PIECE
        return joined(digests)

    def _windows(self) -> Iterator[tuple[int, int, Patch]]:
        """The whole in order: spans of patches, what came as it is, and what did not change; none crosses a piece."""
        spans = {offset: (offset + span, patch) for offset, span, patch in self._patches}
        edges = {*range(0, self.nbytes, WINDOW), *spans, *(stop for stop, _ in spans.values()), self.nbytes}
        edges |= {edge for gap in self._plain.gaps(0, self.nbytes) for edge in gap}
        ordered = sorted(edges)
        done = 0
        for start, stop in pairwise(ordered):
            if start < done:
                continue  # inside the span of a patch
            done, patch = spans.get(start, (stop, NOTHING))
            yield start, done, patch

    def parts(self) -> list[memoryview]:
        """What threads may hash apart from each other (digest.py); one if it has to be computed as a whole."""
        if self.scattered or self.by_sums or self.streamed is not None or not self.contiguous:
            return []
        return pieces(memoryview(self._view.reshape(-1).view(np.uint8).data))

    def compute(self) -> tuple[int, int]:
        """Digest of what the slot holds, in the copy's C order, and the digest that its trainer must have sent.

        Takes the rest from the base, applies patches and scatters scratch into the slot first. Raises ValueError for
        a patch that does not fit.
        """
        if self.streamed is not None and not self.scattered:
            return self.streamed, self.streamed
        filled = None
        if self._base is not None:
            filled = self._fill(self._base)
            self._base = None
            self._patches.clear()
        if self._scratch is not None:
            self._view[...] = self._scratch
            self._scratch = None
        whole = self._view if self.contiguous else np.ascontiguousarray(self._view)
        if self.by_sums:
            return both_digests(whole)
        if filled is None or not self.contiguous:
            filled = digest_of(whole.reshape(-1).data)
        return filled, filled

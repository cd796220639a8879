"""A copy of which a trainer sends only what has changed: the rest comes from the slot of the live version."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from rollout_client import patches
from rollout_client.digest import PIECE, joined
from rollout_client.patches import BITS
from weight_manager.intervals import Intervals
from weight_manager.layout import Array

WINDOW = 1 << 20
"""Bytes that are taken from the base and hashed at a time, so that they stay in the core's cache."""
Patch = tuple[memoryview, memoryview]
"""Gaps and values (rollout_client/patches.py)."""
NOTHING: Patch = (memoryview(b""), memoryview(b""))


class Patched:
    """What has come for such a copy: bytes as they are, and patches of spans. Everything else is the base's."""

    def __init__(self, base: Array) -> None:
        """base: the copy's elements in the live slot, of the served dtype."""
        self._base = base
        self._patches: list[tuple[int, int, Patch]] = []  # offset, span
        self._plain = Intervals()

    def plain(self, offset: int, size: int) -> None:
        """Note bytes that come as they are, not as a patch."""
        self._plain.add(offset, offset + size)

    def patch(self, offset: int, span: int, sizes: Sequence[int]) -> list[memoryview] | None:
        """Where a patch's gaps and values are received; None if there can be no such patch."""
        item = self._base.itemsize
        if offset % item or span % item or len(sizes) != 2:
            return None
        if offset // PIECE != (offset + span - 1) // PIECE:
            return None
        gaps, values = sizes
        if not 0 < values <= span or values % item or not 0 < gaps <= span // item:
            return None
        frames = memoryview(bytearray(gaps)), memoryview(bytearray(values))
        self._patches.append((offset, span, frames))
        return list(frames)

    def fill(self, whole: Array) -> int | None:
        """Write what was not received. Digest of it all, each window taken while hot; None if a patch does not fit.

        whole: [bytes] uint8 of the copy in C order, in which what came as it is lies already.
        """
        bits = BITS[self._base.itemsize]
        source = np.ascontiguousarray(self._base).reshape(-1).view(np.uint8)
        digests: list[int] = []
        state, room = patches.hasher(), PIECE
        for start, stop, (gaps, values) in self._windows(whole.size):
            came = self._plain.gaps(start, stop) != [(start, stop)]
            patch = np.frombuffer(gaps, np.uint8), np.frombuffer(values, bits)
            if came:
                state.update(whole[start:stop])
            elif not patches.patched(whole[start:stop].view(bits), source[start:stop].view(bits), *patch, state):
                return None
            room -= stop - start
            if not room or stop == whole.size:
                digests.append(state.intdigest())
                state, room = patches.hasher(), PIECE
        return joined(digests)

    def _windows(self, nbytes: int) -> Iterator[tuple[int, int, Patch]]:
        """The whole in order: spans of patches, what came as it is, and what did not change; none crosses a piece."""
        spans = {offset: (offset + span, patch) for offset, span, patch in self._patches}
        edges = {*range(0, nbytes, WINDOW), *spans, *(stop for stop, _ in spans.values()), nbytes}
        edges |= {edge for gap in self._plain.gaps(0, nbytes) for edge in gap}
        done = 0
        for start, stop in pairwise(sorted(edges)):
            if start < done:
                continue  # inside the span of a patch
            done, patch = spans.get(start, (stop, NOTHING))
            yield start, done, patch

"""The digest of a copy or a region: xxh3-64, of large ones in pieces so that several cores can share the work.

xxh3 is a chain from the first byte to the last. Up to `PIECE` bytes the digest is xxh3-64 of the bytes; beyond that it
is xxh3-64 over the digests of all pieces of `PIECE` bytes (the last may be shorter), as little-endian 64-bit words.
"""

import struct
from collections.abc import Sequence
from typing import Any

import xxhash

PIECE = 16 << 20
"""Bytes that are hashed by themselves: the digest of more is taken over the digests of such pieces."""


def digest_of(content: Any) -> int:
    """The digest of a contiguous buffer."""
    raw = memoryview(content).cast("B")
    return joined([xxhash.xxh3_64_intdigest(piece) for piece in pieces(raw)])


def pieces(raw: memoryview) -> list[memoryview]:
    """The pieces of a buffer that are hashed each by itself; at least one."""
    return [raw[start : start + size] for start, size in piece_spans(0, len(raw))]


def piece_spans(start: int, size: int) -> list[tuple[int, int]]:
    """(offset, bytes) of the pieces of `size` bytes from `start` on; at least one."""
    end = start + size
    return [(at, min(PIECE, end - at)) for at in range(start, max(end, start + 1), PIECE)]


def joined(digests: Sequence[int]) -> int:
    """The digest of the whole from the xxh3-64 of each piece, in order."""
    if len(digests) == 1:
        return int(digests[0])
    return int(xxhash.xxh3_64_intdigest(struct.pack(f"<{len(digests)}Q", *digests)))


class Digest:
    """The digest of bytes that come one block after the other."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._state = xxhash.xxh3_64()
        self._room = PIECE

    def update(self, raw: memoryview) -> None:
        """Hash the next bytes."""
        while len(raw) > self._room:
            self._state.update(raw[: self._room])
            raw = raw[self._room :]
            self._done.append(self._state.intdigest())
            self._state = xxhash.xxh3_64()
            self._room = PIECE
        self._state.update(raw)
        self._room -= len(raw)

    def intdigest(self) -> int:
        """The digest of all bytes so far."""
        return joined([*self._done, self._state.intdigest()])

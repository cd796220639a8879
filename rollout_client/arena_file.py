"""The arena file as anybody may open it: one header page, then the slots. Little-endian, u64 unless said.

 byte 0    magic, 8 bytes                     byte 64 + 64 i    write epoch of slot i
 byte 8    nonce, 16 bytes                    byte 72 + 64 i    1 = slot i has memory behind it
 byte 24   bytes in a slot
 byte 32   number of slots                    byte 4096         slot 0, slot 1, ...
 byte 40   lease, CLOCK_BOOTTIME nanoseconds; 0 = none is needed
 byte 48, and bytes 1024 to 4095: nobody reads them; older trainers and replicas wrote hints to each other there

A slot of 2 MiB or more starts at a multiple of 2 MiB, the first one at 2 MiB, so that huge pages fit.

The store moves a slot's write epoch before it lets anybody write there. A reader that remembers the
epoch it saw when the slot became live knows, by reading it again after its work, whether the bytes it
worked on stood still. A store that belongs to a tree of stores may serve only until its lease runs out,
even if it is stopped or dead by then; a reader that finds the lease in the past throws its work away in
the same manner. `mmap` by hand: the resource tracker of multiprocessing.shared_memory unlinks
segments that other processes still use.
"""

import contextlib
import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_client.aligned_map import HUGE, map_aligned
from rollout_client.errors import ArenaError

MAGIC = b"PDLROLL2"
NONCE_BYTES = 16
HEADER_BYTES = 4096
MAX_SLOTS = 8

_FIXED = struct.Struct(f"<8s{NONCE_BYTES}sQQ")
_LEASE = 5  # u64 word
_EPOCH, _BACKED, _LINE = 8, 9, 8  # u64 words: first slot's entries, and from one slot to the next


class ArenaFile:
    """An open arena. Closing it leaves mappings alone that views still use; they go with the last view."""

    def __init__(
        self, path: str | Path, *, write: bool = False, write_header: bool = False, fd: int | None = None
    ) -> None:
        """fd: an open file to take over, also when this raises.

        Raises ArenaError if `path` is no arena, OSError if it cannot be opened.
        """
        self.path = Path(path)
        self.writable = write
        self.fd = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC) if fd is None else fd
        try:
            self._header = self._map(0, HEADER_BYTES, write_header)
            magic, self.nonce, self.slot_bytes, self.slots = _FIXED.unpack_from(self._header)
            size = os.fstat(self.fd).st_size
            if magic != MAGIC or not 0 < self.slots <= MAX_SLOTS or size < file_bytes(self.slots, self.slot_bytes):
                raise ArenaError(f"{path} is not an arena of this version")
        except (ValueError, ArenaError) as error:  # ValueError: shorter than a header
            os.close(self.fd)
            raise ArenaError(f"{path} is not an arena of this version") from error
        except OSError:  # no memory to map it
            os.close(self.fd)
            raise
        self._words: npt.NDArray[np.uint64] = np.frombuffer(self._header, dtype="<u8")
        self._maps: dict[int, memoryview] = {}

    def slot_offset(self, slot: int) -> int:
        """Where the slot starts, bytes from the start of the file."""
        return slot_offset(slot, int(self.slot_bytes))

    def slot_at(self, offset: int) -> int:
        """The slot that starts there. Raises ArenaError if none does."""
        for slot in range(self.slots):
            if self.slot_offset(slot) == offset:
                return slot
        raise ArenaError(f"no slot of {self.path} starts at {offset}")

    def write_epoch(self, slot: int) -> int:
        """How often the store has given this slot away for writing. One aligned load, never torn."""
        return int(self._words[_EPOCH + _LINE * slot])

    def expired(self) -> bool:
        """Whether a lease is needed and has run out: nothing may be served."""
        lease = int(self._words[_LEASE])
        return lease != 0 and time.clock_gettime_ns(time.CLOCK_BOOTTIME) > lease

    def backed(self, slot: int) -> bool:
        """Whether the slot has memory; reading one without would silently allocate it."""
        return bool(self._words[_BACKED + _LINE * slot])

    def mapped(self, slot: int) -> bool:
        """Whether `slot` has its bytes at hand already."""
        return slot in self._maps

    def slot(self, slot: int) -> memoryview:
        """The slot's bytes, prefaulted once and kept mapped; read-only unless the arena was opened to write."""
        if slot not in self._maps:
            if not 0 <= slot < self.slots or not self.backed(slot):
                raise ArenaError(f"{self.path}: slot {slot} has no memory")
            offset, size = self.slot_offset(slot), int(self.slot_bytes)
            if offset % HUGE:
                self._maps[slot] = memoryview(self._map(offset, size, self.writable))
            else:
                self._maps[slot] = map_aligned(self.fd, size, offset, write=self.writable)
        return self._maps[slot]

    def close(self) -> None:
        """Close the file and drop the mappings. Idempotent."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self._words = self._words.copy()
        self._maps.clear()
        with contextlib.suppress(BufferError):  # a view still reads it; the mapping lives exactly as long as the view
            self._header.close()

    def __enter__(self) -> "ArenaFile":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def _map(self, offset: int, length: int, write: bool) -> mmap.mmap:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        return mmap.mmap(self.fd, length, mmap.MAP_SHARED | mmap.MAP_POPULATE, protection, offset=offset)


def fixed_header(nonce: bytes, slot_bytes: int, slots: int) -> bytes:
    """The first bytes of a new arena."""
    return _FIXED.pack(MAGIC, nonce, slot_bytes, slots)


def slot_offset(slot: int, slot_bytes: int) -> int:
    """Where a slot starts, bytes from the start of the file."""
    if slot_bytes < HUGE:
        return HEADER_BYTES + slot * slot_bytes
    return HUGE + slot * -(-slot_bytes // HUGE) * HUGE


def file_bytes(slots: int, slot_bytes: int) -> int:
    """Bytes that the file of an arena with so many slots has."""
    return slot_offset(slots - 1, slot_bytes) + slot_bytes

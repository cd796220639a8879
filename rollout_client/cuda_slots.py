"""Slots of the arena that the driver has registered, and copies of device memory into them.

A registered slot (cudaHostRegister, once) is written to at the link's full speed and beside everything else, whether
this process's CPUs may write there or not. One whose memory the store gave back and took anew since then would receive
nothing: the driver still holds the old pages. So each push first sends a few random bytes down the same way, and
registers anew if they do not arrive.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from rollout_client.cuda_pieces import Piece

log = logging.getLogger(__name__)

_MARKS, _MARK_BYTES = 64, 16
"""Random marks that are sent to the device at once, and bytes of each."""
_PORTABLE = 0x01
"""cudaHostRegisterPortable: pinned for every device of this process."""


class PinnedSlots:
    """What is registered stays so from push to push. Used by one thread at a time, with the device current."""

    def __init__(self, torch: Any, driver: Any) -> None:
        """driver: NVIDIA's driver library, which knows how cuMemcpyDtoHAsync_v2 is called."""
        self._torch, self._driver = torch, driver
        self._pinned: dict[int, int] = {}  # slot -> address
        self._refused: set[int] = set()
        self._marks: dict[Any, _Marks] = {}

    @contextlib.contextmanager
    def place(
        self,
        slot: int,
        memory: memoryview,
        writable: Callable[[], AbstractContextManager[object]],
        device: Any,
        stream: Any,
        first: Piece,
    ) -> Iterator["Place"]:
        """The slot, as `stream` writes to it. memory: of the slot. writable: makes it that for this process's CPUs as
        well, which it has to be until the slot is registered. first: whose place in the slot is tried.
        """
        place = Place(memory, self._driver, stream)
        with contextlib.ExitStack() as held:
            if slot in self._pinned and not self._arrives(memory, device, place, first):
                log.info("weight slot %d has new memory: pinning it again", slot)
                self._unpin(slot)
            if slot not in self._pinned:
                held.enter_context(writable())
                self._pin(slot, memory, device)
            yield place

    def close(self) -> None:
        """Unregister; call before the mappings go. Idempotent."""
        for slot in list(self._pinned):
            self._unpin(slot)
        self._refused.clear()

    def _pin(self, slot: int, memory: memoryview, device: Any) -> None:
        """Register the slot's mapping. A driver that refuses is told of once; copies then work, but slower."""
        if slot in self._refused:
            return
        started = time.monotonic()
        address = np.frombuffer(memory, np.uint8).ctypes.data
        code = int(self._torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, _PORTABLE))
        if code:
            self._refused.add(slot)
            self._forget_error(device)
            log.warning(
                "cannot pin weight slot %d (CUDA error %d): copies into it will be several times slower", *(slot, code)
            )
            return
        self._pinned[slot] = address
        log.info("pinned weight slot %d, %.2f GB in %.2f s", slot, memory.nbytes / 1e9, time.monotonic() - started)

    def _unpin(self, slot: int) -> None:
        code = int(self._torch.cuda.cudart().cudaHostUnregister(self._pinned.pop(slot)))
        if code:
            log.warning("cannot unpin weight slot %d: CUDA error %d", slot, code)

    def _arrives(self, memory: memoryview, device: Any, place: "Place", first: Piece) -> bool:
        """Whether what the device writes into the slot is seen by this process, and so by all others."""
        if device not in self._marks:
            self._marks[device] = _Marks(self._torch, device)
        mark, sent = self._marks[device].next()
        nbytes = min(first.nbytes, _MARK_BYTES)
        place.send(Piece(first.number, sent.data_ptr(), first.start, nbytes))
        place.stream.synchronize()
        return bytes(memory[first.start : first.start + nbytes]) == mark[:nbytes]

    def _forget_error(self, device: Any) -> None:
        """The runtime remembers a failed call and lets torch's next kernel raise it: let it be one of ours."""
        with contextlib.suppress(RuntimeError):
            self._torch.zeros(1, device=device)


class _Marks:
    """Random bytes in the device's memory, for one push each: to send them there takes as long as a turn on the GPU."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch, self._device, self._left = torch, device, 0

    def next(self) -> tuple[bytes, Any]:
        """Bytes that were not used before, and where they lie on the device."""
        if not self._left:
            self._bytes, self._left = os.urandom(_MARKS * _MARK_BYTES), _MARKS
            self._there = self._torch.frombuffer(bytearray(self._bytes), dtype=self._torch.uint8).to(self._device)
            self._torch.cuda.current_stream(self._device).synchronize()
        self._left -= 1
        part = slice(_MARK_BYTES * self._left, _MARK_BYTES * (self._left + 1))
        return self._bytes[part], self._there[part]


class Place:
    """A slot as the driver writes to it, on one stream."""

    def __init__(self, memory: memoryview, driver: Any, stream: Any) -> None:
        self.stream = stream
        self._dma, self._bytes, self._queue = driver.cuMemcpyDtoHAsync_v2, memory.nbytes, stream.cuda_stream
        self._start = np.frombuffer(memory, np.uint8).ctypes.data

    def send(self, piece: Piece, offset: int = 0, most: int | None = None) -> None:
        """Queue the copy of a piece's bytes from `offset` on, all or so many. Raises ValueError, RuntimeError from the
        driver.
        """
        start, nbytes = piece.start + offset, piece.nbytes - offset if most is None else most
        if start < 0 or start + nbytes > self._bytes:
            raise ValueError(f"{nbytes} bytes at {start} leave a slot of {self._bytes}")
        code = self._dma(self._start + start, piece.address + offset, nbytes, self._queue)
        if code:
            raise RuntimeError(f"cuMemcpyDtoHAsync failed: CUDA error {code}")

"""The least a push can take: one copy of as many bytes from the device into ordinary pinned memory."""

import time
from typing import Any

BUFFER = 2 << 30
"""Bytes of pinned memory; larger models are so many copies of this."""


class PinnedCopy:
    """Made once, as pinning takes seconds; `rate` may be asked again under another load."""

    def __init__(self, torch: Any, device: Any, nbytes: int) -> None:
        self._torch = torch
        size = min(nbytes, BUFFER)
        self._source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
        self._target = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = device

    def rate(self, rounds: int = 5) -> float:
        """Bytes per second, the best of some rounds."""
        return max(self._once() for _ in range(rounds))

    def _once(self) -> float:
        self._sync()
        started = time.perf_counter()
        self._target.copy_(self._source, non_blocking=True)
        self._sync()
        return float(self._source.numel() / (time.perf_counter() - started))

    def _sync(self) -> None:
        if self._device.type == "cuda":
            self._torch.cuda.synchronize()

"""Requests per second and client (`ApiConfig.requests_per_s`): token buckets in a table that all API processes share.

A client's bucket is one of the `WAYS` of its set; when all are others', the one that was used longest ago is given up.
Where there are several processes the table is locked for the microseconds of a change. A process that was stopped
inside it must not stop the others: after `TRIES` they go on without the lock, and at worst two requests are counted as
one.
"""

import fcntl
import mmap
import os
import struct
from hashlib import blake2b
from pathlib import Path

from api.errors import TooMany
from api.processes.mapped import mapped

SETS, WAYS, TRIES = 4096, 4, 100
_BUCKET = struct.Struct("<Qdd")  # hash of the client (0 = free), requests left, when that was (monotonic seconds)


class RateLimit:
    """A token bucket per client address, which holds one second's worth of requests."""

    def __init__(self, per_s: float, directory: Path | None = None) -> None:
        """directory: that the processes share; None = there is one process."""
        self._per_s = per_s
        size = SETS * WAYS * _BUCKET.size
        self._fd = -1
        if directory is None:
            self._table = mmap.mmap(-1, size)
            return
        self._table = mapped(directory / "rate", size)
        self._fd = os.open(directory / "rate", os.O_RDWR)

    def take(self, client: str, now: float) -> None:
        """Count one request. now: of the system's monotonic clock. Raises TooMany saying when to come back."""
        key = int.from_bytes(blake2b(client.encode(), digest_size=8).digest(), "little") or 1
        burst = max(1.0, self._per_s)
        locked = self._lock()
        try:
            at, left, last = self._find(key, burst, now)
            left = min(burst, left + max(0.0, now - last) * self._per_s)
            _BUCKET.pack_into(self._table, at, key, left - 1.0 if left >= 1.0 else left, now)
        finally:
            if locked:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)
        if left < 1.0:
            raise TooMany(f"over {self._per_s:g} requests a second; try again in {(1.0 - left) / self._per_s:.2f} s")

    def _lock(self) -> bool:
        if self._fd < 0:
            return False
        for _ in range(TRIES):
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            return True
        return False

    def _find(self, key: int, burst: float, now: float) -> tuple[int, float, float]:
        """Where the client's bucket is, what is left in it, and since when."""
        start = key % SETS * WAYS * _BUCKET.size
        places = [(start + way * _BUCKET.size) for way in range(WAYS)]
        found = [(at, *_BUCKET.unpack_from(self._table, at)) for at in places]
        for at, known, left, last in found:
            if known == key:
                return at, left, last
        return min(found, key=lambda bucket: (bucket[1] != 0, bucket[3]))[0], burst, now

"""Hashes runs of the slot on many cores. Threads of Python ask for its lock between any two runs, and with ten of them
that takes as long as the hashing: where a C compiler was found, the threads are those of reading.c.
"""

import ctypes
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout_client.native.compiler import compiled
from rollout_client.native.xxh3 import wheel_functions

log = logging.getLogger(__name__)

SOURCES = (Path(__file__).with_name("reading.c"),)
Done = Callable[[list[int]], None]


class Group(ctypes.Structure):
    """`group` of reading.c."""

    _fields_ = [
        ("next", ctypes.c_void_p),
        ("runs", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "taken", "left")),
    ]


class Reading:
    """A pool of threads. Everything but its making is called by one thread, the store's loop."""

    def __init__(self, library: Path, threads: int, event: int) -> None:
        """event: an eventfd that is written when there is something to `collect`. Raises OSError."""
        self._library = ctypes.CDLL(str(library))
        self._library.open_pool.restype = ctypes.c_void_p
        self._library.submit.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._library.left.argtypes, self._library.left.restype = [ctypes.c_void_p], ctypes.c_int64
        self._library.close_pool.argtypes = [ctypes.c_void_p]
        (self._hash,) = wheel_functions("64bits")
        cores = sorted(os.sched_getaffinity(0))
        self._cores = (ctypes.c_int32 * len(cores))(*cores)
        pool = self._library.open_pool(threads, event, self._hash, self._cores, len(cores))
        if not pool:
            raise OSError("no threads could be started")
        self._pool: int | None = pool
        self._running: deque[tuple[Group, np.ndarray[Any, Any], np.ndarray[Any, Any], Done]] = deque()

    def submit(self, memory: memoryview, spans: Sequence[tuple[int, int]], done: Done) -> None:
        """Hash spans (offset, bytes) of `memory`, at least one; `collect` calls `done` with xxh3-64 of each."""
        content = np.frombuffer(memory, np.uint8)
        rows = np.zeros((len(spans), 3), np.uint64)
        rows[:, :2] = spans
        assert (rows[:, 0] + rows[:, 1]).max() <= content.size
        rows[:, 0] += np.uint64(content.ctypes.data)
        group = Group(None, rows.ctypes.data, len(spans), 0, len(spans))
        self._running.append((group, rows, content, done))
        self._library.submit(self._pool, ctypes.addressof(group))

    def collect(self) -> None:
        """Call back for what is done, in the order in which it was submitted."""
        while self._running and not self._library.left(ctypes.addressof(self._running[0][0])):
            _, rows, _, done = self._running.popleft()
            done(rows[:, 2].tolist())

    def close(self) -> None:
        """Stop after the runs that are being hashed. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            self._library.close_pool(pool)
            self._running.clear()


class Opening:
    """Compiling takes a second: until then, and where it cannot be done, `reading` is None."""

    def __init__(self, threads: int, event: int) -> None:
        self.reading: Reading | None = None
        self._sizes = threads, event
        self._closed = False
        self._lock = threading.Lock()
        self.thread = threading.Thread(target=self._open, name="reading", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Does not wait for the compiler. Idempotent."""
        with self._lock:
            self._closed = True
            if self.reading is not None:
                self.reading.close()

    def _open(self) -> None:
        try:
            library = compiled("reading", SOURCES)
            with self._lock:
                if not self._closed:
                    self.reading = Reading(library, *self._sizes)
        except OSError as error:
            log.info("no compiled threads, the slot is checked by Python's: %s", error)

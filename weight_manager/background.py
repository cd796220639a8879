"""A few threads for what would hold the store's loop: hashing, scattering, disk. Results come back to the loop.

`fileno` becomes readable when results wait, so the loop sleeps in one poll for sockets, processes and these.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import xxhash

from weight_manager.reading import Opening


class Inbox:
    """Calls from threads to the loop, which polls `fileno`."""

    def __init__(self) -> None:
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiting: deque[Callable[[], None]] = deque()

    def fileno(self) -> int:
        """Readable while something waits."""
        return self._wake

    def put(self, call: Callable[[], None]) -> None:
        """Have the loop call this. To be used from any thread."""
        self._waiting.append(call)
        os.eventfd_write(self._wake, 1)

    def deliver(self) -> None:
        """Call everything that waits, in the loop's thread."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        for _ in range(len(self._waiting)):  # what comes meanwhile waits for the next turn
            self._waiting.popleft()()

    def close(self) -> None:
        """Give the descriptor back, after the last thread has ended."""
        os.close(self._wake)


class Gang:
    """Have as many threads call `work` as should share it."""

    def __init__(self, units: Iterable[Callable[[], None]], finished: Callable[[BaseException | None], None]) -> None:
        """finished: called by the thread that ends the last unit, with what one of them raised."""
        self._units = deque(units)
        self._left = len(self._units)
        self._error: BaseException | None = None
        self._finished = finished
        self._lock = threading.Lock()

    def work(self) -> None:
        """Take units until there are none."""
        while True:
            try:
                unit = self._units.popleft()
            except IndexError:
                return
            try:
                unit()
            except BaseException as error:
                self._error = error
            with self._lock:
                self._left -= 1
                last = not self._left
            if last:
                self._finished(self._error)


T = TypeVar("T")


class Background:
    """A thread pool whose callbacks run in the thread that calls `deliver`."""

    def __init__(self, threads: int, name: str, *, reads: bool = False) -> None:
        """reads: `digests` will be asked for."""
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._finished = Inbox()
        self._opening = Opening(threads, self._finished.fileno()) if reads else None

    def fileno(self) -> int:
        """Readable while results wait."""
        return self._finished.fileno()

    def submit(
        self, work: Callable[[], T], done: Callable[[T], None], failed: Callable[[BaseException], None]
    ) -> "Future[T]":
        """Run `work` in a thread; `deliver` then calls `done` with its result, or `failed` with what it raised."""
        future = self._pool.submit(work)
        future.add_done_callback(lambda f: self._finish(f, done, failed))
        return future

    def digests(
        self,
        memory: memoryview,
        spans: Sequence[tuple[int, int]],
        done: Callable[[list[int]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """xxh3-64 of each span (offset, bytes) of `memory`, by all threads; `deliver` then calls `done`, or `failed`
        with what went wrong.
        """
        reading = self._opening.reading if self._opening is not None else None
        if reading is not None:
            reading.submit(memory, spans, done)
            return
        found = [0] * len(spans)

        def over(error: BaseException | None) -> None:
            self._finished.put(lambda: done(found) if error is None else failed(error))

        runs = [memory[start : start + size] for start, size in spans]
        gang = Gang([partial(_note, found, number, run) for number, run in enumerate(runs)], over)
        for _ in range(min(self._threads, len(runs))):
            self._pool.submit(gang.work)

    def deliver(self) -> None:
        """Run the callbacks of everything that finished."""
        self._finished.deliver()
        if self._opening is not None and self._opening.reading is not None:
            self._opening.reading.collect()

    def close(self) -> None:
        """Drop what has not started and wait for what runs."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._opening is not None:
            self._opening.close()
        self._finished.close()

    def _finish(
        self, future: "Future[Any]", done: Callable[[Any], None], failed: Callable[[BaseException], None]
    ) -> None:
        if future.cancelled():
            error: BaseException | None = CancelledError()
        else:
            error = future.exception()
        if error is None:
            result = future.result()
            self._finished.put(lambda: done(result))
        else:
            self._finished.put(lambda: failed(error))


def _note(found: list[int], number: int, run: memoryview) -> None:
    found[number] = xxhash.xxh3_64_intdigest(run)

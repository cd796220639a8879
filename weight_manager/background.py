"""A few threads for what would hold the store's loop: hashing, scattering, disk. Results come back to the loop.

`fileno` becomes readable when results wait, so the loop sleeps in one poll for sockets, processes and these.
"""

import contextlib
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, TypeVar

from weight_manager.inbox import Inbox

T = TypeVar("T")
NICE = -10


class Background:
    """A thread pool whose callbacks run in the thread that calls `deliver`."""

    def __init__(self, threads: int, name: str, *, first: bool = False) -> None:
        """first: they go before what else runs on this machine, as far as the system lets them (`_go_first`)."""
        self.threads = threads
        numbers = itertools.count()
        self._pool = ThreadPoolExecutor(
            threads, thread_name_prefix=name, initializer=(lambda: _go_first(next(numbers))) if first else None
        )
        self._finished = Inbox()

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

    def start(self, work: Callable[[], None]) -> None:
        """Run `work`, which does not raise, in a thread."""
        self._pool.submit(work)

    def tell(self, call: Callable[[], None]) -> None:
        """From a thread: have `deliver` call this."""
        self._finished.put(call)

    def deliver(self) -> None:
        """Run the callbacks of everything that finished."""
        self._finished.deliver()

    def close(self) -> None:
        """Drop what has not started and wait for what runs."""
        self._pool.shutdown(wait=True, cancel_futures=True)
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


def _go_first(number: int) -> None:
    """One core for each thread, where it goes before threads that compute: these leave a waking thread without a core
    of its own to wait for a scheduler's slice, and crowd several of them on the few cores that are free.
    """
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, {cores[number % len(cores)]})
    with contextlib.suppress(OSError):  # takes CAP_SYS_NICE
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)

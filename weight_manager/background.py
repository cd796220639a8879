"""A few threads for what would hold the store's loop: hashing, scattering, disk. Results come back to the loop.

`fileno` becomes readable when results wait, so the loop sleeps in one poll for sockets, processes and these.
"""

from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, TypeVar

from weight_manager.inbox import Inbox

T = TypeVar("T")


class Background:
    """A thread pool whose callbacks run in the thread that calls `deliver`."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
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

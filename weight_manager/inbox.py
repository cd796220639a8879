"""Calls from threads to the store's loop, which sleeps in one poll for sockets, processes and these."""

import contextlib
import os
from collections import deque
from collections.abc import Callable


class Inbox:
    """From the threads to the loop, which polls `fileno`."""

    def __init__(self) -> None:
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiting: deque[Callable[[], None]] = deque()

    def fileno(self) -> int:
        """Readable while something waits."""
        return self._wake

    def put(self, call: Callable[[], None]) -> None:
        """From any thread: have the loop call this."""
        self._waiting.append(call)
        os.eventfd_write(self._wake, 1)

    def deliver(self) -> None:
        """In the loop: call everything that waits."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        for _ in range(len(self._waiting)):  # what comes meanwhile waits for the next turn
            self._waiting.popleft()()

    def close(self) -> None:
        """After the last thread has ended."""
        os.close(self._wake)

"""Ends the store in bounded time, whoever wants it to end and whatever its loop is doing.

Two things end it: a signal, and the death of the process that started it. The kernel's death signal alone does not
do: it reaches a loop that may be held by something that does not return (a sync on a disk that is stuck, a peer's
pipe), and it is gone if anything resets it. So a thread listens for both, tells the loop, and when the loop has not
ended in time removes its arenas and ends the process.
"""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

ASKED_S = 12.0
"""Seconds from a signal to the end at the latest: the supervisor kills after 15 s, and then the arena would stay."""
ORPHANED_S = 3.0
"""Seconds from the death of the parent to the end, when there is nothing to be saved to disk."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_BEGIN = 0
_ENDS = frozenset((*_SIGNALS, _BEGIN))
"""Numbers in the pipe that ask for the end: signals, and what `begin` writes."""


class Ending:
    """Sees to it that the store's process ends in time and leaves no arena behind. Made in the main thread before
    anything that has to be removed.
    """

    def __init__(self, parent: int, *, orphaned_s: float = ORPHANED_S, asked_s: float = ASKED_S) -> None:
        """parent: the process without which this one makes no sense.

        arenas: files that must not outlive this one.
        """
        self._limits = orphaned_s, asked_s
        self._heard, self._written = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._parent: int | None = None
        with contextlib.suppress(OSError):  # gone already: its signal is on its way
            self._parent = os.pidfd_open(parent)
        self._asked = False
        self._lock = threading.Lock()
        self._stop: Callable[[], None] | None = None
        self.arenas: list[Path] = []
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)  # what matters is the byte in the pipe
        signal.set_wakeup_fd(self._written)
        threading.Thread(target=self._listen, name="ending", daemon=True).start()

    def made(self, arena: Path) -> None:
        """Remember an arena's file: it must not outlive the process, nor must those that were told of before. What is
        gone is forgotten: adapters of other shapes come with arenas of their own, for weeks.
        """
        self.arenas = [*(path for path in self.arenas if path.exists()), arena]

    def spare(self) -> None:
        """Forget all files: whoever made them has removed them, or they are to stay for the next life of the store."""
        self.arenas.clear()

    def tell(self, stop: Callable[[], None]) -> None:
        """Call `stop` from a thread when it is time; at once if it is time already."""
        with self._lock:
            self._stop = stop
            if self._asked:
                stop()

    def begin(self) -> None:
        """Start the time limit now, whatever else there is: the interpreter's own end can hang, too."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._written, bytes([_BEGIN]))

    def _wanted(self, heard: list[int]) -> bool:
        """Whether the end is what was heard. Every signal writes its number, that of processor_limit.py too."""
        return self._parent in heard or not _ENDS.isdisjoint(os.read(self._heard, 4096))

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._heard, select.POLLIN)
        if self._parent is not None:
            poll.register(self._parent, select.POLLIN)
        while not self._wanted([fd for fd, _ in poll.poll()]):
            pass
        with self._lock:
            self._asked = True
            if self._stop is not None:
                self._stop()
        orphaned = self._parent is not None and bool(select.select([self._parent], [], [], 0)[0])
        limit = self._limits[0] if orphaned else self._limits[1]
        time.sleep(limit)  # a daemon's: the process does not wait for this
        for arena in list(self.arenas):
            arena.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            os.write(2, f"the store did not end within {limit:g} s of being asked to; it ends now\n".encode())
        os._exit(1)

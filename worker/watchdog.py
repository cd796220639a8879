"""Ends a rank that hangs. A long step is none: it moves from operation to operation.

What a rank does is told by its motion: a count that the loop raises at every turn, and the engine after every operation
of a step. A thread looks at it every second. When it has stood still for the limit the process ends with the stacks of
all its threads on stderr, and the supervisor starts another; that end comes from a thread of the interpreter's own,
which needs no lock of Python's, since whoever hangs may hold it.

A process that was stopped (SIGSTOP, a debugger) for longer than the limit ends as well, once it goes on.
"""

import faulthandler
import sys
import threading
import time

LOOK_S = 1.0
"""Seconds between two looks, at most."""


class Watchdog:
    """Ends this process when neither a turn of the loop nor an operation of a step has come for limit_s seconds."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._moves = 0

    def moved(self) -> None:
        """Note that something was done. Called by one thread."""
        self._moves += 1

    def start(self) -> None:
        """Watch until the process ends."""
        self._wind()
        threading.Thread(target=self._look, name="watchdog", daemon=True).start()

    def _look(self) -> None:
        seen = self._moves
        while True:
            time.sleep(min(LOOK_S, self._limit_s / 4))
            if self._moves != seen:
                seen = self._moves
                self._wind()

    def _wind(self) -> None:
        faulthandler.dump_traceback_later(self._limit_s, exit=True, file=sys.__stderr__ or sys.stderr)

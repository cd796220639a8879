"""Rank 0's gaps between steps while a push has to share the cores with them; see rollout_client/turns.py."""

import contextlib
import logging
import time
from collections.abc import Callable

from rollout_client.arena_file import MOST_THREADS, ArenaFile
from rollout_client.errors import ArenaError
from worker.cpu import openmp

log = logging.getLogger(__name__)

LONGEST_S = 0.5
"""A step counts as no longer than this."""
SPIN_MS = 1
"""While gaps are left: threads that spin through them would leave nothing to the push."""


class GivingWay:
    """`until`: no step begins before, by `clock`."""

    def __init__(self, replica: int, threads: int, share: float, clock: Callable[[], float]) -> None:
        """threads: of a step, of all ranks; 0 = it runs on a GPU, which no copy holds up. share: gaps over steps."""
        self.until = 0.0
        self._share = share
        self._replica = replica
        self._threads = min(threads, MOST_THREADS)
        self._clock = clock
        self._path = ""
        self._arena: ArenaFile | None = None
        self._leaving = False
        self._usual_s = LONGEST_S  # of a step that nothing copied beside

    def begin(self, arena_path: str) -> None:
        """A step begins; the arena is where its weights are."""
        if arena_path != self._path and self._threads and self._share:
            self._open(arena_path)
        if self._arena is not None:
            self._arena.take_turn(self._replica, self._threads)

    def ended(self, seconds: float) -> None:
        """The step is over and took so long."""
        if self._arena is None:
            return
        asked = self._arena.asked_for_turns()
        if asked != self._leaving:
            openmp.spin(SPIN_MS if asked else openmp.USUAL_MS)
            self._leaving = asked
        elif not asked:
            self._usual_s = seconds
        gap = self._share * min(seconds, self._usual_s, LONGEST_S) if asked else 0.0
        self.until = self._clock() + gap
        self._arena.take_turn(self._replica, time.monotonic_ns() + int(gap * 1e9) if asked else 0)

    def _open(self, path: str) -> None:
        self._path = path
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        with contextlib.suppress(ArenaError, OSError):  # none that may be written: pushes take what they need
            self._arena = ArenaFile(path, write=True)

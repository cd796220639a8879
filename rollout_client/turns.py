"""Turns on the processor, between replicas that compute and a trainer that copies, where there are not cores for both.

The threads of a step wait for each other at every operation, so a copy on their cores holds up all of them, and each of
the two takes as long as both. A push that had to wait for the processor therefore asks for turns: a replica that is
asked leaves a gap after every step, and the push copies in the gaps. What they tell each other are words in the arena's
header, good for a moment; nobody depends on them, and a copy that sees no gap goes on without one.
"""

import os
import threading
import time

import numpy as np

from rollout_client.arena_file import MOST_THREADS, ArenaFile

ASKED_S = 1.0
"""For so long an ask is good: longer than a step, and over soon if the trainer is killed."""
PATIENCE_S = 0.5
"""Without a gap for so long, the copy goes on all the same."""
POLL_S = 0.003
SHORTEST_S = 0.002
"""Of a gap that ends sooner nothing is used."""
LATE_S = 0.1
"""After its gap a replica is expected to begin a step; once this has passed it has nothing to do."""


class Turns:
    """A trainer's side, shared by the threads that copy."""

    def __init__(self, arena: ArenaFile) -> None:
        self._arena = arena
        self._asked_until = 0.0

    def begin(self) -> None:
        """A push begins to copy: ask at once if steps keep every core busy."""
        turns = self._arena.turns()
        if turns[turns <= MOST_THREADS].sum() >= (os.cpu_count() or 1):
            self.crowded()

    def crowded(self) -> None:
        """Work took much longer than the processor time it used: ask."""
        self._asked_until = time.monotonic() + ASKED_S
        self._arena.ask_for_turns(int(self._asked_until * 1e9))

    def wait(self, stop: threading.Event) -> None:
        """For a gap, if one has been asked for."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < min(end, self._asked_until) and not stop.is_set():
            if self._may_go():
                return
            time.sleep(POLL_S)

    def over(self) -> None:
        """The push has nothing more to copy."""
        if self._asked_until:
            self._asked_until = 0.0
            self._arena.ask_for_turns(0)

    def _may_go(self) -> bool:
        turns, now = self._arena.turns(), time.monotonic()
        moments = turns > MOST_THREADS
        gaps = turns[moments] / 1e9
        if (gaps > now + SHORTEST_S).any():
            return True
        return not turns[~moments].any() and not (np.abs(gaps - now) < LATE_S).any()

"""Turns on the processor, between replicas that compute and a trainer that copies, where there are not cores for both.

The threads of a step wait for each other at every operation, so a copy on their cores holds up all of them, and each of
the two takes as long as both. A push that finds the cores taken therefore asks for turns: a replica that is asked
leaves a gap after every step, and the push copies in the gaps. What they tell each other are words in the arena's
header, good for a moment; nobody depends on them, and a copy that sees no gap goes on without one.
"""

import contextlib
import os
import threading
import time

import numpy as np
import numpy.typing as npt

from rollout_client.arena_file import NEAR_NS, TURN_BITS, ArenaFile

ASKED_S = 1.0
"""For so long an ask is good, and it is made again meanwhile: over soon if the trainer is killed."""
PATIENCE_S = 0.5
"""Without a gap for so long, the push goes on without gaps until it sees one."""
POLL_S, LONGEST_POLL_S = 0.001, 0.05
"""Between two looks: each holds up a step."""
SHORTEST_S = 0.002
"""Of a gap that ends sooner nothing is used."""
LATE_S = 0.1
"""After its gap a replica is expected to begin a step; once this has passed it has nothing to do."""


class Turns:
    """A trainer's side, shared by the threads that copy."""

    def __init__(self, arena: ArenaFile, threads: int) -> None:
        """threads: that copy."""
        self._arena = arena
        self._threads = threads
        self._cores = len(os.sched_getaffinity(0))
        self._asked_until = 0.0
        self._given_up = False
        self._room_seen = 0.0
        self._copying = 0
        self._lock = threading.Lock()
        self._first_in_line = threading.Lock()  # of the threads that wait one looks for all

    def begin(self) -> None:
        """A push begins: ask at once if steps keep every core busy."""
        if not self._asked_until and self._computing()[0] >= self._cores:
            self._ask()

    def wait(self, deadline: float) -> bool:
        """For a gap, if one has been asked for: all that a push does beside a step holds that up. False = too late."""
        end = min(deadline, time.monotonic() + PATIENCE_S)
        while self._asked_until and time.monotonic() < end:
            if self._taken(at_once=False):
                self.give_back()
                return True
            time.sleep(self._until_a_gap())
        self._given_up = self._asked_until > 0
        return not self._given_up or time.monotonic() < deadline

    def held_up(self) -> None:
        """Work took much longer than the processor time it used: ask, if it was steps that it waited for."""
        if self._asked_until or self._computing()[0] + self._threads > self._cores:
            self._ask()

    def take(self, stop: threading.Event) -> None:
        """Wait for a gap if one has been asked for; `give_back` when the work is done."""
        began = time.monotonic()
        with self._first_in_line:
            while not self._taken(stop.is_set()):
                if time.monotonic() >= max(began, self._room_seen) + PATIENCE_S:
                    self._given_up = True
                else:
                    time.sleep(self._until_a_gap())

    def give_back(self) -> None:
        """This thread does not copy any more."""
        with self._lock:
            self._copying -= 1

    def over(self) -> None:
        """The push needs no more gaps, as the store has said if all went well. The ask of another publisher stays."""
        mine, self._asked_until, self._given_up = int(self._asked_until * 1e9), 0.0, False
        if mine and self._arena.asked_until_ns <= mine:
            self._tell(0)

    def _taken(self, at_once: bool) -> bool:
        with self._lock:
            if self._asked_until and not at_once:
                self._go_on_asking()
                if self._room():
                    self._given_up, self._room_seen = False, time.monotonic()
                elif not self._given_up:
                    return False
            self._copying += 1
        return True

    def _room(self) -> bool:
        """A core is free of steps and of copies."""
        threads, in_gaps = self._computing()
        return threads + self._copying < self._cores or (in_gaps > 0 and self._copying == 0)

    def _computing(self) -> tuple[int, int]:
        """(threads that compute or are about to, of all replicas; how many replicas are in a gap)."""
        turns, left, gap, steps = self._words()
        late = gap & (left <= SHORTEST_S * 1e9) & (left > -LATE_S * 1e9)
        gaps = gap & (left > SHORTEST_S * 1e9) & (left < NEAR_NS)
        threads = (turns[steps | late, 0] & (1 << TURN_BITS) - 1) >> 1
        return int(threads.sum()), int(gaps.sum())

    def _until_a_gap(self) -> float:
        """Seconds to sleep: a step will take about as long as steps usually do, and if not, then who knows."""
        turns, left, _, steps = self._words()
        ends = left[steps] / 1e9 + (turns[steps, 0] >> TURN_BITS) / 1e6
        soonest = float(ends.min(initial=LONGEST_POLL_S)) if len(ends) else 0.0
        return max(POLL_S, soonest if soonest > 0 else min(-soonest / 8, LONGEST_POLL_S / 5))

    def _words(self) -> tuple[npt.NDArray[np.int64], ...]:
        """(what and when, nanoseconds until then, whether it is the end of a gap, whether a step began then)."""
        turns = self._arena.turns().astype(np.int64)
        left = turns[:, 1] - time.monotonic_ns()
        gap = turns[:, 0] & 1 == 1
        return turns, left, gap, ~gap & (left <= 0) & (left > -NEAR_NS)

    def _go_on_asking(self) -> None:
        now = time.monotonic()
        if now > self._asked_until - ASKED_S / 2 or not self._arena.asked_for_turns():
            self._ask()

    def _ask(self) -> None:
        self._asked_until = time.monotonic() + ASKED_S
        self._tell(int(self._asked_until * 1e9))

    def _tell(self, word: int) -> None:
        with contextlib.suppress(OSError):
            self._arena.ask_for_turns(word)

"""Rank 0's gaps between steps while a push has to share the cores with them; see rollout_client/turns.py."""

import contextlib
import time
from collections import deque
from collections.abc import Callable

from rollout_client.arena_file import MOST_REPLICAS, take_turn
from worker.cpu import openmp

LONGEST_S = 0.5
"""A step counts as no longer than this."""
BEARABLE_S = 0.16
"""A token and its gap may always take so long: in gaps as short as short steps a push would do little but begin."""
SHORT_S = 0.01
"""Steps that take less are not told of, and get no gaps."""
LOOK_S = 0.002
"""So often a gap looks whether the push is through: then it is over."""
LATELY = 9
"""The usual step is the median of so many: one that begins new sequences takes ten times as long."""
SPIN_MS = 1
"""While gaps are left: threads that spin through them would leave nothing to the push."""


class GivingWay:
    """Gaps are left while a push asks for them."""

    def __init__(self, replica: int, threads: int, share: float, clock: Callable[[], float]) -> None:
        """threads: of a step, of all ranks; 0 = it runs on a GPU, which no copy holds up. share: gaps over steps."""
        self._until = 0.0
        self._replica = replica
        self._threads = threads if share and replica < MOST_REPLICAS else 0
        self._share = share
        self._clock = clock
        self._leaving = False
        self._lately = deque([LONGEST_S], LATELY)  # steps beside which nothing was copied
        self._usual_s = LONGEST_S  # their median

    def begin(self, arena_path: str) -> None:
        """A step begins, on weights of that arena."""
        if self._threads and self._long:
            self._tell(arena_path, time.monotonic_ns(), gap=False)

    def until(self, asked: Callable[[], bool]) -> float:
        """By `clock`: no step begins before, and then it is to be asked again. asked: looked at in a gap only."""
        now = self._clock()
        if self._until > now and not asked():
            self._until = now
        return min(self._until, now + LOOK_S)

    def ended(self, arena_path: str, seconds: float, *, asked: bool) -> None:
        """The step is over and took so long. asked: a push asks for turns."""
        if not self._threads:
            return
        if not asked:
            self._lately.append(seconds)
            self._usual_s = sorted(self._lately)[len(self._lately) // 2]
        asked = asked and self._long
        if asked != self._leaving:
            openmp.spin(SPIN_MS if asked else openmp.USUAL_MS)
            self._leaving = asked
        step = min(seconds, self._usual_s, LONGEST_S)
        gap = max(self._share * step, BEARABLE_S - step) if asked else 0.0
        self._until = self._clock() + gap
        if self._long:
            self._tell(arena_path, time.monotonic_ns() + int(gap * 1e9), gap=True)

    @property
    def _long(self) -> bool:
        return self._usual_s >= SHORT_S

    def _tell(self, arena_path: str, moment_ns: int, *, gap: bool) -> None:
        with contextlib.suppress(OSError):  # a hint: of an arena that is gone, or may not be written
            take_turn(arena_path, self._replica, self._threads, moment_ns, gap=gap, usual_s=self._usual_s)

"""The lease that the store above gives: asked for with beats, kept where every rank looks (arena header)."""

import time

from weight_manager.arena import Arena
from weight_manager.relay.messages import Holdings


def clock() -> float:
    """Seconds that a lease is counted in. They go on while the machine sleeps, as those of the store above do, which
    commits without this one once the lease is over: by CLOCK_MONOTONIC a machine that wakes up would serve on.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """Fenced until the first one. until: by `clock`."""

    def __init__(self, arena: Arena, seconds: float) -> None:
        """seconds: of a full lease. What the last life of this store was given still counts, for its ranks."""
        self._arena = arena
        self._seconds = seconds
        self._asked: dict[int, tuple[float, Holdings]] = {}  # beat -> when, and what was held then
        self._seq = self._void_before = 0
        self.until = 0.0
        if not arena.needs_lease:
            arena.lease(1)

    @property
    def closed(self) -> bool:
        """Whether the lease has run out, so that nothing may be served here."""
        return clock() >= self.until

    @property
    def left_s(self) -> float:
        """Seconds of the lease that may be handed on to stores below."""
        return max(0.0, self.until - clock())

    def ask(self, holds: Holdings) -> int:
        """The number of the next beat, which says what is held here."""
        self._seq += 1
        now = clock()
        self._asked = {seq: asked for seq, asked in self._asked.items() if asked[0] > now - self._seconds}
        self._asked[self._seq] = now, holds
        return self._seq

    def given(self, seq: int, seconds: float, holds: Holdings) -> None:
        """The answer to a beat; it counts from when that was sent, and for what was held then."""
        asked = self._asked.pop(seq, None)
        if asked is None or seq < self._void_before:
            return
        at, held = asked
        if not seconds > 0:  # nor is it if that is no number
            self.fence()
        elif held == holds:
            self.until = at + min(seconds, self._seconds)
            self._arena.lease(int(self.until * 1e9))

    def fence(self) -> None:
        """Stop serving at once, whatever leases are on their way."""
        self.until = 0.0
        self._void_before = self._seq + 1
        self._arena.lease(1)

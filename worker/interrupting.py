"""Giving up a step that stands between a commit and its flip: what was computed is thrown away and computed again.

Weights change between two steps, and a step of a large model on a few cores takes longer than a push. So a step that
runs alone (one rank: several would have to stop at the same place) ends early once the store says something. What that
costs is bounded: the step after one that was given up runs to its end, and short steps are left alone.
"""

from collections.abc import Callable

LONG_S = 0.2
"""Where steps are shorter than this a version soon has its turn, and what would be computed twice costs more."""
GRACE_S = 0.01
"""A step younger than this is not asked about."""


class Interrupting:
    """Rank 0's policy. The engine calls `asked` between its operations and raises `Interrupted` when it is true."""

    def __init__(self, waiting: Callable[[], bool], clock: Callable[[], float]) -> None:
        """waiting: whether a message of the store lies unread."""
        self._waiting = waiting
        self._clock = clock
        self._after = float("inf")
        self._spared = False

    def begin(self, last_s: float) -> None:
        """A step begins. last_s: how long the one before it took."""
        self._after = float("inf") if self._spared or last_s < LONG_S else self._clock() + GRACE_S

    def ended(self, *, given_up: bool) -> None:
        """It is over; the next one is spared if it was given up."""
        self._spared = given_up

    def asked(self) -> bool:
        """Whether the step should be given up."""
        return self._clock() >= self._after and self._waiting()

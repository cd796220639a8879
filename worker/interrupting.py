"""Giving up a step that stands between a commit and its flip, while little is lost: rank 0's policy.

Weights change between two steps, and a step of a large model on a few cores takes longer than a push. So a step that
runs alone (one rank: several would have to stop at the same place) ends early once the store says something, but only
in its first part; later the commit waits for its end, or those who are served would wait for nearly two steps. What was
computed is thrown away and computed again, under the weights that are served then. The step after one that was given up
runs to its end, and short steps are left alone.
"""

from collections import deque
from collections.abc import Callable
from statistics import median

_LONG_S = 0.2
"""Where steps are shorter than this a version soon has its turn, and what would be computed twice costs more."""
_GRACE_S = 0.01
"""Seconds for which a step that has begun is not given up."""
_LITTLE = 0.4
"""The part of a usual step that is thrown away at most: those who are served then wait for 1.4 steps, and what the
commit itself takes. In a steady run it waits for a step's end 0.18 steps long on average."""
_RECENT = 8
"""Steps whose median is the usual one. A trainer that copies slows those before a commit down: by what they took, a
quick step that is nearly through, or a slow one that has lasted longer than most, would seem to have just begun."""


class Interrupting:
    """Rank 0's policy. The engine calls `asked` between its operations and raises `Interrupted` when it is true."""

    def __init__(self, waiting: Callable[[], bool], clock: Callable[[], float]) -> None:
        """waiting: whether a message of the store lies unread."""
        self._waiting = waiting
        self._clock = clock
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._began = self._most_s = 0.0  # of a step that may be given up, until it has lasted so long
        self._spared = False

    @property
    def usual_s(self) -> float:
        """Seconds of a step, as the last ones went; 0 where they are too short for a commit to mind."""
        usual = median(self._recent) if self._recent else 0.0
        return usual if usual >= _LONG_S else 0.0

    def begin(self) -> None:
        """Note that a step begins."""
        self._began = self._clock()
        self._most_s = 0.0 if self._spared else _LITTLE * self.usual_s

    def ended(self, seconds: float) -> None:
        """Note that the step is through and took so many seconds."""
        self._recent.append(seconds)
        self._spared = False

    def given_up(self) -> None:
        """The step was given up; the next one is spared."""
        self._spared = True

    def asked(self) -> bool:
        """Whether the step should be given up."""
        return _GRACE_S <= self._clock() - self._began < self._most_s and self._waiting()

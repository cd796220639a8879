"""Rank 0's part of engine steps: whether one may run, under which version, and what becomes of its result.

A step that stands between a commit and its flip is given up: what was computed is thrown away and computed again.
Weights change between two steps, and a step of a large model on a few cores takes longer than a push. So a step that
runs alone (one rank: several would have to stop at the same place) ends early once the store says something. What that
costs is bounded: the step after one that was given up runs to its end, and short steps are left alone.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from worker.actions import Actions
from worker.engine.base import Float32, ForwardBatch, Logits
from worker.lifecycle import Lifecycle, WorkerState
from worker.membership import Membership
from worker.scheduler import Scheduler
from worker.signals import Verdict

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
        """The step is over; the next one is spared if it was given up."""
        self._spared = given_up

    def asked(self) -> bool:
        """Whether the step should be given up."""
        return self._clock() >= self._after and self._waiting()


log = logging.getLogger(__name__)

_RETRY_S = 0.01
"""Until the scheduler is asked again when it found nothing to run, whatever it counts."""


class Stepping:
    """Steps run only while SERVING, and not between a flip and the store's last word on it."""

    def __init__(
        self,
        scheduler: Scheduler,
        actions: Actions,
        membership: Membership,
        lifecycle: Lifecycle,
        *,
        admits: Callable[[], bool],
        interrupting: Interrupting,
        clock: Callable[[], float],
    ) -> None:
        self.unjudged = False  # a step ran here, and the other ranks have not said how it went there
        self.retry_at = 0.0
        self.counters: Counter[str] = Counter()
        self.seconds: list[float] = []  # of each step, since last taken
        self._last_s = 0.0  # of the last step
        self._scheduler = scheduler
        self._actions = actions
        self._membership = membership
        self._lifecycle = lifecycle
        self._admits = admits
        self.interrupting = interrupting
        self._clock = clock

    @property
    def possible(self) -> bool:
        """There is something to run, and it may."""
        if self._lifecycle.state is not WorkerState.SERVING or self._membership.holding:
            return False
        if self._clock() < self.not_before:
            return False
        return self._scheduler.running > 0 or (self._admits() and self._scheduler.waiting > 0)

    @property
    def not_before(self) -> float:
        """No step begins before that: nothing was found to run, or a flip is near."""
        return max(self.retry_at, self._expects_flip_until)

    @property
    def _expects_flip_until(self) -> float:
        """A long step begun now would keep a flip waiting that may come at once: none is, for a quarter of a step."""
        session = self._membership.session
        if session is None or session.in_flight == "wait" or self._last_s < LONG_S:
            return 0.0
        return session.began + self._last_s / 4

    def schedule(self) -> ForwardBatch | None:
        """The next batch, under what every rank is bound to."""
        live = self._membership.serving
        if live is None or not self.possible:
            return None
        assert live == self._actions.live, f"bound to {self._actions.live}, serving {live}"
        batch = self._scheduler.schedule(live.version, live.epoch, admit=self._admits())
        if batch is None:
            self.retry_at = self._clock() + _RETRY_S
            return None
        self._begun()
        return batch

    @property
    def flying(self) -> bool:
        """The next step has been launched already, and still counts."""
        return self._scheduler.flying

    def follow(self, logits: Float32 | Logits) -> Logits | None:
        """Launch the step after the one under way, where a device can and it is known which; its logits."""
        return None if isinstance(logits, np.ndarray) else self._scheduler.follow(logits)

    def stepped(self, logits: Float32 | Logits, began: float) -> None:
        """The forward pass, begun at a time of `time.monotonic`, is through on this rank, or on a device soon is."""
        if not isinstance(logits, np.ndarray):
            logits.wait()
        seconds = time.monotonic() - began
        self.unjudged = True
        self._last_s = seconds
        self.interrupting.ended(given_up=False)
        if self._actions.fenced:
            self.counters["fenced_steps"] += 1
            self._scheduler.discard()
            self._membership.lost_slot()
            return
        self._scheduler.apply(logits, seconds)
        self.counters["steps"] += 1
        self.seconds.append(seconds)
        if self._scheduler.flying:
            self._begun()

    def given_up(self) -> None:
        """The step was interrupted; it is done again, under the weights that are served then."""
        self._scheduler.discard()
        self.interrupting.ended(given_up=True)
        self.counters["interrupted_steps"] += 1

    def raised(self) -> None:
        """The step failed on this rank; nothing of it is kept."""
        self.unjudged = True
        self._scheduler.discard()

    def failed(self, verdict: Verdict) -> None:
        """All ranks know that a step failed on one of them: its sequences end, the worker goes on."""
        self.counters["engine_errors"] += 1
        text = f"the engine failed on rank {verdict.rank}: {verdict.error}"
        ended = self._scheduler.fail_all(text, waiting=False)
        self._scheduler.clear_cache(keep_running=False)
        log.error("%s; %d requests ended", text, ended)

    def _begun(self) -> None:
        self.interrupting.begin(self._last_s)
        if self._membership.session is not None:
            self._membership.session.still_since = float("inf")

"""Rank 0's part of a step: whether one may run now, what is in it, and what it came to.

A step runs while SERVING, and not between a flip and the store's last word on it. One that would keep a flip waiting,
and with it all other replicas, is put off for as long as a flip may be near.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from statistics import median

import numpy as np

from weight_manager.life import State
from worker.adapter_membership import AdapterMembership
from worker.engine.base import Float32, ForwardBatch, Logits
from worker.interrupting import Interrupting
from worker.lifecycle import Lifecycle, WorkerState
from worker.membership import Membership
from worker.orders import Actions, Verdict
from worker.scheduler import Scheduler
from worker.versions import Version

log = logging.getLogger(__name__)

_PREPARING, _PROMPT, _LONGEST = 1 / 4, 1 / 8, 3 / 4
"""Usual steps for which none begins: while a version is prepared; then until its flip, if flips come at once, and at
most. The last is what another replica needs to finish a step that it does not give up, and to prepare: a step begun
before that would keep all of them waiting to its end."""
_LEAD_S, _WORTH_S = 0.0006, 0.001
"""Before a step's end the next is launched: what that takes the host, and some. Steps shorter than the other are not
worth it.
"""
_PERIODS = 8
"""The last steps whose median time from end to end is the usual one."""
_RETRY_S = 0.01
"""Seconds until the scheduler is asked again when it found nothing to run, whatever it counts."""


class Stepping:
    """What rank 0 does about steps, over its scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        actions: Actions,
        membership: Membership,
        lifecycle: Lifecycle,
        adapters: AdapterMembership,
        *,
        admits: Callable[[], bool],
        interrupting: Interrupting,
        clock: Callable[[], float],
    ) -> None:
        self.unjudged = False  # a step ran here, and the other ranks have not said how it went there
        self.retry_at = 0.0
        self.counters: Counter[str] = Counter()
        self.seconds: list[float] = []  # of each step, since last taken
        self._was_ahead = False  # the step under way was launched behind the one before
        self._last_s = 0.0  # of the last step
        self._step_ended = 0.0  # when it did
        self._periods: deque[float] = deque(maxlen=_PERIODS)  # from end to end of steps that were launched ahead
        self._scheduler = scheduler
        self._actions = actions
        self._membership = membership
        self._lifecycle = lifecycle
        self._adapters = adapters
        self._admits = admits
        self.interrupting = interrupting
        self._clock = clock

    @property
    def paused(self) -> bool:
        """Whether the worker is paused: nothing runs because somebody wants it so."""
        return self._lifecycle.state is WorkerState.PAUSED

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
        return max(self.retry_at, self._expects_flip_until, self._adapters_settle_by)

    @property
    def _expects_flip_until(self) -> float:
        """A long step begun now would keep a flip waiting that may come at once, and with it all other replicas.

        How long a vote has to wait for its flip is what it took lately, up to what other replicas need for their steps.
        Where it mostly takes longer than that (a fleet of many hosts) nothing is gained by standing still.
        """
        session, usual = self._membership.session, self.interrupting.usual_s
        if session is None or session.in_flight == "wait" or not usual:
            return 0.0
        if session.state is not State.READY:
            return session.began + _PREPARING * usual
        longest, took = _LONGEST * usual, self._membership.until_flips
        soon = [seconds for seconds in took if seconds <= longest]
        if 2 * len(soon) < len(took):
            return session.voted + _PROMPT * usual
        return session.voted + min(longest, max(_PROMPT * usual, 2 * max(soon, default=longest)))

    @property
    def _adapters_settle_by(self) -> float:
        """The commit of an adapter waits for the step under way when it comes, and not for the next two as well, one
        before its vote and one before the store's word. All such commits together put a step off by half of one.
        """
        return min(self._adapters.settles_by(self._last_s / 4), self._step_ended + self._last_s / 2)

    def schedule(self) -> ForwardBatch | None:
        """The next batch, under what every rank is bound to."""
        live = self._membership.serving
        if live is None or not self.possible:
            return None
        assert live == self._actions.live, f"bound to {self._actions.live}, serving {live}"
        former = self._actions.former
        batch = self._scheduler.schedule(
            Version.of(live),
            admit=self._admits(),
            former=Version.of(former) if former else None,
        )
        if batch is None:
            self.retry_at = self._clock() + _RETRY_S
            return None
        self._begun()
        return batch

    @property
    def launched_ahead(self) -> bool:
        """The next step has been launched already, and still counts."""
        return self._scheduler.launched_ahead

    @property
    def serves_its_weights(self) -> bool:
        """The step that has been launched is under the weights that are served for good."""
        serving = self._membership.serving
        return serving is not None and self._scheduler.launched_under == Version.of(serving)

    def follow(self, logits: Float32 | Logits) -> Logits | None:
        """Launch the step after the one under way, where a device can and it is known which; its logits."""
        return None if isinstance(logits, np.ndarray) else self._scheduler.follow(logits)

    def venture_behind(self, logits: Float32 | Logits) -> Logits | None:
        """The store has said to flip: launch the step after the one under way, with the weights that come then, or have
        come. None where that cannot be, or not all that run go on as they are.
        """
        session = self._membership.session
        if session is None or session.state is not State.FLIPPING or session.in_flight != "keep":
            return None
        launching = self._actions.launching_with_next() if self._lifecycle.state is WorkerState.SERVING else None
        if launching is None or isinstance(logits, np.ndarray):
            return None
        with launching:
            return self._scheduler.follow(logits, Version.of(session.live))

    def puts_off(self, logits: Float32 | Logits) -> bool:
        """Whether the step behind the one under way is launched late, as the store may say to flip before. The tokens
        of this one are drawn all the same.
        """
        if isinstance(logits, np.ndarray) or not self._flip_is_near or not self._due > self._clock():
            return False
        return self._scheduler.draw(logits)

    def launch_is_due(self) -> bool:
        """Whether a step that is put off has to be launched now: the device would soon stand idle, or no flip is near
        any more.
        """
        return self._clock() >= self._due or not self._flip_is_near

    @property
    def _flip_is_near(self) -> bool:
        """The ranks prepare a version, or have voted on it."""
        session = self._membership.session
        return session is not None and session.in_flight != "wait" and session.state in (State.PREPARING, State.READY)

    @property
    def _due(self) -> float:
        """When the step under way, which was launched ahead, is nearly through; 0 = nothing is known of that."""
        usual = median(self._periods) if self._periods else 0.0
        return self._step_ended + usual - _LEAD_S if self._was_ahead and usual >= _WORTH_S else 0.0

    def stepped(self, logits: Float32 | Logits, began: float) -> None:
        """The forward pass, begun at a time of `time.monotonic`, is through on this rank, or on a device soon is."""
        if not isinstance(logits, np.ndarray):
            logits.wait()
        seconds = time.monotonic() - began
        self.unjudged = True
        self.interrupting.ended(seconds)
        now = self._clock()
        if self._was_ahead:
            self._periods.append(now - self._step_ended)
        self._last_s, self._step_ended = seconds, now
        if self._actions.fenced:
            self.counters["fenced_steps"] += 1
            self._scheduler.discard()
            self._adapters.overwritten(self._actions.adapters.overwritten())
            self._membership.lost_slot()
            return
        if self._scheduler.under_former:
            self.counters["former_steps"] += 1
            if self._actions.former is None:  # its slot was given to a push meanwhile: any byte of it may be another
                self._scheduler.discard()
                return
        self._scheduler.apply(logits, seconds)
        self.counters["steps"] += 1
        self.seconds.append(seconds)
        self._was_ahead = self._scheduler.launched_ahead
        if self._was_ahead:
            self._begun()

    def venture(self) -> ForwardBatch | None:
        """A step under weights that this rank is bound to and the store has not said the last word on, of sequences
        that go on with the KV they have; None: there is none that could be known.
        """
        session = self._membership.session
        if session is None or not self.flipped or session.in_flight != "keep":
            return None
        return self._scheduler.venture(Version.of(session.live))

    @property
    def flipped(self) -> bool:
        """This rank serves, and is bound to what the store has said to flip to."""
        session = self._membership.session
        if session is None or session.state is not State.FLIPPING or self._actions.live != session.live:
            return False
        return self._lifecycle.state is WorkerState.SERVING

    def dropped(self) -> None:
        """Throw away the step that was ventured."""
        self._scheduler.discard()

    def tidy(self, logits: Logits) -> None:
        """While the device computes what was ventured and the store decides: what else would be done once the weights
        are final. The device draws the tokens, too; nobody hears of them before.
        """
        self._scheduler.draw_together(logits)
        self._scheduler.bring_up()

    def given_up(self) -> None:
        """The step was interrupted; it is done again, under the weights that are served then."""
        self._scheduler.discard()
        self.interrupting.given_up()
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
        self.interrupting.begin()
        if self._membership.session is not None:
            self._membership.session.still_since = float("inf")

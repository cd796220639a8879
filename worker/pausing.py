"""Pause and resume, with leases that undo themselves. Rank 0 only: what never gets a batch stands still."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from worker.channel import Send
from worker.lifecycle import Event, IllegalTransition, Lifecycle, WorkerState, step
from worker.messages import CallFailed, Done, Pause, PauseMode, Resume
from worker.scheduler import Scheduler

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Waiting:
    """A pause of mode wait whose running requests have not finished."""

    origin: bytes
    message: Pause
    deadline: float


@dataclass(frozen=True)
class _Standing:
    """A pause in force. until: when its lease ends, None = at a Resume."""

    mode: PauseMode
    lease_s: float
    until: float | None


class Pausing:
    """The pause of a worker. Check and act are one call, in the order in which messages came."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        scheduler: Scheduler,
        held: Callable[[], int],
        send: Send,
        clock: Callable[[], float],
    ) -> None:
        self.leases_expired = 0
        self._lifecycle = lifecycle
        self._scheduler = scheduler
        self._held = held
        self._send = send
        self._clock = clock
        self._waiting: _Waiting | None = None
        self._standing: _Standing | None = None

    @property
    def mode(self) -> PauseMode | None:
        """Mode of the pause in force."""
        return self._standing.mode if self._standing else None

    @property
    def left_s(self) -> float | None:
        """Seconds until the lease of the pause in force ends; None = it has none, or there is none."""
        until = self._standing.until if self._standing else None
        return None if until is None else max(0.0, until - self._clock())

    @property
    def waiting(self) -> bool:
        """Running requests finish, new ones are held."""
        return self._waiting is not None

    @property
    def next_deadline(self) -> float | None:
        """When `advance` has something to do at the latest."""
        ends = [w.deadline for w in (self._waiting,) if w] + [s.until for s in (self._standing,) if s and s.until]
        return min(ends, default=None)

    def pause(self, origin: bytes, message: Pause) -> None:
        """Stop, at once or (mode wait) when what runs has finished. A later pause replaces an earlier one."""
        try:
            step(self._lifecycle.state, Event.PAUSE)
        except IllegalTransition as error:
            self._send(origin, CallFailed(message.call, "conflict", str(error)))
            return
        self._give_up_waiting("another pause came before the running requests had finished")
        running = self._scheduler.running
        if message.mode == "wait" and running and self._lifecycle.state is WorkerState.SERVING:
            self._waiting = _Waiting(origin, message, self._clock() + message.deadline_s)
            return
        if message.mode == "wait" and running:
            text = f"{running} sequences stand still in a {self._lifecycle.state.value} worker and cannot finish"
            self._send(origin, CallFailed(message.call, "conflict", text))
            return
        self._enter(origin, message)

    def resume(self, origin: bytes, message: Resume) -> None:
        """Go on. Also a clean answer when nothing is paused."""
        try:
            step(self._lifecycle.state, Event.RESUME)
        except IllegalTransition as error:
            self._send(origin, CallFailed(message.call, "conflict", str(error)))
            return
        self._give_up_waiting("a resume came before the running requests had finished")
        self._leave("resumed")
        self._send(origin, Done(message.call))

    def advance(self) -> None:
        """Act on what ended since the last tick: a drain, a deadline, a lease."""
        now = self._clock()
        waiting, standing = self._waiting, self._standing
        if waiting and not self._scheduler.running:
            self._waiting = None
            self._enter(waiting.origin, waiting.message)
        elif waiting and now >= waiting.deadline:
            self._waiting = None
            text = f"{self._scheduler.running} sequences still ran after {waiting.message.deadline_s:g} s; not paused"
            self._send(waiting.origin, CallFailed(waiting.message.call, "timeout", text))
        elif standing and standing.until is not None and now >= standing.until:
            self.leases_expired += 1
            log.warning("the pause's lease of %g s ran out; going on", standing.lease_s)
            self._leave(f"the pause's lease of {standing.lease_s:g} s ran out")

    def reapply(self) -> None:
        """The worker has just begun to serve: a pause that was asked for meanwhile takes effect."""
        if self._standing and self._lifecycle.state is WorkerState.SERVING:
            self._lifecycle.apply(Event.PAUSE, f"paused ({self._standing.mode})")

    def _enter(self, origin: bytes, message: Pause) -> None:
        aborted = self._scheduler.abort(None) if message.mode == "abort" else 0
        if message.clear_cache or message.mode == "recompute":
            self._scheduler.clear_cache(keep_running=False)
        until = self._clock() + message.lease_s if message.lease_s > 0 else None
        self._standing = _Standing(message.mode, message.lease_s, until)
        self._lifecycle.apply(Event.PAUSE, f"paused ({message.mode})")
        self._send(origin, Done(message.call, {"aborted": aborted, "held": self._held()}))

    def _leave(self, reason: str) -> None:
        self._standing = None
        self._lifecycle.apply(Event.RESUME, reason)

    def _give_up_waiting(self, why: str) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting:
            self._send(waiting.origin, CallFailed(waiting.message.call, "conflict", why))

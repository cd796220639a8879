"""The orderly end of a replica: nothing new, what runs finishes or is aborted by a deadline, then it leaves."""

import logging
from collections.abc import Callable

from worker.channel import Send
from worker.messages import CallFailed, Done, Drain
from worker.scheduler import Scheduler

log = logging.getLogger(__name__)


class Draining:
    """Begun by `Drain` or SIGTERM; there is no way back."""

    def __init__(
        self,
        scheduler: Scheduler,
        refuse: Callable[[str], None],
        abort: Callable[[], int],
        send: Send,
        clock: Callable[[], float],
    ) -> None:
        """refuse: what is held and what comes, for this reason. abort: all that runs; returns how many requests."""
        self.begun = False
        self._scheduler = scheduler
        self._refuse = refuse
        self._abort = abort
        self._send = send
        self._clock = clock
        self._deadline = 0.0
        self._owed: tuple[bytes, Drain] | None = None

    @property
    def over(self) -> bool:
        """Nothing runs and nothing waits."""
        return self.begun and self._scheduler.idle

    @property
    def next_deadline(self) -> float | None:
        """When `advance` has something to do at the latest."""
        return self._deadline if self.begun else None

    def begin(self, origin: bytes | None, message: Drain) -> bool:
        """Refuse what is held and what comes. origin: who is answered at the end. False: it had begun before."""
        if self.begun:
            if origin is not None:
                self._send(origin, CallFailed(message.call, "conflict", "draining already"))
            return False
        log.info("draining: %d running may take %g s", self._scheduler.running, message.deadline_s)
        self.begun = True
        self._deadline = self._clock() + message.deadline_s
        self._owed = None if origin is None else (origin, message)
        self._refuse("this replica is draining")
        return True

    def advance(self) -> int:
        """Past the deadline: abort what is left. Returns how many requests."""
        if not self.begun or self._scheduler.idle or self._clock() < self._deadline:
            return 0
        return self._abort()

    def finish(self) -> None:
        """Answer whoever asked for the drain."""
        if self._owed:
            self._send(self._owed[0], Done(self._owed[1].call))

"""States of a worker: one enum, one transition table, one pure step function.

STARTING  the live version is not mapped yet: nothing is served, requests are held
SERVING   steps run
PAUSED    no step runs; requests are held; aborts and weight updates work
CLEARED   parameters, KV or both are released; updates are followed without mapping them
STOPPED   left on purpose
FAILED    left because it could not go on
"""

from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType


class WorkerState(Enum):
    """Where a worker stands; the value is what messages and metrics say."""

    STARTING = "starting"
    SERVING = "serving"
    PAUSED = "paused"
    CLEARED = "cleared"
    STOPPED = "stopped"
    FAILED = "failed"


class Event(Enum):
    """What may happen to a worker."""

    MAPPED = "mapped"  # the live version is bound on every rank
    LOST = "lost"  # what is mapped may no longer be used (the slot was given away)
    PAUSE = "pause"
    RESUME = "resume"
    CLEAR = "clear"
    RELOAD = "reload"  # everything that was released is back
    STOP = "stop"
    FAIL = "fail"


class IllegalTransition(Exception):
    """The event is not allowed in this state; the message says so and becomes the caller's conflict."""


_S, _E = WorkerState, Event

TRANSITIONS: Mapping[tuple[WorkerState, Event], WorkerState] = MappingProxyType(
    {
        (_S.STARTING, _E.MAPPED): _S.SERVING,
        (_S.STARTING, _E.LOST): _S.STARTING,
        (_S.STARTING, _E.PAUSE): _S.STARTING,  # remembered; takes effect when mapped
        (_S.STARTING, _E.RESUME): _S.STARTING,
        (_S.SERVING, _E.MAPPED): _S.SERVING,  # a newer version
        (_S.SERVING, _E.LOST): _S.STARTING,
        (_S.SERVING, _E.PAUSE): _S.PAUSED,
        (_S.SERVING, _E.RESUME): _S.SERVING,
        (_S.SERVING, _E.CLEAR): _S.CLEARED,
        (_S.SERVING, _E.RELOAD): _S.SERVING,  # nothing was released
        (_S.PAUSED, _E.MAPPED): _S.PAUSED,
        (_S.PAUSED, _E.LOST): _S.STARTING,
        (_S.PAUSED, _E.PAUSE): _S.PAUSED,
        (_S.PAUSED, _E.RESUME): _S.SERVING,
        (_S.PAUSED, _E.CLEAR): _S.CLEARED,
        (_S.PAUSED, _E.RELOAD): _S.PAUSED,
        (_S.CLEARED, _E.MAPPED): _S.CLEARED,  # weights are back, KV is not
        (_S.CLEARED, _E.LOST): _S.CLEARED,
        (_S.CLEARED, _E.PAUSE): _S.CLEARED,  # remembered; takes effect when reloaded
        (_S.CLEARED, _E.RESUME): _S.CLEARED,
        (_S.CLEARED, _E.CLEAR): _S.CLEARED,
        (_S.CLEARED, _E.RELOAD): _S.SERVING,
        **{(state, _E.STOP): _S.STOPPED for state in (_S.STARTING, _S.SERVING, _S.PAUSED, _S.CLEARED, _S.STOPPED)},
        **{(state, _E.FAIL): _S.FAILED for state in (_S.STARTING, _S.SERVING, _S.PAUSED, _S.CLEARED, _S.FAILED)},
    }
)


def step(state: WorkerState, event: Event) -> WorkerState:
    """The state after `event`. Raises IllegalTransition naming both."""
    after = TRANSITIONS.get((state, event))
    if after is None:
        allowed = ", ".join(sorted(e.value for s, e in TRANSITIONS if s is state))
        ended = state in (WorkerState.STOPPED, WorkerState.FAILED)
        raise IllegalTransition(
            f"cannot {event.value} while {state.value}; " + ("it has ended" if ended else f"possible now: {allowed}")
        )
    return after


class Lifecycle:
    """The one cell that holds a worker's state. on_change(state, reason) runs after each change."""

    def __init__(self, on_change: Callable[[WorkerState, str], None]) -> None:
        self.state = WorkerState.STARTING
        self._on_change = on_change

    def apply(self, event: Event, reason: str = "") -> None:
        """Move. Raises IllegalTransition and stays where it is."""
        before, self.state = self.state, step(self.state, event)
        if self.state is not before:
            self._on_change(self.state, reason)

"""States of a push session: one table, one pure step function, and a machine that remembers how it got here.

A store runs one session at a time. IDLE is "no session". A commit's inner phases are in commit.py; they
move the session only at the three points named here: all prepared, all flipped and recorded, rolled back.
"""

from collections import deque
from enum import Enum

from weight_manager.errors import IllegalTransition


class State(Enum):
    """Where the one session is."""

    IDLE = "idle"  # no session
    STAGING = "staging"  # bytes arrive in the staged slot and are checked
    SEALED = "sealed"  # every byte arrived and matches; replicas may be preparing
    COMMITTING = "committing"  # every replica is prepared; they flip, or are being rolled back


class Event(Enum):
    """What moves it."""

    BEGIN = "begin"
    SEAL_OK = "seal ok"
    ALL_PREPARED = "all ranks prepared"
    ALL_FLIPPED = "all flipped and recorded"
    ABORT = "abort, lease expired, bad checksum or refused prepare"
    ROLLED_BACK = "failed flip, rolled back"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.IDLE, Event.BEGIN): State.STAGING,
    (State.STAGING, Event.SEAL_OK): State.SEALED,
    (State.STAGING, Event.ABORT): State.IDLE,
    (State.SEALED, Event.ALL_PREPARED): State.COMMITTING,
    (State.SEALED, Event.ABORT): State.IDLE,
    (State.COMMITTING, Event.ALL_FLIPPED): State.IDLE,
    (State.COMMITTING, Event.ROLLED_BACK): State.IDLE,
}
"""Everything that may happen. The live version changes at ALL_FLIPPED and at no other edge."""


def step(state: State, event: Event) -> State:
    """The next state. Raises IllegalTransition for anything the table does not name."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"{event.name} is not allowed in {state.name}") from None


class Machine:
    """The session's state and its last transitions."""

    def __init__(self, keep: int = 32) -> None:
        self.state = State.IDLE
        self.history: deque[tuple[State, Event, State, str]] = deque(maxlen=keep)

    def fire(self, event: Event, note: str = "") -> State:
        """Take one step; note says who or why. Raises IllegalTransition with the history so far."""
        try:
            after = step(self.state, event)
        except IllegalTransition as error:
            trail = "; ".join(f"{a.name} -{e.name}-> {b.name} ({n})" for a, e, b, n in self.history)
            raise IllegalTransition(f"{error}; history: {trail or 'none'}") from None
        self.history.append((self.state, event, after, note))
        self.state = after
        return after

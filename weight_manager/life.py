"""The life of a version at one store: its states, what may happen in each, and what everybody is told meanwhile.

`CELLS` decides every event in every state of every role; docs/states.md is rendered from it. Pure: it does nothing,
it says what is to be done. Who owes an answer is in ballot.py, and coordinator.py is the one that acts.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from weight_manager.errors import IllegalTransition


class Role(Enum):
    """Who has the last word on a session. Fixed when it begins."""

    ROOT = "root"  # this store: a push to it, or a load of its own
    RELAY = "relay"  # the store above: when to flip, and whether to record
    CATCH_UP = "catch-up"  # this store, on what is live above already; the store above may take it back


class State(Enum):
    """Where a version is. The value is what status and logs say."""

    STAGING = "staging"  # bytes arrive in the staged slot and are checked
    CHECKING = "checking"  # everything was sent; checks run, and stores below finish
    SEALED = "sealed"  # every byte arrived and matches, here and below; nobody was asked yet
    PREPARING = "preparing"  # replicas and stores below build their views and vote
    READY = "ready"  # relay: all here are prepared; the store above says when to flip
    FLIPPING = "flipping"  # replicas and stores below flip and hold their output
    FENCING = "fencing"  # all have flipped; a store that is left behind may still be serving
    FLIPPED = "flipped"  # nobody serves anything else any more; it is written down next
    DOUBT = "in doubt"  # relay: voted for; only the store above knows whether it is live
    LIVE = "live"  # written down; stall figures come in
    UNDOING = "undoing"  # everybody goes back to what was live before
    OVER = "over"  # nothing is owed to anybody


class Event(Enum):
    """What may happen to it. The value completes "when ..."."""

    SENT = "everything was sent"
    WHOLE = "every byte is there and matches, here and below"
    COMMIT = "its owner asks for the commit"
    OPERATOR_COMMITS = "an operator asks for the commit"
    PREPARE = "the store above asks to prepare"
    PREPARED = "all are prepared"
    FLIP = "the store above says flip"
    ALL_FLIPPED = "all have flipped"
    ALL_FENCED = "nobody who is left behind can be serving"
    NOTED = "it is written down that it may go live"
    RECORDED = "it is written down as live"
    UNWRITTEN = "it cannot be written down"
    CLOSED = "all have reported, or their time is over"
    REFUSED = "a check, a replica or a store below says no"
    LATE = "its time is over"
    TRAINER_SILENT = "its trainer is not heard of"
    TRAINER_ABORTS = "its trainer gives it up"
    OPERATOR_ABORTS = "an operator ends it"
    STOPPING = "this store stops"
    WITHDRAWN = "the store above takes it back"
    ABOVE_LOST = "the store above is lost, or has begun something else"


class Bound(Enum):
    """What ends the wait in a state if nothing else does."""

    LEASE = "a trainer's lease (`lease_s`); of a load from disk, the deadline it was asked with"
    DEADLINE = "the deadline that came with the request, `max_deadline_s` at most"
    FLIP = "`flip_s`, twice that with stores below"
    LEASES_BELOW = "the leases of those left behind (`relay_lease_s`)"
    FINALIZE = "`finalize_s`, twice that with stores below; of an adapter their leases (`relay_lease_s`)"
    ROLLBACK = "`rollback_s`, twice that with stores below; who is silent must register again"
    ABOVE = "the store above: its silence, its next session, or `max_deadline_s` without a word"
    ASKING = "no time: the store above is asked every 2 s; replicas hold for their `hold_s` and `unknown_s`"
    PASSED = "nothing: it is passed through in one turn of the loop"
    NONE = "nothing is waited for"


@dataclass(frozen=True)
class Go:
    """The version moves to another state."""

    to: State


@dataclass(frozen=True)
class Refused:
    """Who asked is told why not."""

    why: str


@dataclass(frozen=True)
class Ignored:
    """The event came late or twice: nothing changes."""

    why: str


@dataclass(frozen=True)
class Bug:
    """The event cannot come in this state: a bug of ours. `Life.fire` raises IllegalTransition."""

    why: str


Cell = Go | Refused | Ignored | Bug
S, E = State, Event

ASKED = (S.PREPARING, S.READY, S.FLIPPING, S.FENCING, S.FLIPPED)
"""Somebody was asked to prepare, and everybody can still go back."""
UNASKED = (S.STAGING, S.CHECKING, S.SEALED)
"""Nobody was asked to prepare: there is nothing to go back from."""
VOTING = (*ASKED, S.DOUBT, S.UNDOING)
"""Between the first question and the outcome: what everybody serves is in question."""
ABORTS = (
    *(E.REFUSED, E.LATE, E.TRAINER_SILENT, E.TRAINER_ABORTS),
    *(E.OPERATOR_ABORTS, E.STOPPING, E.WITHDRAWN, E.ABOVE_LOST),
)


def states_of(role: Role) -> tuple[State, ...]:
    """The states that a version can be in."""
    return tuple(s for s in State if role is Role.RELAY or s not in (S.READY, S.DOUBT))


def _cells(role: Role) -> Iterator[tuple[State, Event, Cell]]:
    """Everything that is decided. What a later row says about a cell that an earlier one has is a mistake."""
    relay, below = role is Role.RELAY, role is not Role.ROOT
    after = {s: states_of(role)[states_of(role).index(s) + 1 :] for s in states_of(role)}

    def row(event: Event, cell: Cell, *states: State) -> Iterator[tuple[State, Event, Cell]]:
        yield from ((state, event, cell) for state in states if state in states_of(role))

    # the way up
    yield from row(E.SENT, Go(S.CHECKING), S.STAGING)
    yield from row(E.SENT, Ignored("said already"), *after[S.STAGING])
    yield from row(E.WHOLE, Bug("not everything was sent"), S.STAGING)
    yield from row(E.WHOLE, Go(S.SEALED), S.CHECKING)
    yield from row(E.WHOLE, Ignored("known already, or nobody waits for it any more"), *after[S.CHECKING])

    answered = Ignored("asked already: all who ask are answered when it is over")
    for event, early in (
        (E.COMMIT, Refused("commit comes after seal has been answered")),
        (E.OPERATOR_COMMITS, Refused("is not sealed yet: its trainer still sends")),
    ):
        if relay or (below and event is E.OPERATOR_COMMITS):
            yield from row(event, Refused("is committed by the root of the tree: this store follows another"), *S)
            continue
        yield from row(event, early, S.STAGING, S.CHECKING)
        yield from row(event, Go(S.PREPARING), S.SEALED)
        yield from row(event, answered, *after[S.SEALED])
    if relay:
        yield from row(E.PREPARE, Refused("asked to prepare before it was staged"), S.STAGING, S.CHECKING)
        yield from row(E.PREPARE, Go(S.PREPARING), S.SEALED)
        yield from row(E.PREPARE, Ignored("asked already"), S.PREPARING, S.READY, S.FLIPPING, S.FENCING)
        yield from row(E.PREPARE, Ignored("asked already"), S.FLIPPED, S.DOUBT, S.LIVE)
        yield from row(E.PREPARE, Refused("the session is over here"), S.UNDOING, S.OVER)
        yield from row(E.FLIP, Refused("nothing is prepared for it here"), *UNASKED)
        yield from row(E.FLIP, Ignored("it has not voted yet"), S.PREPARING)
        yield from row(E.FLIP, Go(S.FLIPPING), S.READY)
        yield from row(E.FLIP, Ignored("asked already"), S.FLIPPING, S.FENCING, S.FLIPPED, S.DOUBT, S.LIVE)
        yield from row(E.FLIP, Refused("the session is over here"), S.UNDOING, S.OVER)
    else:
        unasked_for = Refused("it is live above: no votes are asked for") if below else Bug("there is no store above")
        yield from row(E.PREPARE, unasked_for, *S)
        yield from row(E.FLIP, unasked_for, *S)

    unasked = "nobody was asked"
    for event, state, to in (
        (E.PREPARED, S.PREPARING, S.READY if relay else S.FLIPPING),
        (E.ALL_FLIPPED, S.FLIPPING, S.FENCING),
        (E.ALL_FENCED, S.FENCING, S.FLIPPED),
    ):
        yield from row(event, Go(to), state)
        yield from row(event, Bug(unasked), *(s for s in S if s is not state))

    # what is written down
    yield from row(E.NOTED, Go(S.DOUBT) if relay else Bug("this store has the word"), S.FLIPPED)
    yield from row(E.NOTED, Bug("not everybody has flipped, or it is decided"), *(s for s in S if s is not S.FLIPPED))
    if relay:
        unvoted = Refused("this store has not voted for it: it was left behind, and catches up")
        yield from row(E.RECORDED, unvoted, *UNASKED, *ASKED)
        yield from row(E.RECORDED, Go(S.LIVE), S.DOUBT)
        yield from row(E.RECORDED, Ignored("known already"), S.LIVE, S.OVER)
        yield from row(E.RECORDED, Refused("it was taken back"), S.UNDOING)
        yield from row(E.UNWRITTEN, Ignored("it is live above: it is written down with the next word"), S.DOUBT)
    else:
        yield from row(E.RECORDED, Go(S.LIVE), S.FLIPPED)
        yield from row(E.RECORDED, Bug("not everybody has flipped"), *(s for s in S if s is not S.FLIPPED))
    yield from row(E.UNWRITTEN, Go(S.UNDOING), S.FLIPPED)
    nothing = (s for s in S if s not in (S.FLIPPED, S.DOUBT))
    yield from row(E.UNWRITTEN, Bug("nothing is written down here"), *nothing)

    yield from row(E.CLOSED, Go(S.OVER), S.LIVE, S.UNDOING)
    yield from row(E.CLOSED, Bug("it is not decided"), *UNASKED, *ASKED, S.DOUBT)
    yield from row(E.CLOSED, Bug("closed twice"), S.OVER)

    # the way down
    from_above, trainers = (E.WITHDRAWN, E.ABOVE_LOST), (E.TRAINER_SILENT, E.TRAINER_ABORTS)
    for event in ABORTS:
        if event in (trainers if below else from_above):
            yield from row(event, Bug("trainers push to the root" if below else "there is no store above"), *S)
            continue
        yield from row(event, Go(S.OVER), *UNASKED)
        if event is E.TRAINER_SILENT:
            yield from row(event, Ignored("its commit was asked for: nothing more is expected of it"), *ASKED)
        else:
            yield from row(event, Go(S.UNDOING), *ASKED)
        yield from row(event, _in_doubt(event), S.DOUBT)
        asks = event in (E.TRAINER_ABORTS, E.OPERATOR_ABORTS)
        yield from row(event, Refused("is already live") if asks else Ignored("it is recorded"), S.LIVE)
        yield from row(event, Ignored("it is being undone: the first reason stands"), S.UNDOING)
        yield from row(event, Ignored("it is over"), S.OVER)


def _in_doubt(event: Event) -> Cell:
    match event:
        case E.WITHDRAWN:
            return Go(S.UNDOING)
        case E.OPERATOR_ABORTS:
            return Refused(
                "is in doubt: all replicas here have flipped, and only the store above knows whether it counts. It is "
                "asked every 2 s; if it is gone for good, restart this store with another upstream"
            )
        case E.STOPPING:
            return Ignored("it is written down: the next life of this store asks")
        case E.ABOVE_LOST:
            return Ignored("only the store above knows: it is asked until it answers")
        case _:
            return Ignored("this store has voted: only the store above ends it now")


def _table() -> Mapping[tuple[Role, State, Event], Cell]:
    cells: dict[tuple[Role, State, Event], Cell] = {}
    for role in Role:
        for state, event, cell in _cells(role):
            assert (role, state, event) not in cells, f"two answers: {role.name} {state.name} {event.name}"
            cells[role, state, event] = cell
    return MappingProxyType(cells)


CELLS = _table()


@dataclass(frozen=True)
class Answers:
    """What a person on call asks about a state. `may_end` is read from CELLS."""

    bound: Bound
    restart: str
    trainer: str
    operator: str


_FORGOTTEN = "forgotten: what was live is served, the trainer pushes again"
_LEARN = "not recorded: what was live is served; replicas that flipped learn it when they register"
_WAITS = "nothing yet: its commit is answered when it is over"
_SHOWN = "status shows the session; may end it"

ANSWERS: Mapping[State, Answers] = MappingProxyType(
    {
        S.STAGING: Answers(
            Bound.LEASE, _FORGOTTEN, "`Renewed` with the bytes verified so far", f"{_SHOWN}, or ask what is missing"
        ),
        S.CHECKING: Answers(Bound.DEADLINE, _FORGOTTEN, "nothing yet: its seal is answered after the checks", _SHOWN),
        S.SEALED: Answers(Bound.LEASE, _FORGOTTEN, "`Sealed` with the version's digest", f"{_SHOWN}, or commit it"),
        S.PREPARING: Answers(Bound.DEADLINE, _FORGOTTEN, _WAITS, _SHOWN),
        S.READY: Answers(Bound.ABOVE, _FORGOTTEN, _WAITS, _SHOWN),
        S.FLIPPING: Answers(Bound.FLIP, _LEARN, _WAITS, _SHOWN),
        S.FENCING: Answers(Bound.LEASES_BELOW, _LEARN, _WAITS, _SHOWN),
        S.FLIPPED: Answers(Bound.PASSED, _LEARN, _WAITS, "is not seen"),
        S.DOUBT: Answers(
            Bound.ASKING,
            "the note on disk is found; what is live above decides, and the bytes are where they lay",
            _WAITS,
            "status says in doubt; ending it is refused",
        ),
        S.LIVE: Answers(
            Bound.FINALIZE,
            "served: the record is on disk",
            "`Committed`, once stall figures are in; an abort is refused",
            "status shows it live",
        ),
        S.UNDOING: Answers(Bound.ROLLBACK, _LEARN, "the reason, once everybody is back", "status shows it undone"),
        S.OVER: Answers(Bound.NONE, "served if it was live", "how it ended, again and again", "the last push or error"),
    }
)


def bound(role: Role, state: State) -> Bound:
    """What ends the wait. Below the root, bytes and the word to go on come from the store above."""
    if role is not Role.ROOT and state in (S.STAGING, S.SEALED):
        return Bound.ABOVE if role is Role.RELAY or state is S.STAGING else Bound.PASSED
    return ANSWERS[state].bound


def may_end(role: Role, state: State) -> tuple[Event, ...]:
    """The events that undo a version in this state."""
    cells = ((event, CELLS[role, state, event]) for event in (*ABORTS, E.UNWRITTEN))
    return tuple(event for event, cell in cells if isinstance(cell, Go))


class Life:
    """One version at this store, and how it came to where it is."""

    def __init__(self, role: Role, keep: int = 32) -> None:
        self.role = role
        self.state = State.STAGING
        self.trail: deque[tuple[State, Event, State, str]] = deque(maxlen=keep)

    def cell(self, event: Event) -> Cell:
        """What the table says of the event in the state that the version is in."""
        return CELLS[self.role, self.state, event]

    def fire(self, event: Event, note: str = "") -> Cell:
        """Move, if the event moves it. Raises IllegalTransition with the trail so far for what cannot be."""
        cell = self.cell(event)
        if isinstance(cell, Bug):
            trail = "; ".join(f"{a.name} -{e.name}-> {b.name} ({n})" for a, e, b, n in self.trail)
            raise IllegalTransition(
                f"{event.name} in {self.state.name} of a {self.role.value}: {cell.why}; so far: {trail or 'nothing'}"
            )
        if isinstance(cell, Go):
            self.trail.append((self.state, event, cell.to, note))
            self.state = cell.to
        return cell

    def moves(self, event: Event) -> bool:
        """Whether the event would move it."""
        return isinstance(self.cell(event), Go)

    @property
    def in_question(self) -> bool:
        """Whether the commit is between its first question and its outcome: what everybody serves is not known then."""
        return self.state in VOTING

    @property
    def whole(self) -> bool:
        """Every byte is there and matches, here and below."""
        return self.state not in (State.STAGING, State.CHECKING)

    @property
    def ended_by(self) -> Event | None:
        """The event that undid the version; None = it was not undone."""
        return next((event for _, event, to, _ in reversed(self.trail) if to is State.UNDOING or event in ABORTS), None)

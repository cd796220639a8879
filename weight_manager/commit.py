"""Two-phase commit of one sealed version over all replicas: a pure state machine, driven by the store's loop.

Who votes: every replica that is registered when the commit starts. With none, the version commits at once
(it is live for whoever comes).

What happens to a voter decides what happens to the commit:
  - it says no, or its deadline passes in silence: everybody rolls back. The silent one must register again.
  - it dies (pidfd), or registers anew: it leaves the vote, because it will serve nothing before it has
    adopted whatever is live then; so a commit without it leaves no replica on another version. The rest
    must still all say yes, and at least one must: weights that kill everyone who maps them never go live.
  - it dies after the version was recorded: nothing to undo.
A version is live once it is recorded (see history.py), not before and not later.
"""

from dataclasses import dataclass, field
from enum import Enum

from rollout_client.protocol import InFlight
from weight_manager.errors import IllegalTransition, PushRefused
from weight_manager.messages import (
    Finalize,
    Finalized,
    Flip,
    Flipped,
    Live,
    Prepare,
    Prepared,
    Rollback,
    RolledBack,
    ToReplica,
)


class Phase(Enum):
    """What the round waits for."""

    PREPARE = "prepare"  # votes
    FLIP = "flip"  # all ranks on the new slot, output held
    RECORD = "record"  # the store writes the version down
    FINALIZE = "finalize"  # stall figures; nothing depends on them
    ROLLBACK = "rollback"  # everybody back on the old slot
    DONE = "done"


@dataclass(frozen=True)
class Limits:
    """Seconds. prepare: until all votes are in. The others as in StoreConfig."""

    prepare: float
    flip: float
    rollback: float
    finalize: float


@dataclass
class Round:
    """One commit. Inputs are method calls with the monotonic time; outputs are `outbox` and `lost`."""

    session: str
    live: Live  # what would become live
    in_flight: InFlight
    voters: set[int]
    limits: Limits
    phase: Phase = Phase.PREPARE
    outbox: list[tuple[int, ToReplica]] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)  # silent ones: they must register again
    refusal: PushRefused | None = None
    stall_ms: dict[str, float] = field(default_factory=dict)
    flipped: int = 0  # replicas that serve the version from this commit on
    deadline: float = 0.0
    _waiting: set[int] = field(default_factory=set)

    def start(self, now: float) -> None:
        """Ask everybody to prepare."""
        prepare = Prepare(self.session, self.live, self.in_flight, self.limits.prepare)
        self._enter(Phase.PREPARE, now + self.limits.prepare, prepare)
        self._advance(now)

    def prepared(self, replica: int, vote: Prepared, now: float) -> None:
        """A replica's vote on preparing."""
        self._vote(Phase.PREPARE, replica, vote, "cannot prepare", now)

    def flipped_by(self, replica: int, vote: Flipped, now: float) -> None:
        """A replica flipped, or could not."""
        self._vote(Phase.FLIP, replica, vote, "failed to flip", now)

    def recorded(self, now: float) -> None:
        """The version is written down: it is live."""
        if self.phase is not Phase.RECORD:
            raise IllegalTransition(f"recorded in phase {self.phase.name}")
        self.flipped = len(self.voters)
        self._enter(Phase.FINALIZE, now + self.limits.finalize, Finalize(self.session))
        self._advance(now)

    def finalized(self, replica: int, report: Finalized, now: float) -> None:
        """A replica goes on under the new version."""
        if self.phase is Phase.FINALIZE and report.session == self.session and replica in self._waiting:
            self.stall_ms[str(replica)] = report.stall_ms
            self._settle(replica, now)

    def rolled_back(self, replica: int, report: RolledBack, now: float) -> None:
        """A replica serves the old version again."""
        if self.phase is Phase.ROLLBACK and report.session == self.session:
            self._settle(replica, now)

    def fail(self, refusal: PushRefused, now: float) -> None:
        """Give the commit up; everybody who was asked goes back. No effect once it is recorded."""
        if self.phase in (Phase.PREPARE, Phase.FLIP, Phase.RECORD):
            self.refusal = refusal
            rollback = Rollback(self.session, refusal.message)
            self._enter(Phase.ROLLBACK, now + self.limits.rollback, rollback)
            self._advance(now)

    def gone(self, replica: int, why: str, now: float) -> None:
        """A replica died or registered anew."""
        if replica not in self.voters:
            return
        self.voters.discard(replica)
        if self.phase in (Phase.PREPARE, Phase.FLIP, Phase.RECORD) and not self.voters:
            message = f"no replica is left to serve the version; the last, replica {replica}, {why}"
            self.fail(PushRefused("refused", message, rank=f"replica {replica}"), now)
        else:
            self._settle(replica, now)

    def tick(self, now: float) -> None:
        """Act on a passed deadline."""
        if now < self.deadline or self.phase in (Phase.RECORD, Phase.DONE):
            return
        silent = sorted(self._waiting)
        if self.phase is Phase.FINALIZE:
            self._waiting.clear()
            self._advance(now)
            return
        self.lost += silent
        self.voters.difference_update(silent)
        self._waiting.clear()
        if self.phase is Phase.ROLLBACK:
            self._advance(now)
            return
        limit = self.limits.prepare if self.phase is Phase.PREPARE else self.limits.flip
        names = ", ".join(f"replica {r}" for r in silent)
        message = f"{names} did not answer to {self.phase.value} within {limit:g} s"
        for replica in silent:  # should they wake, they find the rollback before anything else
            self.outbox.append((replica, Rollback(self.session, message)))
        self.fail(PushRefused("deadline", message, rank=f"replica {silent[0]}"), now)

    def _vote(self, phase: Phase, replica: int, vote: Prepared | Flipped, verb: str, now: float) -> None:
        if self.phase is not phase or vote.session != self.session or replica not in self._waiting:
            return  # late: the round has moved on
        if vote.ok:
            self._settle(replica, now)
            return
        rank = f"replica {replica} rank {vote.rank}"
        self.fail(PushRefused("refused", f"{rank} {verb}: {vote.error}", vote.tensors, rank=rank), now)

    def _settle(self, replica: int, now: float) -> None:
        self._waiting.discard(replica)
        self._advance(now)

    def _advance(self, now: float) -> None:
        if self._waiting:
            return
        if self.phase is Phase.PREPARE:
            self._enter(Phase.FLIP, now + self.limits.flip, Flip(self.session))
            self._advance(now)
        elif self.phase is Phase.FLIP:
            self.phase = Phase.RECORD
        elif self.phase in (Phase.FINALIZE, Phase.ROLLBACK):
            self.phase = Phase.DONE

    def _enter(self, phase: Phase, deadline: float, message: ToReplica) -> None:
        self.phase, self.deadline = phase, deadline
        self._waiting = set(self.voters)
        self.outbox += [(replica, message) for replica in sorted(self.voters)]

"""Two-phase commit of one sealed version over all voters: a pure state machine, driven by the store's loop.

Who votes: every replica that is registered when the commit starts, by its number, and every store below that
takes part, by its name. With none, the version commits at once (it is live for whoever comes).

What happens to a replica decides what happens to the commit:
  - it says no, or its deadline passes in silence: everybody rolls back. The silent one must register again.
  - it dies (pidfd), or registers anew: it leaves the vote, because it will serve nothing before it has
    adopted whatever is live then; so a commit without it leaves no replica on another version. The rest
    must still all say yes, and at least one must: weights that kill everyone who maps them never go live.
  - it dies after the version was recorded: nothing to undo.
A store below that fails the same way fails the commit, unless it is one of `may_miss`: then it is left behind, and
the version is not recorded before it is fenced, by its own word or because its lease ran out.
With `gated` there is a store above: it says when to flip (READY) and whether to record (RECORD).
A version is live once it is recorded (see history.py), not before and not later.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

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
from weight_manager.votes import OPEN, Limits, Phase, Tally, Voter, label


@dataclass
class Round:
    """One commit. Inputs are method calls with the monotonic time; outputs are `outbox` and `lost`."""

    session: str
    live: Live  # what would become live
    in_flight: InFlight
    voters: set[Voter]
    limits: Limits
    may_miss: frozenset[str] = frozenset()
    needed: int = 1  # stores that must take part, this one included
    gated: bool = False
    serves_until: Callable[[str], float] = lambda store: 0.0  # until when a silent store may go on serving
    phase: Phase = Phase.PREPARE
    outbox: list[tuple[Voter, ToReplica]] = field(default_factory=list)
    lost: list[Voter] = field(default_factory=list)  # silent ones: they must register again
    refusal: PushRefused | None = None
    stall_ms: dict[str, float] = field(default_factory=dict)
    flipped: int = 0  # replicas that serve the version from this commit on
    behind: dict[str, str] = field(default_factory=dict)  # stores left behind, and why
    _tallies: dict[Voter, Tally] = field(default_factory=dict)
    _waiting: set[Voter] = field(default_factory=set)
    _fencing: dict[str, float] = field(default_factory=dict)  # left behind and perhaps still serving, until when
    _hard: float = 0.0
    _soft: float = 0.0

    @property
    def stores(self) -> int:
        """That take part, this one included."""
        return 1 + sum(self._tallies.get(v, Tally(1)).stores for v in self.voters if isinstance(v, str))

    @property
    def replicas(self) -> int:
        """That take part, here and below."""
        return sum(self._tallies.get(v, Tally()).replicas for v in self.voters)

    @property
    def in_doubt(self) -> bool:
        """The store above has been told that all flipped, and it alone knows whether the version counts: nothing that
        happens here undoes it any more."""
        return self.gated and self.phase is Phase.RECORD

    @property
    def deadline(self) -> float:
        """When `tick` has something to do; inf = not before something is heard."""
        if self.phase in (Phase.RECORD, Phase.DONE):
            return float("inf")
        times = [self._hard] if self._waiting or not self._fencing else []
        if any(v in self.may_miss for v in self._waiting):
            times.append(self._soft)
        if not self._waiting:
            times += self._fencing.values()
        return min(times)

    def patience(self, voter: Voter, now: float) -> float:
        """Seconds that are left to a voter for its answer."""
        return max(0.0, (self._soft if voter in self.may_miss else self._hard) - now)

    def start(self, now: float) -> None:
        """Ask everybody to prepare."""
        prepare = Prepare(self.session, self.live, self.in_flight, self.limits.prepare)
        self._enter(Phase.PREPARE, now, self.limits.prepare, prepare)
        self._advance(now)

    def prepared(self, replica: int, vote: Prepared, now: float) -> None:
        """A replica's vote on preparing."""
        self._vote(Phase.PREPARE, replica, vote, f"replica {replica} rank {vote.rank}", now)

    def flipped_by(self, replica: int, vote: Flipped, now: float) -> None:
        """A replica flipped, or could not."""
        self._vote(Phase.FLIP, replica, vote, f"replica {replica} rank {vote.rank}", now)

    def store_voted(self, store: str, vote: Prepared | Flipped, tally: Tally, rank: str, now: float) -> None:
        """A store below, for all of its subtree. rank: where its no comes from."""
        self._tallies[store] = tally
        where = f"store {store}" + (f", {rank}" if rank else "")
        self._vote(Phase.PREPARE if isinstance(vote, Prepared) else Phase.FLIP, store, vote, where, now)

    def leave_behind(self, store: str, why: str, now: float) -> None:
        """Go on without a store that does not vote but may still be serving."""
        self.behind[store] = why
        self.outbox.append((store, Rollback(self.session, why)))
        if self.serves_until(store) > now:
            self._fencing[store] = self.serves_until(store)

    def fenced(self, store: str, now: float) -> None:
        """A store that was left behind says that nobody below it serves."""
        if self._fencing.pop(store, None) is not None:
            self._advance(now)

    def proceed(self, seconds: float, now: float) -> None:
        """The store above says: flip."""
        if self.phase is Phase.READY:
            self._flip(now, min(seconds, self.limits.flip * 2))
            self._advance(now)

    def recorded(self, now: float) -> None:
        """The version is written down: it is live."""
        if self.phase is not Phase.RECORD:
            raise IllegalTransition(f"recorded in phase {self.phase.name}")
        self.flipped = self.replicas
        self._enter(Phase.FINALIZE, now, self.limits.finalize, Finalize(self.session))
        self._advance(now)

    def finalized(self, replica: Voter, report: Finalized, now: float) -> None:
        """A replica goes on under the new version."""
        if self.phase is Phase.FINALIZE and report.session == self.session and replica in self._waiting:
            self.stall_ms[str(replica)] = report.stall_ms
            self._settle(replica, now)

    def store_finalized(self, store: str, stall_ms: dict[str, float], now: float) -> None:
        """All of a subtree goes on."""
        if self.phase is Phase.FINALIZE and store in self._waiting:
            self.stall_ms |= {f"{store}/{replica}": ms for replica, ms in stall_ms.items()}
            self._settle(store, now)

    def rolled_back(self, replica: Voter, report: RolledBack, now: float) -> None:
        """A replica serves the old version again."""
        if self.phase is Phase.ROLLBACK and report.session == self.session:
            self._settle(replica, now)

    def fail(self, refusal: PushRefused, now: float, *, word: bool = False) -> None:
        """Give the commit up; everybody who was asked goes back. No effect once it is recorded, or in doubt.

        word: it is the store above that says so, or that has not been told of the flip.
        """
        if self.phase in OPEN and (word or not self.in_doubt):
            self.refusal = refusal
            self._fencing.clear()
            rollback = Rollback(self.session, refusal.message)
            self._enter(Phase.ROLLBACK, now, self.limits.rollback, rollback)
            self._advance(now)

    def gone(self, voter: Voter, why: str, now: float) -> None:
        """A replica died or registered anew; or a store below is lost or has joined anew."""
        if voter not in self.voters:
            return
        if self.in_doubt:  # it holds its output back, or adopts what is live before it serves again
            self.voters.discard(voter)
            return
        if isinstance(voter, str) and self.phase in OPEN:
            self._miss(voter, why, PushRefused("refused", f"store {voter} {why}", rank=voter, retryable=True), now)
            return
        self.voters.discard(voter)
        if self.phase in OPEN and isinstance(voter, int) and not any(isinstance(v, int) for v in self.voters):
            message = f"no replica is left to serve the version; the last, replica {voter}, {why}"
            self.fail(PushRefused("refused", message, rank=f"replica {voter}"), now)
        else:
            self._settle(voter, now)

    def tick(self, now: float) -> None:
        """Act on a passed deadline."""
        if self.phase in (Phase.RECORD, Phase.DONE) or now < self.deadline:
            return
        for store in [s for s, until in self._fencing.items() if now >= until]:
            del self._fencing[store]
        silent = sorted(self._waiting, key=str)
        if self.phase is Phase.FINALIZE:
            self._waiting.clear()
            self._advance(now)
        elif self.phase is Phase.ROLLBACK:
            self._drop(silent)
            self._advance(now)
        elif silent:
            self._late(silent, now)
        else:
            self._advance(now)

    def _late(self, silent: list[Voter], now: float) -> None:
        for store in silent:
            if isinstance(store, str) and store in self.may_miss and self.phase in OPEN:
                why = f"did not answer to {self.phase.value} in time"
                self._miss(store, why, PushRefused("deadline", f"store {store} {why}", rank=store), now)
        silent = sorted(self._waiting, key=str)
        if self.phase not in (Phase.PREPARE, Phase.FLIP) or not silent or now < self._hard:
            return
        self._drop(silent)
        limit = self.limits.prepare if self.phase is Phase.PREPARE else self.limits.flip
        names = [label(v) for v in silent]
        message = f"{', '.join(names)} did not answer to {self.phase.value} within {limit:g} s"
        for voter in silent:  # should they wake, they find the rollback before anything else
            self.outbox.append((voter, Rollback(self.session, message)))
        self.fail(PushRefused("deadline", message, rank=names[0]), now)

    def _drop(self, silent: list[Voter]) -> None:
        self.lost += silent
        self.voters.difference_update(silent)
        self._waiting.clear()

    def _vote(self, phase: Phase, voter: Voter, vote: Prepared | Flipped, where: str, now: float) -> None:
        if self.phase is not phase or vote.session != self.session or voter not in self._waiting:
            return  # late: the round has moved on
        if vote.ok:
            self._settle(voter, now)
            return
        verb = "cannot prepare" if phase is Phase.PREPARE else "failed to flip"
        refusal = PushRefused("refused", f"{where} {verb}: {vote.error}", vote.tensors, rank=where)
        if isinstance(voter, str):
            self._miss(voter, f"{verb}: {vote.error}", refusal, now)
        else:
            self.fail(refusal, now)

    def _miss(self, store: str, why: str, refusal: PushRefused, now: float) -> None:
        """A store does not take part after all: go on without it if that is allowed."""
        if store not in self.may_miss:
            self.fail(refusal, now)
            return
        self.voters.discard(store)
        self._waiting.discard(store)
        self.leave_behind(store, why, now)
        if self.stores < self.needed:
            message = f"{self.stores} stores are left, {self.needed} must take part; {refusal.message}"
            self.fail(PushRefused(refusal.code, message, refusal.tensors, rank=refusal.rank, retryable=True), now)
        else:
            self._advance(now)

    def _settle(self, voter: Voter, now: float) -> None:
        self._waiting.discard(voter)
        self._advance(now)

    def _advance(self, now: float) -> None:
        if self._waiting:
            return
        if self.phase is Phase.PREPARE and self.stores < self.needed:
            self.fail(PushRefused("refused", f"{self.stores} stores take part, {self.needed} must"), now)
        elif self.phase is Phase.PREPARE and self.gated:
            self.phase, self._hard = Phase.READY, float("inf")  # upstream.py gives up on a store above that is silent
        elif self.phase is Phase.PREPARE:
            self._flip(now, self.limits.flip)
            self._advance(now)
        elif self.phase is Phase.FLIP and not self._fencing:
            self.phase = Phase.RECORD
        elif self.phase in (Phase.FINALIZE, Phase.ROLLBACK):
            self.phase = Phase.DONE

    def _flip(self, now: float, seconds: float) -> None:
        self._enter(Phase.FLIP, now, seconds, Flip(self.session))

    def _enter(self, phase: Phase, now: float, seconds: float, message: ToReplica) -> None:
        self.phase = phase
        self._hard, self._soft = now + seconds, now + min(seconds, self.limits.behind)
        self._waiting = set(self.voters)
        self.outbox += [(voter, message) for voter in sorted(self.voters, key=str)]

"""Who owes an answer in a commit, and what the answers come to: pure, driven by coordinator.py with the time.

Who votes: every replica that is registered when the commit starts, by its number, and every store below that
takes part, by its name. With none, the version is recorded at once (it is live for whoever comes).

What happens to a replica decides what happens to the version:
  - it says no, or its deadline passes in silence: everybody goes back. The silent one must register again.
  - it dies (pidfd), or registers anew: it leaves the vote, because it will serve nothing before it has
    adopted whatever is live then; so a commit without it leaves no replica on another version. The rest
    must still all say yes, and at least one must: weights that kill everyone who maps them never go live.
  - it dies after this store has voted for its subtree (DOUBT) or after the record: nothing to undo. A store below
    that is lost then holds its output of a model's version. Of an adapter's it goes on under the one before (`holds`
    is False), so the commit is not over before it is fenced.
A store below that fails the same way fails the commit, unless it is one of `may_miss`: then it is left behind, and
the version is not recorded before it is fenced, by its own word or because its lease ran out.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from rollout_client.protocol import AdapterInFlight
from weight_manager.errors import PushRefused
from weight_manager.life import Event, Go, Life, State
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

Voter = int | str
"""A replica of this host, or a store below."""

NEVER = float("inf")


@dataclass(frozen=True)
class Limits:
    """Seconds. prepare: until all votes are in. behind: patience with a store that may miss. word: with the store
    above, once all here are prepared. The others as in StoreConfig."""

    prepare: float
    flip: float
    rollback: float
    finalize: float
    behind: float = 3600.0
    word: float = 3600.0


@dataclass(frozen=True)
class Tally:
    """How many stores and replicas a voter's yes stands for: a store below votes for its whole subtree."""

    stores: int = 0
    replicas: int = 1


@dataclass
class Ballot:
    """One commit. Inputs are method calls with the monotonic time; outputs are `outbox` and `lost`, and moves of
    `life`, which is SEALED at first."""

    life: Life
    session: str
    live: Live  # what would become live
    in_flight: AdapterInFlight
    voters: set[Voter]
    limits: Limits
    may_miss: frozenset[str] = frozenset()
    holds: bool = True  # replicas flip and hold their output before the record; else `Flip` asks stores alone
    regions: bytes = b""  # as in `Prepare`
    needed: int = 1  # stores that must take part, this one included
    serves_until: Callable[[str], float] = lambda store: 0.0  # until when a silent store may go on serving
    outbox: list[tuple[Voter, ToReplica]] = field(default_factory=list)
    lost: list[Voter] = field(default_factory=list)  # silent ones: they must register again
    refusal: PushRefused | None = None
    stall_ms: dict[str, float] = field(default_factory=dict)
    flipped: int = 0  # replicas that serve the version from this commit on
    behind: dict[str, str] = field(default_factory=dict)  # stores left behind, and why
    _tallies: dict[Voter, Tally] = field(default_factory=dict)
    _owing: set[Voter] = field(default_factory=set)
    _fences: dict[str, float] = field(default_factory=dict)  # left behind or lost, perhaps still serving, until when
    _seconds: float = 0.0  # for the answers that are owed
    _hard: float = NEVER
    _soft: float = NEVER

    @property
    def stores(self) -> int:
        """How many stores take part, this one included."""
        return 1 + sum(self._tallies.get(v, Tally(1)).stores for v in self.voters if isinstance(v, str))

    @property
    def replicas(self) -> int:
        """How many replicas take part, here and below."""
        return sum(self._tallies.get(v, Tally()).replicas for v in self.voters)

    @property
    def deadline(self) -> float:
        """When `tick` has something to do."""
        match self.life.state:
            case State.PREPARING | State.FLIPPING:
                return min(self._hard, self._soft if any(v in self.may_miss for v in self._owing) else NEVER)
            case State.READY | State.UNDOING:
                return self._hard
            case State.LIVE:
                return min([*self._fences.values(), self._hard if self._owing else NEVER])
            case State.FENCING:
                return min(self._fences.values(), default=NEVER)
            case _:
                return NEVER

    def patience(self, voter: Voter, now: float) -> float:
        """Seconds that are left to a voter for its answer."""
        return max(0.0, (self._soft if voter in self.may_miss else self._hard) - now)

    # the questions

    def prepare(self, event: Event, now: float) -> None:
        """Ask everybody to prepare. event: who wants it."""
        limit = self.limits.prepare
        self._ask(event, now, limit, Prepare(self.session, self.live, self.in_flight, limit, regions=self.regions))
        self._count(now)

    def flip(self, seconds: float, now: float) -> None:
        """The store above says: flip. Late or early it changes nothing."""
        if isinstance(self.life.cell(Event.FLIP), Go):
            self._ask(Event.FLIP, now, min(seconds, self.limits.flip * 2), Flip(self.session), self._flipping)
            self._count(now)

    def recorded(self, now: float) -> None:
        """The version is written down: it is live."""
        self.flipped = self.replicas
        self._ask(Event.RECORDED, now, self.limits.finalize, Finalize(self.session))
        self._count(now)

    def undo(self, event: Event, refusal: PushRefused, now: float) -> None:
        """Have everybody who was asked go back, if the event may do that now."""
        if isinstance(self.life.cell(event), Go):
            self.refusal = refusal
            self._fences.clear()
            self._ask(event, now, self.limits.rollback, Rollback(self.session, refusal.message))
            self._count(now)

    # the answers

    def prepared(self, replica: int, vote: Prepared, now: float) -> None:
        """A replica's vote on preparing."""
        self._vote(State.PREPARING, replica, vote, f"replica {replica} rank {vote.rank}", now)

    def flipped_by(self, replica: int, vote: Flipped, now: float) -> None:
        """A replica flipped, or could not."""
        self._vote(State.FLIPPING, replica, vote, f"replica {replica} rank {vote.rank}", now)

    def store_voted(self, store: str, vote: Prepared | Flipped, tally: Tally, rank: str, now: float) -> None:
        """A store below, for all of its subtree. rank: where its no comes from."""
        if store in self._owing:
            self._tallies[store] = tally
        where = f"store {store}" + (f", {rank}" if rank else "")
        self._vote(State.PREPARING if isinstance(vote, Prepared) else State.FLIPPING, store, vote, where, now)

    def finalized(self, replica: int, report: Finalized, now: float) -> None:
        """A replica goes on under the new version."""
        if self._answers(State.LIVE, replica, report.session):
            self.stall_ms[str(replica)] = report.stall_ms
            self._settle(replica, now)

    def store_finalized(self, store: str, stall_ms: dict[str, float], now: float) -> None:
        """A store below says that all replicas of its subtree go on under the new version."""
        if self._answers(State.LIVE, store, self.session):
            self.stall_ms |= {f"{store}/{replica}": ms for replica, ms in stall_ms.items()}
            self._settle(store, now)

    def rolled_back(self, voter: Voter, report: RolledBack, now: float) -> None:
        """A replica, or a subtree, serves the old version again."""
        if self._answers(State.UNDOING, voter, report.session):
            self._settle(voter, now)

    def leave_behind(self, store: str, why: str, now: float) -> None:
        """Go on without a store that does not vote but may still be serving."""
        self.behind[store] = why
        self.outbox.append((store, Rollback(self.session, why)))
        self._fence(store, now)

    def fenced(self, store: str, now: float) -> None:
        """A store that was left behind says that nobody below it serves."""
        if self._fences.pop(store, None) is not None:
            self._count(now)

    def gone(self, voter: Voter, why: str, now: float) -> None:
        """A replica died or registered anew; or a store below is lost or has joined anew."""
        if voter not in self.voters:
            return
        undoable = isinstance(self.life.cell(Event.REFUSED), Go)
        if isinstance(voter, str) and undoable:
            self._miss(voter, why, PushRefused("refused", f"store {voter} {why}", rank=voter, retryable=True), now)
            return
        self.voters.discard(voter)
        if undoable and isinstance(voter, int) and not any(isinstance(v, int) for v in self.voters):
            message = f"no replica is left to serve the version; the last, replica {voter}, {why}"
            self.undo(Event.REFUSED, PushRefused("refused", message, rank=f"replica {voter}"), now)
        else:
            if isinstance(voter, str) and not self.holds:
                self._fence(voter, now)
            self._settle(voter, now)

    def tick(self, now: float) -> None:
        """Act on a passed deadline."""
        if now < self.deadline:
            return
        for store in [s for s, until in self._fences.items() if now >= until]:
            del self._fences[store]
        match self.life.state:
            case State.PREPARING | State.FLIPPING:
                self._late(now)
            case State.READY:
                message = f"the store above did not say within {self.limits.word:g} s whether to flip"
                self.undo(Event.LATE, PushRefused("deadline", message, retryable=True), now)
            case State.LIVE if now >= self._hard:
                self._owing.clear()
            case State.UNDOING:
                self._drop()
            case _:
                pass
        self._count(now)

    # what they come to

    def _late(self, now: float) -> None:
        verb = "prepare" if self.life.state is State.PREPARING else "flip"
        for store in sorted(v for v in self._owing if isinstance(v, str) and v in self.may_miss):
            if isinstance(self.life.cell(Event.LATE), Go):
                why = f"did not answer to {verb} in time"
                self._miss(store, why, PushRefused("deadline", f"store {store} {why}", rank=store), now)
        # It goes on without them, or everybody goes back: there is another deadline, or none where this turn came so
        # late that both were over, and nobody owes anything any more.
        if now < self._hard or not self._owing:
            return
        silent = self._drop()
        names = [label(v) for v in silent]
        message = f"{', '.join(names)} did not answer to {verb} within {self._seconds:g} s"
        for voter in silent:  # should they wake, they find the rollback before anything else
            self.outbox.append((voter, Rollback(self.session, message)))
        self.undo(Event.LATE, PushRefused("deadline", message, rank=names[0]), now)

    def _drop(self) -> list[Voter]:
        silent = sorted(self._owing, key=str)
        self.lost += silent
        self.voters.difference_update(silent)
        self._owing.clear()
        return silent

    def _answers(self, state: State, voter: Voter, session: str) -> bool:
        """Whether it owes this answer; a late one counts for nothing."""
        return self.life.state is state and session == self.session and voter in self._owing

    def _vote(self, state: State, voter: Voter, vote: Prepared | Flipped, where: str, now: float) -> None:
        if not self._answers(state, voter, vote.session):
            return
        if vote.ok:
            self._settle(voter, now)
            return
        verb = "cannot prepare" if state is State.PREPARING else "failed to flip"
        refusal = PushRefused("refused", f"{where} {verb}: {vote.error}", vote.tensors, rank=where)
        if isinstance(voter, str):
            self._miss(voter, f"{verb}: {vote.error}", refusal, now)
        else:
            self.undo(Event.REFUSED, refusal, now)

    def _miss(self, store: str, why: str, refusal: PushRefused, now: float) -> None:
        """A store does not take part after all: go on without it if that is allowed."""
        if store not in self.may_miss:
            self.undo(Event.REFUSED, refusal, now)
            return
        self.voters.discard(store)
        self._owing.discard(store)
        self.leave_behind(store, why, now)
        if self.stores < self.needed:
            message = f"{self.stores} stores are left, {self.needed} must take part; {refusal.message}"
            few = PushRefused(refusal.code, message, refusal.tensors, rank=refusal.rank, retryable=True)
            self.undo(Event.REFUSED, few, now)
        else:
            self._count(now)

    def _fence(self, store: str, now: float) -> None:
        until = self.serves_until(store)
        if until > now:
            self._fences[store] = until

    def _settle(self, voter: Voter, now: float) -> None:
        self._owing.discard(voter)
        self._count(now)

    def _count(self, now: float) -> None:
        """Go on once nobody owes anything."""
        if self._owing:
            return
        match self.life.state:
            case State.PREPARING if self.stores < self.needed:
                few = f"{self.stores} stores take part, {self.needed} must"
                self.undo(Event.REFUSED, PushRefused("refused", few), now)
            case State.PREPARING:
                if self.life.cell(Event.PREPARED) == Go(State.FLIPPING):
                    self._ask(Event.PREPARED, now, self.limits.flip, Flip(self.session), self._flipping)
                    self._count(now)
                else:
                    self.life.fire(Event.PREPARED, self.session)
                    self._hard = now + self.limits.word
            case State.FLIPPING:
                self.life.fire(Event.ALL_FLIPPED, self.session)
                self._count(now)
            case State.FENCING if not self._fences:
                self.life.fire(Event.ALL_FENCED, self.session)
            case State.LIVE if self._fences:
                pass
            case State.LIVE | State.UNDOING:
                self.life.fire(Event.CLOSED, self.session)
            case _:
                pass

    @property
    def _flipping(self) -> set[Voter]:
        """Who has something to do before the record: replicas flip, stores below note down that it may go live."""
        return self.voters if self.holds else {voter for voter in self.voters if isinstance(voter, str)}

    def _ask(
        self, event: Event, now: float, seconds: float, message: ToReplica, whom: set[Voter] | None = None
    ) -> None:
        """Move, and have these owe an answer; None = all voters."""
        self.life.fire(event, self.refusal.message if self.refusal else self.session)
        self._seconds = seconds
        self._hard, self._soft = now + seconds, now + min(seconds, self.limits.behind)
        self._owing = set(self.voters if whom is None else whom)
        self.outbox += [(voter, message) for voter in sorted(self._owing, key=str)]


def label(voter: Voter) -> str:
    """What a voter is called in messages and logs."""
    return f"replica {voter}" if isinstance(voter, int) else f"store {voter}"

"""Takes one push session from begin to live, or to nothing. The only place where a version becomes live.

Whoever pushes (trainers.py over the wire, own_sessions.py from a directory, relay/relayed.py for the store above) owns
the `PushSession` and is told what becomes of it through `Owner`. What may happen when is life.py's table; who owes an
answer is ballot.py's. Everything here runs in the store's loop and returns at once.
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from rollout_client.device_slots import socket_of
from rollout_client.protocol import Committed
from weight_manager.background import Background
from weight_manager.ballot import Ballot, Limits, Voter
from weight_manager.checker import Checker, Told
from weight_manager.config import StoreConfig
from weight_manager.devices import Devices
from weight_manager.errors import IllegalTransition, PushRefused
from weight_manager.following import Following, Step, Way
from weight_manager.history import History, Intent
from weight_manager.layout import Layout, packed, version_digest
from weight_manager.life import Event, Go, Ignored, Refused, Role, State
from weight_manager.messages import Live, Prepared, ToReplica
from weight_manager.metrics import Counters
from weight_manager.plan import Planned
from weight_manager.push_session import Owner, PushSession
from weight_manager.relay.downstreams import Downstreams
from weight_manager.relay.members import Members
from weight_manager.slots import Reserved, Slots
from weight_manager.staging import Staging
from weight_manager.together import Proven

log = logging.getLogger(__name__)

LITTLE_BYTES = 32 << 20
"""Versions of so few, as most adapters are, are looked through whole for what is no number: in a millisecond or two."""
STILL_ARRIVES_S = 0.04
"""Ranks that copy a version from its trainer's memory only have to hear that it still arrives: once in so long, which
is less than half of what they listen for it after each word (`_ARRIVING_S` of worker/membership.py).
"""


class Audience(Protocol):
    """Who is asked about a version on this host, and told of it."""

    def voters(self) -> set[int]:
        """Numbers of the replicas that vote."""
        ...

    def send(self, number: int, message: ToReplica) -> None:
        """Send to a replica by number; one that is not there simply does not answer."""
        ...

    def in_place(self, slot: int, write_epoch: int, spans: list[tuple[int, int]]) -> None:
        """Bytes of the slot that a session fills are there: whoever copies versions may begin with these."""
        ...

    def drop(self, number: int, why: str) -> None:
        """A replica did not answer: it must register again."""
        ...

    def went_live(self, live: Live, *, voted: bool) -> None:
        """A version was recorded. voted: those who vote hold it already."""
        ...

    def admit_held(self, now: float) -> None:
        """The commit is settled: take in whoever registered meanwhile."""
        ...


class Coordinator:
    """Drives a session's life; owns what is live, and those who are told of it: replicas, checks, stores below.

    One for the model's weights, and one for each adapter (adapters/line.py).

    session: the running one, until it is recorded or over. ballot: of its commit, or of the last one while that waits
    for stall figures.
    """

    def __init__(
        self,
        config: StoreConfig,
        layout: Layout,
        *,
        slots: Slots,
        history: History,
        background: Background,
        counters: Counters,
        members: Members,
        replicas: Callable[["Coordinator"], Audience],
        holds: bool = True,
        devices: Devices | None = None,
    ) -> None:
        """members: the stores below. replicas: makes those of this host. holds: see Ballot. devices: of the model's
        ranks; None: nothing goes live from there.
        """
        self._config = config
        self.layout = layout
        self.slots = slots
        self._background = background
        self._counters = counters
        self.history = history
        self.planned = Planned()
        self._holds = holds
        self._devices = devices
        self.replicas = replicas(self)
        self.below = Downstreams(
            config, layout, coordinator=self, members=members, slots=slots, history=history, background=background
        )
        self.session: PushSession | None = None
        self.ballot: Ballot | None = None
        self._committing: PushSession | None = None  # the session of the ballot
        self.following: Following | None = None  # a version that goes live from device memory, until the arena has it
        self._report: Committed | None = None  # of its commit, which is over
        self.last_error: dict[str, Any] | None = None
        self._of_loss: dict[str, Any] | None = None  # the last error, while it is about a version that is lost
        self.last_push: dict[str, Any] | None = None
        self.changes = 0  # moves whenever a status would differ

    @property
    def idle(self) -> bool:
        """Nothing is pushed, and no commit is under way."""
        return self.session is None and self.ballot is None and self.following is None

    @property
    def filling(self) -> bool:
        """Somebody may be writing into a slot of the arena."""
        return self.session is not None or self.following is not None

    @property
    def awaits_arena(self) -> bool:
        """What is live is in device memory only: nobody who begins can map it, and what reads it has to wait."""
        return self.following is not None and self.following.live

    @property
    def stranded(self) -> bool:
        """Whether what is live is in device memory only, and no copy of it has succeeded: a push of it brings it."""
        return self.awaits_arena and self.following is not None and self.following.way is Way.STRANDED

    @property
    def settled(self) -> bool:
        """No commit is between its first question and its outcome: `history.live` is what everybody serves."""
        return self._committing is None or not self._committing.life.in_question

    @property
    def in_doubt(self) -> bool:
        """All replicas here have flipped, and only the store above knows whether the version was committed."""
        return self.session is not None and self.session.life.state is State.DOUBT

    @property
    def ranks(self) -> int:
        """How many there are of all replicas that vote."""
        return self.layout.tp * len(self.replicas.voters())

    def device_sockets(self) -> list[str]:
        """Sockets of all ranks that can copy from a trainer's memory on a GPU (rollout_client/device_slots.py)."""
        ranks = ((number, rank) for number in sorted(self.replicas.voters()) for rank in range(self.layout.tp))
        paths = (socket_of(self._config.run_dir, number, rank) for number, rank in ranks)
        return [str(path) for path in paths if path.is_socket()]

    def call_devices(self) -> None:
        """A version may go live from the memory of all replicas, which are asked for it soon."""
        assert self._devices is not None
        for number in sorted(self.replicas.voters()):
            self._devices.call(number)

    def why_not_ahead(self) -> str:
        """Why nothing may go live here from device memory, before the arena has it; "" = it may."""
        config = self._config
        if self._devices is None or config.upstream is not None or config.relay_endpoint is not None:
            return "stores of other hosts take their bytes from the arena"
        if self.layout.tp > 1:
            return "ranks that share a model each have a part of it, and the store would have to hold all of them"
        if config.refuse_non_finite:
            return "refuse_non_finite looks for what is no number in the arena"
        if not self.replicas.voters():
            return "no replica serves yet"
        if len(self.device_sockets()) < len(self.replicas.voters()):
            return "a replica has no device memory of its own"
        return "" if self.following is None else "the version before is not in the arena yet"

    def check_root(self) -> None:
        """Only the store at the root takes pushes, and commits them. Raises PushRefused."""
        if self._config.upstream is not None:
            raise PushRefused("refused", f"this store follows {self._config.upstream}; ask the root of its tree")

    def check_moved(self) -> None:
        """Of an adapter's version nobody holds the output, so that who pushed it is not told that it is there before
        all have moved to it. Raises PushRefused busy until then.
        """
        if self._committing is not None and self.settled and not self._holds:
            message = f"{self._committing.intent} is live, and not everybody has moved to it yet"
            raise PushRefused("busy", message, retryable=True)

    def check_arena(self) -> None:
        """While a version that went ahead is on its way into the arena, nothing else is begun. Raises PushRefused."""
        if self.following is not None and self.following.way is not Way.STRANDED:
            message = f"{self.following.session.intent} is live, and the arena does not have all of it yet"
            raise PushRefused("busy", message, retryable=True)

    def begin(
        self,
        intent: Intent,
        owner: Owner,
        now: float,
        *,
        role: Role = Role.ROOT,
        reuse: Live | None = None,
        reserved: Reserved | None = None,
    ) -> PushSession:
        """A session with a slot to fill, one that is full, or one that `Slots` still `holds` for it. Raises PushRefused
        busy, stale_version or io.

        Stores below hear of it at once, but by `announce` of a slot that is full and of the session of a store above.
        """
        intent.check_order(self.history, again=self.stranded)
        if self.session is not None:
            raise PushRefused("busy", f"a push of {self.session.intent} is running", retryable=True)
        if role is Role.ROOT:
            self.check_moved()  # the next commit would end the wait for those who have not
        if intent.source == "merge" and self.following is not None:
            raise PushRefused("busy", "what is merged into is not in the arena", retryable=True)
        self.check_arena()
        live = self.history.live
        if reuse is not None:
            slot, write_epoch = reuse.slot, reuse.write_epoch
        elif reserved is not None:
            slot, write_epoch = reserved.slot, reserved.write_epoch
        else:
            slot, write_epoch = self.slots.take(live.slot if live else None, self.history.forget_slot)
        staging = Staging(self.layout, self.slots.arena.slot(slot), chunked=intent.transport in ("zmq", "relay"))
        told = Told(
            refused=lambda refusal: self._check_failed(session, refusal),
            in_place=lambda spans: self._in_place(session, spans),
            verified=lambda copies: self._verified(session, copies),
            named=lambda digests, non_finite: self._named(session, digests, non_finite),
        )
        checker = Checker(
            staging, slot, background=self._background, slots=self.slots, counters=self._counters, told=told
        )
        session = PushSession(intent, owner, slot, write_epoch, staging, checker, now, role)
        if reserved is not None:
            session.id = reserved.session
        self.session = session
        self._counters.add("sessions")
        self.changes += 1
        log.info("push of %s began", intent, extra=session.extra() | {"slot": slot, "transport": intent.transport})
        if reuse is None and intent.source != "relay":
            self.announce(session, now)
        return session

    def announce(self, session: PushSession, now: float) -> None:
        """Tell the stores below."""
        self.below.begin(session, now)

    def seal(self, session: PushSession, deadline: float, now: float) -> None:
        """Everything was sent: sealed once all checks are back, and the stores below have it."""
        if session.life.moves(Event.SENT):
            session.life.fire(Event.SENT)
            session.deadline = deadline
            session.lap("stage", now)
            self._name_if_checked(session)

    def go_ahead(
        self, session: PushSession, digests: list[int], seconds: float, now: float, is_live: Callable[[int], None]
    ) -> None:
        """All replicas have the version in their memory, as its trainer says, which has these digests of regions: make
        it live from there once they have proved it, while the arena's slot still fills. is_live: told how many have it.
        """
        assert self._devices is not None
        digest = version_digest(self.layout, digests)
        try:
            session.intent.check_same(self.history, digest)
        except PushRefused as refusal:
            self.abort(session, refusal, now)
            return
        session.is_live, session.digest = is_live, digest
        self.following = Following(
            session,
            devices=self._devices,
            slots=self.slots,
            background=self._background,
            lease_s=self._config.lease_s,
            safe=self._is_safe,
        )
        session.lap("stage", now)
        session.life.fire(Event.SENT)
        session.life.fire(Event.WHOLE)
        session.deadline = None
        self.changes += 1
        self.commit(session, seconds, now)

    def arena_sent(self, session: PushSession) -> None:
        """The trainer of a version that went ahead has sent all of it to the arena as well."""
        if self.following is not None and self.following.session is session:
            self.following.sent = True
            self._name_if_checked(session)

    def arena_heard(self, session: PushSession, now: float) -> None:
        """A word of the trainer of a session, which may be one that went ahead."""
        if self.following is not None and self.following.session is session:
            self.following.heard(now)

    def arena_given_up(self, session: PushSession, why: str) -> None:
        """It will not."""
        if self.following is not None and self.following.session is session:
            self.following.step(Step.GONE, why)

    def prepared(self, number: int, vote: Prepared, now: float) -> None:
        """A replica's vote on preparing. If the version is to go live from its memory, a yes counts once the store
        holds that, too.
        """
        ballot, following = self.ballot, self.following
        if ballot is None:
            return
        if following is None or following.live or not vote.ok or vote.session != following.session.id:
            ballot.prepared(number, vote, now)
            return

        def held(why: str) -> None:
            if self.ballot is ballot:
                counted = Prepared(vote.session, ok=not why, error=why and f"its memory cannot be held: {why}")
                ballot.prepared(number, counted, time.monotonic())
                self.drive(time.monotonic())

        following.hold(number, held)

    def commit(self, session: PushSession, seconds: float, now: float, event: Event = Event.COMMIT) -> None:
        """Ask everybody to prepare, to flip, and record it. event: who wants it. Raises PushRefused if it may not.

        While nothing is live nobody serves and there is nothing to protect: no votes, replicas adopt it after.
        """
        match session.life.cell(event):
            case Refused(why):
                raise PushRefused("refused", why)
            case Ignored():
                return
        if not self.settled:
            raise IllegalTransition(f"commit of {session.id} while another commit is in {self.ballot}")
        if self.ballot is not None and self._committing is not None:  # the last one: answer it without stall figures
            self._committing.life.fire(Event.CLOSED)
            self._finish(now)
        try:
            epoch = self.history.next_epoch()
        except OSError as error:
            self.abort(session, PushRefused("io", f"no epoch could be reserved: {error}", retryable=True), now)
            return
        session.deadline = None
        session.mark = now
        self._committing = session
        self.ballot = self._ballot(session, session.live(epoch), seconds)
        for name, why in self.below.outsiders(now).items():
            self.ballot.leave_behind(name, why, now)
        ballot = self.ballot
        ballot.prepare(event, now)
        self.drive(now)
        if self.ballot is ballot and self.following is not None and self.following.session is session:
            for replica in sorted(voter for voter in ballot.voters if isinstance(voter, int)):
                self.following.hold_once_proved(replica)
        if self.ballot is ballot and session.role is Role.ROOT and session.life.state is State.PREPARING:
            ahead = session.is_live is not None
            self.history.draft(ballot.live, session.record(ballot.live, ballot.replicas), ahead=ahead)

    def flip(self, session: PushSession, seconds: float, now: float) -> None:
        """The store above says flip."""
        if self.ballot is not None and session is self._committing:
            self.ballot.flip(seconds, now)
            self.drive(now)

    def recorded_above(self, session: PushSession, now: float) -> None:
        """The store above has recorded it: so it is here, if this store has voted for it."""
        if self.ballot is not None and session is self._committing and session.life.moves(Event.RECORDED):
            self._record(self.ballot, session, now)
            self.drive(now)

    def abort(self, session: PushSession, refusal: PushRefused, now: float, event: Event = Event.REFUSED) -> None:
        """End a session, if the event may do that in its state; what is served does not change. Raises PushRefused
        for who has to be told that it may not.
        """
        match session.life.cell(event):
            case Go(State.OVER):
                session.life.fire(event, refusal.message)
                self._end(session, refusal)
            case Go() if self.ballot is not None:
                self.ballot.undo(event, refusal, now)
                self.drive(now)
            case Refused(why):
                raise PushRefused("refused", f"{session.intent} {why}", retryable=session.life.state is State.DOUBT)
            case Ignored(why):
                log.warning("not ended (%s): %s", why, refusal.message, extra=session.extra())
            case _:
                session.life.fire(event, refusal.message)

    def tick(self, now: float) -> None:
        """Passed deadlines."""
        session = self.session
        if session is not None and session.deadline is not None and now >= session.deadline:
            stage = "staged" if session.life.state is State.STAGING else "checked"
            late = f" on {', '.join(self.below.unstaged())}" if session.digest else ""
            refusal = PushRefused("deadline", f"{session.intent} was not {stage}{late} in time")
            self.abort(session, refusal, now, Event.LATE)
        if self.ballot is not None:
            self.ballot.tick(now)
            self.drive(now)
        if self.following is not None:
            self.following.tick(now)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do."""
        times = [self.session.deadline] if self.session and self.session.deadline is not None else []
        if self.ballot is not None:
            times.append(self.ballot.deadline)
        if self.following is not None and self.following.next_deadline is not None:
            times.append(self.following.next_deadline)
        return min(times, default=None)

    def drive(self, now: float) -> None:
        """Carry out what the ballot has come to, until it waits for somebody."""
        while self.ballot is not None and self._committing is not None:
            ballot, session = self.ballot, self._committing
            self._deliver(ballot, now)
            if self.ballot is not ballot:
                continue  # dropping a silent replica has settled it
            state = session.life.state
            if "prepare" not in session.seconds and state in (State.FLIPPING, State.FENCING, State.FLIPPED):
                session.lap("prepare", now)
                self.changes += 1
            if state is State.FLIPPED and session.role is Role.RELAY:
                self._note(ballot, session, now)
            elif state is State.FLIPPED:
                self._record(ballot, session, now)
            elif state is State.OVER:
                self._finish(now)
            else:
                return

    def note_error(self, refusal: PushRefused, extra: dict[str, Any]) -> None:
        """Remember for the status, and log."""
        said = {"code": refusal.code, "rank": refusal.rank, "tensors": refusal.tensors[:100]}
        self.last_error = extra | said | {"message": refusal.message, "time": time.time()}
        self.changes += 1
        log.warning("refused: %s", refusal.message, extra=extra | said)

    def note_loss(self) -> None:
        """Say what an earlier life of the store has lost, until it, or a later version, is live again."""
        lost = self.history.saved.lost
        if lost is not None:
            message = f"version {lost.version} was live from device memory and is lost: push it again, or a later one"
            self.note_error(PushRefused("internal", message), {"run_id": lost.run_id})
            self._of_loss = self.last_error

    def _ballot(self, session: PushSession, live: Live, seconds: float) -> Ballot:
        """A ballot of everybody who votes now. seconds: time to prepare."""
        config, stores = self._config, self.below.voters()
        voters: set[Voter] = {*self.replicas.voters(), *stores}
        hops = 2 if stores else 1
        times = (seconds, config.flip_s * hops, config.rollback_s * hops, config.finalize_s * hops)
        if stores and not self._holds:  # one that does not say so serves the version before until its lease is over
            times = (*times[:3], max(times[3], config.relay_lease_s))
        return Ballot(
            *(session.life, session.id, live, session.intent.in_flight, voters),
            Limits(*times, behind=config.relay_patience_s, word=config.max_deadline_s),
            may_miss=frozenset(name for name, required in stores.items() if not required),
            holds=self._holds,
            regions=session.regions,
            needed=self.below.needed(),
            serves_until=self.below.serves_until,
        )

    def _deliver(self, ballot: Ballot, now: float) -> None:
        outbox, ballot.outbox = ballot.outbox, []
        for voter, message in outbox:
            if isinstance(voter, int):
                self.replicas.send(voter, message)
            else:
                self.below.tell(voter, message, ballot.patience(voter, now), fence=voter in ballot.behind)
        lost, ballot.lost = ballot.lost, []
        for voter in lost:
            drop = self.replicas.drop if isinstance(voter, int) else self.below.drop
            drop(voter, "did not answer in time during a commit")  # type: ignore[arg-type]

    def _note(self, ballot: Ballot, session: PushSession, now: float) -> None:
        """Write down what may go live, before this store votes for the flip: should it die, its next life asks."""
        try:
            self.history.may_go_live(ballot.live)
        except OSError as error:
            refusal = PushRefused("io", f"the flip could not be written down: {error}")
            ballot.undo(Event.UNWRITTEN, refusal, now)
        else:
            session.life.fire(Event.NOTED)
            self.changes += 1

    def _record(self, ballot: Ballot, session: PushSession, now: float) -> None:
        session.lap("commit", now)
        live, intent = ballot.live, session.intent
        ahead = session.is_live is not None
        try:
            self.history.commit(live, session.record(live, ballot.replicas), ahead=ahead)
        except OSError as error:
            refusal = PushRefused("io", f"the commit could not be written down: {error}", retryable=True)
            if session.life.moves(Event.UNWRITTEN):
                ballot.undo(Event.UNWRITTEN, refusal, now)
            else:  # it is live above: hold the output, and try again with the next word from there
                self.note_error(refusal, session.extra())
            return
        if self._of_loss is not None and self.history.saved.lost is None:  # as a snapshot brings it back
            self.last_error = None if self.last_error is self._of_loss else self.last_error
            self._of_loss = None
        session.lap("record", time.monotonic())
        self.replicas.went_live(live, voted=any(isinstance(v, int) for v in ballot.voters))
        self.below.went_live(live, ballot)
        ballot.recorded(now)
        self._deliver(ballot, now)  # first: replicas wait
        self.session = None
        self._counters.add("commits")
        following = self.following
        if following is not None and ahead and session.is_live is not None:
            session.is_live(ballot.flipped)
            self._counters.add("commits_ahead")
            following.recorded(now)
        elif following is not None:  # it was stranded, and what is live now is in the arena
            self._leave(following)
        if self.history.name_unsynced:  # now that all who waited have been told

            def failed(error: BaseException) -> None:
                log.error("%s may be lost with the machine's power: %s", intent, error)

            self._background.submit(self.history.sync_name, lambda _: None, failed)
        self._admit_held(now)
        self.changes += 1
        log.info("%s is live", intent, extra=session.extra() | {"epoch": live.epoch, "slot": live.slot})

    def _finish(self, now: float) -> None:
        """Nobody owes anything any more: tell the owner."""
        ballot, session = self.ballot, self._committing
        assert ballot is not None
        assert session is not None
        self.ballot = self._committing = None
        if ballot.refusal is not None:
            self._counters.add("commits_rolled_back")
            self._end(session, ballot.refusal)
            self._admit_held(now)
            return
        live = ballot.live
        session.lap("finalize", time.monotonic())
        report = Committed(live.version, live.digest, ballot.flipped, session.seconds, ballot.stall_ms)
        if self.following is not None and self.following.session is session:
            self._report = report
        else:
            session.owner.committed(session, report)  # first: a trainer waits
            session.staging.forget()
        self.history.amend(live.epoch, ballot.stall_ms)
        self.last_push = self.history.tail(1)[0]
        self.changes += 1

    def replica_gone(self, number: int, why: str) -> None:
        """A replica has left: a commit goes on without its answers."""
        self.changes += 1
        if self.ballot is not None:
            now = time.monotonic()
            self.ballot.gone(number, why, now)
            self.drive(now)

    def _admit_held(self, now: float) -> None:
        if not self.awaits_arena:
            self.replicas.admit_held(now)

    def _is_safe(self, following: Following) -> None:
        """The arena has what is live."""
        session, now = following.session, time.monotonic()
        self.following = None
        self.history.arrived()
        session.lap("arena", now)
        if following.from_device:
            self._counters.add("rescued")
        self.changes += 1
        log.info("%s is in the arena", session.intent, extra=session.extra())
        self._answer_ahead(session)
        self.replicas.admit_held(now)

    def _leave(self, following: Following) -> None:
        """Another version is live: nobody needs this one."""
        following.close()
        self.following = None
        self._answer_ahead(following.session)

    def _answer_ahead(self, session: PushSession) -> None:
        """Its owner hears of it last, once the commit is over, too."""
        report, self._report = self._report, None
        if report is not None:
            session.owner.committed(session, report)
            session.staging.forget()

    def _check_failed(self, session: PushSession, refusal: PushRefused) -> None:
        if session is self.session:
            self.abort(session, refusal, time.monotonic())
        elif self.following is not None and session is self.following.session:
            self.note_error(refusal, session.extra())
            self.following.step(Step.DIFFERS, refusal.message)

    def _in_place(self, session: PushSession, spans: list[tuple[int, int]]) -> None:
        if session is not self.session or session.is_live is not None:
            return
        if session.taken:
            now = time.monotonic()
            if now < session.told_until:
                return
            session.told_until = now + STILL_ARRIVES_S
        self.replicas.in_place(session.slot, session.write_epoch, spans)

    def _verified(self, session: PushSession, copies: Iterable[Proven]) -> None:
        self.below.verified(session, copies)
        self._name_if_checked(session)

    def _name_if_checked(self, session: PushSession) -> None:
        if session.is_live is not None:
            if self.following is not None and self.following.sent and session.staging.checking == 0:
                session.checker.name(every=self.layout.slot_bytes <= LITTLE_BYTES)
            return
        if session is self.session and session.life.state is State.CHECKING and session.staging.checking == 0:
            every = self._config.refuse_non_finite or self.layout.slot_bytes <= LITTLE_BYTES
            session.checker.name(every=every and session.intent.transport != "relay")  # the store above has seen to it

    def _named(self, session: PushSession, digests: list[int], non_finite: list[str]) -> None:
        """The slot is complete and intact on this host. non_finite: names of parameters."""
        following = self.following
        if following is not None and session is following.session:
            if non_finite:
                self._say_non_finite(session, non_finite)
            found = version_digest(self.layout, digests)
            if session is self.session and found != session.digest:  # not live yet: nobody needs it
                message = f"{session.intent} is {found} in the arena, and was said to be {session.digest}"
                self.abort(session, PushRefused("checksum_mismatch", message), time.monotonic())
                return
            following.whole(found)
            return
        if session is not self.session:
            return
        if non_finite and session.intent.transport != "relay":
            message = self._say_non_finite(session, non_finite)
            if self._config.refuse_non_finite:
                self._check_failed(session, PushRefused("non_finite", message, non_finite))
                return
        now, intent, digest = time.monotonic(), session.intent, version_digest(self.layout, digests)
        if session.expected not in ("", digest):
            message = f"{intent} is {digest} here, not {session.expected}"
            self.abort(session, PushRefused("checksum_mismatch", message), now)
            return
        try:
            intent.check_same(self.history, digest)
        except PushRefused as refusal:
            self.abort(session, refusal, now)
            return
        session.digest, session.regions = digest, packed(digests) if self.layout.tp > 1 else b""
        self.below.seal(session, digest, digests, now)
        self.staged_below(now)

    def _say_non_finite(self, session: PushSession, names: list[str]) -> str:
        self._counters.add("non_finite")
        message = f"weights that are NaN or infinite: {', '.join(names[:20])}"
        log.warning("%s has %s", session.intent, message, extra=session.extra() | {"tensors": names[:100]})
        return message

    def staged_below(self, now: float) -> None:
        """Sealed once the stores below have it too, or are not waited for any more."""
        session = self.session
        if session is None or session.life.whole or not session.digest or self.below.unstaged():
            return
        session.life.fire(Event.WHOLE)
        session.deadline = None
        session.lap("seal", now)
        self.changes += 1
        session.owner.sealed(session)

    def _end(self, session: PushSession, refusal: PushRefused) -> None:
        self.session = None
        if self.following is not None and self.following.session is session:
            self.following.close()
            self.following = None
        self._counters.add("sessions_failed")
        self.note_error(refusal, session.extra())
        session.owner.ended(session, refusal)
        self.below.ended(session, refusal)
        session.staging.forget()

"""Takes one push session from begin to live, or to nothing. The only place where a version becomes live.

Whoever pushes (trainers.py over the wire, disk_load.py from a directory) owns the session and is told what
becomes of it through `Owner`. Everything here runs in the store's loop and returns at once.
"""

import logging
import time
from typing import Any

from rollout_client.device_slots import socket_of
from rollout_client.protocol import Committed
from weight_manager.checking import Checker
from weight_manager.commit import Round
from weight_manager.config import StoreConfig
from weight_manager.errors import IllegalTransition, PushRefused
from weight_manager.fleet import Fleet
from weight_manager.history import History
from weight_manager.layout import version_digest
from weight_manager.manifest import Layout
from weight_manager.messages import Live
from weight_manager.metrics import Counters
from weight_manager.push_session import Intent, Owner, PushSession
from weight_manager.relay.downstreams import Downstreams
from weight_manager.rounds import live_as, make_round, record_of
from weight_manager.session import Event, Machine, State
from weight_manager.slots import Slots
from weight_manager.staging import Staging
from weight_manager.version_order import check_order, check_same
from weight_manager.votes import Phase

log = logging.getLogger(__name__)


class Coordinator:
    """Drives the session's states; owns what is live."""

    def __init__(
        self,
        config: StoreConfig,
        layout: Layout,
        *,
        slots: Slots,
        history: History,
        fleet: Fleet,
        checker: Checker,
        counters: Counters,
        below: Downstreams,
    ) -> None:
        self._config = config
        self.layout = layout
        self.slots = slots
        self._fleet = fleet
        self._counters = counters
        self.history = history
        self.checker = checker
        self.below = below
        self.machine = Machine()
        self.session: PushSession | None = None
        self.last_error: dict[str, Any] | None = None
        self.last_push: dict[str, Any] | None = None
        self.changes = 0  # moves whenever a status would differ
        self._round: Round | None = None
        self._committing: PushSession | None = None  # the session the round belongs to
        fleet.on_gone = self._replica_gone
        checker.on_refused = self._check_failed
        checker.on_checked = self._digest_if_checked
        checker.on_verified = below.verified
        checker.on_digest = self._sealed_here
        below.coordinator = self

    @property
    def round(self) -> Round | None:
        """The commit that is running, or still waits for stall figures."""
        return self._round

    def committing(self, session: PushSession) -> bool:
        """Whether the running commit is this session's."""
        return self._round is not None and self._committing is session

    @property
    def settled(self) -> bool:
        """No commit is between its first question and its outcome: `history.live` is what everybody serves."""
        return self._round is None or self._round.phase in (Phase.FINALIZE, Phase.DONE)

    def device_sockets(self) -> list[str]:
        """Of the replicas that vote and have memory on a GPU of this host to lend (rollout_client/device_slots.py)."""
        paths = (socket_of(self._config.run_dir, number) for number in sorted(self._fleet.numbers()))
        return [str(path) for path in paths if path.is_socket()]

    def check_root(self) -> None:
        """Only the store at the root takes pushes, and commits them. Raises PushRefused."""
        if self._config.upstream is not None:
            raise PushRefused("refused", f"this store follows {self._config.upstream}; ask the root of the fleet")

    def begin(self, intent: Intent, owner: Owner, now: float, *, reuse: Live | None = None) -> PushSession:
        """IDLE -> STAGING with a slot to fill or one that is full. Raises PushRefused busy, stale_version or io.

        Stores below hear of it at once, but by `announce` of a slot that is full and of the session of a store above.
        """
        check_order(self.history, intent)
        if self.session is not None:
            raise PushRefused("busy", f"a push of {self.session.intent} is running", retryable=True)
        live = self.history.live
        if reuse is not None:
            slot, write_epoch = reuse.slot, reuse.write_epoch
        else:
            slot, write_epoch = self.slots.take(live.slot if live else None, self.history.forget_slot)
        staging = Staging(self.layout, self.slots.arena.slot(slot), chunked=intent.transport in ("zmq", "relay"))
        session = PushSession(intent, owner, slot, write_epoch, staging, now)
        self.machine.fire(Event.BEGIN, session.id)
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
        """Everything was sent: STAGING -> SEALED once all checks are back."""
        session.sealing = True
        session.deadline = deadline
        session.lap("stage", now)
        self._digest_if_checked(session)

    def commit(self, session: PushSession, seconds: float, now: float) -> None:
        """SEALED: ask the replicas; COMMITTING once all are prepared; live once all have flipped.

        While nothing is live nobody serves and there is nothing to protect: no votes, replicas adopt it after.
        """
        if not self.settled:
            raise IllegalTransition(f"commit of {session.id} while another commit is in {self._round}")
        if self._round is not None:
            self._finish_round(now)  # the last commit still waits for stall figures: answer it without
        try:
            epoch = self.history.next_epoch()
        except OSError as error:
            self.abort(PushRefused("io", f"no epoch could be reserved: {error}", retryable=True), now)
            return
        live = live_as(session, epoch)
        replicas = self._fleet.numbers() if self.history.live else set()
        session.deadline = None
        session.mark = now
        self._committing = session
        self._round = make_round(self._config, session, live, replicas, self.below, seconds)
        for name, why in self.below.outsiders(now).items():
            self._round.leave_behind(name, why, now)
        self._round.start(now)
        self.drive(now)

    @property
    def in_doubt(self) -> bool:
        """Everybody here has flipped, and only the store above knows whether it counts."""
        return self._round is not None and self._round.in_doubt

    def abort(self, refusal: PushRefused, now: float, *, word: bool = False) -> None:
        """End the running session, from whatever state; what is served does not change.

        No effect in doubt, unless it is the `word` of the store above, or that has not been told of the flip.
        """
        if self.session is None:
            return
        if self._round is not None and self._committing is self.session:
            if self.in_doubt and not word:
                log.error("in doubt, and not undone: %s", refusal.message, extra=self.session.extra())
            self._round.fail(refusal, now, word=word)
            self.drive(now)
        else:
            self._end(self.session, refusal, Event.ABORT)

    def tick(self, now: float) -> None:
        """Passed deadlines."""
        session = self.session
        if session is not None and session.deadline is not None and now >= session.deadline:
            stage = "checked" if session.sealing else "staged"
            late = f" on {', '.join(self.below.unstaged())}" if session.local_digest else ""
            self.abort(PushRefused("deadline", f"{session.intent} was not {stage}{late} in time"), now)
        if self._round is not None:
            self._round.tick(now)
            self.drive(now)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do."""
        times = [self.session.deadline] if self.session and self.session.deadline is not None else []
        if self._round is not None:
            times.append(self._round.deadline)
        return min(times, default=None)

    def drive(self, now: float) -> None:
        """Carry out what the round wants, until it waits for somebody."""
        while self._round is not None and self._committing is not None:
            round_, session = self._round, self._committing
            self._deliver(round_, now)
            if self._round is not round_:
                continue  # dropping a silent replica has settled it
            asking = round_.phase in (Phase.PREPARE, Phase.READY)
            mine = session is self.session  # else the machine is at a later session, which waits for nobody yet
            if mine and self.machine.state is State.SEALED and round_.refusal is None and not asking:
                self.machine.fire(Event.ALL_PREPARED, session.id)
                session.lap("prepare", now)
                self.changes += 1
            if round_.phase is Phase.RECORD and (session.decided or not session.gated):
                self._record(round_, session, now)
            elif round_.phase is Phase.DONE:
                self._finish_round(now)
            else:
                return

    def note_error(self, refusal: PushRefused, extra: dict[str, Any]) -> None:
        """Remember for the status, and log."""
        said = {"code": refusal.code, "rank": refusal.rank, "tensors": refusal.tensors[:100]}
        self.last_error = extra | said | {"message": refusal.message, "time": time.time()}
        self.changes += 1
        log.warning("refused: %s", refusal.message, extra=extra | said)

    def _deliver(self, round_: Round, now: float) -> None:
        outbox, round_.outbox = round_.outbox, []
        for voter, message in outbox:
            if isinstance(voter, int):
                self._fleet.send(voter, message)
            else:
                self.below.tell(voter, message, round_.patience(voter, now), fence=voter in round_.behind)
        lost, round_.lost = round_.lost, []
        for voter in lost:
            drop = self._fleet.drop if isinstance(voter, int) else self.below.drop
            drop(voter, "did not answer in time during a commit")  # type: ignore[arg-type]

    def _record(self, round_: Round, session: PushSession, now: float) -> None:
        session.lap("commit", now)
        live, intent = round_.live, session.intent
        try:
            self.history.commit(live, record_of(round_, session))
        except OSError as error:
            refusal = PushRefused("io", f"the commit could not be written down: {error}", retryable=True)
            if round_.in_doubt:  # it is live above: hold the output, and try again with the next word from there
                session.decided = False
                self.note_error(refusal, session.extra())
                return
            round_.fail(refusal, now)
            return
        self._fleet.went_live(live, voted=any(isinstance(v, int) for v in round_.voters))
        self.below.went_live(live, round_)
        round_.recorded(now)
        self.machine.fire(Event.ALL_FLIPPED, session.id)
        self.session = None
        self._counters.add("commits")
        self._fleet.admit_held(live, now)
        self.changes += 1
        log.info("%s is live", intent, extra=session.extra() | {"epoch": live.epoch, "slot": live.slot})

    def _finish_round(self, now: float) -> None:
        round_, session = self._round, self._committing
        assert round_ is not None
        assert session is not None
        self._round = self._committing = None
        if round_.refusal is not None:
            self._counters.add("commits_rolled_back")
            rolled_back = self.machine.state is State.COMMITTING
            self._end(session, round_.refusal, Event.ROLLED_BACK if rolled_back else Event.ABORT)
            self._fleet.admit_held(self.history.live, now)
            return
        live = round_.live
        self.history.amend(live.epoch, round_.stall_ms)
        self.last_push = self.history.tail(1)[0]
        self.changes += 1
        report = Committed(live.version, live.digest, round_.flipped, session.seconds, round_.stall_ms)
        session.owner.committed(session, report)

    def _replica_gone(self, number: int, why: str) -> None:
        self.changes += 1
        if self._round is not None:
            now = time.monotonic()
            self._round.gone(number, why, now)
            self.drive(now)

    def _check_failed(self, session: PushSession, refusal: PushRefused) -> None:
        if session is self.session:
            self.abort(refusal, time.monotonic())

    def _digest_if_checked(self, session: PushSession) -> None:
        if session is self.session and session.sealing and session.staging.checking == 0:
            self.checker.digest(session)

    def _sealed_here(self, session: PushSession, digests: list[int]) -> None:
        """The slot is complete and intact on this host."""
        if session is not self.session:
            return
        now, intent, digest = time.monotonic(), session.intent, version_digest(self.layout, digests)
        if session.expected not in ("", digest):
            self.abort(PushRefused("checksum_mismatch", f"{intent} is {digest} here, not {session.expected}"), now)
            return
        try:
            check_same(self.history, intent, digest)
        except PushRefused as refusal:
            self.abort(refusal, now)
            return
        session.local_digest = digest
        self.below.seal(session, digest, digests, now)
        self.staged_below(now)

    def staged_below(self, now: float) -> None:
        """STAGING -> SEALED once the stores below have it too, or are not waited for any more."""
        session = self.session
        if session is None or session.digest or not session.local_digest or self.below.unstaged():
            return
        session.digest = session.local_digest
        session.deadline = None
        self.machine.fire(Event.SEAL_OK, session.id)
        session.lap("seal", now)
        self.changes += 1
        session.owner.sealed(session)

    def _end(self, session: PushSession, refusal: PushRefused, event: Event) -> None:
        self.machine.fire(event, refusal.message)
        self.session = None
        self._counters.add("sessions_failed")
        self.note_error(refusal, session.extra())
        session.owner.ended(session, refusal)
        self.below.ended(session, refusal)

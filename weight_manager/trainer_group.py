"""The trainer ranks of one push session: who joined, their leases, and which of their requests await an answer."""

import time
from collections.abc import Sequence

from rollout_client.protocol import (
    Abort,
    Aborted,
    Begin,
    Chunk,
    Commit,
    Committed,
    Copy,
    Placement,
    Renew,
    Renewed,
    Seal,
    Sealed,
    Written,
)
from weight_manager.config import StoreConfig
from weight_manager.coordinator import Coordinator
from weight_manager.data_plane import DataPlane
from weight_manager.errors import PushRefused
from weight_manager.life import Event, Refused
from weight_manager.members import Answer, Member, Members, check_same_push, late_answer
from weight_manager.messages import Live
from weight_manager.metrics import Counters
from weight_manager.plan import place, prove
from weight_manager.push_session import Intent, PushSession
from weight_manager.receiver import Arrived, Ended, News, Taken


class TrainerGroup:
    """Owner of a pushed session. `outcome` is set once it is over; late requests are then answered with it."""

    def __init__(
        self, config: StoreConfig, coordinator: Coordinator, answer: Answer, counters: Counters, data: DataPlane
    ) -> None:
        self._config = config
        self._coordinator = coordinator
        self._answer = answer
        self._counters = counters
        self._data = data
        self.members = Members(config.lease_s, answer)
        self.session: PushSession | None = None
        self.outcome: Committed | PushRefused | None = None
        self._kept: tuple[str, ...] = ()  # tensors taken from the base version

    @property
    def id(self) -> str:
        """Of the session."""
        return self._running.id

    @property
    def _running(self) -> PushSession:
        assert self.session is not None
        return self.session

    def same_push(self, intent: Intent) -> bool:
        """Whether this is another rank, or a retry, of what the group pushes."""
        mine = self._running.intent
        return (mine.run_id, mine.version) == (intent.run_id, intent.version)

    def open(self, peer: bytes, begin: Begin, intent: Intent, now: float) -> Placement:
        """The first rank: plan, then take the store's one session. Raises PushRefused, then nothing is staged."""
        live = self._coordinator.history.live
        if begin.base_version is not None:
            fits = live is not None and live.version == begin.base_version and live.run_id in ("", intent.run_id)
            if not fits:
                message = f"a partial push on version {begin.base_version}, but {_name(live)} is live"
                raise PushRefused("base_mismatch", message)
        copies = self._plan([begin])
        self.session = self._coordinator.begin(intent, self, now)
        return self._enrol(peer, begin, copies, now)

    def join(self, peer: bytes, begin: Begin, now: float) -> Placement:
        """Another rank of the same push. Raises PushRefused; wrong tensors end the session for all ranks."""
        if not check_same_push(begin, self.members.begins, peer in self.members):
            message = f"a push of {self._running.intent} is running, rank {begin.rank} of {begin.world} cannot join it"
            raise PushRefused("busy", message, retryable=True)
        try:
            copies = self._plan([*self.members.begins, begin])
        except PushRefused as refusal:
            self.refuse(refusal, now)
            raise
        return self._enrol(peer, begin, copies, now)

    def chunk(self, peer: bytes, chunk: Chunk, now: float) -> Sequence[memoryview] | None:
        """Where the payload goes; None when it is refused, which ends the session."""
        try:
            member = self._staging_member(peer, now)
            number = member.number(chunk.copy)
            return self._running.staging.destinations(number, chunk.offset, chunk.sizes, chunk.span)
        except PushRefused as refusal:
            self.refuse(refusal, now)
            return None

    def received(self, peer: bytes, chunk: Chunk) -> None:
        """A chunk's bytes are in the slot, unless they still have to be scattered or patched in: stores below may
        have them."""
        if not chunk.span:
            self._arrived(peer, chunk.copy, chunk.offset, sum(chunk.sizes))

    def data(self, peer: bytes, news: News, now: float) -> None:
        """What came through a data connection."""
        if self.outcome is not None:
            return
        match news:
            case Arrived():
                self.members.heard(peer, now)
                self._arrived(peer, news.copy, news.offset, news.size)
            case Taken():
                self.written(peer, Written(self.id, [(news.copy, news.digest)]), now)
            case Ended(refusal) if refusal is not None:
                self.refuse(refusal, now)

    def written(self, peer: bytes, written: Written, now: float) -> None:
        """Copies that are complete: check them while the rest arrives."""
        try:
            member = self._staging_member(peer, now)
            digests = [(member.number(copy), digest) for copy, digest in written.digests]
            sums = [(member.number(copy), digest) for copy, digest in written.sums]
            checks = self._running.staging.written(digests, sums)
        except PushRefused as refusal:
            self.refuse(refusal, now)
            return
        self._counters.add("bytes_staged", sum(target.nbytes for check in checks for target, _ in check))
        self._coordinator.checker.check(self._running, checks)

    def renew(self, peer: bytes, renew: Renew, now: float) -> None:
        """Keep the lease."""
        if self._over(peer, renew):
            return
        self.members.heard(peer, now)
        verified = self._running.staging.verified_bytes
        self._answer(peer, Renewed(self.id, self._config.lease_s, verified))

    def seal(self, peer: bytes, seal: Seal, now: float) -> None:
        """This rank has sent everything; answered once all ranks have and all bytes are checked."""
        if self._over(peer, seal):
            return
        session, member = self._running, self.members[peer]
        if session.life.whole:
            self._answer(peer, Sealed(self.id, session.digest))
            return
        member.owed.append(seal)
        member.sealed = True
        missing = session.staging.unwritten(member.first, member.count)
        if missing:
            message = f"sealed, but these were not reported complete: {', '.join(missing[:20])}"
            self.refuse(PushRefused("missing_tensor", message, missing), now)
            return
        deadline = now + self._config.patience(seal.deadline_s)
        if session.deadline is not None:
            deadline = min(deadline, session.deadline)
        session.deadline = deadline
        if self.members.complete and self.members.sealed:
            self._coordinator.seal(session, deadline, now)

    def commit(self, peer: bytes, commit: Commit, now: float) -> None:
        """Make it live; the first rank to ask starts it, all who ask are answered."""
        if self._over(peer, commit):
            return
        cell = self._running.life.cell(Event.COMMIT)
        if isinstance(cell, Refused):
            self._answer(peer, PushRefused("refused", cell.why).to_wire(self.id))
            return
        self.members[peer].owed.append(commit)
        self._coordinator.commit(self._running, self._config.patience(commit.deadline_s), now)

    def abort(self, peer: bytes, abort: Abort, now: float) -> None:
        """Give it up."""
        if self.outcome is not None:
            self._settle(peer, abort)
            return
        session = self._running
        refusal = PushRefused("aborted", abort.reason or f"aborted by its trainer {session.intent.client}")
        cell = session.life.cell(Event.TRAINER_ABORTS)
        if isinstance(cell, Refused):
            self._answer(peer, PushRefused("refused", f"{session.intent} {cell.why}").to_wire(self.id))
            return
        self.members[peer].owed.append(abort)
        self._coordinator.abort(session, refusal, now, Event.TRAINER_ABORTS)

    def expire(self, now: float) -> None:
        """End the session if a trainer has not been heard of in time."""
        if not self._needs_lease:
            return
        for member in self.members.late(now):
            if self.outcome is None:
                self._counters.add("leases_expired")
                who = f"{member.label} ({self._running.intent.client})"
                message = f"{who} was not heard of for {self._config.lease_s:g} s; its push was undone"
                refusal = PushRefused("lease_expired", message)
                self._coordinator.abort(self._running, refusal, now, Event.TRAINER_SILENT)

    def next_expiry(self) -> float | None:
        """When `expire` may have something to do."""
        if self.outcome is not None or not self._needs_lease:
            return None
        return self.members.next_expiry()

    def sealed(self, session: PushSession) -> None:
        """Owner: every byte is there and matches."""
        self.members.reply_all(Seal, Sealed(session.id, session.digest))

    def committed(self, session: PushSession, report: Committed) -> None:
        """Owner: live."""
        self._over_with(report)
        self.members.reply_all(Commit, report)

    def ended(self, session: PushSession, refusal: PushRefused) -> None:
        """Owner: gone."""
        self._over_with(refusal)
        self.members.reply_all(Abort, Aborted(session.id))
        self.members.reply_all((Seal, Commit), refusal.to_wire(session.id))

    def _over_with(self, outcome: Committed | PushRefused) -> None:
        """Keep what late requests are answered from, not the plan."""
        self.outcome = outcome
        self._data.end(self._running)
        self._running.staging.forget()
        self.members.forget_parts()

    @property
    def _needs_lease(self) -> bool:
        return self._running.life.moves(Event.TRAINER_SILENT)

    def _plan(self, begins: Sequence[Begin]) -> list[Copy]:
        """Copies of the last one; with the whole world there, the proof that everything is covered."""
        layout = self._coordinator.layout
        begin = begins[-1]
        if len(begins) == begin.world:
            self._kept = prove([b.parts for b in begins], layout, partial=begin.base_version is not None)
        return place(begin.parts, layout)

    def _enrol(self, peer: bytes, begin: Begin, copies: list[Copy], now: float) -> Placement:
        session = self._running
        base = self._base(begin)
        first = session.staging.add(copies, [begin.parts[c.part].name for c in copies], base)
        self.members.add(peer, begin, first, len(copies), now)
        if self.members.complete and begin.base_version is not None:
            live = self._coordinator.history.live
            assert live is not None
            self._coordinator.checker.carry(session, self._kept, live.slot)
        arena = self._coordinator.slots.arena
        offset = arena.slot_offset(session.slot)
        span, key = (first, len(copies)), b""
        if begin.transport == "zmq":
            key = self._data.expect(session, span, lambda news: self.data(peer, news, time.monotonic()))
        return Placement(
            *(session.id, self._config.lease_s, offset, arena.slot_bytes, copies, session.write_epoch),
            delta=base is not None,
            data_key=key,
            devices=self._devices(begin),
        )

    def _devices(self, begin: Begin) -> list[str]:
        """Sockets of ranks that may lend device memory, to a trainer that writes the whole version on this host."""
        if not begin.devices or begin.transport != "shm" or begin.world > 1 or begin.base_version is not None:
            return []
        return self._coordinator.device_sockets()

    def _base(self, begin: Begin) -> memoryview | None:
        """The live slot, if it is what this rank has patches against. It stays live while the session runs."""
        live = self._coordinator.history.live
        if live is None or not begin.base_digest or begin.transport != "zmq" or live.digest != begin.base_digest:
            return None
        return self._coordinator.slots.arena.slot(live.slot)

    def _staging_member(self, peer: bytes, now: float) -> Member:
        member = self.members.heard(peer, now)
        if member.sealed:
            raise PushRefused("bad_message", f"{member.label} sent more after its seal")
        return member

    def _arrived(self, peer: bytes, copy: int, offset: int, size: int) -> None:
        """Bytes are in the slot, unless they still have to be scattered: stores below may have them."""
        session = self._running
        target = session.staging.targets[self.members[peer].first + copy]
        if target.contiguous and size:
            self._coordinator.below.arrived(session, target.start + offset, size)

    def refuse(self, refusal: PushRefused, now: float) -> None:
        """What a rank has sent cannot be taken: the session ends, unless its outcome is known."""
        if self.outcome is None:
            self._coordinator.abort(self._running, refusal, now)

    def _over(self, peer: bytes, request: Renew | Seal | Commit) -> bool:
        if self.outcome is None:
            return False
        self._settle(peer, request)
        return True

    def _settle(self, peer: bytes, request: Renew | Seal | Commit | Abort) -> None:
        """Answer a request that came after the session was over."""
        assert self.outcome is not None
        self._answer(peer, late_answer(self.outcome, request, self._running.intent))


def _name(live: Live | None) -> str:
    return "nothing" if live is None else f"version {live.version} of run {live.run_id!r}"

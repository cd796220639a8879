"""The trainer ranks of one push: what each stages, its lease, and which of its requests await an answer."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from rollout_client.protocol import (
    Abort,
    Aborted,
    Ahead,
    Begin,
    Chunk,
    Commit,
    Committed,
    Copy,
    IsLive,
    NotAhead,
    Part,
    Placement,
    Renew,
    Renewed,
    Reply,
    Seal,
    Sealed,
    Written,
)
from weight_manager.config import StoreConfig
from weight_manager.coordinator import Coordinator
from weight_manager.data_plane import Arrived, DataPlane, Ended, News, Taken
from weight_manager.errors import PushRefused
from weight_manager.history import Intent
from weight_manager.life import Event, Refused, State
from weight_manager.messages import Live
from weight_manager.metrics import Counters
from weight_manager.plan import place, prove
from weight_manager.push_session import PushSession
from weight_manager.slots import Reserved

Answer = Callable[[bytes, Reply], None]
Outcome = Committed | PushRefused
SessionRequest = Ahead | Renew | Seal | Commit | Abort


@dataclass
class TrainerRank:
    """One trainer rank. Its copies are numbers [first, first + count) of the session's staging."""

    begin: Begin
    first: int
    count: int
    lease: float  # monotonic; runs only while the trainer owes us the next message
    sealed: bool = False
    owed: list[Ahead | Seal | Commit | Abort] = field(default_factory=list)

    @property
    def label(self) -> str:
        """What a rank is called in messages."""
        return f"trainer rank {self.begin.rank} of {self.begin.world}"

    def number(self, copy: int) -> int:
        """The number that one of its copies has in the session's staging. Raises PushRefused for no such copy."""
        if not 0 <= copy < self.count:
            raise PushRefused("bad_message", f"copy {copy} is not among the {self.count} that were placed")
        return self.first + copy


def late_answer(outcome: Outcome, request: SessionRequest, intent: object) -> Reply:
    """The answer to a request that came after its session was over."""
    if isinstance(outcome, PushRefused):
        return Aborted(request.session) if isinstance(request, Abort) else outcome.to_wire(request.session)
    if isinstance(request, Commit):
        return outcome
    return PushRefused("refused", f"{intent} is already live").to_wire(request.session)


def check_same_push(begin: Begin, joined: Sequence[Begin], known: bool) -> bool:
    """Whether this rank fits those that joined before it. known: by connection."""
    first = joined[0]
    mine, theirs = ((b.world, b.in_flight, b.transport, b.base_version, b.force) for b in (begin, first))
    return first.world > 1 and not known and begin.rank not in {b.rank for b in joined} and mine == theirs


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
        self.ranks: dict[bytes, TrainerRank] = {}  # by connection, in the order in which they joined
        self.session: PushSession | None = None
        self.outcome: Committed | PushRefused | None = None
        self.plan = ""  # what its trainer calls the parts
        self._kept: tuple[str, ...] = ()  # tensors taken from the base version
        self._sealed_by = 0.0  # the soonest deadline of a seal
        self._is_sealed = False
        self._offered: list[str] = []  # sockets of ranks that the trainer was told of
        self._goes_ahead = False  # its version goes live from device memory

    @property
    def id(self) -> str:
        """The session's id."""
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
            if self._coordinator.awaits_arena:
                raise PushRefused("busy", f"{_name(live)} is not in the arena yet", retryable=True)
            fits = live is not None and live.version == begin.base_version and live.run_id in ("", intent.run_id)
            if not fits:
                message = f"a partial push on version {begin.base_version}, but {_name(live)} is live"
                raise PushRefused("base_mismatch", message)
        copies = self._plan([begin])
        self.session = self._coordinator.begin(intent, self, now, reserved=self._reserved(begin))
        return self._enrol(peer, begin, copies, now)

    def join(self, peer: bytes, begin: Begin, now: float) -> Placement:
        """Another rank of the same push. Raises PushRefused; wrong tensors end the session for all ranks."""
        if not check_same_push(begin, self._begins, peer in self.ranks):
            message = f"a push of {self._running.intent} is running, rank {begin.rank} of {begin.world} cannot join it"
            raise PushRefused("busy", message, retryable=True)
        try:
            copies = self._plan([*self._begins, begin])
        except PushRefused as refusal:
            self.refuse(refusal, now)
            raise
        return self._enrol(peer, begin, copies, now)

    def chunk(self, peer: bytes, chunk: Chunk, now: float) -> Sequence[memoryview] | None:
        """Where the payload goes; None when it is refused, which ends the session."""
        try:
            rank = self._staging_member(peer, now)
            number = rank.number(chunk.copy)
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
                self._heard(peer, now)
                self._arrived(peer, news.copy, news.offset, news.size)
            case Taken():
                self.written(peer, Written(self.id, [(news.copy, news.digest)]), now)
            case Ended(refusal) if refusal is not None:
                self.refuse(refusal, now)

    def written(self, peer: bytes, written: Written, now: float) -> None:
        """Copies that are complete: check them while the rest arrives."""
        try:
            rank = self._staging_member(peer, now)
            digests = [(rank.number(copy), digest) for copy, digest in written.digests]
            sums = [(rank.number(copy), digest) for copy, digest in written.sums]
            self._running.taken = written.taken and len(self._offered) == self._coordinator.ranks
            self._running.checker.arrived((rank.number(copy), start, size) for copy, start, size in written.arrived)
            self._counters.add("bytes_staged", self._running.checker.written(digests, sums))
        except PushRefused as refusal:
            self.refuse(refusal, now)

    def take(self, peer: bytes, request: SessionRequest, now: float) -> None:
        """Carry a request out. Once the session is over, it is answered from what became of that."""
        if self.outcome is not None:
            settled = self._goes_ahead and isinstance(self.outcome, Committed)
            if settled and isinstance(request, Seal):  # the arena got it by itself
                self._answer(peer, Sealed(self.id, self._running.digest))
                request = Commit(self.id)
            self._answer(peer, late_answer(self.outcome, request, self._running.intent))
            return
        match request:
            case Ahead():
                self._go_ahead(peer, request, now)
            case Renew():
                self._heard(peer, now)
                verified = self._running.staging.verified_bytes
                self._answer(peer, Renewed(self.id, self._config.lease_s, verified))
            case Seal():
                self._seal(peer, request, now)
            case Commit():
                self._commit(peer, request, now)
            case Abort():
                self._abort(peer, request, now)

    def expire(self, now: float) -> None:
        """End the session if a trainer has not been heard of in time."""
        if not self._needs_lease:
            return
        for rank in [m for m in self.ranks.values() if not m.owed and now >= m.lease]:
            if self.outcome is None:
                self._counters.add("leases_expired")
                who = f"{rank.label} ({self._running.intent.client})"
                message = f"{who} was not heard of for {self._config.lease_s:g} s; its push was undone"
                refusal = PushRefused("lease_expired", message)
                self._coordinator.abort(self._running, refusal, now, Event.TRAINER_SILENT)

    def next_expiry(self) -> float | None:
        """When `expire` may have something to do."""
        if self.outcome is not None or not self._needs_lease:
            return None
        return min((m.lease for m in self.ranks.values() if not m.owed), default=None)

    def sealed(self, session: PushSession) -> None:
        """Owner: every byte is there and matches. Ranks that asked for the commit are owed the answer to that next."""
        seals = [(rank, owed) for rank in self.ranks.values() for owed in rank.owed if isinstance(owed, Seal)]
        asked = [(rank, seal) for rank, seal in seals if seal.commit]
        for rank, seal in asked:
            rank.owed.append(Commit(session.id, seal.deadline_s))
        self._is_sealed = True
        try:
            if asked:  # first: replicas have something to do meanwhile
                now = time.monotonic()
                self._coordinator.commit(session, max(self._sealed_by - now, 0.0), now)
        finally:
            self._say_sealed()

    def committed(self, session: PushSession, report: Committed) -> None:
        """`Owner.committed`: the version is live; answer the ranks that asked."""
        self._say_sealed()
        self._over_with(report)
        self._reply_all(Commit, report)

    def ended(self, session: PushSession, refusal: PushRefused) -> None:
        """`Owner.ended`: the session has come to nothing; answer the ranks that wait."""
        if self._is_sealed:
            self._say_sealed()
        self._over_with(refusal)
        self._reply_all(Abort, Aborted(session.id))
        self._reply_all((Ahead, Seal, Commit), refusal.to_wire(session.id))

    def _say_sealed(self) -> None:
        """Answer the ranks that wait for that; every other answer comes after it."""
        self._reply_all(Seal, Sealed(self.id, self._running.digest))

    def _over_with(self, outcome: Committed | PushRefused) -> None:
        """Keep what late requests are answered from, not the plan."""
        self.outcome = outcome
        self._data.end(self._running)
        for rank in self.ranks.values():
            rank.begin = msgspec.structs.replace(rank.begin, parts=[])

    def _go_ahead(self, peer: bytes, ahead: Ahead, now: float) -> None:
        """Every rank has it: have it made live, unless that cannot be, or not any more."""
        session, rank = self._running, self._heard(peer, now)
        if session.life.state is not State.STAGING or rank.sealed:
            self._answer(peer, PushRefused("bad_message", "said after everything was sent").to_wire(self.id))
            return
        why = "it did not ask for that" if rank.begin.durability != "device" else self._coordinator.why_not_ahead()
        if not why and self._coordinator.device_sockets() != self._offered:
            why = "the replicas are others than those that were to be filled"
        digests = None if why else session.staging.claimed((rank.number(copy), d) for copy, d in ahead.digests)
        if digests is None:
            self._answer(peer, NotAhead(self.id, why or "not every parameter is one copy in one piece"))
            return
        self._goes_ahead = True
        rank.owed.append(ahead)
        seconds = self._config.patience(ahead.deadline_s)
        self._coordinator.go_ahead(session, digests, seconds, now, self._say_live)

    def _say_live(self, replicas: int) -> None:
        session = self._running
        self._reply_all(Ahead, IsLive(session.id, session.intent.version, session.digest, replicas))

    def _seal(self, peer: bytes, seal: Seal, now: float) -> None:
        """This rank has sent everything; answered once all ranks have and all bytes are checked."""
        session, rank = self._running, self.ranks[peer]
        if self._goes_ahead:
            self._arena_sent(rank, seal)
            return
        if session.life.whole:
            self._answer(peer, Sealed(self.id, session.digest))
            if seal.commit:
                self._commit(peer, Commit(self.id, seal.deadline_s), now)
            return
        rank.owed.append(seal)
        rank.sealed = True
        missing = session.staging.unwritten(rank.first, rank.count)
        if missing:
            message = f"sealed, but these were not reported complete: {', '.join(missing[:20])}"
            self.refuse(PushRefused("missing_tensor", message, missing), now)
            return
        deadline = now + self._config.patience(seal.deadline_s)
        if session.deadline is not None:
            deadline = min(deadline, session.deadline)
        session.deadline = self._sealed_by = deadline
        if self._complete and all(rank.sealed for rank in self.ranks.values()):
            self._coordinator.seal(session, deadline, now)

    def _arena_sent(self, rank: TrainerRank, seal: Seal) -> None:
        """Of a version that went ahead; answered once the arena has it, whoever brings it there."""
        session = self._running
        rank.owed += [seal, Commit(session.id, seal.deadline_s)] if seal.commit else [seal]
        rank.sealed = True
        missing = session.staging.unwritten(rank.first, rank.count)
        if missing:
            self._coordinator.arena_given_up(session, f"not reported complete: {', '.join(missing[:20])}")
        else:
            self._coordinator.arena_sent(session)

    def _commit(self, peer: bytes, commit: Commit, now: float) -> None:
        """Make it live; the first rank to ask starts it, all who ask are answered."""
        if self._goes_ahead:
            self.ranks[peer].owed.append(commit)
            return
        cell = self._running.life.cell(Event.COMMIT)
        if isinstance(cell, Refused):
            self._answer(peer, PushRefused("refused", cell.why).to_wire(self.id))
            return
        self.ranks[peer].owed.append(commit)
        self._coordinator.commit(self._running, self._config.patience(commit.deadline_s), now)

    def _abort(self, peer: bytes, abort: Abort, now: float) -> None:
        session = self._running
        if self._goes_ahead and not session.life.moves(Event.TRAINER_ABORTS):
            self._answer(peer, PushRefused("refused", f"{session.intent} is already live").to_wire(self.id))
            self._coordinator.arena_given_up(session, abort.reason or "its trainer gives it up")
            return
        refusal = PushRefused("aborted", abort.reason or f"aborted by its trainer {session.intent.client}")
        cell = session.life.cell(Event.TRAINER_ABORTS)
        if isinstance(cell, Refused):
            self._answer(peer, PushRefused("refused", f"{session.intent} {cell.why}").to_wire(self.id))
            return
        self.ranks[peer].owed.append(abort)
        self._coordinator.abort(session, refusal, now, Event.TRAINER_ABORTS)

    def _reply_all(self, kind: type | tuple[type, ...], reply: Reply) -> None:
        """Answer every rank that waits for the answer to such a request."""
        for peer, rank in self.ranks.items():
            answered = [r for r in rank.owed if isinstance(r, kind)]
            rank.owed = [r for r in rank.owed if not isinstance(r, kind)]
            rank.lease = time.monotonic() + self._config.lease_s
            for _ in answered:
                self._answer(peer, reply)

    def _heard(self, peer: bytes, now: float) -> TrainerRank:
        """The rank is alive: its lease begins anew."""
        rank = self.ranks[peer]
        self._coordinator.arena_heard(self._running, now)
        rank.lease = now + self._config.lease_s
        return rank

    @property
    def _begins(self) -> list[Begin]:
        return [rank.begin for rank in self.ranks.values()]

    @property
    def _complete(self) -> bool:
        """Whether all ranks of the push have joined."""
        return len(self.ranks) == self._begins[0].world

    @property
    def _needs_lease(self) -> bool:
        return self._running.life.moves(Event.TRAINER_SILENT)

    def _plan(self, begins: Sequence[Begin]) -> list[Copy]:
        """Copies of the last one; with the whole world there, the proof that everything is covered."""
        of = ([b.parts for b in begins], begins[-1].world, begins[-1].base_version is not None)
        copies, self._kept = self._coordinator.planned.plan(of, lambda: self._make_plan(*of))
        return copies

    def _make_plan(self, ranks: list[list[Part]], world: int, partial: bool) -> tuple[list[Copy], tuple[str, ...]]:
        layout = self._coordinator.layout
        kept = prove(ranks, layout, partial=partial) if len(ranks) == world else ()
        return place(ranks[-1], layout), kept

    def _reserved(self, begin: Begin) -> Reserved | None:
        """The slot that the trainer was told of before, and is writing into."""
        return None

    def _enrol(self, peer: bytes, begin: Begin, copies: list[Copy], now: float) -> Placement:
        session, arena = self._running, self._coordinator.slots.arena
        base = self._base(begin)
        first = self._add(begin, copies, base)
        self.ranks[peer] = TrainerRank(begin, first, len(copies), now + self._config.lease_s)
        if self._complete and begin.base_version is not None:
            live = self._coordinator.history.live
            assert live is not None
            session.checker.carry(self._kept, arena.slot(live.slot))
        offset = arena.slot_offset(session.slot)
        span, key = (first, len(copies)), b""
        if begin.transport == "zmq":
            key = self._data.expect(session, span, lambda news: self.data(peer, news, time.monotonic()))
        self._offered = self._devices(begin)
        asked = begin.durability == "device"
        why = self._why_not_ahead(begin) if asked else ""
        if asked and not why:
            self._coordinator.call_devices()
        return Placement(
            *(session.id, self._config.lease_s, offset, arena.slot_bytes, copies, session.write_epoch),
            delta=base is not None,
            data_key=key,
            devices=self._offered,
            ahead=asked and not why,
            not_ahead=why,
        )

    def _why_not_ahead(self, begin: Begin) -> str:
        """Why this version may not go live from device memory; "" = it may."""
        if not begin.devices or begin.transport != "shm" or begin.world > 1 or begin.base_version is not None:
            return "one process on this host has to push the whole version, from a GPU and with transport cuda_ipc"
        return self._coordinator.why_not_ahead()

    def _add(self, begin: Begin, copies: list[Copy], base: memoryview | None) -> int:
        """The rank's copies are part of the session from now on; the number of the first."""
        staging = self._running.staging

        def names() -> list[str]:
            return [begin.parts[c.part].name for c in copies]

        if begin.world == 1 and not staging.chunked:
            laid = self._coordinator.planned.laid(copies, names, staging.layout)
            if laid is not None:
                staging.lay(laid)
                return 0
        return staging.add(copies, names(), base)

    def _devices(self, begin: Begin) -> list[str]:
        """Sockets of ranks that may copy from the memory of a trainer that has the whole version on this host."""
        if not begin.devices or begin.transport != "shm" or begin.world > 1 or begin.base_version is not None:
            return []
        return self._coordinator.device_sockets()

    def _base(self, begin: Begin) -> memoryview | None:
        """The live slot, if it is what this rank has patches against. It stays live while the session runs."""
        live = self._coordinator.history.live
        if live is None or not begin.base_digest or begin.transport != "zmq" or live.digest != begin.base_digest:
            return None
        if self._coordinator.awaits_arena:  # it is stranded on devices
            return None
        return self._coordinator.slots.arena.slot(live.slot)

    def _staging_member(self, peer: bytes, now: float) -> TrainerRank:
        rank = self._heard(peer, now)
        if rank.sealed:
            raise PushRefused("bad_message", f"{rank.label} sent more after its seal")
        return rank

    def _arrived(self, peer: bytes, copy: int, offset: int, size: int) -> None:
        """Bytes are in the slot, unless they still have to be scattered: stores below may have them."""
        session = self._running
        target = session.staging.targets[self.ranks[peer].first + copy]
        if target.contiguous and size:
            self._coordinator.below.arrived(session, target.start + offset, size)

    def refuse(self, refusal: PushRefused, now: float) -> None:
        """What a rank has sent cannot be taken: the session ends, unless its outcome is known."""
        if self.outcome is None:
            self._coordinator.abort(self._running, refusal, now)


def _name(live: Live | None) -> str:
    return "nothing" if live is None else f"version {live.version} of run {live.run_id!r}"

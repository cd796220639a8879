"""The stores below: who has joined, who may serve until when, and what each is sent. Steps: relay/messages.py."""

import hmac
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weight_manager import messages as inner
from weight_manager.background import Background
from weight_manager.ballot import Ballot, Tally
from weight_manager.config import StoreConfig
from weight_manager.errors import PushRefused
from weight_manager.history import History
from weight_manager.layout import Layout
from weight_manager.life import Role
from weight_manager.messages import Live
from weight_manager.relay import messages as wire
from weight_manager.relay.catch_up import CatchUp
from weight_manager.relay.lease import Lease
from weight_manager.relay.messages import FromBelow, version_of
from weight_manager.relay.roster import Downstream, Enrolment, Roster
from weight_manager.relay.stream import Stream
from weight_manager.slots import Slots
from weight_manager.staging import Check

if TYPE_CHECKING:
    from weight_manager.coordinator import Coordinator, PushSession  # which makes us

log = logging.getLogger(__name__)

SHRINK = 0.8
"""Of a deadline, for the subtree below: its stores must be heard of before we have to answer ourselves."""


class Downstreams:
    """Nobody, unless a router is bound."""

    def __init__(
        self,
        config: StoreConfig,
        layout: Layout,
        *,
        coordinator: "Coordinator",
        slots: Slots,
        history: History,
        background: Background,
        lease: Lease | None,
    ) -> None:
        """lease: our own, from above; None at the root."""
        self._config = config
        self._layout = layout
        self._slots = slots
        self._history = history
        self._coordinator = coordinator
        self._lease = lease
        self.roster = Roster(history.saved.members, config.relay_lease_s)
        self._session: PushSession | None = None
        self._quorum = config.relay_policy == "quorum"
        self._held: dict[str, tuple[bytes, wire.Join]] = {}
        self._stream: Stream | None = None
        self._patience = float("inf")
        self._late = CatchUp(*(layout, self.roster, slots, history, background), busy=lambda: self._session is not None)

    # a session, as the coordinator tells it

    def begin(self, session: "PushSession", now: float) -> None:
        """Bytes are about to arrive in its slot."""
        if self.roster.router is None:
            return
        self._session, self._stream = session, Stream(self._layout)
        self._patience = float("inf")
        self._quorum = session.quorum if session.intent.source == "relay" else self._config.relay_policy == "quorum"
        for store in self.roster.all():
            self._enrol(store, session)

    def arrived(self, session: "PushSession", start: int, size: int) -> None:
        """Bytes of the slot that a trainer or the store above sent. They are forwarded before they are verified."""
        if session is self._session and self._stream is not None:
            self._stream.arrived(start, size)

    def verified(self, session: "PushSession", check: Check) -> None:
        """Copies that were compared in place."""
        if session is self._session and self._stream is not None:
            for target, _ in check:
                self._stream.proven(target.start, target.nbytes, target.digest, contiguous=target.contiguous)

    def seal(self, session: "PushSession", digest: str, digests: Sequence[int], now: float) -> None:
        """The slot is complete and intact."""
        if session is not self._session or self._stream is None:
            return
        self._stream.finish(digests)
        self._late.sealed(digests)
        self._patience = now + self._config.relay_patience_s
        for _, enrolment in self.roster.taking_part():
            enrolment.digest = digest

    def went_live(self, live: Live, ballot: Ballot) -> None:
        """Recorded here: whoever voted holds it, the others have to catch up."""
        if self.roster.router is None:
            return
        self._late.went_live(live)
        self._session, self._stream, self._patience = None, None, float("inf")
        for store in self.roster.all():
            self.roster.take(store)
            store.fenced = False
            if store.name in ballot.voters:
                store.holds = version_of(live)
            self._late.offer(store)

    def ended(self, session: "PushSession", refusal: PushRefused) -> None:
        """Nothing came of it."""
        if session is not self._session:
            return
        self._session, self._stream, self._patience = None, None, float("inf")
        for store in self.roster.all():
            enrolment, store.fenced = self.roster.take(store), False
            if enrolment is not None:
                self.roster.send(store, wire.Rollback(enrolment.session, refusal.message))
            self._late.offer(store)

    def tell(self, name: str, message: inner.ToReplica, seconds: float, *, fence: bool) -> None:
        """What the ballot says to one of its voters."""
        store = self.roster.named(name)
        if store is None:
            return
        store.fenced = store.fenced or (fence and isinstance(message, inner.Rollback))
        order = wire.order_of(message, seconds * SHRINK, fence=fence)
        if order is not None:
            self.roster.send(store, order)

    def drop(self, name: str, why: str) -> None:
        """A store did not answer: it must join again."""
        store = self.roster.named(name)
        if store is not None:
            self.roster.send(store, wire.NotJoined(f"store {name} {why}; join again"))
            self._remove(store, why, absent=True)

    # who takes part

    def unstaged(self) -> list[str]:
        """Stores that the session still waits for."""
        return [store.name for store, enrolment in self.roster.taking_part() if not (enrolment.staged or enrolment.out)]

    def stores(self) -> int:
        """How many stores are staged, this one included."""
        return 1 + sum(
            store.stores for store, enrolment in self.roster.taking_part() if enrolment.staged and not enrolment.out
        )

    def voters(self) -> dict[str, bool]:
        """Stores that vote in the commit -> whether it fails without them."""
        return {
            store.name: enrolment.required
            for store, enrolment in self.roster.taking_part()
            if enrolment.staged and not enrolment.out
        }

    def outsiders(self, now: float) -> dict[str, str]:
        """Stores that do not vote but may be serving -> why they do not. One may have joined since the seal."""
        voters = self.voters()
        out = {
            store.name: (store.enrolment and store.enrolment.out) or "is not staged"
            for store in self.roster.all()
            if store.name not in voters and store.serves_until > now
        }
        return out | {name: "is away" for name, until in self.roster.absent.items() if until > now}

    def serving(self, now: float) -> bool:
        """Whether a store below may be."""
        return any(
            until > now for until in (*(k.serves_until for k in self.roster.all()), *self.roster.absent.values())
        )

    def serves_until(self, name: str) -> float:
        """Until when a store may serve if it hears nothing more."""
        store = self.roster.named(name)
        return store.serves_until if store else self.roster.absent.get(name, 0.0)

    def needed(self) -> int:
        """Stores that must take part in the commit, this one included."""
        if self._session is None or self._session.intent.source == "relay" or not self._quorum:
            return 1
        total = 1 + sum(store.stores for store in self.roster.all())
        return self._config.relay_quorum or total // 2 + 1

    # what stores below say

    def request(self, peer: bytes, message: FromBelow) -> None:
        """Take one message of a store below."""
        now = time.monotonic()
        if isinstance(message, wire.Join):
            self._join(peer, message, now)
            return
        store = self.roster.of_peer(peer)
        if store is None:
            self.malformed(peer, "this connection has not joined")
            return
        store.seen = now
        match message:
            case wire.Beat():
                if message.holds == store.holds:  # else one of us has news for the other
                    self.roster.send(store, wire.Lease(message.seq, self._grant(store, now)))
            case wire.Holds():
                self._coordinator.changes += 1
                store.holds = message.version
                if store.enrolment and store.enrolment.catch_up:
                    self.roster.take(store)
                self._late.offer(store)
            case wire.Leave():
                store.serves_until = 0.0
                self._remove(store, "has stopped")
            case _:
                self._of_session(store, message, now)

    def _of_session(self, store: Downstream, message: FromBelow, now: float) -> None:
        enrolment, ballot = store.enrolment, self._coordinator.ballot
        match message:
            case wire.Credit() if enrolment and enrolment.session == message.session:
                self.roster.credit(enrolment, message.upto)
            case wire.Staged() if enrolment and enrolment.session == message.session:
                enrolment.staged, store.stores = True, message.stores
                self._coordinator.staged_below(now)
            case wire.Failed() if enrolment and enrolment.session == message.session:
                self._failed(store, enrolment, message, now)
            case wire.Vote() if ballot and ballot.session == message.session:
                kind = inner.Prepared if message.question == "prepare" else inner.Flipped
                vote = kind(message.session, message.ok, 0, message.error, message.tensors)
                ballot.store_voted(store.name, vote, Tally(message.stores, message.replicas), message.rank, now)
                self._coordinator.drive(now)
            case wire.Over():
                if message.fenced:
                    store.serves_until = 0.0
                if ballot and ballot.session == message.session:
                    if message.fenced:
                        ballot.fenced(store.name, now)
                    ballot.store_finalized(store.name, message.stall_ms, now)
                    ballot.rolled_back(store.name, inner.RolledBack(message.session), now)
                    self._coordinator.drive(now)
            case _:
                pass

    def malformed(self, peer: bytes, why: str) -> None:
        """Cannot be read, or from nobody we know."""
        self.roster.answer(peer, wire.NotJoined(why))

    def broken(self, peer: bytes, why: str) -> None:
        """A store sent what cannot be used: it must join again, and a session that needs it ends."""
        store = self.roster.of_peer(peer)
        if store is None:
            self.malformed(peer, why)
        else:
            self.roster.send(store, wire.NotJoined(f"store {store.name} {why}; join again"))
            self._remove(store, why)

    def tick(self, now: float) -> None:
        """Silence, patience, and who waited for a commit to be settled."""
        for store in self.roster.all():
            if store.deaf:
                self._remove(store, "takes no more messages")
            elif now >= store.seen + self._config.relay_lease_s:
                self._remove(store, f"was silent for {self._config.relay_lease_s:g} s")
        self.roster.absent = {name: until for name, until in self.roster.absent.items() if until > now}
        if now >= self._patience:
            self._patience = float("inf")
            for _, enrolment in self.roster.taking_part():
                if not (enrolment.required or enrolment.staged or enrolment.out):
                    enrolment.out = f"was not staged {self._config.relay_patience_s:g} s after the others"
            self._coordinator.staged_below(now)
        if self._held and self._coordinator.settled:
            held, self._held = self._held, {}
            for peer, join in held.values():
                self._join(peer, join, now)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do."""
        times = [0.0 if store.deaf else store.seen + self._config.relay_lease_s for store in self.roster.all()]
        return min([*times, self._patience], default=None) if times else None

    def status(self, now: float) -> dict[str, Any]:
        """Per store, as the API shows it."""
        live = version_of(self._history.live)
        return {store.name: store.status(live, now) for store in self.roster.all()}

    def _join(self, peer: bytes, join: wire.Join, now: float) -> None:
        why = why_not(join, self._config.token, self._layout)
        if why:
            self._refuse(peer, join, why)
            return
        self._held.pop(join.store, None)  # this is its latest word
        known = self.roster.of_id(join.store)
        if known is not None:
            known.seen = now
            if known.identity != peer:
                self._remove(known, "joined anew", absent=True)
        if self._coordinator.settled:
            self._welcome(peer, join, now)
        else:
            self._held[join.store] = peer, join

    def _welcome(self, peer: bytes, join: wire.Join, now: float) -> None:
        known = self.roster.of_peer(peer)
        if known is not None and known.enrolment is not None and not known.enrolment.out:
            live, session = version_of(self._history.live), known.enrolment.session
            self.roster.send(known, wire.Joined(live, self._config.relay_lease_s, session))
            return  # it asked twice; it has been told of the session
        namesake = self.roster.named(join.name)
        if namesake is not None and namesake.id != join.store:  # their votes would count as one
            self._refuse(peer, join, f"another store is called {join.name}")
            return
        try:  # before it is given a lease: should we crash, the next life waits for that
            self._history.remember([*self.roster.names(), join.name])
        except OSError as error:
            self._refuse(peer, join, f"the store above cannot write down who has joined: {error}")
            return
        store = Downstream(join.store, join.name, peer, join.holds, now)
        self.roster.add(store)
        log.info("store %s has joined", store.name, extra={"holds": join.holds and join.holds.version})
        live = version_of(self._history.live)
        self.roster.send(store, wire.Joined(live, self._config.relay_lease_s))
        if self._session is not None and self._stream is not None:
            self._enrol(store, self._session)
        else:
            self._late.offer(store)

    def _remove(self, store: Downstream, why: str, *, absent: bool = False) -> None:
        """absent: it may still be serving, until its lease runs out."""
        self.roster.remove(store)
        try:
            self._history.remember(self.roster.names())
        except OSError as error:  # who is written down and gone is waited for once, should we crash
            log.error("who has left cannot be written down: %s", error)
        log.warning("store %s %s", store.name, why)
        self._coordinator.changes += 1
        now, ballot, enrolment = time.monotonic(), self._coordinator.ballot, store.enrolment
        if ballot is not None and not self._coordinator.settled:
            ballot.gone(store.name, why, now)
            self._coordinator.drive(now)
        elif enrolment is not None and self._session is not None and not enrolment.catch_up and not absent:
            refusal = PushRefused("refused", f"store {store.name} {why}; push again", rank=store.name, retryable=True)
            if enrolment.required:
                self._coordinator.abort(self._session, refusal, now)
            else:
                self._coordinator.staged_below(now)

    def _failed(self, store: Downstream, enrolment: Enrolment, message: wire.Failed, now: float) -> None:
        enrolment.out = message.message
        log.warning("store %s cannot stage: %s", store.name, message.message)
        if enrolment.catch_up:
            self.roster.take(store)
        elif enrolment.required and self._session is not None:
            text = f"store {store.name}: {message.message}"
            refusal = PushRefused(message.code, text, message.tensors, rank=store.name, retryable=message.retryable)
            self._coordinator.abort(self._session, refusal, now)
        else:
            self._coordinator.staged_below(now)

    def _enrol(self, store: Downstream, session: "PushSession") -> None:
        assert self._stream is not None
        live, intent = self._history.live, session.intent
        holds = live is not None and store.holds == version_of(live)
        caught_up = session.role is Role.CATCH_UP  # whoever has it above does not wait for those below
        required = holds and not self._quorum and not caught_up
        enrolment = Enrolment(session.id, self._stream, self._slots.arena.slot(session.slot), required)
        enrolment.digest = session.digest
        port, key = self.roster.give(store, enrolment)
        stage = wire.Stage(
            *(session.id, intent.run_id, intent.version, intent.in_flight, intent.client),
            digest=session.expected or enrolment.digest,
            quorum=self._quorum or caught_up,
            data_port=port,
            data_key=key,
        )
        self.roster.send(store, stage)

    def _grant(self, store: Downstream, now: float) -> float:
        live, ballot = self._history.live, self._coordinator.ballot
        if live is None or store.fenced or store.holds != version_of(live):
            return 0.0
        if ballot is not None and not self._coordinator.settled and store.name not in ballot.voters:
            return 0.0  # the commit that runs does not wait for a lease that is given now
        seconds = self._config.relay_lease_s
        if self._lease is not None:
            seconds = max(0.0, min(seconds, self._lease.left_s(now) - 0.05))
        store.serves_until = now + seconds if seconds else store.serves_until
        return seconds

    def _refuse(self, peer: bytes, join: wire.Join, why: str) -> None:
        log.error("store %s cannot join: %s", join.name, why)
        self.roster.answer(peer, wire.NotJoined(why, refused=True))


def why_not(join: wire.Join, token: str | None, layout: Layout) -> str:
    """Why this store cannot join; "" if it can."""
    if not hmac.compare_digest(join.token.encode(), (token or "").encode()):
        return "the token is wrong or missing"
    if join.protocol != wire.RELAY_PROTOCOL:
        return f"relay protocol {join.protocol}, this store speaks {wire.RELAY_PROTOCOL}: use the same release"
    if join.layout_digest != layout.digest:
        return "another layout: model config, dtype and tp must be the same on all stores"
    return ""

"""One line's sessions at the stores below: who takes part, what they are asked, and what their answers mean.

The model's weights are a line, and so is each adapter. Which stores there are at all: members.py.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

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
from weight_manager.relay.members import Members
from weight_manager.relay.messages import FromBelow, version_of
from weight_manager.relay.roster import Downstream, Enrolment
from weight_manager.relay.stream import Stream
from weight_manager.slots import Slots
from weight_manager.together import Proven

if TYPE_CHECKING:
    from weight_manager.coordinator import Coordinator  # which makes us
    from weight_manager.push_session import PushSession

log = logging.getLogger(__name__)

SHRINK = 0.8
"""Share of a deadline that the subtree below is given: its stores must be heard of before we have to answer ourselves.
"""


class Downstreams:
    """The stores below, as one line's sessions see them: what is staged there, who votes, who has to catch up. There
    are none unless stores may join.
    """

    def __init__(
        self,
        config: StoreConfig,
        layout: Layout,
        *,
        coordinator: "Coordinator",
        members: Members,
        slots: Slots,
        history: History,
        background: Background,
    ) -> None:
        self._config = config
        self._layout = layout
        self._members = members
        self._roster = members.roster
        self._slots = slots
        self._history = history
        self._coordinator = coordinator
        saved = history.saved
        self._line = saved.adapter
        self._adapter = None if saved.shape is None else wire.StagedAdapter(saved.adapter, saved.shape)
        self._session: PushSession | None = None
        self._quorum = config.relay_policy == "quorum"
        self._stream: Stream | None = None
        self._retired = False
        self._patience = float("inf")
        self._late = CatchUp(
            *(self._adapter, layout, self._roster, slots, history, background),
            busy=lambda: self._retired or self._session is not None,
        )

    # a session, as the coordinator tells it

    def begin(self, session: "PushSession", now: float) -> None:
        """Begin a session for the stores below: bytes are about to arrive in its slot."""
        if not self._members.wanted:
            return
        self._session, self._stream = session, Stream(self._layout)
        self._patience = float("inf")
        self._quorum = session.quorum if session.intent.source == "relay" else self._config.relay_policy == "quorum"
        for store in self._roster.all():
            self._enrol(store, session)

    def arrived(self, session: "PushSession", start: int, size: int) -> None:
        """Bytes of the slot that a trainer or the store above sent. They are forwarded before they are verified."""
        if session is self._session and self._stream is not None:
            self._stream.arrived(start, size)

    def verified(self, session: "PushSession", copies: Iterable[Proven]) -> None:
        """Log copies as good for the stores below: their bytes were compared in place."""
        if session is self._session and self._stream is not None:
            for copy in copies:
                self._stream.proven(copy.start, copy.nbytes, copy.digest, contiguous=copy.contiguous)

    def seal(self, session: "PushSession", digest: str, digests: Sequence[int], now: float) -> None:
        """Tell the stores below that the slot is complete and intact."""
        if session is not self._session or self._stream is None:
            return
        self._stream.finish(digests)
        self._late.sealed(digests)
        self._patience = now + self._config.relay_patience_s
        for _, enrolment in self._roster.taking_part(self._line):
            enrolment.digest = digest

    def went_live(self, live: Live, ballot: Ballot) -> None:
        """Recorded here: whoever voted holds it, the others have to catch up."""
        if not self._members.wanted:
            return
        self._late.went_live(live)
        self._session, self._stream, self._patience = None, None, float("inf")
        for store in self._roster.all():
            self._roster.take(store, self._line)
            store.behind.discard(self._line)
            if store.name in ballot.voters:
                store.holds = store.holds.having(self._line, version_of(live))
            self._late.offer(store)

    def ended(self, session: "PushSession", refusal: PushRefused) -> None:
        """End the session for the stores below: nothing came of it."""
        if session is not self._session:
            return
        self._session, self._stream, self._patience = None, None, float("inf")
        for store in self._roster.all():
            store.behind.discard(self._line)
            self._withdraw(store, refusal.message)
            self._members.offer(store)

    def retired(self) -> None:
        """The line's name stands for nothing any more, or for another: nobody is brought to its version."""
        self._retired = True
        if self._history.live is None:
            return  # nobody was: who is brought to anything under its name, is so by the line that the name stands for
        for store, enrolment in self._roster.taking_part(self._line):
            if enrolment.catch_up:
                self._withdraw(store, "it is live no more")

    def _withdraw(self, store: Downstream, why: str) -> None:
        enrolment = self._roster.take(store, self._line)
        if enrolment is not None:
            self._roster.send(store, wire.Rollback(enrolment.session, why))

    def tell(self, name: str, message: inner.ToReplica, seconds: float, *, fence: bool) -> None:
        """What the ballot says to one of its voters."""
        store = self._roster.named(name)
        if store is None:
            return
        if fence and isinstance(message, inner.Rollback):
            store.behind.add(self._line)
        order = wire.order_of(message, seconds * SHRINK, fence=fence)
        if order is not None:
            self._roster.send(store, order)

    def drop(self, name: str, why: str) -> None:
        """A store did not answer: it must join again."""
        self._members.drop(name, why)

    # who takes part

    def unstaged(self) -> list[str]:
        """Stores that the session still waits for."""
        taking_part = self._roster.taking_part(self._line)
        return [store.name for store, enrolment in taking_part if not (enrolment.staged or enrolment.out)]

    def stores(self) -> int:
        """How many stores are staged, this one included."""
        return 1 + sum(
            store.stores
            for store, enrolment in self._roster.taking_part(self._line)
            if enrolment.staged and not enrolment.out
        )

    def voters(self) -> dict[str, bool]:
        """Stores that vote in the commit -> whether it fails without them."""
        return {
            store.name: enrolment.required
            for store, enrolment in self._roster.taking_part(self._line)
            if enrolment.staged and not enrolment.out
        }

    def outsiders(self, now: float) -> dict[str, str]:
        """Stores that do not vote but may be serving -> why they do not. One may have joined since the seal."""
        voters = self.voters()
        parts = {store.name: enrolment.out for store, enrolment in self._roster.taking_part(self._line)}
        out = {
            store.name: parts.get(store.name) or "is not staged"
            for store in self._roster.all()
            if store.name not in voters and store.serves_until > now
        }
        return out | {name: "is away" for name, until in self._roster.absent.items() if until > now}

    def serves_until(self, name: str) -> float:
        """Until when a store may serve if it hears nothing more."""
        return self._members.serves_until(name)

    def needed(self) -> int:
        """Stores that must take part in the commit, this one included."""
        if self._session is None or self._session.intent.source == "relay" or not self._quorum:
            return 1
        total = 1 + sum(store.stores for store in self._roster.all())
        return self._config.relay_quorum or total // 2 + 1

    # what members.py has for it

    def admit(self, store: Downstream) -> None:
        """A store has joined: it takes part in what runs, or is brought to what is live."""
        session = self._session
        enrolment = store.enrolments.get(self._line)
        if enrolment is not None and not enrolment.out:
            return  # it asked twice; it has been told of the session
        if session is None:
            self._late.offer(store)
        elif not session.life.in_question:  # else it is offered the outcome
            self._enrol(store, session)

    def offer(self, store: Downstream) -> None:
        """Bring a store to what is live of this line, unless it takes part in a session."""
        self._late.offer(store)

    def undecided(self, store: Downstream) -> str:
        """The session in which the store has a vote, while nobody knows its outcome; "" = there is none."""
        ballot = self._coordinator.ballot
        open_ = ballot is not None and not self._coordinator.settled and store.name in ballot.voters
        return ballot.session if ballot is not None and open_ else ""

    def excludes(self, store: Downstream) -> bool:
        """Whether a commit runs that does not wait for a lease which the store is given now."""
        ballot = self._coordinator.ballot
        return ballot is not None and not self._coordinator.settled and store.name not in ballot.voters

    def caught_up(self, store: Downstream, held: wire.Holds) -> None:
        """A store holds a version, if it is this line's. What is not live is not believed: it is gone from here."""
        if held.adapter != self._line or self._members.live().of(self._line) is None:
            return
        self._coordinator.changes += 1
        store.holds = store.holds.having(self._line, held.version)
        enrolment, ballot = store.enrolments.get(self._line), self._coordinator.ballot
        if enrolment is not None and enrolment.catch_up:
            self._roster.take(store, self._line)
        if ballot is not None and held.version == version_of(ballot.live) and not held.moving:
            # It has missed the word that it was committed.
            now = time.monotonic()
            ballot.store_finalized(store.name, {}, now)
            self._coordinator.drive(now)
        self._late.offer(store)

    def take(self, store: Downstream, message: FromBelow, now: float) -> None:
        """What a store says of a session, if it is this line's."""
        enrolment, ballot = store.enrolments.get(self._line), self._coordinator.ballot
        match message:
            case wire.Credit() if enrolment and enrolment.session == message.session:
                self._roster.credit(enrolment, message.upto)
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
            case wire.Over() if ballot and ballot.session == message.session:
                if message.fenced:
                    ballot.fenced(store.name, now)
                ballot.store_finalized(store.name, message.stall_ms, now)
                ballot.rolled_back(store.name, inner.RolledBack(message.session), now)
                self._coordinator.drive(now)
            case _:
                pass

    def lost(self, store: Downstream, why: str, now: float, *, absent: bool) -> None:
        """A store has left, or must join again. absent: it may still be serving, until its lease runs out."""
        self._coordinator.changes += 1
        ballot, enrolment = self._coordinator.ballot, store.enrolments.get(self._line)
        in_question = ballot is not None and not self._coordinator.settled
        if ballot is not None and (in_question or store.serves_until <= now):
            ballot.gone(store.name, why, now)
            self._coordinator.drive(now)
        if in_question:
            return  # of the very session that it was enrolled in
        if enrolment is not None and self._session is not None and not enrolment.catch_up and not absent:
            refusal = PushRefused("refused", f"store {store.name} {why}; push again", rank=store.name, retryable=True)
            if enrolment.required:
                self._coordinator.abort(self._session, refusal, now)
            else:
                self._coordinator.staged_below(now)

    def tick(self, now: float) -> None:
        """Patience with those who may miss the session."""
        if now >= self._patience:
            self._patience = float("inf")
            for _, enrolment in self._roster.taking_part(self._line):
                if not (enrolment.required or enrolment.staged or enrolment.out):
                    enrolment.out = f"was not staged {self._config.relay_patience_s:g} s after the others"
            self._coordinator.staged_below(now)

    @property
    def next_deadline(self) -> float:
        """When `tick` has something to do."""
        return self._patience

    def _failed(self, store: Downstream, enrolment: Enrolment, message: wire.Failed, now: float) -> None:
        enrolment.out = message.message
        log.warning("store %s cannot stage: %s", store.name, message.message)
        if enrolment.catch_up:
            self._roster.take(store, self._line)
        elif enrolment.required and self._session is not None:
            text = f"store {store.name}: {message.message}"
            refusal = PushRefused(message.code, text, message.tensors, rank=store.name, retryable=message.retryable)
            self._coordinator.abort(self._session, refusal, now)
        else:
            self._coordinator.staged_below(now)

    def _enrol(self, store: Downstream, session: "PushSession") -> None:
        assert self._stream is not None
        intent = session.intent
        caught_up = session.role is Role.CATCH_UP  # whoever has it above does not wait for those below
        required = self._members.complete(store) and not self._quorum and not caught_up
        enrolment = Enrolment(session.id, self._stream, self._slots.arena.slot(session.slot), required)
        enrolment.digest = session.digest
        port, key = self._roster.give(store, self._line, enrolment)
        stage = wire.Stage(
            *(session.id, intent.run_id, intent.version, intent.in_flight, intent.client),
            digest=session.expected or enrolment.digest,
            quorum=self._quorum or caught_up,
            data_port=port,
            data_key=key,
            adapter=self._adapter,
            merged=intent.source == "merge" or intent.merged or self._history.is_merged(session.expected),
        )
        self._roster.send(store, stage)

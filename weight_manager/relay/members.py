"""The stores below: who has joined, what each holds, and who may serve until when. Steps: relay/messages.py.

One for all lines: a store that lacks the live version of any, or has one too many, may not serve. What a line's
sessions ask of them: downstreams.py.
"""

import hmac
import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from weight_manager.config import StoreConfig
from weight_manager.history import History
from weight_manager.layout import Layout
from weight_manager.relay import messages as wire
from weight_manager.relay.lease import Lease
from weight_manager.relay.messages import FromBelow, Holdings
from weight_manager.relay.roster import Downstream, Roster

if TYPE_CHECKING:
    from weight_manager.coordinator import Coordinator  # which is made after us
    from weight_manager.relay.downstreams import Downstreams

log = logging.getLogger(__name__)


class Members:
    """Nobody, unless a router is bound.

    live: what is live here. lines: all lines of versions, the model's first.
    """

    def __init__(self, config: StoreConfig, layout: Layout, *, history: History, lease: Lease | None) -> None:
        """layout, history: of the model. lease: our own, from above; None at the root."""
        self._config = config
        self._layout = layout
        self._history = history
        self._lease = lease
        self._held: dict[str, tuple[bytes, wire.Join]] = {}
        self._last_lives: dict[str, float] = {}  # stores that were lost, back or not -> until when they had a lease
        self.roster = Roster(history.saved.members, config.relay_lease_s)
        self.live: Callable[[], Holdings] = Holdings
        self.lines: Callable[[], Iterable[Coordinator]] = tuple

    @property
    def wanted(self) -> bool:
        """Whether stores may join at all."""
        return self.roster.router is not None

    def complete(self, store: Downstream) -> bool:
        """Whether a store holds what is live here, all of it and nothing else."""
        return store.holds.model is not None and store.holds == self.live()

    def serving(self, now: float) -> bool:
        """Whether a store below may be."""
        return any(
            until > now for until in (*(k.serves_until for k in self.roster.all()), *self.roster.absent.values())
        )

    def serves_until(self, name: str) -> float:
        """Until when a store may serve if it hears nothing more."""
        store = self.roster.named(name)
        return store.serves_until if store else self.roster.absent.get(name, 0.0)

    def beginning(self, adapter: str, now: float) -> dict[str, float]:
        """Stores that may begin sequences under an adapter's name -> until when. One that is away may; and one that has
        come back does not know what those below it do under the lease of its last life.
        """
        times = self.roster.absent | self._last_lives
        for store in self.roster.all():
            if adapter in store.beginning:
                times[store.name] = max(store.serves_until, times.get(store.name, 0.0))
        return {name: until for name, until in times.items() if until > now}

    def unloaded(self, adapter: str) -> None:
        """Note that an adapter is live here no more; stores below unload it."""
        for store in self.roster.all():
            store.beginning |= {adapter}  # until it says otherwise
            self._keep_live(store)

    def offer(self, store: Downstream) -> None:
        """A session of some line has come to nothing: its name may stand for another line, of another shape."""
        for line in self._lines():
            line.offer(store)

    def drop(self, name: str, why: str) -> None:
        """A store did not answer: it must join again."""
        store = self.roster.named(name)
        if store is not None:
            self.roster.send(store, wire.NotJoined(f"store {name} {why}; join again"))
            self._remove(store, why, absent=True)

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
                self._beat(store, message, now)
            case wire.Holds():
                for line in self._lines():  # two have the name of an adapter that is about to change its shape
                    line.caught_up(store, message)
            case wire.Leave():
                if not message.serving:
                    store.serves_until = 0.0
                self._remove(store, "has stopped")
            case _:
                if isinstance(message, wire.Over) and message.fenced:
                    store.serves_until = 0.0
                for line in self._lines():
                    line.take(store, message, now)

    def malformed(self, peer: bytes, why: str) -> None:
        """Turn away who sent what cannot be read, or has not joined."""
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
        self._last_lives = {name: until for name, until in self._last_lives.items() if until > now}
        for line in self._lines():
            line.tick(now)
        if self._held and self._settled:
            held, self._held = self._held, {}
            for peer, join in held.values():
                self._join(peer, join, now)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do."""
        times = [0.0 if store.deaf else store.seen + self._config.relay_lease_s for store in self.roster.all()]
        return min([*times, *(line.next_deadline for line in self._lines())], default=None) if times else None

    def status(self, now: float) -> dict[str, Any]:
        """What the API shows of each store below."""
        live = self.live()
        return {store.name: store.status(live, now) for store in self.roster.all()}

    def _lines(self) -> "list[Downstreams]":
        return [coordinator.below for coordinator in self.lines()]

    @property
    def _settled(self) -> bool:
        """Whether it is known what is live of the model: no commit is in question."""
        return next((coordinator.settled for coordinator in self.lines()), True)

    def _beat(self, store: Downstream, beat: wire.Beat, now: float) -> None:
        store.beginning = frozenset([*beat.holds.adapters, *beat.leaving])
        if beat.holds.adapters.keys() - self.live().adapters.keys():
            self._keep_live(store)
        elif beat.holds == store.holds:  # else one of us has news for the other
            self.roster.send(store, wire.Lease(beat.seq, self._grant(store, now)))

    def _keep_live(self, store: Downstream) -> None:
        """Have a store unload what is not live here, if it is known here what is."""
        if self._lease is not None and self._lease.closed:
            return
        names = list(self.live().adapters)
        for name in sorted(store.holds.adapters.keys() - set(names)):
            store.holds = store.holds.having(name, None)
        self.roster.send(store, wire.Adapters(names))

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
        if self._settled:
            self._welcome(peer, join, now)
        else:
            self._held[join.store] = peer, join

    def _welcome(self, peer: bytes, join: wire.Join, now: float) -> None:
        store = self.roster.of_peer(peer)
        if store is None:
            store = self._add(peer, join, now)
            if store is None:
                return
        else:  # it has lost track: of what it takes part in we know more
            running = {name for name, enrolment in store.enrolments.items() if not enrolment.out}
            for name in sorted({"", *store.holds.adapters, *join.holds.adapters} - running):
                store.holds = store.holds.having(name, join.holds.of(name))
        lines = self._lines()
        sessions = [enrolment.session for enrolment in store.enrolments.values() if not enrolment.out]
        undecided = [session for line in lines if (session := line.undecided(store))]
        self.roster.send(store, wire.Joined(self.live(), self._config.relay_lease_s, sessions, undecided))
        for line in lines:
            line.admit(store)

    def _add(self, peer: bytes, join: wire.Join, now: float) -> Downstream | None:
        namesake = self.roster.named(join.name)
        if namesake is not None and namesake.id != join.store:  # their votes would count as one
            self._refuse(peer, join, f"another store is called {join.name}")
            return None
        try:  # before it is given a lease: should we crash, the next life waits for that
            self._history.remember([*self.roster.names(), join.name])
        except OSError as error:
            self._refuse(peer, join, f"the store above cannot write down who has joined: {error}")
            return None
        store = Downstream(join.store, join.name, peer, join.holds, now, beginning=frozenset(join.holds.adapters))
        self.roster.add(store)
        log.info("store %s has joined", store.name, extra={"holds": join.holds.model and join.holds.model.version})
        return store

    def _remove(self, store: Downstream, why: str, *, absent: bool = False) -> None:
        """absent: it may still be serving, until its lease runs out."""
        self.roster.remove(store)
        self._last_lives[store.name] = store.serves_until
        try:
            self._history.remember(self.roster.names())
        except OSError as error:  # who is written down and gone is waited for once, should we crash
            log.error("who has left cannot be written down: %s", error)
        log.warning("store %s %s", store.name, why)
        now = time.monotonic()
        for line in self._lines():
            line.lost(store, why, now, absent=absent)

    def _grant(self, store: Downstream, now: float) -> float:
        if store.behind or not self.complete(store):
            return 0.0
        if any(line.excludes(store) for line in self._lines()):
            return 0.0  # the commit that runs does not wait for a lease that is given now
        seconds = self._config.relay_lease_s
        if self._lease is not None:
            seconds = max(0.0, min(seconds, self._lease.left_s - 0.05))
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

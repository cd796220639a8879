"""Rank 0's side of the weight store's protocol: registering, commits, and the truth after a lost store.

`take` accepts messages in their order, `next_order` turns the first one that needs the ranks into an order
when none is under way, `settled` reports an order's outcome. A vote binds us for as long as the store may take to
say flip; it is taken back with the connection, or `hold_s` past that time. Between a flip that went well and the
store's last word the loop holds: it neither serves the old version nor the new one. The word is bounded: past
`hold_s` we register again, and `Registered.live` tells whether the commit happened; with no store at all
for `unknown_s` we go back to the version before, under its own name, which the slot's write epoch guards.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from rollout_client.protocol import InFlight
from weight_manager import messages as store
from weight_manager.life import State
from weight_manager.messages import Live
from worker.adapter_membership import AdapterMembership
from worker.lifecycle import Event, Lifecycle, WorkerState
from worker.orders import Actions, Order, Phase, Signal, Verdict
from worker.scheduler import Scheduler
from worker.versions import Version, same

log = logging.getLogger(__name__)

_REGISTER_AGAIN_S = 2.0
"""Seconds between two tries of a registration that nobody answered."""
_FLIPS = 8
"""How many of the last commits' waits for their flip are kept: they tell how long the next may take."""
_ARRIVING_S = 0.1
"""So long after the last that was heard of a version, more of it is expected."""
_FORGOTTEN_S = 0.1
"""Seconds until a replica registers again with a store that does not know it any more."""


@dataclass
class Session:
    """The commit that this replica takes part in."""

    id: str
    live: Live
    in_flight: InFlight
    deadline: float
    state: State = State.SEALED  # of SEALED to DOUBT, as far as this replica has come
    held_since: float = 0.0
    began: float = 0.0
    voted: float = 0.0  # when it was READY
    still_since: float = float("inf")  # since when no step has run because of it, though there is something to run
    regions: bytes = b""  # as in `Prepare`
    stall: float | None = None  # as the store was told it when its last word came, beside a step

    @property
    def waits(self) -> bool:
        """Whether it waits for what runs to end, before the ranks are told to prepare."""
        return self.state is State.SEALED

    @property
    def holds(self) -> bool:
        """Told to flip: neither version is served until the last word. DOUBT: the store was asked what is live."""
        return self.state in (State.FLIPPING, State.DOUBT)


class Membership:
    """Rank 0's side of a replica's membership: what the store is told of it, and what the store wants becomes
    orders.
    """

    def __init__(
        self,
        replica: int,
        pids: list[int],
        layout_digest: str,
        *,
        actions: Actions,
        lifecycle: Lifecycle,
        scheduler: Scheduler,
        adapters: AdapterMembership,
        send: Callable[[store.FromReplica], bool],
        hold_s: float,
        unknown_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.known: Live | None = None  # what the store says is live
        self.serving: Live | None = None  # what the ranks are bound to, as far as it is final
        self.arena_path = ""
        self.session: Session | None = None
        self.stalls: list[float] = []  # seconds, since last taken
        self.until_flips: deque[float] = deque(maxlen=_FLIPS)  # seconds from a vote to its flip, newest last
        self.registered = False
        self._me = store.Register(
            *(replica, pids, layout_digest), copies_ahead=actions.copies_ahead, adapters_ahead=actions.adapters_ahead
        )
        self._actions = actions
        self._lifecycle = lifecycle
        self._scheduler = scheduler
        self._adapters = adapters
        self._send = send
        self._hold_s = hold_s
        self._unknown_s = unknown_s
        self._clock = clock
        self._queue: deque[store.ToReplica] = deque()
        self._orders: deque[Order] = deque()
        self._arriving_until = 0.0  # the next version's bytes
        self._moved = False  # the store has another arena than the one we map
        self._going_back = False  # a flip is taken back, which the ranks have not been told: another order is under way
        self._beat_s = 0.0
        self._next_beat = 0.0
        self._next_register: float | None = None

    @property
    def holding(self) -> bool:
        """Flipped, and waiting for the store's last word, or for the ranks to go back: no step may run."""
        return self._going_back or (self.session is not None and self.session.holds)

    @property
    def draining(self) -> bool:
        """A commit waits until nothing runs."""
        return self.session is not None and self.session.in_flight == "wait" and not self.session.holds

    @property
    def next_deadline(self) -> float | None:
        """When `advance` has something to do at the latest."""
        times = [self._next_register] if self._next_register is not None else []
        if self.registered and self._beat_s:
            times.append(self._next_beat)
        session = None if self._queue else self.session
        if session and session.holds:
            limit = self._unknown_s if session.state is State.DOUBT else self._hold_s
            times.append(session.held_since + limit)
        elif session and not session.waits:
            times.append(session.deadline + self._hold_s)
        elif session and self.draining:
            times.append(session.deadline)
        return min(times, default=None)

    def register(self) -> None:
        """Say who we are; said again until it is answered."""
        self.registered = False
        self._next_register = self._clock() + _REGISTER_AGAIN_S
        self._send(msgspec.structs.replace(self._me, adapters=self._adapters.held))

    def store_down(self) -> None:
        """The connection broke. Nothing is registered any more; serving goes on.

        A vote is taken back, or a commit that waited would keep requests out for as long as there is no store. A flip
        that comes all the same is answered with no.
        """
        self.registered = False
        self._next_register = None
        self._adapters.store_down()
        if self.session and not self.session.holds:
            self._undo(self.session)

    def take(self, message: store.ToReplica) -> None:
        """A message of the store, in order. Those about adapters do not wait until an order is over."""
        if isinstance(message, store.Registered):
            self._adapters.registered(message.adapters)
            self._orders = deque(order for order in self._orders if order.signal is not Signal.RELOAD)  # said anew
        if not self._adapters.take(message):
            self._queue.append(message)

    def advance(self) -> None:
        """Time passes: beats, repeated registrations, and the two limits of a hold."""
        now = self._clock()
        if self._next_register is not None and now >= self._next_register:
            self.register()
        if self.registered and self._beat_s and now >= self._next_beat:
            self.beat()
        session = self.session
        if session is None or self._queue:  # what the store has said comes first: it may be the word
            return
        if session.state is State.FLIPPING and now >= session.held_since + self._hold_s:
            log.warning("no word from the store %g s after the flip; asking what is live", self._hold_s)
            session.state = State.DOUBT
            self.register()
        elif session.holds and now >= session.held_since + self._unknown_s and not self._orders:
            log.error("no store for %g s after the flip; back to the version before", self._unknown_s)
            self._undo(session)
        elif not session.holds and not session.waits and now >= session.deadline + self._hold_s:
            log.warning("no word from the store %g s after it had to say flip; asking what is live", self._hold_s)
            self._undo(session)
            self.register()
        elif self.draining and session.waits and now >= session.deadline:
            self.session = None
            running = self._scheduler.running
            self._send(store.Prepared(session.id, False, 0, f"{running} sequences still run at the deadline"))

    def leave(self) -> None:
        """The ranks end after this tick, as they were told to."""
        if self.registered:
            self._send(store.Leaving())

    def beat(self) -> None:
        """Tell the store that the loop turns."""
        self._next_beat = self._clock() + self._beat_s
        live = self._actions.live
        self._send(store.Beat(live.epoch, live.digest) if live else store.Beat(0, ""))

    def next_order(self) -> Order | None:
        """The next thing all ranks have to do for the store. Call only when no order is under way."""
        while not self._orders and self._queue:
            self._handle(self._queue.popleft())
        if self._lifecycle.state is WorkerState.STARTING and not self._adapters.complete:
            if self._adapters.problem:
                self._refuse_to_prepare(f"it cannot serve: {self._adapters.problem}")
            return None  # nothing is served before everything that is live is held
        session = self.session
        if not self._orders and session and session.waits and not (self.draining and self._scheduler.running):
            return self._preparing(session)
        if not self._orders:
            return None
        order = self._orders.popleft()
        self._going_back &= order.phase is not Phase.ROLLBACK
        return order

    def arrives(self) -> None:
        """Part of the next version is on its way; its `Prepare` is expected. Any thread may say it."""
        self._arriving_until = self._clock() + _ARRIVING_S

    @property
    def expects(self) -> bool:
        """A version is arriving, or its commit is under way: the store is heard of while a step is computed."""
        session = self.session
        if session is None or session.state is State.DOUBT or session.stall is not None:
            return self._clock() < self._arriving_until
        return True

    @staticmethod
    def beside_steps(message: store.ToReplica) -> bool:
        """Whether a message may be acted on while a step is computed, to which it is nothing."""
        match message:
            case store.InPlace():
                return not message.adapter
            case store.Prepare():
                return message.adapter is None and message.in_flight != "wait"
            case _:
                return False

    def next_beside(self) -> Order | None:
        """As `next_order`, of what goes with a step under way; None where something else comes first."""
        if self._orders or self._lifecycle.state is not WorkerState.SERVING:
            return None
        while self._queue and self.beside_steps(self._queue[0]):
            self._handle(self._queue.popleft())
        session = self.session
        return self._preparing(session) if session and session.waits and not self.draining else None

    def flips_next(self, message: store.ToReplica) -> bool:
        """Whether it says to flip to what was voted for, and nothing comes before. Then it is taken: the next order is
        to flip.
        """
        session = self.session
        if not isinstance(message, store.Flip) or session is None or self._queue or self._orders:
            return False
        if session.id != message.session or session.state is not State.READY:
            return False
        self._on_flip(message)
        return True

    def is_last_word(self, message: store.ToReplica) -> bool:
        """Whether it says that the version that the ranks have flipped to is live."""
        session = self.session
        if not isinstance(message, store.Finalize) or message.adapter or session is None:
            return False
        return session.holds and session.id == message.session

    def answer_last_word(self) -> None:
        """While a step is computed: if it is the next thing that the store has said, say so. It is acted on later."""
        session = self.session
        if session is None or session.stall is not None or self._orders or not self._queue:
            return
        if self.is_last_word(self._queue[0]):
            session.stall = self._stall(session)
            self._send(store.Finalized(session.id, session.stall * 1000))

    def settled(self, order: Order, verdict: Verdict) -> None:
        """Tell the store how an order of ours went."""
        session = self.session
        match order.signal, order.phase:
            case Signal.RELOAD, _:
                live = order.live
                assert live is not None
                if verdict.ok:
                    self.mapped(live)
                else:
                    log.error("cannot map version %d: %s", live.version, verdict.error)
                    self._next_register = self._clock() + _REGISTER_AGAIN_S
                self._send(store.Adopted(live.epoch, verdict.ok, verdict.rank, verdict.error))
            case Signal.UPDATE, Phase.PREPARE if session and session.id == order.session:
                session.state, session.voted = State.READY, self._clock()
                if not verdict.ok:
                    self.session = None
                answer = store.Prepared(session.id, verdict.ok, verdict.rank, verdict.error, verdict.tensors)
                self._send(answer)
            case Signal.UPDATE, Phase.FLIP if session and session.id == order.session:
                if not verdict.ok:
                    self.session = None
                self._send(store.Flipped(session.id, verdict.ok, verdict.rank, verdict.error, verdict.tensors))
            case _:
                pass

    def mapped(self, live: Live) -> None:
        """Every rank is bound to `live`, and the store says so too."""
        self.known = self.serving = live
        self._moved = False
        self._lifecycle.apply(Event.MAPPED, f"version {live.version}")

    def lost_slot(self) -> None:
        """What we serve is being overwritten: the store went on without us. Ask it what is live."""
        self._lifecycle.apply(Event.LOST, "the store gave our slot to another version while we stood still")
        self.register()

    def _preparing(self, session: Session) -> Order:
        session.state = State.PREPARING
        return Order(Signal.UPDATE, Phase.PREPARE, session=session.id, live=session.live, regions=session.regions)

    def _handle(self, message: store.ToReplica) -> None:
        match message:
            case store.Registered():
                self._on_registered(message)
            case store.Adopt():
                self._adopt(message.live)
            case store.InPlace():
                self.arrives()
                self._actions.hear(message)
            case store.Prepare():
                self._on_prepare(message)
            case store.Flip():
                self._on_flip(message)
            case store.Finalize():
                self._on_finalize(message)
            case store.Rollback():
                if self.session and self.session.id == message.session:
                    log.warning("commit of version %d undone: %s", self.session.live.version, message.reason)
                    self._undo(self.session)
                self._send(store.RolledBack(message.session))
            case store.Refused():
                log.warning("the store refuses: %s", message.message)
                if self._next_register is None:
                    wait = _FORGOTTEN_S if self.registered else _REGISTER_AGAIN_S
                    self._next_register = self._clock() + wait

    def _on_registered(self, message: store.Registered) -> None:
        self.registered = True
        self._next_register = None
        self._beat_s = message.beat_s
        self._moved |= message.arena_path != self.arena_path
        self.arena_path = message.arena_path
        session = self.session
        if session and message.live and session.holds and same(message.live, session.live):
            self._conclude(session)
        elif session:
            self._undo(session)
        if message.live:  # after the order that ends the session, if there was one
            self._queue.appendleft(store.Adopt(message.live))

    def _refuse_to_prepare(self, why: str) -> None:
        """Vote no at once, where the ranks would never be asked: in silence a push ends at its deadline."""
        asked = [message for message in self._queue if isinstance(message, store.Prepare)]
        self._queue = deque(message for message in self._queue if not isinstance(message, store.Prepare))
        for message in asked:
            self._send(store.Prepared(message.session, False, 0, why))

    def _adopt(self, live: Live) -> None:
        """Map `live`, unless every rank holds it already or holds nothing on purpose."""
        self.known = live
        holds = self._actions.live
        current = holds is not None and same(holds, live) and not self._moved
        if "weights" in self._actions.released or (current and self._lifecycle.state is not WorkerState.STARTING):
            self._send(store.Adopted(live.epoch))
        else:
            self._orders.append(
                Order(Signal.RELOAD, Phase.MAP, live=live, arena_path=self.arena_path, tags=("weights",))
            )

    def _on_prepare(self, message: store.Prepare) -> None:
        if self.session and self.session.id == message.session:
            return  # said twice
        text = ""
        if self.session:
            text = f"session {self.session.id} is not over"
        elif (
            message.in_flight == "wait" and self._scheduler.running and self._lifecycle.state is not WorkerState.SERVING
        ):
            text = f"{self._scheduler.running} sequences stand still ({self._lifecycle.state.value}) and cannot finish"
        policy = message.in_flight
        if text or policy == "finish":
            text = text or "sequences finish on their version under an adapter only"
            self._send(store.Prepared(message.session, False, 0, text))
            return
        now = self._clock()
        still = now if self._scheduler.running else float("inf")
        self.session = Session(
            *(message.session, message.live, policy, now + message.deadline_s),
            began=now,
            still_since=still,
            regions=message.regions,
        )

    def _on_flip(self, message: store.Flip) -> None:
        session = self.session
        if session is not None and session.id == message.session and session.holds:
            return  # said twice
        if session is None or session.id != message.session or session.state is not State.READY:
            self._send(store.Flipped(message.session, False, 0, "nothing is prepared for this session"))
            return
        session.state, session.held_since = State.FLIPPING, self._clock()
        self.until_flips.append(session.held_since - session.voted)
        self._orders.append(Order(Signal.UPDATE, Phase.FLIP, session=session.id, live=session.live))

    def _on_finalize(self, message: store.Finalize) -> None:
        if self.session and self.is_last_word(message):
            session, told, stall = self.session, self.session.stall is not None, self._stall(self.session)
            self._conclude(session)
            if not told:
                self._send(store.Finalized(session.id, stall * 1000))
        else:  # we had gone back: what is live is not what we serve
            log.warning("a commit of session %s that we are not in; asking what is live", message.session)
            self.register()

    def _conclude(self, session: Session) -> None:
        """Serve the session's version for good: the store has recorded it."""
        self._orders.append(Order(Signal.UPDATE, Phase.FINALIZE, session=session.id, live=session.live))
        self.stalls.append(self._stall(session))
        self.session = None
        self.known = session.live
        if "weights" not in self._actions.released:
            update_sequences(self._scheduler, session.in_flight, Version.of(session.live))
            self.mapped(session.live)

    def _stall(self, session: Session) -> float:
        if session.stall is not None:
            return session.stall
        return self._clock() - min(session.held_since, session.still_since)

    def _undo(self, session: Session) -> None:
        """Serve what was live before the session."""
        self._going_back |= session.holds
        self._orders.append(Order(Signal.UPDATE, Phase.ROLLBACK, session=session.id))
        self.session = None


def update_sequences(scheduler: Scheduler, policy: InFlight, weights: Version) -> None:
    """New weights are final: what becomes of sequences that run. "keep" goes on with old KV, "recompute" computes it
    again from the tokens, "abort" ends what has begun (the queue stays); "wait" has drained them, and does as "keep".
    """
    if policy == "abort":  # before the version moves: an empty output belongs to the weights it waited under
        scheduler.abort_begun()
    scheduler.enter(weights, recompute=policy == "recompute")

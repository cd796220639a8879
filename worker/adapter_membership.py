"""Rank 0's side of adapters: which versions the ranks hold, and which of them each name stands for.

A commit: `Prepare` -> all ranks map and prove the version beside those they have, and vote -> `Finalize`: the name
stands for the new epoch from the next step on, which is a change of a table on rank 0 alone and cannot fail. So no
output is held. Sequences that stay on the version they began with keep it here until the last of them has ended.
What is live as a whole comes with `Registered` and `Adapters`: this replica makes it so, and serves nothing before.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from rollout_client.protocol import AdapterInFlight
from weight_manager import messages as store
from weight_manager.ballot import NEVER
from weight_manager.life import State
from weight_manager.messages import HeldAdapter, LiveAdapter
from worker.lifecycle import Lifecycle, WorkerState
from worker.orders import Order, Phase, Signal, Verdict
from worker.scheduler import Scheduler
from worker.versions import Version, same

log = logging.getLogger(__name__)

_ASK_AGAIN_S = 2.0
"""Seconds until what is live is tried again, after a live version could not be held."""


@dataclass
class AdapterSession:
    """A commit of one adapter's version that this replica takes part in."""

    id: str
    adapter: LiveAdapter
    in_flight: AdapterInFlight
    deadline: float
    state: State = State.SEALED  # of SEALED, PREPARING and READY
    quick: bool = False  # the ranks prepare it between two steps, in milliseconds
    voted_at: float = 0.0


class AdapterMembership:
    """What this replica holds of adapters, and what it owes the store for them."""

    def __init__(
        self,
        scheduler: Scheduler,
        lifecycle: Lifecycle,
        *,
        send: Callable[[store.FromReplica], bool],
        ask: Callable[[], None],
        is_quick: Callable[[LiveAdapter], bool],
        hold_s: float,
        clock: Callable[[], float],
    ) -> None:
        """ask: have the store say again what is live. is_quick: whether the ranks prepare it in milliseconds."""
        self.live: dict[str, LiveAdapter] = {}
        self._scheduler = scheduler
        self._lifecycle = lifecycle
        self._send = send
        self._ask = ask
        self._is_quick = is_quick
        self._hold_s = hold_s
        self._clock = clock
        self._held: dict[int, LiveAdapter] = {}  # on every rank
        self._wanted: dict[str, LiveAdapter] = {}  # said to be live, and not held yet
        self._sessions: dict[str, AdapterSession] = {}
        self._owed: dict[int, str] = {}  # sessions that wait for a version that was recorded without us, by its epoch
        self._untold = False  # what is held or live has changed since the store heard of it
        self._error = ""
        self._ask_at: float | None = None  # a version that is live could not be held: perhaps another one is by then
        self._registered = False
        self._arriving: dict[str, store.InPlace] = {}  # by adapter, what the ranks have not been told yet

    @property
    def complete(self) -> bool:
        """Everything that the store says is live is live here."""
        return not self._wanted

    @property
    def problem(self) -> str:
        """Why a version that is live could not be held, the last time that it was tried; "" = all could."""
        return self._error

    @property
    def held(self) -> list[HeldAdapter]:
        """Every version that the ranks hold."""
        return [HeldAdapter(epoch, a.arena_path, a.live.slot) for epoch, a in self._held.items()]

    @property
    def next_deadline(self) -> float | None:
        """When `advance` has something to do at the latest."""
        times = [s.deadline if s.state is State.SEALED else s.deadline + self._hold_s for s in self._sessions.values()]
        if self._ask_at is not None:
            times.append(self._ask_at)
        return min(times, default=None)

    def settles_by(self, patience_s: float) -> float:
        """A step begun before then would keep a commit waiting that is nearly through: one that the ranks prepare, or
        have voted on no longer than patience_s ago. 0 without one.
        """
        sessions = self._sessions.values()
        times = [NEVER for s in sessions if s.state is State.PREPARING and s.quick]
        times += [s.voted_at + patience_s for s in sessions if s.state is State.READY]
        return max(times, default=0.0)

    def take(self, message: store.ToReplica) -> bool:
        """A message of the store, in order; False if it is not about an adapter."""
        match message:
            case store.Prepare() if message.adapter is not None:
                self._on_prepare(message, message.adapter)
            case store.Finalize() if message.adapter:
                self._on_finalize(message)
            case store.Rollback() if message.session in self._sessions:
                self._undo(self._sessions[message.session], message.reason)
                self._say_held()  # first: the slot is the next push's once all have gone back, unless it is read
                self._send(store.RolledBack(message.session))
            case store.InPlace() if message.adapter:
                self._arriving[message.adapter] = _together(self._arriving.get(message.adapter), message)
            case store.Adapters():
                self.reconcile(message.live)
            case _:
                return False
        return True

    def reconcile(self, live: list[LiveAdapter]) -> None:
        """Make this, and nothing else, what is live here. What is held under an epoch that is another version's now, as
        the store has begun without its history, is served no more; what computes with it ends as far as it is.
        """
        names, stale = {adapter.name for adapter in live}, {a.live.epoch for a in live if self._names_another(a)}
        for name in [n for n, a in self.live.items() if n not in names or a.live.epoch in stale]:
            del self.live[name]
            self._scheduler.adapter_gone(name)
            self._untold = True
        if stale:
            log.warning("versions of adapters are held under epochs that are others' now: what computes with them ends")
            self._scheduler.abort_adapters(stale)
        self._wanted = {a.name: a for a in live if a.name not in self.live or not same(self.live[a.name].live, a.live)}
        coming = {adapter.live.epoch for adapter in self._wanted.values()}
        self._owed = {epoch: session for epoch, session in self._owed.items() if epoch in coming}
        self._ask_at = None
        self._untold |= bool(self._held)
        self._adopt()

    def registered(self, live: list[LiveAdapter]) -> None:
        """The store has taken this replica in: commits that were under way are not, and this is live."""
        for session in list(self._sessions.values()):
            self._undo(session, "registered anew")
        self._registered = True
        self.reconcile(live)

    def store_down(self) -> None:
        """Nothing comes of what is under way; what is live is served on."""
        for session in list(self._sessions.values()):
            self._undo(session, "the store is gone")
        self._registered = False

    def advance(self) -> None:
        """Time passes; and the store hears of what has changed."""
        now = self._clock()
        for session in list(self._sessions.values()):
            if session.state is State.SEALED and now >= session.deadline:
                running = self._scheduler.adapter_running(session.adapter.name)
                self._undo(session, "drained too slowly")
                text = f"{running} sequences of {session.adapter.name} still run at the deadline"
                self._send(store.Prepared(session.id, False, 0, text))
            elif session.state is State.READY and now >= session.deadline + self._hold_s:
                self._undo(session, "no word from the store")
                self._ask()
        if self._ask_at is not None and now >= self._ask_at:
            self._ask_at = None
            self._ask()
        self._say_held()

    def _say_held(self) -> None:
        if self._untold and self._registered:
            epochs = {name: adapter.live.epoch for name, adapter in self.live.items()}
            self._untold = not self._send(store.AdaptersHeld(epochs, self.held, self._error))

    def overwritten(self, epochs: set[int]) -> None:
        """The store has given away the slots of these: it was started again, and did not know who held what. Sequences
        that stayed on one that is live no more end as far as they are, or every step would be thrown away for them. Of
        one that is live still, `registered` brings the version that came after it.
        """
        live = {adapter.live.epoch for adapter in self.live.values()}
        if lost := (epochs & self._held.keys()) - live:
            log.warning("versions of adapters were overwritten while sequences stayed on them: these end")
            self._scheduler.abort_adapters(lost)

    def next_order(self) -> Order | None:
        """The next thing that all ranks have to do. Call only when no order is under way."""
        idle = self._idle_epoch()
        if idle is not None:
            del self._held[idle]
            self._untold = True
            return Order(Signal.ADAPTER, Phase.FORGET, epoch=idle)
        for session in list(self._sessions.values()):
            waits = session.in_flight == "wait" and self._scheduler.adapter_running(session.adapter.name)
            if session.state is State.SEALED and self._names_another(session.adapter):
                why = f"epoch {session.adapter.live.epoch} still names another version, which is computed with"
                self._undo(session, why)
                self._send(store.Prepared(session.id, False, 0, why))
            elif session.state is State.SEALED and not waits:
                session.state, session.quick = State.PREPARING, self._is_quick(session.adapter)
                return Order(Signal.ADAPTER, Phase.PREPARE, session=session.id, adapter=session.adapter)
        for name in self._arriving:
            return Order(Signal.ADAPTER, Phase.TAKE_IN, in_place=self._arriving.pop(name))
        if self._ask_at is None:
            for adapter in self._wanted.values():
                return Order(Signal.ADAPTER, Phase.PREPARE, adapter=adapter)
        return None

    def settled(self, order: Order, verdict: Verdict) -> None:
        """All ranks have prepared a version, or one could not."""
        adapter, session = order.adapter, self._sessions.get(order.session)
        assert adapter is not None
        if verdict.ok:
            self._held[adapter.live.epoch] = adapter
            self._untold |= session is None  # a yes says it too, and the end of its commit comes soon
        if session is not None:
            session.state, session.voted_at = State.READY, self._clock()
            if not verdict.ok:
                self._undo(session, verdict.error)
            self._send(store.Prepared(session.id, verdict.ok, verdict.rank, verdict.error, verdict.tensors))
        elif not order.session and not verdict.ok:
            self._error = f"rank {verdict.rank} cannot map adapter {adapter.name}: {verdict.error}"
            log.error("%s", self._error)
            self._ask_at, self._untold = self._clock() + _ASK_AGAIN_S, True
        self._adopt()

    def _on_prepare(self, message: store.Prepare, adapter: LiveAdapter) -> None:
        self._arriving.pop(adapter.name, None)  # what is missing is taken in with the rest
        if message.session in self._sessions:
            return  # said twice
        running = self._scheduler.adapter_running(adapter.name)
        if message.in_flight == "wait" and running and self._lifecycle.state is not WorkerState.SERVING:
            text = f"{running} sequences stand still ({self._lifecycle.state.value}) and cannot finish"
            self._send(store.Prepared(message.session, False, 0, text))
            return
        deadline = self._clock() + message.deadline_s
        self._sessions[message.session] = AdapterSession(message.session, adapter, message.in_flight, deadline)
        if message.in_flight == "wait":
            self._scheduler.hold_adapter(adapter.name, True)

    def _on_finalize(self, message: store.Finalize) -> None:
        session = self._sessions.get(message.session)
        began = self._clock()
        if session is not None and session.state is State.READY:
            self._flip(session.adapter, session.in_flight)
            self._end(session)
        elif message.adapter in self._wanted and self._wanted[message.adapter].live.epoch == message.epoch:
            self._owed[message.epoch] = message.session  # we registered after the vote: said once it is live here
            return
        elif self._epoch(message.adapter) != message.epoch:  # we had gone back: what is live is not what we serve
            log.warning("a commit of adapter %s that we are not in; asking what is live", message.adapter)
            self._ask()
            return
        self._send(store.Finalized(message.session, (self._clock() - began) * 1000))

    def _flip(self, adapter: LiveAdapter, policy: AdapterInFlight) -> None:
        self.live[adapter.name] = adapter
        self._wanted.pop(adapter.name, None)
        self._scheduler.adapter_live(adapter.name, Version.of(adapter.live), policy)
        self._untold = True
        owed = self._owed.pop(adapter.live.epoch, None)
        if owed is not None:
            self._send(store.Finalized(owed, 0.0))

    def _adopt(self) -> None:
        """Make live here what is wanted and has been prepared."""
        for adapter in list(self._wanted.values()):
            held = self._held.get(adapter.live.epoch)
            if held is not None and not self._names_another(adapter):
                self._flip(adapter, "keep")
        if not self._wanted:
            self._error = ""

    def _undo(self, session: AdapterSession, why: str) -> None:
        adapter = session.adapter
        log.warning("commit of version %d of adapter %s undone: %s", adapter.live.version, adapter.name, why)
        self._end(session)

    def _end(self, session: AdapterSession) -> None:
        del self._sessions[session.id]
        self._untold |= session.adapter.live.epoch in self._held
        if session.in_flight == "wait":
            self._scheduler.hold_adapter(session.adapter.name, False)

    def _names_another(self, adapter: LiveAdapter) -> bool:
        """Whether its epoch is held as that of another version."""
        held = self._held.get(adapter.live.epoch)
        return held is not None and (held.name != adapter.name or not same(held.live, adapter.live))

    def _epoch(self, name: str) -> int:
        adapter = self.live.get(name)
        return adapter.live.epoch if adapter is not None else 0

    def _idle_epoch(self) -> int | None:
        """The epoch of a version that nobody needs any more; None = there is none."""
        needed = [*self.live.values(), *self._wanted.values(), *(s.adapter for s in self._sessions.values())]
        idle = self._held.keys() - {a.live.epoch for a in needed if not self._names_another(a)}
        return min(idle - self._scheduler.adapter_epochs(), default=None) if idle else None


def _together(before: store.InPlace | None, new: store.InPlace) -> store.InPlace:
    """What is there of a version, if both speak of the same; else of the newer one."""
    if before is None or msgspec.structs.replace(before, spans=new.spans) != new:
        return new
    return msgspec.structs.replace(new, spans=before.spans + new.spans)

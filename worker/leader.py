"""Rank 0: reads the inbox in its one order, and owes everyone their answer. Which order the ranks get, and whether a
step runs, is decided by what is made here and lives in deciding.py and stepping.py.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection

from weight_manager.messages import ToReplica
from worker import channel
from worker.adapter_membership import AdapterMembership
from worker.calls import Calls
from worker.channel import Channel, Send
from worker.config import WorkerConfig
from worker.deciding import Asker, Deciding
from worker.draining import Draining
from worker.grammar import Grammars
from worker.interrupting import Interrupting
from worker.lifecycle import Event, Lifecycle, WorkerState
from worker.membership import Membership
from worker.messages import (
    Abort,
    CallFailed,
    Chunk,
    Clear,
    Done,
    Drain,
    Generate,
    GetStats,
    Pause,
    Reload,
    ResetPrefixCache,
    Resume,
    StateChanged,
    Stats,
    Verify,
)
from worker.orders import Actions, Order, Phase, Verdict
from worker.pausing import Pausing
from worker.scheduler import Scheduler
from worker.sequence import Line, Telling, span_of
from worker.stats import Subscribers, memory_of, of_scheduler
from worker.stepping import Stepping
from worker.versions import NO_VERSION, Version

log = logging.getLogger(__name__)

_NAMELESS = b"\0"
"""How the names begin that ZMQ's ROUTER gives to connections without one of their own."""
_POLL_WORK_S = 0.002
"""How often background work is asked for while nothing else happens."""


class Admission:
    """Which requests reach the scheduler, and who is owed an answer.

    Requests pass while `is_open()`; otherwise they are held in arrival order, or refused.

    A refusal is a `CallFailed` whose call is the request id: nothing was begun, so it may go elsewhere.
    """

    def __init__(
        self, scheduler: Scheduler, send: Send, is_open: Callable[[], bool], max_held: int, grammars: Grammars
    ) -> None:
        self._refusing = ""  # why everything new is refused; "" = it is not
        self.compiling = False  # somebody waits for a grammar alone: `flush` soon
        self._scheduler = scheduler
        self._send = send
        self._is_open = is_open
        self._max_held = max_held
        self._grammars = grammars
        self._held: deque[tuple[bytes, Generate]] = deque()
        self._owed: dict[bytes, dict[str, int]] = {}  # origin -> request -> sequences without a finish
        self._ended: list[tuple[bytes, list[Chunk]]] = []

    @property
    def held(self) -> int:
        """Requests that wait outside the scheduler."""
        return len(self._held)

    def offer(self, origin: bytes, request: Generate) -> None:
        """Admit, hold or refuse."""
        if self._refusing:
            self._refuse(origin, request, self._refusing)
        elif request.adapter and request.adapter not in self._scheduler.adapters:
            self._send(
                origin, CallFailed(request.request_id, "unknown_adapter", f"no adapter {request.adapter!r} is loaded")
            )
        elif request.request_id in self._owed.get(origin, ()):
            self._refuse(origin, request, f"request id {request.request_id!r} is running")
        elif not self._is_open() and len(self._held) >= self._max_held:
            self._refuse(origin, request, f"{self._max_held} requests are held already")
        else:
            self._owed.setdefault(origin, {})[request.request_id] = request.sampling.n
            self._held.append((origin, request))
            self.flush()

    def flush(self) -> None:
        """Let through what is held, if the door is open. What waits for its grammar keeps nobody else waiting."""
        waiting: list[tuple[bytes, Generate]] = []
        while self._held and self._is_open():
            origin, request = self._held.popleft()
            grammar = self._grammars.look_up(request.sampling.grammar) if request.sampling.grammar else None
            if request.sampling.grammar and grammar is None:
                waiting.append((origin, request))
            else:
                self._scheduler.add(origin, request, grammar)
        self._held.extendleft(reversed(waiting))
        self.compiling = bool(waiting)

    def abort(self, ids: Collection[str] | None, live: Version) -> int:
        """End requests by exact id or all, held ones too. Returns how many."""
        kept: deque[tuple[bytes, Generate]] = deque()
        ended = 0
        for origin, request in self._held:
            if ids is None or request.request_id in ids:
                self._ended.append((origin, self._aborted(request, live)))
                ended += 1
            else:
                kept.append((origin, request))
        self._held = kept
        return ended + self._scheduler.abort(ids)

    def abort_of(self, origin: bytes, live: Version) -> int:
        """End all requests of whoever made this connection, those of its earlier connections too. Returns how many.

        A connection has a name, `api-1-<nonce>`, where several processes of one API ask; without a name it speaks for
        all there is.
        """
        if origin.startswith(_NAMELESS):
            return self.abort(None, live)
        name = origin.rpartition(b"-")[0] + b"-"
        return self.abort([i for other, ids in self._owed.items() if other.startswith(name) for i in ids], live)

    def refuse_from_now(self, why: str) -> None:
        """Take nothing more, and send every held request away: it may go to another replica."""
        self._refusing = why
        while self._held:
            origin, request = self._held.popleft()
            self._owed[origin].pop(request.request_id, None)
            self._refuse(origin, request, why)

    def forget(self, origin: bytes, live: Version) -> int:
        """A connection is gone: end its requests. Returns how many it had."""
        owed = self._owed.pop(origin, {})
        if owed:
            self.abort(owed.keys(), live)
        return len(owed)

    def take_outputs(self) -> dict[bytes, list[Chunk | Line]]:
        """Everything to be sent now, per connection that is still there."""
        outputs = self._scheduler.take_outputs()
        for origin, chunks in self._ended:
            outputs.setdefault(origin, []).extend(chunks)
        self._ended.clear()
        for origin, items in outputs.items():
            for item in items:
                if isinstance(item, Chunk) and item.finish is not None:
                    self._settle(origin, item.request_id)
        return {origin: items for origin, items in outputs.items() if items}

    def _settle(self, origin: bytes, request_id: str) -> None:
        owed = self._owed.get(origin)
        if owed is None or request_id not in owed:
            return
        owed[request_id] -= 1
        if owed[request_id] <= 0:
            del owed[request_id]
        if not owed:
            del self._owed[origin]

    def _aborted(self, request: Generate, live: Version) -> list[Chunk]:
        span = span_of(live, self._scheduler.adapters.get(request.adapter), 0, 0)
        return [Chunk(request.request_id, index, [], [], [span], finish="abort") for index in range(request.sampling.n)]

    def _refuse(self, origin: bytes, request: Generate, why: str) -> None:
        self._send(origin, CallFailed(request.request_id, "conflict", why))


class Leader:
    """What only rank 0 does. The loop calls it; it calls nothing that any other rank has to take part in."""

    def __init__(
        self,
        channel_: Channel,
        scheduler: Scheduler,
        actions: Actions,
        config: WorkerConfig,
        *,
        replica: int,
        pids: list[int],
        layout_digest: str,
        grammars: Grammars,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.lifecycle = Lifecycle(self._on_change)
        self._channel = channel_
        self._scheduler = scheduler
        self._actions = actions
        self._config = config
        self._replica = replica
        self._pids = pids
        self._clock = clock
        send = channel_.send_api
        self.adapters = AdapterMembership(
            scheduler,
            self.lifecycle,
            send=channel_.send_store,
            ask=self._ask_what_is_live,
            is_quick=actions.adapters.is_quick,
            hold_s=config.hold_s,
            clock=clock,
        )
        self.membership = Membership(
            replica,
            pids,
            layout_digest,
            actions=actions,
            lifecycle=self.lifecycle,
            scheduler=scheduler,
            adapters=self.adapters,
            send=channel_.send_store,
            hold_s=config.hold_s,
            unknown_s=config.unknown_s,
            clock=clock,
        )
        self._admission = Admission(scheduler, send, self._is_open, config.max_held, grammars)
        self.pausing = Pausing(self.lifecycle, scheduler, lambda: self._admission.held, send, clock)
        self._calls = Calls(
            actions=actions,
            lifecycle=self.lifecycle,
            membership=self.membership,
            scheduler=scheduler,
            send=send,
            memory=lambda: memory_of(pids),
            clock=clock,
        )
        self._grammars = grammars
        self._telling = Telling()
        self._subscribers = Subscribers(send, config.stats_busy_s, config.stats_idle_s, clock)
        self.stepping = Stepping(
            scheduler,
            actions,
            self.membership,
            self.lifecycle,
            self.adapters,
            admits=self._admits,
            interrupting=Interrupting(lambda: config.give_up_steps and channel_.store_waits, clock),
            clock=clock,
        )
        self._draining = Draining(
            scheduler,
            self._admission.refuse_from_now,
            lambda: self._admission.abort(None, self._live),
            send,
            clock,
        )
        self.deciding = Deciding(
            self._askers,
            beside=lambda: None if self._calls.under_way else self.membership,
            advance=self._advance,
            ended=self._ended,
            settled=self._settled,
            stepping=self.stepping,
            actions=actions,
            heartbeat_s=config.heartbeat_s,
            clock=clock,
        )
        self._announced: Version | None = None
        self._early: deque[ToReplica] = deque()  # of the store, read beside a step

    # receive

    def receive(self) -> None:
        """Wait for messages, or for the next moment at which something is due; take them in order."""
        early, self._early = self._early, deque()
        for waiting in early:  # it was read while a step was computed
            self.membership.take(waiting)
        for incoming in self._channel.receive(0.0 if early else self._timeout()):
            match incoming:
                case channel.FromApi(origin, message):
                    self._take(origin, message)
                case channel.FromStore(from_store):
                    self.membership.take(from_store)
                case channel.StoreUp():
                    self.membership.register()
                case channel.StoreDown():
                    log.warning("the weight store is gone; serving goes on")
                    self.membership.store_down()
                case channel.OriginGone(origin):
                    self._subscribers.remove(origin)
                    self._telling.forget(origin)
                    self.counters["orphaned"] += self._admission.forget(origin, self._live)
                case channel.Terminate():
                    self._drain(None, Drain("", self._config.drain_s))

    def hear_beside(self) -> None:
        """While a step is computed: hear the store, as far as what it says goes with that. Its last word on a version
        is answered, and acted on later.
        """
        self._early += self._channel.receive_store()
        membership = self.membership
        while self._early and (membership.beside_steps(self._early[0]) or membership.is_last_word(self._early[0])):
            membership.take(self._early.popleft())
        membership.answer_last_word()

    def hear_flip(self) -> bool:
        """Whether the store has said to flip, and the ranks do so next. What comes after it has to wait."""
        if not self._early or not self.deciding.free or not self.membership.flips_next(self._early[0]):
            return False
        self._early.popleft()
        self.deciding.hurry = True
        return True

    @property
    def heard_more(self) -> bool:
        """The store has said something that has to wait for the step's end."""
        return bool(self._early)

    def _timeout(self) -> float:
        hurry, self.deciding.hurry = self.deciding.hurry, False
        now = self._clock()  # before what follows looks at it: a moment that comes in between is not overslept
        if hurry or self.stepping.possible:
            return 0.0
        owners = (self.membership, self.adapters, self.pausing, self._draining)
        due = [self.deciding.next_heartbeat, self._subscribers.due, *(t for t in [self.stepping.not_before] if t > now)]
        due += [t for owner in owners if (t := owner.next_deadline) is not None]
        polled = self._actions.work or self.stepping.unjudged or self._admission.compiling
        due += [now + _POLL_WORK_S] if polled else []
        return max(0.0, min(due) - now)

    def _take(self, origin: bytes, message: object) -> None:
        match message:
            case Generate():
                self._generate(origin, message)
            case Abort():
                if message.request_ids is None:
                    ended = self._admission.abort_of(origin, self._live)
                else:
                    ended = self._admission.abort(message.request_ids, self._live)
                self._channel.send_api(origin, Done(message.call, {"aborted": ended}))
            case Pause():
                self.pausing.pause(origin, message)
            case Resume():
                self.pausing.resume(origin, message)
            case Clear() | Reload() | Verify():
                self._calls.take(origin, message)
            case ResetPrefixCache():
                empty = self._scheduler.clear_cache(keep_running=True)
                self._channel.send_api(origin, Done(message.call, {"empty": empty}))
            case GetStats():
                self._subscribers.add(origin)
                # What several listen to is told to all of them at once: each sample to each, and none to one alone.
                self._channel.send_api(origin, self._stats(message.call, samples=self._subscribers.count == 1))
            case Drain():
                self._drain(origin, message)

    def _generate(self, origin: bytes, message: Generate) -> None:
        if self.lifecycle.state is WorkerState.CLEARED and self._config.when_cleared == "refuse":
            text = "parameters or KV are released"
            self._channel.send_api(origin, CallFailed(message.request_id, "conflict", text))
        else:
            self._admission.offer(origin, message)

    # agree: Deciding, with this

    def _advance(self) -> None:
        self.membership.advance()
        self.adapters.advance()
        self.pausing.advance()
        self._admission.flush()
        self.counters["aborted_by_drain"] += self._draining.advance()

    def _askers(self) -> list[Asker]:
        askers: list[Asker] = [self.membership, self.adapters, self._calls]
        if self._calls.under_way:  # a commit prepared between two phases of a reload would flip other weights
            askers.reverse()
        return askers

    def _ended(self) -> bool:
        """Whether a drain is over: the ranks stop, and whoever is owed something has it."""
        if not self._draining.over:
            return False
        self.reply()  # the last tokens leave before the last answer
        self._draining.finish()
        self.membership.leave()
        self.lifecycle.apply(Event.STOP, "drained")
        return True

    def _settled(self, order: Order, verdict: Verdict) -> None:
        self.pausing.reapply()
        if verdict.ok and order.phase is Phase.MAP and order.live:
            self.membership.beat()

    def _ask_what_is_live(self) -> None:
        self.membership.register()

    # reply

    def reply(self) -> None:
        """Send what the tick produced."""
        for origin, items in self._admission.take_outputs().items():
            for message in self._telling.messages(origin, items):
                self._channel.send_api(origin, message)
        if self._serving != self._announced:
            self._on_change(self.lifecycle.state, "")
        busy = self._busy
        self._subscribers.wait_at_most(busy)
        if self._clock() >= self._subscribers.due:
            self._subscribers.publish(self._stats(""), busy)

    def close(self) -> None:
        """Let the sockets go, and what is being compiled."""
        self._grammars.close()
        self._channel.close()

    @property
    def _busy(self) -> bool:
        return self.lifecycle.state is WorkerState.SERVING and not self._scheduler.idle

    @property
    def _serving(self) -> Version | None:
        serving = self.membership.serving
        return Version.of(serving) if serving and self._actions.live else None

    @property
    def _live(self) -> Version:
        return self._serving or NO_VERSION

    def _is_open(self) -> bool:
        return (
            self.lifecycle.state is WorkerState.SERVING
            and not self.pausing.waiting
            and not self.membership.draining
            and not self._draining.begun
        )

    def _admits(self) -> bool:
        """What the scheduler already has may begin; a drain finishes it all."""
        return self._is_open() or self._draining.begun

    def _drain(self, origin: bytes | None, message: Drain) -> None:
        if self._draining.begin(origin, message):
            self._on_change(self.lifecycle.state, "draining")

    def _on_change(self, state: WorkerState, reason: str) -> None:
        self._announced = serving = self._serving
        version = serving.version if serving else None
        extra = {"replica": self._replica, "version": version, "state": state.value}
        log.info("%s%s", state.value, f": {reason}" if reason else "", extra=extra)
        change = StateChanged(
            *(state.value, version, reason, self._draining.begun), digest=serving.digest if serving else ""
        )
        self._subscribers.announce(change)

    def _stats(self, call: str, *, samples: bool = True) -> Stats:
        """samples: with all that were taken since the last time, which are then forgotten."""
        held, serving = self.membership.serving, self._serving
        own = {
            **{name: float(count) for name, count in (self.counters + self.stepping.counters).items()},
            "bad_messages": float(self._channel.bad_messages),
            "leases_expired": float(self.pausing.leases_expired),
            **self._grammars.counters,
        }
        taken = None
        if samples:
            taken = {"step_s": self.stepping.seconds, "stall_s": self.membership.stalls}
            self.stepping.seconds, self.membership.stalls = [], []
        return Stats(
            call=call,
            replica=self._replica,
            state=self.lifecycle.state.value,
            pause_mode=self.pausing.mode,
            pause_left_s=self.pausing.left_s,
            version=serving.version if serving else None,
            digest=serving.digest if serving else "",
            epoch=held.epoch if held else 0,
            held=self._admission.held,
            ranks=memory_of(self._pids),
            draining=self._draining.begun,
            released=tuple(sorted(self._actions.released)),
            **of_scheduler(self._scheduler, self._actions.engine.spec, own, taken),
        )

"""The loop of one rank. All ranks run the same one; rank 0 has a leader, the others follow its orders.

A tick reads: receive -> agree -> act -> schedule -> step -> reply. Weights change in `act` and nowhere else.

A device that samples for itself computes the next step while the host takes in the tokens of the last one: then a tick
takes the tokens of the step that the tick before launched *ahead*, and launches the next. What else happens in a tick
does not go with a step under way (`Order.beside_steps` says what does): then what was launched is taken in first.

While its device computes, a rank that is alone hears the store on the version that arrives: it copies what is there,
prepares the version and votes on it (`_go_on_beside`). It binds nothing, and nothing is scheduled because of it. A flip
waits for every step that has been launched, so while one is near the next step is launched late, just before the device
would stand idle, and not at all if the store has said to flip by then.

Between a flip and the store's last word on it a device would stand idle for as long as two messages and a synced file
take. So it *ventures* a step: it launches the next one under the weights it has flipped to. No token is drawn of that
before they are final; after a rollback it is thrown away, and what it wrote is written anew (ADR 22).

Of several ranks rank 0 alone draws, so it alone takes steps in; all launch each step, in one order. A tick with a step
says to the others which it is, or that the one that was launched ahead is taken; then which goes behind it; and a flip
says which is ventured. Each may be none, but it is said, also where a launch has failed: they wait for the word.
"""

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from weight_manager.life import State
from worker.adapter_membership import AdapterMembership
from worker.engine.base import Float32, ForwardBatch, Interrupted, LaunchesTogether, Logits, OnDevice, never
from worker.interrupting import Interrupting
from worker.lifecycle import Event, Lifecycle, WorkerState
from worker.membership import Membership
from worker.orders import (
    DONE,
    FAILED,
    PENDING,
    Actions,
    GroupDead,
    Order,
    Phase,
    Report,
    Signal,
    Signals,
    Verdict,
    judge,
)
from worker.scheduler import Scheduler
from worker.sequence import Version

if TYPE_CHECKING:
    from worker.leader import Leader  # which makes its `Deciding` and `Stepping`

log = logging.getLogger(__name__)

_ALONE_S = 5.0
"""How long a rank of several whose step failed waits for the others' word before it leaves."""
_OVERRUN_S = 25.0
"""A step that failed after so long waited in vain for a rank that stands still; that rank will give no word."""
_ALONE_AFTER_OVERRUN_S = 0.5
_PREPARING, _PROMPT, _LONGEST = 1 / 4, 1 / 8, 3 / 4
"""Usual steps for which none begins: while a version is prepared; then until its flip, if flips come at once, and at
most. The last is what another replica needs to finish a step that it does not give up, and to prepare: a step begun
before that would keep all of them waiting to its end."""
_TAKEN = np.array([-1], np.int32)
"""In the place of a batch, which begins with no such number: the step that was launched ahead is taken."""
_BESIDE_S = 0.0001
"""Between two looks at the device and the store while a version is prepared in a thread."""
_LEAD_S, _WORTH_S = 0.0006, 0.001
"""Before a step's end the next is launched: what that takes the host, and some. Steps shorter than the other are not
worth it.
"""
_PERIODS = 8
"""The last steps whose median time from end to end is the usual one."""
_RETRY_S = 0.01
"""Seconds until the scheduler is asked again when it found nothing to run, whatever it counts."""


class EventLoop:
    """One rank: what it was told, what it does, and how its last step went."""

    def __init__(
        self, signals: Signals, actions: Actions, leader: "Leader | None", moved: Callable[[], None] = lambda: None
    ) -> None:
        """moved: told of every turn, and of every operation of a step (see worker/watchdog.py)."""
        assert (leader is not None) == (signals.rank == 0)
        self.stopped = False
        self._signals = signals
        self._actions = actions
        self._leader = leader
        self._step_error = ""
        self._ahead: Logits | None = None  # of a step launched ahead of its tick
        self._ventured = False  # under weights that are not final yet
        self._put_off = False  # the step behind the one under way: a flip is near
        self._first_took = False  # rank 0 takes the step that was launched ahead: heard on another rank
        self._alone: threading.Timer | None = None
        self._moved = moved
        self._given_up = leader.stepping.interrupting.asked if leader is not None and signals.size == 1 else never
        actions.engine.asked = self._between_operations

    def run(self) -> None:
        """Turn until STOP. Raises GroupDead when the ranks lost each other."""
        try:
            while not self.stopped:
                self.tick()
        except BaseException as error:
            if self._leader:
                self._leader.lifecycle.apply(Event.FAIL, f"{type(error).__name__}: {error}")
            raise

    def tick(self) -> None:
        """One turn of the loop."""
        self._moved()
        self.receive()
        order = self.agree()
        if order is None or not order.beside_steps:
            self.take_in()  # what was launched ahead is over before anything else happens
        if order is None:
            self.reply()
            return
        self.act(order)
        if not self.go_on_ahead():
            self.step(self.schedule(order))
        if order.phase is Phase.FLIP:
            self.venture()
        self.reply()

    def receive(self) -> None:
        """Rank 0: messages, or the time at which something is due."""
        if self._leader:
            self._leader.receive()

    def agree(self) -> Order | None:
        """This tick's order, the same on every rank, and the verdict on what went before it."""
        order = self._leader.deciding.decide() if self._leader else None
        if self._leader and order is None:
            return None  # nothing to tell: the other ranks sleep on
        order = self._signals.agree(order)
        if order.vote:
            self._judge()
        return order

    def act(self, order: Order) -> None:
        """Begin what the order says."""
        if order.signal is Signal.STOP:
            self.stopped = True
        self._actions.start(order, alone=self._signals.size == 1)
        work = self._actions.work
        if self._signals.size == 1 and work is not None and work.state != PENDING:
            self._judge()  # nobody else has to be heard: who asked need not wait for the end of a step

    def schedule(self, order: Order) -> ForwardBatch | None:
        """The batch of this tick on every rank, if there is one."""
        if not order.step:
            return None
        batch = self._leader.stepping.schedule() if self._leader else None
        if self._signals.size == 1:
            return batch
        return self._shared(batch)

    def step(self, batch: ForwardBatch | None) -> None:
        """One forward pass on every rank; rank 0 samples."""
        if batch is not None:
            self._compute(lambda: self._actions.forward(batch), ahead=True)
        elif self._first_took:  # ranks but the first have nothing to take in
            self._first_took = False
            self._compute(lambda: None, ahead=True)

    def go_on_ahead(self) -> bool:
        """Take the tokens of the step that was launched ahead, the next one launched behind it; False: none was."""
        logits = self._taken()
        if logits is not None:
            if self._signals.size > 1:
                self._signals.share(_TAKEN)
            self._compute(lambda: logits, ahead=True)
        return logits is not None

    def take_in(self) -> None:
        """Take the tokens of the step that was launched ahead, if one was, and launch none behind it. One that was
        ventured waits until it is known whether its weights are final, and is thrown away if no step follows it then.
        """
        ventured, logits = self._ventured, self._taken()
        if logits is not None and self._leader and ventured:
            self._leader.stepping.dropped()
        elif logits is not None:
            self._compute(lambda: logits, ahead=False)

    def venture(self) -> None:
        """A device has flipped: launch the next step while the store decides, if rank 0 knows one."""
        if self._signals.size > 1:
            self._venture_together()
            return
        if self._leader is None or not isinstance(self._actions.engine, OnDevice):
            return
        batch = self._leader.stepping.venture()
        if batch is None:
            return
        try:
            logits = self._actions.forward(batch)
        except Exception:
            log.exception("a step could not be launched")  # it is launched again, and its failure is then told
            logits = None
        self._ventured_is(logits)

    def _venture_together(self) -> None:
        """The same on all ranks. One that cannot launch it, where others have, fails a step."""
        if self._together is None:
            return
        batch = self._shared(self._leader.stepping.venture() if self._leader else None)
        if batch is None:
            return
        logits: Float32 | Logits | None = None
        try:
            logits = self._actions.forward(batch)
        except GroupDead:
            raise
        except Exception as error:
            self._failed(error, time.monotonic())
        if self._leader and self._leader.stepping.launched_ahead:
            self._ventured_is(logits)

    def _ventured_is(self, logits: Float32 | Logits | None) -> None:
        assert self._leader is not None
        if logits is None or isinstance(logits, np.ndarray):
            self._leader.stepping.dropped()
        else:
            self._ahead, self._ventured = logits, True
            self._leader.stepping.tidy()

    def _taken(self) -> Logits | None:
        if self._ventured and self._leader and self._leader.membership.holding:
            return None
        logits, self._ahead, self._ventured = self._ahead, None, False
        return logits if logits is not None and self._leader and self._leader.stepping.launched_ahead else None

    @property
    def _together(self) -> LaunchesTogether | None:
        """The engine, if it is one whose ranks launch steps ahead together."""
        engine = self._actions.engine
        return engine if self._signals.size > 1 and isinstance(engine, LaunchesTogether) else None

    def _shared(self, batch: ForwardBatch | None) -> ForwardBatch | None:
        """Rank 0's batch on every rank of several."""
        packed = self._signals.share(batch.pack() if batch else None)
        if packed is not None and packed[0] == _TAKEN[0]:
            self._first_took, packed = True, None
        return None if packed is None else batch or ForwardBatch.unpack(packed)

    def _launch_behind(self, logits: Float32 | Logits | None) -> None:
        """Launch the step after the one under way, on every rank, where a device can and rank 0 knows which. logits: of
        the one under way; None on other ranks, or where it could not be launched.
        """
        if self._signals.size == 1:
            if self._leader and logits is not None:
                self._put_off = self._leader.stepping.puts_off(logits)
                if not self._put_off:
                    self._ahead = self._leader.stepping.follow(logits)
            return
        engine = self._together
        if engine is None:
            return
        if self._leader is None:
            batch = self._shared(None)
            if batch is not None:
                engine.follow(batch)
            return
        said: list[ForwardBatch] = []

        def tell(batch: ForwardBatch) -> None:
            said.append(batch)
            self._shared(batch)

        engine.telling = tell
        try:
            if logits is not None:
                self._ahead = self._leader.stepping.follow(logits)
        finally:
            if not said:
                self._shared(None)

    def _compute(self, launch: Callable[[], Float32 | Logits | None], *, ahead: bool) -> None:
        """Have a step computed, or take one that was, and hand its logits on. ahead: launch the step behind it, too."""
        began = time.monotonic()
        try:
            logits = self._launched(launch, ahead=ahead)
            if ahead:  # else an order is in hand already
                self._go_on_beside(logits)
            if self._leader:
                assert logits is not None
                self._leader.stepping.stepped(logits, began)
        except Interrupted:
            assert self._leader is not None
            self._leader.stepping.given_up()
        except GroupDead:  # its sums were ended: no other step will go well, and no word of the others is needed
            raise
        except Exception as error:
            self._failed(error, began)

    def _go_on_beside(self, logits: Float32 | Logits | None) -> None:
        """While a device computes the step: copy what the store says has arrived of the next version, have it prepared,
        and vote on it. Each would wait for the end of a step otherwise, one after the other. Of several ranks all would
        have to agree on it, which they do between steps.
        """
        leader = self._leader
        if leader is None or logits is None or isinstance(logits, np.ndarray) or self._signals.size > 1:
            return
        while (leader.deciding.expects or self._put_off) and not logits.through():
            leader.hear_beside()
            order = leader.deciding.beside()
            if order is not None:
                self._actions.start(order, alone=True)
            work = self._actions.work
            if work is not None and work.state != PENDING and work.order.beside_steps and not self._step_error:
                self._judge()
            if self._put_off and not leader.heard_more and leader.stepping.launch_is_due():
                self._put_off, self._ahead = False, leader.stepping.follow(logits)
            elif work is not None and work.state == PENDING:
                work.wait(_BESIDE_S)
        self._put_off = False

    def _launched(self, launch: Callable[[], Float32 | Logits | None], *, ahead: bool) -> Float32 | Logits | None:
        """ahead: the step behind it is launched too; where this one cannot be, the others hear that there is none."""
        try:
            logits = launch()
        except GroupDead:
            raise
        except Exception:
            if ahead and self._together is not None:
                self._shared(None)
            raise
        if ahead:
            self._launch_behind(logits)
        return logits

    def _failed(self, error: Exception, began: float) -> None:
        """A step did, on this rank."""
        log.error("the step failed", exc_info=error)
        self._step_error = f"{type(error).__name__}: {error}"
        if self._leader:
            self._leader.stepping.raised()
        overran = time.monotonic() - began > _OVERRUN_S
        self._leave_if_alone(_ALONE_AFTER_OVERRUN_S if overran else _ALONE_S)

    def reply(self) -> None:
        """Rank 0: tokens, answers, statistics."""
        if self._leader:
            self._leader.reply()

    def _between_operations(self) -> bool:
        self._moved()
        return self._given_up()

    def _judge(self) -> None:
        """All ranks tell how their last step and their work stand, and draw the same conclusions."""
        work = self._actions.work
        votes = self._signals.vote((FAILED if self._step_error else DONE, work.state if work else DONE))
        if self._alone:
            self._alone.cancel()
            self._alone = None
        if any(step == FAILED for step, _ in votes):
            verdict = judge(self._signals, [step for step, _ in votes], Report(self._step_error))
            assert verdict is not None
            self._recover(verdict)
        if work is None:
            return
        verdict = judge(self._signals, [state for _, state in votes], Report(work.error, work.tensors, work.data))
        if verdict is None:
            return
        self._actions.settle(verdict.ok)
        if self._leader:
            self._leader.deciding.settled(work.order, verdict)

    def _recover(self, verdict: Verdict) -> None:
        self._step_error = ""
        self._actions.recover()  # before requests are told: those of a replica that leaves begin again elsewhere
        if self._leader:
            self._leader.stepping.failed(verdict)

    def _leave_if_alone(self, wait_s: float) -> None:
        """The others may sit in a collective of the step that this rank left: they must see it gone, not wait."""
        if self._signals.size > 1 and self._alone is None:
            self._alone = threading.Timer(wait_s, _leave)
            self._alone.daemon = True
            self._alone.start()


def _leave() -> None:
    log.critical("this rank's step failed and the other ranks' did not: leaving so that the replica restarts")
    logging.shutdown()
    os._exit(70)


class Asker(Protocol):
    """Who has something for all ranks to do: the store's commits, those of adapters, and calls of the API."""

    def next_order(self) -> Order | None:
        """The next thing; called only when no order is under way."""
        ...

    def settled(self, order: Order, verdict: Verdict) -> None:
        """All ranks are through with an order of its own."""
        ...


class Beside(Asker, Protocol):
    """One whose orders may go with a step that a device computes."""

    @property
    def expects(self) -> bool:
        """Something may have to be done before the step is over."""
        ...

    def next_beside(self) -> Order | None:
        """The next thing, if a step that is computed is nothing to it; called only when no order is under way."""
        ...


class Deciding:
    """Rank 0: which order the ranks get at a tick. One is under way at a time; who asked for it hears how it went."""

    def __init__(
        self,
        askers: Callable[[], Sequence[Asker]],
        *,
        beside: Callable[[], Beside | None],
        advance: Callable[[], None],
        ended: Callable[[], bool],
        settled: Callable[[Order, Verdict], None],
        stepping: "Stepping",
        actions: Actions,
        heartbeat_s: float,
        clock: Callable[[], float],
    ) -> None:
        """askers: in the order in which they are asked. beside: who is asked while a step is computed. advance: time
        has passed. ended: whether the ranks are to stop. settled: told after the asker.
        """
        self.hurry = False  # an order may follow at once on what has just happened
        self.next_heartbeat = clock() + heartbeat_s
        self._askers = askers
        self._beside = beside
        self._advance = advance
        self._ended = ended
        self._settled = settled
        self._stepping = stepping
        self._actions = actions
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._asker: Asker | None = None

    def decide(self) -> Order | None:
        """This tick's order; None = there is nothing to tell the ranks."""
        self._advance()
        order = self._next_order() if self._actions.work is None else None
        self.hurry = order is not None
        vote = self._actions.work is not None or self._stepping.unjudged
        step = self._stepping.possible
        now = self._clock()
        if order is None and not vote and not step and not self._actions.heard and now < self.next_heartbeat:
            return None
        self.next_heartbeat = now + self._heartbeat_s
        self._stepping.unjudged = False
        order = order or Order(Signal.PAUSE if self._stepping.paused else Signal.RUN)
        return msgspec.structs.replace(order, vote=vote, step=step, arrived=self._actions.take_heard())

    @property
    def expects(self) -> bool:
        """Something may have to be done before a step is over."""
        beside = self._beside()
        return beside is not None and beside.expects

    def beside(self) -> Order | None:
        """An order that goes with the step that a device computes; None = there is none."""
        beside = self._beside()
        if beside is None or self._actions.work is not None:
            return None
        order = beside.next_beside()
        if order is not None:
            self._asker = beside
        elif not self._actions.heard:
            return None
        return msgspec.structs.replace(order or Order(), step=True, arrived=self._actions.take_heard())

    def settled(self, order: Order, verdict: Verdict) -> None:
        """All ranks are through with an order."""
        assert self._asker is not None
        self._asker.settled(order, verdict)
        self.hurry = True
        self._settled(order, verdict)

    def _next_order(self) -> Order | None:
        if self._ended():
            return Order(Signal.STOP)
        for asker in self._askers():
            order = asker.next_order()
            if order is not None:
                self._asker = asker
                return order
        return None


class Stepping:
    """Steps run only while SERVING, and not between a flip and the store's last word on it."""

    def __init__(
        self,
        scheduler: Scheduler,
        actions: Actions,
        membership: Membership,
        lifecycle: Lifecycle,
        adapters: AdapterMembership,
        *,
        admits: Callable[[], bool],
        interrupting: Interrupting,
        clock: Callable[[], float],
    ) -> None:
        self.unjudged = False  # a step ran here, and the other ranks have not said how it went there
        self.retry_at = 0.0
        self.counters: Counter[str] = Counter()
        self.seconds: list[float] = []  # of each step, since last taken
        self._was_ahead = False  # the step under way was launched behind the one before
        self._last_s = 0.0  # of the last step
        self._step_ended = 0.0  # when it did
        self._periods: deque[float] = deque(maxlen=_PERIODS)  # from end to end of steps that were launched ahead
        self._scheduler = scheduler
        self._actions = actions
        self._membership = membership
        self._lifecycle = lifecycle
        self._adapters = adapters
        self._admits = admits
        self.interrupting = interrupting
        self._clock = clock

    @property
    def paused(self) -> bool:
        """Whether the worker is paused: nothing runs because somebody wants it so."""
        return self._lifecycle.state is WorkerState.PAUSED

    @property
    def possible(self) -> bool:
        """There is something to run, and it may."""
        if self._lifecycle.state is not WorkerState.SERVING or self._membership.holding:
            return False
        if self._clock() < self.not_before:
            return False
        return self._scheduler.running > 0 or (self._admits() and self._scheduler.waiting > 0)

    @property
    def not_before(self) -> float:
        """No step begins before that: nothing was found to run, or a flip is near."""
        return max(self.retry_at, self._expects_flip_until, self._adapters_settle_by)

    @property
    def _expects_flip_until(self) -> float:
        """A long step begun now would keep a flip waiting that may come at once, and with it all other replicas.

        How long a vote has to wait for its flip is what it took lately, up to what other replicas need for their steps.
        Where it mostly takes longer than that (a fleet of many hosts) nothing is gained by standing still.
        """
        session, usual = self._membership.session, self.interrupting.usual_s
        if session is None or session.in_flight == "wait" or not usual:
            return 0.0
        if session.state is not State.READY:
            return session.began + _PREPARING * usual
        longest, took = _LONGEST * usual, self._membership.until_flips
        soon = [seconds for seconds in took if seconds <= longest]
        if 2 * len(soon) < len(took):
            return session.voted + _PROMPT * usual
        return session.voted + min(longest, max(_PROMPT * usual, 2 * max(soon, default=longest)))

    @property
    def _adapters_settle_by(self) -> float:
        """The commit of an adapter waits for the step under way when it comes, and not for the next two as well, one
        before its vote and one before the store's word. All such commits together put a step off by half of one.
        """
        return min(self._adapters.settles_by(self._last_s / 4), self._step_ended + self._last_s / 2)

    def schedule(self) -> ForwardBatch | None:
        """The next batch, under what every rank is bound to."""
        live = self._membership.serving
        if live is None or not self.possible:
            return None
        assert live == self._actions.live, f"bound to {self._actions.live}, serving {live}"
        former = self._actions.former
        batch = self._scheduler.schedule(
            *(live.version, live.epoch),
            admit=self._admits(),
            former=Version(former.version, former.epoch) if former else None,
        )
        if batch is None:
            self.retry_at = self._clock() + _RETRY_S
            return None
        self._begun()
        return batch

    @property
    def launched_ahead(self) -> bool:
        """The next step has been launched already, and still counts."""
        return self._scheduler.launched_ahead

    def follow(self, logits: Float32 | Logits) -> Logits | None:
        """Launch the step after the one under way, where a device can and it is known which; its logits."""
        return None if isinstance(logits, np.ndarray) else self._scheduler.follow(logits)

    def puts_off(self, logits: Float32 | Logits) -> bool:
        """Whether the step behind the one under way is launched late, as the store may say to flip before. The tokens
        of this one are drawn all the same.
        """
        if isinstance(logits, np.ndarray) or not self._flip_is_near or not self._due > self._clock():
            return False
        return self._scheduler.draw(logits)

    def launch_is_due(self) -> bool:
        """Whether a step that is put off has to be launched now: the device would soon stand idle, or no flip is near
        any more.
        """
        return self._clock() >= self._due or not self._flip_is_near

    @property
    def _flip_is_near(self) -> bool:
        """The ranks prepare a version, or have voted on it."""
        session = self._membership.session
        return session is not None and session.in_flight != "wait" and session.state in (State.PREPARING, State.READY)

    @property
    def _due(self) -> float:
        """When the step under way, which was launched ahead, is nearly through; 0 = nothing is known of that."""
        usual = median(self._periods) if self._periods else 0.0
        return self._step_ended + usual - _LEAD_S if self._was_ahead and usual >= _WORTH_S else 0.0

    def stepped(self, logits: Float32 | Logits, began: float) -> None:
        """The forward pass, begun at a time of `time.monotonic`, is through on this rank, or on a device soon is."""
        if not isinstance(logits, np.ndarray):
            logits.wait()
        seconds = time.monotonic() - began
        self.unjudged = True
        self.interrupting.ended(seconds)
        now = self._clock()
        if self._was_ahead:
            self._periods.append(now - self._step_ended)
        self._last_s, self._step_ended = seconds, now
        if self._actions.fenced:
            self.counters["fenced_steps"] += 1
            self._scheduler.discard()
            self._adapters.overwritten(self._actions.adapters.overwritten())
            self._membership.lost_slot()
            return
        if self._scheduler.under_former:
            self.counters["former_steps"] += 1
            if self._actions.former is None:  # its slot was given to a push meanwhile: any byte of it may be another
                self._scheduler.discard()
                return
        self._scheduler.apply(logits, seconds)
        self.counters["steps"] += 1
        self.seconds.append(seconds)
        self._was_ahead = self._scheduler.launched_ahead
        if self._was_ahead:
            self._begun()

    def venture(self) -> ForwardBatch | None:
        """A step under weights that this rank is bound to and the store has not said the last word on, of sequences
        that go on with the KV they have; None: there is none that could be known.
        """
        session = self._membership.session
        if session is None or session.state is not State.FLIPPING or session.in_flight != "keep":
            return None
        if self._actions.live != session.live or self._lifecycle.state is not WorkerState.SERVING:
            return None
        return self._scheduler.venture(session.live.version, session.live.epoch)

    def dropped(self) -> None:
        """Throw away the step that was ventured."""
        self._scheduler.discard()

    def tidy(self) -> None:
        """While the device computes and the store decides: what else would be done once the weights are final."""
        self._scheduler.bring_up()

    def given_up(self) -> None:
        """The step was interrupted; it is done again, under the weights that are served then."""
        self._scheduler.discard()
        self.interrupting.given_up()
        self.counters["interrupted_steps"] += 1

    def raised(self) -> None:
        """The step failed on this rank; nothing of it is kept."""
        self.unjudged = True
        self._scheduler.discard()

    def failed(self, verdict: Verdict) -> None:
        """All ranks know that a step failed on one of them: its sequences end, the worker goes on."""
        self.counters["engine_errors"] += 1
        text = f"the engine failed on rank {verdict.rank}: {verdict.error}"
        ended = self._scheduler.fail_all(text, waiting=False)
        self._scheduler.clear_cache(keep_running=False)
        log.error("%s; %d requests ended", text, ended)

    def _begun(self) -> None:
        self.interrupting.begin()
        if self._membership.session is not None:
            self._membership.session.still_since = float("inf")

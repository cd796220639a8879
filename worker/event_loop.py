"""The loop of one rank. All ranks run the same one; rank 0 has a leader, the others follow its orders.

A tick reads: receive -> agree -> act -> schedule -> step -> reply. Weights change in `act` and nowhere else.

A device that samples for itself computes the next step while the host takes in the tokens of the last one:
then a tick takes the tokens of the step that the tick before launched, and launches the next. Before anything but the
next step happens, what is on its way is taken in.
"""

import logging
import os
import threading
import time
from collections.abc import Callable

from worker.actions import Actions
from worker.engine.base import Float32, ForwardBatch, Interrupted, Logits, never
from worker.leader import Leader
from worker.lifecycle import Event
from worker.signals import DONE, FAILED, Order, Report, Signal, Signals, Verdict, judge

log = logging.getLogger(__name__)

_ALONE_S = 5.0
"""How long a rank of several whose step failed waits for the others' word before it leaves."""
_OVERRUN_S = 25.0
"""A step that failed after so long waited in vain for a rank that stands still; that rank will give no word."""
_ALONE_AFTER_OVERRUN_S = 0.5


class EventLoop:
    """One rank: what it was told, what it does, and how its last step went."""

    def __init__(
        self, signals: Signals, actions: Actions, leader: Leader | None, moved: Callable[[], None] = lambda: None
    ) -> None:
        """moved: told of every turn, and of every operation of a step (see worker/watchdog.py)."""
        assert (leader is not None) == (signals.rank == 0)
        self.stopped = False
        self._signals = signals
        self._actions = actions
        self._leader = leader
        self._step_error = ""
        self._flight: Logits | None = None  # of a step launched ahead of its tick
        self._alone: threading.Timer | None = None
        self._moved = moved
        self._given_up = leader.stepping.interrupting.asked if leader is not None and signals.size == 1 else never
        actions.engine.asked = self._between_operations

    def run(self) -> None:
        """Until STOP. Raises GroupDead when the ranks lost each other."""
        try:
            while not self.stopped:
                self.tick()
        except BaseException as error:
            if self._leader:
                self._leader.lifecycle.apply(Event.FAIL, f"{type(error).__name__}: {error}")
            raise

    def tick(self) -> None:
        """One turn."""
        self._moved()
        self.receive()
        order = self.agree()
        if order is None or order.signal is not Signal.RUN or not order.step:
            self.land()  # what was launched ahead is over before anything else happens
        if order is None:
            self.reply()
            return
        self.act(order)
        if not self.fly_on():
            self.step(self.schedule(order))
        self.reply()

    def receive(self) -> None:
        """Rank 0: messages, or the time at which something is due."""
        if self._leader:
            self._leader.receive()

    def agree(self) -> Order | None:
        """This tick's order, the same on every rank, and the verdict on what went before it."""
        order = self._leader.decide() if self._leader else None
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
        self._actions.start(order)

    def schedule(self, order: Order) -> ForwardBatch | None:
        """The batch of this tick on every rank, if there is one."""
        if not order.step:
            return None
        batch = self._leader.stepping.schedule() if self._leader else None
        if self._signals.size == 1:
            return batch
        packed = self._signals.share(batch.pack() if batch else None)
        if packed is None:
            return None
        return batch or ForwardBatch.unpack(packed)

    def step(self, batch: ForwardBatch | None) -> None:
        """One forward pass on every rank; rank 0 samples."""
        if batch is not None:
            self._compute(lambda: self._actions.engine.forward(batch), ahead=True)

    def fly_on(self) -> bool:
        """Take the tokens of the step that was launched ahead, the next one launched behind it; False: none was."""
        flight = self._taken()
        if flight is not None:
            self._compute(lambda: flight, ahead=True)
        return flight is not None

    def land(self) -> None:
        """Take the tokens of the step that was launched ahead, if one was, and launch none behind it."""
        flight = self._taken()
        if flight is not None:
            self._compute(lambda: flight, ahead=False)

    def _taken(self) -> Logits | None:
        flight, self._flight = self._flight, None
        return flight if flight is not None and self._leader and self._leader.stepping.flying else None

    def _compute(self, launch: Callable[[], Float32 | Logits | None], *, ahead: bool) -> None:
        began = time.monotonic()
        try:
            logits = launch()
            if self._leader:
                assert logits is not None
                if ahead and self._signals.size == 1:
                    self._flight = self._leader.stepping.follow(logits)
                self._leader.stepping.stepped(logits, began)
        except Interrupted:
            assert self._leader is not None
            self._leader.stepping.given_up()
        except Exception as error:
            log.exception("the step failed")
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
            self._leader.settled(work.order, verdict)

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

"""The loop of one rank. All ranks run the same one; rank 0 has a leader, the others follow its orders.

A tick reads: receive -> agree -> act -> schedule -> step -> reply. Weights change in `act` and nowhere else.

A device that samples for itself computes the next step while the host takes in the tokens of the last one: then a tick
takes the tokens of the step that the tick before launched *ahead*, and launches the next. What else happens in a tick
does not go with a step under way (`Order.beside_steps` says what does): then what was launched is taken in first.

While its device computes, a rank that is alone hears the store on the version that arrives: it copies what is there,
prepares the version and votes on it (`_go_on_beside`). It flips, too: what is launched from then on is of the new
weights, and the steps that were launched before, two at most, are taken in as what they are, of the weights before.
The store's last word is acted on after them, so nobody writes to what they read, and nothing is scheduled before it.
While a flip is near the next step is launched late, just before the device would stand idle, so that it is of the new
weights if the store has said to flip by then.

Between a flip and the store's last word on it a device would stand idle for as long as two messages and a synced file
take. So it *ventures* a step: it launches the next one under the weights it has flipped to. No token of that leaves the
device before they are final; after a rollback it is thrown away, and what it wrote is written anew (ADR 22).

Of several ranks rank 0 alone draws, so it alone takes steps in; all launch each step, in one order. A tick with a step
says to the others which it is, or that the one that was launched ahead is taken; then which goes behind it; and a flip
says which is ventured. Each may be none, but it is said, also where a launch has failed: they wait for the word.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from worker.engine.base import Float32, ForwardBatch, Interrupted, LaunchesTogether, Logits, OnDevice, never
from worker.lifecycle import Event
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

if TYPE_CHECKING:
    from worker.leader import Leader  # which makes its `Deciding` and `Stepping`

log = logging.getLogger(__name__)

_ALONE_S = 5.0
"""How long a rank of several whose step failed waits for the others' word before it leaves."""
_OVERRUN_S = 25.0
"""A step that failed after so long waited in vain for a rank that stands still; that rank will give no word."""
_ALONE_AFTER_OVERRUN_S = 0.5
_TAKEN = np.array([-1], np.int32)
"""In the place of a batch, which begins with no such number: the step that was launched ahead is taken."""
_BESIDE_S, _NAP_S = 0.0001, 0.00002
"""Between two looks at the device and the store: while a version is prepared in a thread, and else. Without a pause the
threads that copy from a trainer's memory, or lend the store ours, would wait for Python's lock.
"""


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
        self._flipped_behind = False  # steps that were computed then, and nothing has been seen to since
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
        if self._flipped_behind:  # no order comes before the end of steps of the weights before
            self._end_flip_behind()
            return
        order = self.agree()
        if order is not None and self._goes_behind(order):
            self._flip_behind(order)
            self._end_flip_behind()
            return
        if order is None or not order.beside_steps:  # what was launched ahead is over before anything else happens
            self.take_in(flips=order is not None and order.phase is Phase.FLIP)
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

    def take_in(self, *, flips: bool = False) -> None:
        """Take the tokens of the step that was launched ahead, if one was, and launch none behind it, but what is
        ventured before a flip. One that was ventured waits until it is known whether its weights are final, and is
        thrown away if no step follows it then.
        """
        ventured, logits = self._ventured, self._taken()
        if logits is not None and self._leader and ventured:
            self._leader.stepping.dropped()
        elif logits is not None:
            self._compute(lambda: self._followed_by_venture(logits) if flips else logits, ahead=False)
            if flips:
                self.reply()  # whoever reads these tokens has nothing to do with the flip

    def venture(self) -> None:
        """A device has flipped: launch the next step while the store decides, if rank 0 knows one. It may have been
        launched before.
        """
        if self._signals.size > 1:
            self._venture_together()
            return
        if self._leader is None or not isinstance(self._actions.engine, OnDevice):
            return
        if self._ventured:
            early, self._ahead, self._ventured = self._ahead, None, False
            if self._leader.stepping.launched_ahead:  # else something has thrown it away
                self._ventured_is(early if self._leader.stepping.flipped else None)
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

    def _venture_behind(self, logits: Float32 | Logits) -> None:
        """The store has said to flip to other weights, and this step is the last under those that are bound: the step
        after it is launched with the others already, so that the device goes on without a gap. As with one that is
        ventured after the flip, nothing of it is told before the store's last word.
        """
        assert self._leader is not None
        try:
            self._ahead = self._leader.stepping.venture_behind(logits)
        except Exception:
            log.exception("a step could not be launched")  # it is launched again after the flip
            self._ahead = None
        self._ventured = self._ahead is not None

    def _goes_behind(self, order: Order) -> bool:
        """Whether it says to flip while a step is computed, and need not wait for its end."""
        if order.phase is not Phase.FLIP or self._signals.size > 1 or self._ahead is None or self._step_error:
            return False
        return self._actions.flips_behind and self._leader is not None and self._leader.stepping.launched_ahead

    def _flip_behind(self, order: Order) -> None:
        """Flip while a step of the weights before is computed, and tell the store. That step counts, whatever it says
        then: its weights were live, or still are.
        """
        self._actions.start(order, alone=True, behind=True)
        self._judge()
        self._flipped_behind = True

    def _end_flip_behind(self) -> None:
        """Take in the step of the weights before that is still computed, if one is, a step of those that have come
        launched behind it; then do what follows a flip.
        """
        self.go_on_ahead()
        self.reply()  # whoever reads these tokens has nothing to do with the flip
        self._flipped_behind = False
        self.venture()
        if self._leader:
            self._leader.deciding.hurry = True  # the store's last word may have been heard by now

    def _followed_by_venture(self, logits: Logits) -> Logits:
        if self._signals.size == 1:
            self._venture_behind(logits)
        return logits

    def _ventured_is(self, logits: Float32 | Logits | None) -> None:
        assert self._leader is not None
        if logits is None or isinstance(logits, np.ndarray):
            self._leader.stepping.dropped()
        else:
            self._ahead, self._ventured = logits, True
            self._leader.stepping.tidy(logits)

    def _taken(self) -> Logits | None:
        if self._ventured and self._leader and self._leader.membership.holding:
            return None
        ventured, logits, self._ahead, self._ventured = self._ventured, self._ahead, None, False
        if logits is None or self._leader is None or not self._leader.stepping.launched_ahead:
            return None
        if ventured and not self._leader.stepping.serves_its_weights:  # the flip failed, or was taken back
            self._leader.stepping.dropped()
            return None
        return logits

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
            if self._leader and logits is not None and self._flipped_behind:
                self._venture_behind(logits)
            elif self._leader and logits is not None:
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
        vote on it, and flip to it. Each would wait for the end of a step otherwise, one after the other. Of several
        ranks all would have to agree on it, which they do between steps.
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
            at_once = self._actions.flips_behind and not self._step_error
            if (self._put_off or at_once) and leader.hear_flip():
                put_off, self._put_off = self._put_off, False
                flip = leader.deciding.to_flip() if at_once else None
                if flip is not None:
                    self._flip_behind(flip)
                if put_off:  # after the answer, which a trainer waits for
                    self._venture_behind(logits)
            elif self._put_off and not leader.heard_more and leader.stepping.launch_is_due():
                self._put_off, self._ahead = False, leader.stepping.follow(logits)
            elif work is not None and work.state == PENDING:
                work.wait(_BESIDE_S)
            else:
                time.sleep(_NAP_S)
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

"""Rank 0: which order all ranks get at a tick, and who asked for it."""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from worker.orders import Actions, Order, Signal, Verdict
from worker.stepping import Stepping


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
        stepping: Stepping,
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

    @property
    def free(self) -> bool:
        """No order is under way, and none of another asker comes first."""
        return self._beside() is not None and self._actions.work is None

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

    def to_flip(self) -> Order | None:
        """The order to flip, which the store has just said to do; None where it has to come with a tick."""
        beside = self._beside()
        order = beside.next_order() if beside is not None else None
        if order is not None:
            self._asker = beside
        return order

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

"""Control calls that every rank takes part in: clear, reload, verify. One at a time, in their order.

A call that contradicts the one under way is a conflict at once; one that must wait (for a commit to end, for
the call before it) waits its turn, while generation, aborts and pauses go on.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from worker.channel import Send
from worker.lifecycle import Event, IllegalTransition, Lifecycle, step
from worker.membership import Membership
from worker.messages import CallFailed, Clear, Done, Reload, Verify
from worker.orders import Actions, Order, Phase, Signal, Verdict
from worker.scheduler import Scheduler

Call = Clear | Reload | Verify
Clock = Callable[[], float]

_AGAIN_S = 10.0
"""How long a reload whose slot did not hold the live version waits for the store's word on what is live. A version that
is live from device memory is not in the arena for a moment, and the store says nothing until it is.
"""


@dataclass
class _Turn:
    """A call, and what its phases reported so far."""

    origin: bytes
    message: Call
    phase: Phase = Phase.NONE
    data: dict[str, Any] = field(default_factory=dict)
    failed: str = ""
    """Why the version could not be mapped, once: it is tried again when the store has said what is live ..."""
    until: float = 0.0
    """... which is waited for until then, by the clock."""


class Calls:
    """The queue of such calls on rank 0."""

    def __init__(
        self,
        *,
        actions: Actions,
        lifecycle: Lifecycle,
        membership: Membership,
        scheduler: Scheduler,
        send: Send,
        memory: Callable[[], list[dict[str, Any]]],
        clock: Clock,
    ) -> None:
        self._actions = actions
        self._lifecycle = lifecycle
        self._membership = membership
        self._scheduler = scheduler
        self._send = send
        self._memory = memory
        self._clock = clock
        self._queue: deque[_Turn] = deque()
        self._current: _Turn | None = None

    @property
    def under_way(self) -> bool:
        """A call has begun, and its last phase is not over."""
        return self._current is not None

    def take(self, origin: bytes, message: Call) -> None:
        """Queue a call, or answer at once why it cannot be carried out."""
        under_way = self._current.message if self._current else None
        same = type(under_way) is type(message)
        if isinstance(under_way, Clear | Reload) and isinstance(message, Clear | Reload):
            name = type(under_way).__name__.lower()
            text = f"a {name} is running" + (" already" if same else "; wait for its end")
            self._send(origin, CallFailed(message.call, "conflict", text))
            return
        self._queue.append(_Turn(origin, message))

    def next_order(self) -> Order | None:
        """The next phase of the call under way, or the first phase of the next. Only when no order is under way."""
        while self._current is None and self._queue:
            if self._must_wait(self._queue[0]):
                return None
            turn = self._current = self._queue.popleft()
            refusal = self._refusal(turn.message)
            if refusal:
                self._fail(CallFailed(turn.message.call, "conflict", refusal))
            elif turn.failed and not self._membership.registered:
                why = f"{turn.failed}; the store does not say what is live: ask again"
                self._fail(CallFailed(turn.message.call, "busy", why))
        return self._order(self._current) if self._current else None

    def settled(self, order: Order, verdict: Verdict) -> None:
        """An order of ours went through all ranks."""
        turn = self._current
        assert turn is not None
        if not verdict.ok:
            if order.live:  # the slot may have been given away since the store told us of it, or lacks the version yet
                self._membership.register()
                if not turn.failed and order.phase is Phase.MAP:
                    turn.failed, turn.until = verdict.error, self._clock() + _AGAIN_S
                    self._queue.appendleft(turn)
                    self._current = None
                    return
            self._fail(CallFailed(turn.message.call, "internal", verdict.error, verdict.rank))
            return
        match order.signal, order.phase:
            case Signal.CLEAR, Phase.RELEASE:
                turn.data["released"] = verdict.data
                turn.phase = Phase.SHUT if "weights" in order.tags else Phase.NONE
            case Signal.CLEAR, Phase.SHUT:
                turn.data["groups"] = [data.get("groups", []) for data in verdict.data]
                turn.phase = Phase.NONE
            case Signal.RELOAD, Phase.RESTART:
                turn.phase = Phase.MAP
            case Signal.RELOAD, Phase.MAP:
                turn.phase = Phase.NONE
                if order.live:
                    self._membership.mapped(order.live)
                if not self._actions.released:
                    self._lifecycle.apply(Event.RELOAD, "reloaded")
            case _:
                turn.data = {str(rank): data for rank, data in enumerate(verdict.data)}
        if turn.phase is Phase.NONE:
            self._current = None
            if isinstance(turn.message, Clear | Reload):
                turn.data["ranks"] = self._memory()
            self._send(turn.origin, Done(turn.message.call, turn.data))

    def _must_wait(self, turn: _Turn) -> bool:
        """A cleared replica follows a commit without mapping it, so it must not begin to map in its middle. One that
        waits for sequences has not begun: these end only once they have their memory back.
        """
        if turn.failed and not self._membership.registered and self._clock() < turn.until:
            return True
        if isinstance(turn.message, Reload):
            session = self._membership.session
            return session is not None and not session.waits
        return self._membership.holding

    def _refusal(self, message: Call) -> str:
        if isinstance(message, Verify):
            return "" if self._actions.live else "no weights are held"
        try:
            step(self._lifecycle.state, Event.CLEAR if isinstance(message, Clear) else Event.RELOAD)
        except IllegalTransition as error:
            return str(error)
        if isinstance(message, Reload) and "weights" in message.tags and self._membership.known is None:
            return "no version is live yet"
        return ""

    def _order(self, turn: _Turn) -> Order | None:
        message = turn.message
        if isinstance(message, Verify):
            return Order(Signal.VERIFY)
        if isinstance(message, Clear):
            if turn.phase is Phase.NONE:
                turn.phase = Phase.RELEASE
                self._scheduler.clear_cache(keep_running=False)
                self._lifecycle.apply(Event.CLEAR, f"released {', '.join(message.tags)}")
            return Order(Signal.CLEAR, turn.phase, tags=message.tags)
        tags = tuple(tag for tag in message.tags if tag in self._actions.released)
        if not tags:  # nothing of it was released
            self._current = None
            self._send(turn.origin, Done(message.call, {"ranks": self._memory()}))
            return None
        if turn.phase is Phase.NONE:
            turn.phase = Phase.RESTART if "weights" in tags else Phase.MAP
        live = self._membership.known if "weights" in tags else None
        path = self._membership.arena_path if "weights" in tags else ""
        return Order(Signal.RELOAD, turn.phase, live=live, arena_path=path, tags=tags)

    def _fail(self, answer: CallFailed) -> None:
        assert self._current is not None
        self._send(self._current.origin, answer)
        self._current = None
